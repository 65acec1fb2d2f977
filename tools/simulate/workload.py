"""Who asks what, when: conversations, drawn from a seed or read from a trace. Pure but for a file.

A conversation is a shared beginning (its group's) and turns; each prompt is all that was said
before, answers included, and some new tokens. What a conversation waits between an answer and its
next turn is its think time, so that a cluster that is slow is asked less: as people and agents do,
and unlike a list of fixed arrivals. Columns hold all of it: a million requests take some 30 MB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.tools.null.null_worker import hash_tokens

TOKENS = 150_000
"""Token ids of prompts are below this."""
WORKLOADS = ("chat", "agent", "batch")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class LoadShape(Struct, frozen=True):
    """What conversations of a kind are like; lengths are lognormal with a mean and a sigma."""

    turns: float
    """Mean of a geometric distribution."""
    prompt: tuple[float, float]
    """New tokens of a turn: (mean, sigma)."""
    output: tuple[float, float]
    think: tuple[float, float]
    """Seconds before the next turn: (mean, sigma)."""
    shared: tuple[int, int]
    """Tokens of a group's common beginning: (least, most)."""
    groups: int
    longest: int = 2048
    """No turn's prompt or output has more tokens."""


SHAPES = {
    "chat": LoadShape(3.5, (161.0, 1.0), (338.0, 0.8), (20.0, 0.8), (100, 800), 16),
    "agent": LoadShape(15.0, (250.0, 0.9), (80.0, 0.7), (2.0, 0.6), (3000, 6000), 8),
    "batch": LoadShape(1.0, (512.0, 0.6), (128.0, 0.6), (0.0, 0.0), (0, 0), 1),
}
"""chat: prompts and outputs have the means of ShareGPT in Kwon et al., "PagedAttention" (SOSP 2023,
figure 11); turns, think times and shared beginnings are assumptions, as all of the others are."""


class SimulatedLoad(NamedTuple):
    """RequestColumns; requests of a conversation stand together, in order."""

    starts: Floats
    """[conversations]: seconds at which the first turn comes."""
    first: Ints
    """[conversations + 1]: where each one's requests begin."""
    group: Ints
    """[conversations]"""
    shared: Ints
    """[conversations]: tokens of its common beginning."""
    prompt: Ints
    """[requests]: new tokens."""
    output: Ints
    """[requests]"""
    think: Floats
    """[requests]: seconds between the end of this answer and the next turn."""
    seed: int

    @property
    def requests(self) -> int:
        return len(self.prompt)

    def part(self, index: int, of: int) -> SimulatedLoad:
        """Every `of`-th conversation, from number `index` on."""
        mine = np.arange(index, len(self.starts), of)
        counts = np.diff(self.first)[mine]
        first = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(self.first[mine] - first[:-1], counts) + np.arange(first[-1])
        return SimulatedLoad(self.starts[mine], first, self.group[mine], self.shared[mine],
                        self.prompt[rows], self.output[rows], self.think[rows],
                        splitmix64(self.seed, index + 1) >> 1)

    def opening(self, conversation: int) -> bytes:
        """The tokens of its common beginning (i4); those of a group with other lengths are the
        beginnings of the longest."""
        return _tokens(int(self.group[conversation]) + 1, 0, int(self.shared[conversation]))

    def asked(self, request: int) -> bytes:
        """The new tokens of a request (i4)."""
        return _tokens(self.seed, (request + 1) << 24, int(self.prompt[request]))


def _tokens(seed: int, at: int, count: int) -> bytes:
    places = np.arange(at, at + count, dtype=np.uint64)
    return hash_tokens(np.full(count, seed, np.uint64), places, TOKENS).tobytes()


def with_burst(work: SimulatedLoad, at: float, seconds: float, times: float) -> SimulatedLoad:
    """The same conversations, which begin so many times as often from `at` on, for `seconds`."""
    during = np.clip(work.starts - at, 0.0, seconds * times)
    return work._replace(starts=work.starts - during * (1 - 1 / times))


