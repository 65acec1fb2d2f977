"""Makes the 400 questions that come with actorium: 250 of common knowledge from `question_facts`,
75 of arithmetic and 75 of reading that are computed here. The same ones each time.

    python -m actorium.tools.evaluation.questions.question_maker > questions.jsonl

Four options each, the right one as often in each place; `source` says why it is right.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from actorium.tools.evaluation.multiple_choice import ChoiceQuestion
from actorium.tools.evaluation.questions.question_facts import TABLES, WRITTEN, FactTable

SEED = "actorium questions 1"
OPTIONS = 4
EACH = 15
"""Questions of each kind of arithmetic and of reading."""
SENTENCES = 6
"""Of what is to be read."""
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")


class Draft(NamedTuple):
    """A question before its options are shuffled."""

    category: str
    subject: str
    source: str
    question: str
    right: str
    wrong: Sequence[str]
    context: str = ""
    stem: str = ""


def all_questions() -> list[ChoiceQuestion]:
    """All 400."""
    rng = random.Random(SEED)
    drafts = [*_knowledge(rng), *_arithmetic(rng), *_reading(rng)]
    places = [i % OPTIONS for i in range(len(drafts))]
    rng.shuffle(places)
    counts: dict[str, int] = {}
    found = []
    for draft, place in zip(drafts, places, strict=True):
        counts[draft.category] = counts.get(draft.category, 0) + 1
        options = list(draft.wrong)
        rng.shuffle(options)
        options.insert(place, draft.right)
        found.append(ChoiceQuestion(
            id=f"{draft.category}/{counts[draft.category]}", question=draft.question,
            choices=tuple(options), answer=place, subject=draft.subject, category=draft.category,
            context=draft.context, stem=draft.stem, source=draft.source))
    return found


def as_line(one: ChoiceQuestion) -> str:
    """JSON, without what is empty."""
    row = {"id": one.id, "category": one.category, "subject": one.subject, "context": one.context,
           "question": one.question, "stem": one.stem, "choices": one.choices, "answer": one.letter,
           "source": one.source}
    return json.dumps({key: value for key, value in row.items() if value}, ensure_ascii=False)


# --- knowledge ------------------------------------------------------------------------------------

def _knowledge(rng: random.Random) -> Iterator[Draft]:
    for table in TABLES:
        for key in table.facts:
            yield Draft("knowledge", table.subject, table.source, table.form.format(key),
                        table.facts[key], rng.sample(wrong_answers(table, key), OPTIONS - 1))
    for one in WRITTEN:
        yield Draft("knowledge", one.subject, one.source, one.question, one.options[0],
                    one.options[1:])


def wrong_answers(table: FactTable, key: str) -> list[str]:
    """Answers to other keys that are surely no answers to this one."""
    barred = {table.facts[key]}
    words = set(table.conflicts.get(key, "").split())
    return sorted({value for value in table.facts.values()
                   if value not in barred and value.split()[-1] not in words})


# --- arithmetic -----------------------------------------------------------------------------------

def _arithmetic(rng: random.Random) -> Iterator[Draft]:
    kinds: tuple[Callable[[random.Random], Draft], ...] = (
        _small_sum, _tens, _difference, _product, _sequence)
    for kind in kinds:
        yield from _distinct(kind, rng, attrgetter("question"))


def _distinct(kind: Callable[[random.Random], Draft], rng: random.Random,
              key: Callable[[Draft], str]) -> Iterator[Draft]:
    """`EACH` of a kind, no two with the same key."""
    seen: set[str] = set()
    while len(seen) < EACH:
        draft = kind(rng)
        if key(draft) not in seen:
            seen.add(key(draft))
            yield draft


def _number(subject: str, computed: str, right: int, rng: random.Random, step: int = 1) -> Draft:
    """step: wrong numbers are some of these away."""
    wrong = [right + step * i for i in (-4, -3, -2, -1, 1, 2, 3, 4, 6) if right + step * i > 0]
    return Draft("arithmetic", subject, f"arithmetic: computed, {computed} = {right}",
                 f"What is {computed}?", str(right),
                 [str(value) for value in rng.sample(wrong, OPTIONS - 1)],
                 stem=f"Question: Calculate {computed}.\nAnswer: {computed} =")


def _small_sum(rng: random.Random) -> Draft:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return _number("sums of one digit", f"{a} + {b}", a + b, rng)


def _tens(rng: random.Random) -> Draft:
    a, b = 10 * rng.randint(1, 9), 10 * rng.randint(1, 9)
    return _number("sums of tens", f"{a} + {b}", a + b, rng, 10)


def _difference(rng: random.Random) -> Draft:
    a, b = rng.randint(6, 12), rng.randint(1, 5)
    return _number("differences", f"{a} - {b}", a - b, rng)


def _product(rng: random.Random) -> Draft:
    a, b = rng.randint(2, 10), rng.randint(2, 9)
    return _number("products", f"{a} times {b}", a * b, rng, a)


def _sequence(rng: random.Random) -> Draft:
    step, first = rng.choice((1, 2, 3, 5, 10)), rng.randint(1, 10)
    shown = [first + step * i for i in range(5)]
    listed = ", ".join(map(str, shown))
    draft = _number("sequences", f"{shown[-1]} + {step}", shown[-1] + step, rng, step)
    return draft._replace(question=f"What number comes next: {listed}?", stem=f"{listed},")


# --- reading --------------------------------------------------------------------------------------

def _reading(rng: random.Random) -> Iterator[Draft]:
    kinds: tuple[Callable[[random.Random], Draft], ...] = (
        _colours, _places, _meals, _jobs, _counts)
    for kind in kinds:
        yield from _distinct(kind, rng, attrgetter("context"))


def _stated(subject: str, sentences: Sequence[str], question: str, stem: str,
            answers: Sequence[str], rng: random.Random, again: bool = False) -> Draft:
    """answers: to the same question about each sentence; the last one's is asked for, after the
    sentences were shuffled. again: the stem tells the passage once more up to there, which is the
    easier for a small model."""
    order = list(range(len(sentences)))
    rng.shuffle(order)
    where = order.index(len(order) - 1) + 1
    told = [sentences[i] for i in order[:where - 1]] if again else []
    return Draft("reading", subject, f"reading: stated in sentence {where}", question,
                 answers[-1], rng.sample(answers[:-1], OPTIONS - 1),
                 context=" ".join(sentences[i] for i in order), stem=" ".join([*told, stem]))


def _colours(rng: random.Random) -> Draft:
    things = rng.sample(("ball", "hat", "bag", "car", "bike", "cup", "coat", "kite"), SENTENCES)
    colours = rng.sample(("red", "blue", "green", "yellow", "black", "white"), SENTENCES)
    return _stated("colours of things",
                   [f"The {t} is {c}." for t, c in zip(things, colours, strict=True)],
                   f"What colour is the {things[-1]}?", f"The {things[-1]} is", colours, rng)


def _places(rng: random.Random) -> Draft:
    things = rng.sample(("key", "book", "phone", "coat", "lamp", "map", "ring", "letter"),
                        SENTENCES)
    places = rng.sample(("kitchen", "garden", "car", "office", "bathroom", "attic", "garage"),
                        SENTENCES)
    return _stated("places of things",
                   [f"The {t} is in the {p}." for t, p in zip(things, places, strict=True)],
                   f"Where is the {things[-1]}?", f"The {things[-1]} is",
                   [f"in the {p}" for p in places], rng)


def _meals(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    days = rng.sample(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
                      SENTENCES)
    foods = rng.sample(("soup", "fish", "rice", "pizza", "eggs", "salad", "pasta"), SENTENCES)
    return _stated("meals by day",
                   [f"On {d} {name} eats {f}." for d, f in zip(days, foods, strict=True)],
                   f"What does {name} eat on {days[-1]}?", f"On {days[-1]} {name} eats", foods, rng,
                   again=True)


def _jobs(rng: random.Random) -> Draft:
    names = rng.sample(NAMES, SENTENCES)
    jobs = rng.sample(("doctor", "teacher", "farmer", "pilot", "baker", "painter", "lawyer"),
                      SENTENCES)
    return _stated("occupations of people",
                   [f"{n} is a {j}." for n, j in zip(names, jobs, strict=True)],
                   f"What is {names[-1]}'s occupation?", f"{names[-1]} is a", jobs, rng, again=True)


def _counts(rng: random.Random) -> Draft:
    animals = rng.sample(("cows", "dogs", "cats", "horses", "pigs", "ducks", "goats"), SENTENCES)
    counts = rng.sample(("two", "three", "four", "five", "six", "seven", "eight", "nine"),
                        SENTENCES)
    return _stated("numbers of animals",
                   [f"The number of {a} on the farm is {c}."
                    for c, a in zip(counts, animals, strict=True)],
                   f"How many {animals[-1]} are on the farm?",
                   f"The number of {animals[-1]} on the farm is", counts, rng, again=True)


if __name__ == "__main__":
    sys.stdout.writelines(f"{as_line(one)}\n" for one in all_questions())
