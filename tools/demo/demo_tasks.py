"""Checkable tasks for the demo model: generation, held-out split, scoring.

The held-out split is by content, not by wording: the payload of a prompt (its numbers, its
list, its pairs) is hashed, and one residue class in `HELD_OUT_MODULUS` is never used for
training, however the question is phrased.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from actorium.tools.demo.demo_stories import (
    ANIMALS,
    CITIES,
    COLORS,
    NAMES,
    PLACES,
    THINGS,
    TRAITS,
    WORDS,
    article,
    is_story,
    tell,
)

HELD_OUT_MODULUS = 16
"""One payload in this many is reserved for evaluation."""

MAX_PAIRS = 170
"""Most pairs in a recall prompt; about three tokens each."""


class TaskItem(NamedTuple):
    """One question with its expected answer.

    task: name of the task, a key of `TASKS`.
    prompt: text of the user message.
    answer: text of the assistant message; for stories, one of many right ones.
    """

    task: str
    prompt: str
    answer: str


def add(rng: random.Random) -> TaskItem:
    a, b = rng.randrange(100), rng.randrange(100)
    form = rng.choice(("What is {} + {}?", "{} + {} =", "Add {} and {}."))
    return TaskItem("add", form.format(a, b), str(a + b))


def _pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 5)))


def copy(rng: random.Random) -> TaskItem:
    """Repeats 2 to 12 words, sometimes mixed with made-up ones and numbers."""
    words = [rng.choice(WORDS) for _ in range(rng.randint(2, 12))]
    if rng.random() < 0.3:
        for i in range(0, len(words), 2):
            words[i] = rng.choice((_pseudo_word(rng), str(rng.randrange(1000))))
    text = " ".join(words)
    return TaskItem("copy", f"{rng.choice(('Repeat', 'Copy the words'))}: {text}", text)


def reverse(rng: random.Random) -> TaskItem:
    """Reverses a list of 2 to 6 words, or of 3 to 8 letters."""
    if rng.random() < 0.5:
        kind, parts = "words", [rng.choice(WORDS) for _ in range(rng.randint(2, 6))]
    else:
        letters = "abcdefghijklmnopqrstuvwxyz"
        kind, parts = "letters", [rng.choice(letters) for _ in range(rng.randint(3, 8))]
    return TaskItem("reverse", f"Reverse the {kind}: {' '.join(parts)}", " ".join(parts[::-1]))


def sort(rng: random.Random) -> TaskItem:
    """Sorts 3 to 5 different numbers below 100, or 3 or 4 different animals."""
    if rng.random() < 0.5:
        numbers = rng.sample(range(100), rng.randint(3, 5))
        shown, answer = map(str, numbers), map(str, sorted(numbers))
        return TaskItem("sort", f"Sort the numbers: {' '.join(shown)}", " ".join(answer))
    words = rng.sample(ANIMALS, rng.randint(3, 4))
    return TaskItem("sort", f"Sort the words: {' '.join(words)}", " ".join(sorted(words)))


def make_json(rng: random.Random) -> TaskItem:
    """Writes 2 to 5 named values as one JSON object, keys in the order they were given."""
    values: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randrange(1, 100),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
        "pet": rng.choice(ANIMALS),
        "item": rng.choice(WORDS),
        "count": rng.randrange(1, 1000),
    }
    keys = rng.sample(list(values), rng.randint(2, 5))
    chosen = {key: values[key] for key in keys}
    listed = ", ".join(f"{key}={value}" for key, value in chosen.items())
    return TaskItem("json", f"Make JSON: {listed}", json.dumps(chosen))


def lookup_pairs(rng: random.Random, count: int) -> dict[str, str]:
    """Returns `count` different things, each with an animal."""
    return {thing: rng.choice(ANIMALS) for thing in rng.sample(THINGS, count)}


def find(key: str) -> str:
    return f"Find {key}."


def lookup_answer(key: str, value: str) -> str:
    return f"Found: {key} {value}"


def lookup_item(pairs: dict[str, str], key: str) -> TaskItem:
    """Asks for one of `pairs` after listing all of them."""
    listed = ", ".join(f"{thing} {animal}" for thing, animal in pairs.items())
    return TaskItem("recall", f"Remember: {listed}. {find(key)}", lookup_answer(key, pairs[key]))


def lookup(rng: random.Random) -> TaskItem:
    """Finds the value of one key among 10 to `MAX_PAIRS` pairs (up to about 530 tokens)."""
    pairs = lookup_pairs(rng, rng.randint(10, MAX_PAIRS))
    return lookup_item(pairs, rng.choice(list(pairs)))


def story(rng: random.Random) -> TaskItem:
    """Tells a story about an animal, mostly with its character and its home given."""
    animal, trait, place = rng.choice(ANIMALS), rng.choice(TRAITS), rng.choice(PLACES)
    if rng.random() < 0.4:
        form = rng.choice(("Tell me a story about {} {}.", "Tell a story about {} {}"))
        prompt = form.format(article(animal), animal)
        return TaskItem("story", prompt, tell(rng, animal))
    prompt = f"Tell me a story about {article(trait)} {trait} {animal} in the {place}."
    return TaskItem("story", prompt, tell(rng, animal, trait, place))


TASKS: dict[str, Callable[[random.Random], TaskItem]] = {
    "add": add,
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "json": make_json,
    "recall": lookup,
    "story": story,
}
"""Every task: name to a function that draws one item."""


def payload(item: TaskItem) -> str | None:
    """Returns what makes an item new, or None where the item is too common to hold out.

    Sums of two one-digit numbers and stories with no more than an animal are so few that
    they are always left to training.
    """
    if item.task == "add":
        a, b = sorted(map(int, re.findall(r"\d+", item.prompt)))
        return f"{a} {b}" if b > 9 else None
    if item.task == "story":
        return item.prompt if " in the " in item.prompt else None
    content = item.prompt.split(": ", 1)[1]
    return content.split(".", 1)[0] if item.task == "recall" else content


def is_held_out(item: TaskItem) -> bool:
    """Whether the item belongs to the partition that training never sees."""
    content = payload(item)
    if content is None:
        return False
    digest = hashlib.blake2b(f"{item.task}|{content}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def _stream(rng: random.Random, task: str, held: bool) -> Iterator[TaskItem]:
    while True:
        item = TASKS[task](rng)
        if is_held_out(item) == held:
            yield item


def generate(seed: int, count: int, tasks: Iterable[str] | None = None) -> list[TaskItem]:
    """Returns `count` training items, tasks drawn evenly; equal arguments, equal items."""
    rng = random.Random(f"train-{seed}")
    names = list(tasks) if tasks is not None else list(TASKS)
    streams = {name: _stream(rng, name, held=False) for name in names}
    return [next(streams[rng.choice(names)]) for _ in range(count)]


def held_out(task: str, count: int) -> list[TaskItem]:
    """Returns the first `count` evaluation items of a task, always the same ones.

    No prompt repeats, and none of them can come from `generate`.  Raises ValueError where the
    task does not have that many; every task has at least 300.
    """
    stream = _stream(random.Random(f"held-out-{task}"), task, held=True)
    items: dict[str, TaskItem] = {}
    for _ in range(4 * count):
        if len(items) >= count:
            break
        item = next(stream)
        items.setdefault(item.prompt, item)
    if len(items) < count:
        raise ValueError(f"task {task} has fewer than {count} held-out items")
    return list(items.values())


def score(item: TaskItem, text: str) -> bool:
    """Whether `text` answers the item: equal after stripping outer white space.

    A story has many right answers: it counts when it is one of the stories the templates
    can produce about the animal, character and place that were asked for.
    """
    if item.task != "story":
        return text.strip() == item.answer.strip()
    words = re.findall(r"[a-z]+", item.prompt)
    animal = next(word for word in words if word in ANIMALS)
    trait = next((word for word in words if word in TRAITS), None)
    place = item.prompt.rstrip(".").rsplit(" in the ", 1)[1] if " in the " in item.prompt else None
    return is_story(text, animal, trait, place)


# --- small talk -----------------------------------------------------------------------------------

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


__all__ = [
    "TASKS",
    "TaskItem",
    "generate",
    "held_out",
    "is_held_out",
    "lookup_item",
    "lookup_pairs",
    "score",
    "small_talk",
    "tell",
]
