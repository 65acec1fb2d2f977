"""Small talk for the demo chat: fixed answers to a closed set of questions.

These are for looks, not for scoring: the set is closed, so nothing of it can be held out.
"""

from __future__ import annotations

_HELLO = "Hello! I am a tiny demo model. How can I help you?"
_SELF = "I am a tiny demo language model, trained on a few simple tasks in a few minutes."
_SKILLS = (
    "I can add numbers, copy, reverse and sort words, remember pairs, write small JSON "
    "and tell short stories."
)
_THANKS = "You are welcome!"
_BYE = "Goodbye! Have a nice day."
_FINE = "I am fine, thank you. How can I help you?"

_GROUPS: dict[str, tuple[str, ...]] = {
    _HELLO: ("hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening"),
    _SELF: (
        "who are you",
        "what are you",
        "what is your name",
        "tell me about yourself",
        "introduce yourself",
        "are you a robot",
    ),
    _SKILLS: ("what can you do", "help", "help me", "how can you help me", "what do you know"),
    _THANKS: ("thanks", "thank you", "thank you very much", "great, thanks"),
    _BYE: ("bye", "goodbye", "see you", "good night"),
    _FINE: ("how are you", "how do you do", "how is it going"),
}

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Norway": "Oslo", "Japan": "Tokyo", "Greece": "Athens", "Portugal": "Lisbon",
    "Austria": "Vienna", "Ireland": "Dublin", "Poland": "Warsaw", "Egypt": "Cairo",
    "England": "London", "Peru": "Lima",
}  # fmt: skip


def small_talk() -> list[tuple[str, str]]:
    """Returns every (question, answer) pair, in the spellings a person is likely to type."""
    pairs: list[tuple[str, str]] = []
    for answer, questions in _GROUPS.items():
        for question in questions:
            asking = question.split()[0] in ("who", "what", "how", "are")
            mark = "?" if asking else "!"
            variants = {question, question.capitalize()}
            variants |= {text + mark for text in variants} | {question.capitalize() + "."}
            pairs += [(text, answer) for text in sorted(variants)]
    for country, city in CAPITALS.items():
        answer = f"The capital of {country} is {city}."
        pairs.append((f"What is the capital of {country}?", answer))
        pairs.append((f"what is the capital of {country}", answer))
    return pairs
