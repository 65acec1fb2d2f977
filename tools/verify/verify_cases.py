"""The requests that are asked again and again, drawn from a seed, and the conditions under which
they are asked: few engines, many requests for each, every pair of axes. Pure.

A round is some cases that are sent together under one condition; each of them is a comparison with
itself under the plain one. Draws are made several at a time, and that one is taken which has what
was visited least: axes' values and pairs of axes off their plain values.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.tools.compare.default_prompts import PROMPTS
from actorium.tools.verify.conditions import (
    ENGINE_AXES,
    PLAIN,
    SENDING_AXES,
    Condition,
    differing,
)

SCHEMA = json.dumps({"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"},
    "kind": {"enum": ["large", "small"]}}, "required": ["name", "count", "kind"],
    "additionalProperties": False})
"""What answers of requests with a grammar are to be."""
ALLOWED = 24
"""Tokens of a request that may be answered by a few alone."""
STOPS = ("e", "a", "o", "t", "n", "r", "s", "1", " the", "ing", ". ", "\n", ",", " of", "and", "th")
"""Texts that end answers: some that any model says soon, and some that it may not."""
SEVERAL = 4
"""Requests to each of them."""
RARE = 0.15
"""Chance of a request to have a grammar; texts that stop it; a text for a prompt; and so on."""


class VerifyCase(Struct, frozen=True, kw_only=True):
    """A request that says everything: whatever it is asked beside, its answer is one."""

    prompt: tuple[int, ...] | str
    """Token ids, or a text for servers that have ids of their own."""
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    allowed: tuple[int, ...] = ()
    """The only tokens that may be sampled; none = all."""
    schema: str = ""
    """JSON schema of the answer; empty = any."""
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Trial(NamedTuple):
    """A case, and who is sent before and after it."""

    case: VerifyCase
    before: tuple[VerifyCase, ...] = ()
    after: tuple[VerifyCase, ...] = ()


class Vocabulary(NamedTuple):
    tokens: int = 0
    """Ids 0..tokens-1, less those below `first`; 0: texts."""
    first: int = 8
    """Smaller ids may be special."""
    grammars: bool = False
    """The engine knows texts, so that there are grammars; beside token ids also texts that stop an
    answer, and prompts that are texts."""
    seeds: bool = True
    """A seed is kept; without it all is greedy."""
    penalties: bool = True
    texts: tuple[str, ...] = PROMPTS


def drawn_cases(seed: int, count: int, vocabulary: Vocabulary, longest: int = 160,
                max_tokens: int = 24) -> list[VerifyCase]:
    """Greedy ones, sampled ones, some with penalties, few tokens allowed, a grammar or texts that
    stop them; two in three prompts begin as others do. longest: tokens of a prompt (words of a
    text: half as many). A seed has the same prompts and lengths for all who know the same
    vocabulary, whatever else they take."""
    chance = random.Random(seed)
    heads = [_prompt(chance, vocabulary, longest // 2) for _ in range(3)]
    return [_case(random.Random(chance.getrandbits(64)), vocabulary, heads, longest, max_tokens)
            for _ in range(count)]


def _prompt(chance: random.Random, vocabulary: Vocabulary, length: int
            ) -> tuple[int, ...] | str:
    if not vocabulary.tokens:
        words = " ".join(vocabulary.texts).split()
        return " ".join(chance.choices(words, k=max(length // 2, 2)))
    return tuple(chance.choices(range(vocabulary.first, vocabulary.tokens), k=max(length, 1)))


def _case(chance: random.Random, vocabulary: Vocabulary,
          heads: Sequence[tuple[int, ...] | str], longest: int, max_tokens: int) -> VerifyCase:
    tail = _prompt(chance, vocabulary, chance.randint(1, longest // 2))
    head = chance.choice(heads)
    prompt = tail if chance.random() < 1 / 3 else joined(head, tail)
    case = VerifyCase(prompt=prompt, max_tokens=chance.randint(max(max_tokens // 2, 1), max_tokens),
                      seed=chance.getrandbits(31))
    kind = chance.random()
    if kind < 0.4 or not vocabulary.seeds:
        sampled = case
    else:
        sampled = msgspec.structs.replace(
            case, temperature=chance.choice((0.7, 1.0)), top_p=chance.choice((1.0, 0.9)),
            top_k=chance.choice((0, 20)))
    if vocabulary.penalties and chance.random() < 0.25:
        sampled = msgspec.structs.replace(sampled, presence_penalty=chance.choice((0.0, 0.5)),
                                          repetition_penalty=1.2)
    if vocabulary.grammars and vocabulary.tokens:
        sampled = _with_texts(chance, vocabulary, sampled, longest)
    if vocabulary.grammars and chance.random() < RARE:
        return msgspec.structs.replace(sampled, schema=SCHEMA)
    if vocabulary.tokens and chance.random() < RARE:
        allowed = chance.sample(range(vocabulary.first, vocabulary.tokens),
                                min(ALLOWED, vocabulary.tokens - vocabulary.first))
        return msgspec.structs.replace(sampled, allowed=tuple(sorted(allowed)))
    return sampled


def _with_texts(chance: random.Random, vocabulary: Vocabulary, case: VerifyCase, longest: int
                ) -> VerifyCase:
    """The case, now and then with a text for a prompt, now and then with some that stop it."""
    if chance.random() < RARE:  # a word may be a token for each of its bytes
        case = msgspec.structs.replace(case, prompt=_prompt(
            chance, vocabulary._replace(tokens=0), chance.randint(2, max(longest // 4, 2))))
    if chance.random() < RARE:
        case = msgspec.structs.replace(case, stop=tuple(chance.sample(STOPS, SEVERAL)))
    return case


def joined(head: tuple[int, ...] | str, tail: tuple[int, ...] | str) -> tuple[int, ...] | str:
    """Two prompts of one kind as one."""
    if isinstance(head, str) or isinstance(tail, str):
        return f"{head} {tail}"
    return head + tail


def first_part(prompt: tuple[int, ...] | str, share: float) -> tuple[int, ...] | str:
    """Its first tokens, or words; one at least."""
    if isinstance(prompt, str):
        words = prompt.split(" ")
        return " ".join(words[:max(int(len(words) * share), 1)])
    return prompt[:max(int(len(prompt) * share), 1)]


def sibling(case: VerifyCase, number: int) -> VerifyCase:
    """Another request, whose prompt begins as this one's and ends otherwise; asked for its cached
    pages alone."""
    begin = first_part(case.prompt, (0.5, 0.75, 0.9)[number % 3])
    end: tuple[int, ...] | str = (f"and {number}" if isinstance(begin, str)
                                  else tuple(reversed(begin[:5])))
    return VerifyCase(prompt=joined(begin, end), max_tokens=2)


def length_of(prompt: tuple[int, ...] | str) -> int:
    """Tokens, or words."""
    return len(prompt.split(" ")) if isinstance(prompt, str) else len(prompt)


DRAWS = 8
"""Conditions of which the least visited is taken."""
OFF_PLAIN = 0.35
"""Chance of an axis to be off its plain value."""
WITH_NEIGHBOURS = 0.7
"""Probability that a request has neighbours: each of those sent together is a comparison."""
DEATHS_EVERY = 20
"""Rounds of which one may kill the worker, since it takes time to come back."""


class VerifyRound(NamedTuple):
    cases: tuple[VerifyCase, ...]
    condition: Condition
    """`neighbours` and `order` are those of the first."""
    number: int

    def trials(self) -> list[tuple[Trial, Condition]]:
        """Each case with its neighbours, under its own condition."""
        last = len(self.cases) - 1
        return [(Trial(case, self.cases[:i], self.cases[i + 1:]),
                 msgspec.structs.replace(self.condition, order=order_of(i, last)))
                for i, case in enumerate(self.cases)]


def order_of(place: int, last: int) -> str:
    """The value of the axis `order`."""
    return "first" if place == 0 else "last" if place == last else "middle"


class Visits:
    def __init__(self, plain: Condition = PLAIN) -> None:
        self._plain = plain
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.rounds = 0
        """Conditions that were added."""

    def features(self, condition: Condition) -> list[tuple[Any, ...]]:
        axes = differing(condition, self._plain)
        return [*((axis, getattr(condition, axis)) for axis in axes), *combinations(axes, 2)]

    def least(self, conditions: Sequence[Condition]) -> Condition:
        """Returns the candidate with the most pairs that were visited least."""
        def worth(condition: Condition) -> float:
            return sum(1 / (1 + self.counts[each]) ** 2 for each in self.features(condition))
        return max(conditions, key=worth)

    def add(self, condition: Condition) -> None:
        """Counts rounds, not comparisons: small rounds take as long, and a comparison in a large
        one costs a tenth."""
        self.rounds += 1
        self.counts.update(self.features(condition))


def drawn_engines(seed: int, count: int, values: Mapping[str, Sequence[Any]],
                  plain: Condition = PLAIN, known: Sequence[Condition] = ()) -> list[Condition]:
    """So many settings of engines: the plain one first, then each with some axes off. values: of
    the axes that can be varied here; known: those to begin with."""
    chance, visits = random.Random(seed), Visits(plain)
    axes = [axis for axis in ENGINE_AXES if values.get(axis)]
    found = [*known] or [plain]
    for engine in found:
        visits.add(engine)
    while len(found) < count and axes:
        drawn = [own for own in (_off_plain(chance, axes, values, plain, 0.4)
                                 for _ in range(4 * DRAWS)) if own not in found]
        if not drawn:  # few values: there are no more
            break
        best = visits.least(drawn)
        visits.add(best)
        found.append(best)
    return found


def _off_plain(chance: random.Random, axes: Sequence[str], values: Mapping[str, Sequence[Any]],
               plain: Condition, share: float) -> Condition:
    changed = {axis: chance.choice(values[axis]) for axis in axes
               if chance.random() < (WITH_NEIGHBOURS if axis == "neighbours" else share)}
    return msgspec.structs.replace(plain, **changed)


def rounds_of(seed: int, engine: Condition, cases: Sequence[VerifyCase],
              values: Mapping[str, Sequence[Any]], visits: Visits) -> Iterator[VerifyRound]:
    """Rounds for an engine, without end. values: of the axes that can be varied."""
    chance = random.Random(seed)
    axes = [axis for axis in SENDING_AXES if values.get(axis) and axis != "order"]
    number = 0
    while True:
        own = axes if visits.rounds % DEATHS_EVERY == DEATHS_EVERY // 4 else [
            axis for axis in axes if axis != "worker"]
        drawn = [_off_plain(chance, own, values, engine, OFF_PLAIN) for _ in range(DRAWS)]
        condition = visits.least(drawn)
        if condition.neighbours == 0 and condition.neighbours_leave:
            condition = msgspec.structs.replace(condition, neighbours_leave=False)
        several = tuple(chance.sample(cases, min(condition.neighbours + 1, len(cases))))
        condition = msgspec.structs.replace(condition, neighbours=len(several) - 1,
                                            position_seed=chance.getrandbits(16))
        visits.add(condition)
        yield VerifyRound(several, condition, number)
        number += 1