def drawn_workload(kind: str, requests: int, rate: float, seed: int) -> SimulatedLoad:
    """A workload of one of `WORKLOADS`. rate: requests a second, on the whole; conversations begin
    by a Poisson process, those of a batch all at once."""
    shape, rng = SHAPES[kind], np.random.default_rng(seed)
    turns = rng.geometric(1 / shape.turns, requests)
    conversations = int(np.searchsorted(np.cumsum(turns), requests)) + 1
    turns = turns[:conversations]
    turns[-1] -= turns.sum() - requests
    gaps = rng.exponential(turns.mean() / rate, conversations)
    group = rng.integers(0, shape.groups, conversations)
    shared = rng.integers(shape.shared[0], shape.shared[1] + 1, shape.groups)[group]

    def lengths(mean: float, sigma: float) -> Ints:
        drawn = _lognormal(rng, mean, sigma, requests)
        return np.clip(np.rint(drawn), 1, shape.longest).astype(np.int64)

    return SimulatedLoad(np.zeros(conversations) if kind == "batch" else np.cumsum(gaps),
                    np.concatenate(([0], np.cumsum(turns))), group, shared, lengths(*shape.prompt),
                    lengths(*shape.output), _lognormal(rng, *shape.think, requests), seed)


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> Floats:
    if not mean:
        return np.zeros(count)
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


class TraceLine(NamedTuple):
    arrival: float
    prompt: int
    output: int
    group: str
    prefix: int


def read_trace(path: Path, seed: int) -> SimulatedLoad:
    """The requests of a trace, JSON lines of "arrival" (s), "prompt" and "output" (tokens), and for
    prompts with a common beginning "group": its name, "prefix": its tokens (of `prompt`).

    Each is a conversation of one turn. Raises `BadConfig`, naming the line.
    """
    try:
        lines = [_trace_line(path, number, line)
                 for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--trace: {path}: {error}", "trace") from None
    if not lines:
        raise BadConfig(f"--trace: {path} has no requests", "trace")
    lines.sort(key=lambda line: line.arrival)
    names = {name: i for i, name in enumerate(dict.fromkeys(line.group for line in lines))}
    columns = np.array([(line.prompt - line.prefix, line.output, names[line.group], line.prefix)
                        for line in lines], np.int64)
    arrivals = np.array([line.arrival for line in lines])
    return SimulatedLoad(arrivals - arrivals[0], np.arange(len(lines) + 1), columns[:, 2],
                    columns[:, 3], columns[:, 0], columns[:, 1], np.zeros(len(lines)), seed)


def _trace_line(path: Path, number: int, text: str) -> TraceLine:
    def fail(why: str) -> BadConfig:
        return BadConfig(f"--trace: {path}:{number}: {why}", "trace")

    try:
        fields: Any = json.loads(text)
    except ValueError as error:
        raise fail(str(error)) from None
    if not isinstance(fields, dict):
        raise fail("is not an object")
    if unknown := fields.keys() - {"arrival", "prompt", "output", "group", "prefix"}:
        raise fail(f"unknown fields: {', '.join(sorted(unknown))}")
    arrival, group = fields.get("arrival"), str(fields.get("group", ""))
    counts = [fields.get("prompt"), fields.get("output"), fields.get("prefix", 0)]
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < 1e9:
        raise fail(f"arrival: must be seconds, got {arrival!r}")
    for name, value, least in zip(("prompt", "output", "prefix"), counts, (1, 1, 0), strict=True):
        if type(value) is not int or not least <= value < 1 << 24:
            raise fail(f"{name}: must be a number of tokens from {least} on, got {value!r}")
    prompt, output, prefix = counts
    if prefix >= prompt:
        raise fail(f"prefix: must be below prompt ({prompt}), got {prefix}")
    return TraceLine(float(arrival), prompt, output, group, prefix)
