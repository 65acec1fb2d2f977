"""A driver that makes its own plans: pages chunk by chunk, given back behind each group's window.

Pages nobody holds are full of NaN, the sink page too, and a page given back is the next one taken:
whatever is read that is not the sequence's own shows in its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actorium.actors.messages import Admit, RowLogprobs, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.runner import ModelRunner


@dataclass
class Driven:
    """A sequence under a driver."""

    slot: int
    tokens: list[int]
    prompt: int
    params: ResolvedParams
    pages: list[dict[int, int]]
    """Of each group: page by index, those shared with another sequence left out."""
    done: int = 0
    finish: int = 0
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt:]


class Driver:
    """Sequences run together, one step after the other; the last ones admitted extend last."""

    def __init__(self, runner: ModelRunner, chunk: int, poison: float = math.nan,
                 keep: bool = False) -> None:
        """chunk: tokens extended in one step; poison: what unheld pages are filled with; keep: give
        no page back."""
        self.runner, self.chunk, self.poison, self.keep = runner, chunk, poison, keep
        self.windows = [group.window for group in runner.model.shape.groups]
        self.size = runner.tables.page_size
        self.free = [list(range(1, pool.pages)) for pool in runner.pools]
        for pool in runner.pools:
            for layer in pool.layers:
                layer.fill_(poison)
        self.running: list[Driven] = []
        self.admits: list[Admit] = []
        self.appends: list[list[int]] = []
        self.releases: list[int] = []
        self.given_back = 0
        self.steps = 0

    def admit(self, prompt: Sequence[int], params: ResolvedParams, donor: Driven | None = None,
              cached: int = 0) -> Driven:
        """A sequence, whose first `cached` tokens are the donor's."""
        slot = 1 + len(self.running)
        seq = Driven(slot, list(prompt), len(prompt), params, [{} for _ in self.windows], cached)
        shared = [[donor.pages[g].get(i, 0) if donor else 0 for i in range(cached // self.size)]
                  for g in range(len(self.windows))]
        for g, window in enumerate(self.windows):
            behind = self._behind(cached, window)
            shared[g][:behind] = [0] * behind
            assert all(shared[g][behind:])
        self.running.append(seq)
        self.admits.append(Admit(slot, _i4(prompt), len(prompt), cached, _i4(shared), params, 7))
        return seq

    def reserve(self, s: Driven) -> None:
        """Pages for the whole prompt, told with the next step."""
        self.appends += self._cover(s, s.prompt)

    def abort(self, s: Driven) -> None:
        """Its slot and its pages are free from the next step on, and poisoned; the device has not
        ended it."""
        s.finish = -1
        self.releases.append(s.slot)
        for g, own in enumerate(s.pages):
            for index in list(own):
                self._free(g, own.pop(index))

    def step(self, extends: list[tuple[Driven, int]], decodes: list[Driven]) -> None:
        """One step of these."""
        self._step(extends, decodes, [])

    def run(self) -> None:
        """All to their ends, and each a decode beyond it, as when steps overlap."""
        over: list[Driven] = []
        while True:
            decodes = [s for s in self.running if s.done >= s.prompt and not s.finish]
            extends, left = [], self.chunk
            for s in self.running:
                count = min(s.prompt - s.done, left)
                if count > 0:
                    extends.append((s, count))
                    left -= count
            if not decodes and not extends and not over:
                return
            result = self._step(extends, decodes, over)
            assert all(count == 0 for count in result.counts[len(result.counts) - len(over):])
            over = [s for s in decodes if s.finish]

    def _step(self, extends: list[tuple[Driven, int]], decodes: list[Driven],
              over: list[Driven]) -> StepResult:
        appends, self.appends = self.appends, []
        for s, count in [*extends, *((s, 1) for s in decodes)]:
            if not self.keep:
                self._give_back(s)
            appends += self._cover(s, count)
        self.steps += 1
        releases, self.releases = self.releases, []
        plan = StepPlan(1, self.steps, release=_i4(releases), admit=self.admits,
                        page_appends=_i4(appends),
                        extend=_i4([(s.slot, n) for s, n in extends]),
                        decode=_i4([s.slot for s in decodes + over]))
        self.admits = []
        result = self.runner.run(plan)
        for s, count in [*extends, *((s, 1) for s in decodes)]:
            s.done += count
        sampled = [s for s, _ in extends if s.done == s.prompt] + decodes
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        for s, count, finish in zip(sampled, result.counts, result.finish, strict=False):
            s.tokens += [next(tokens) for _ in range(count)]
            s.finish = finish
        for part in result.prompt_logprobs:
            self.running[part.row - 1].prompt_logprobs.append(part)
        return result

    def _behind(self, start: int, window: int) -> int:
        """Pages wholly behind the window of the token at `start`."""
        return max(0, start - window + 1) // self.size if window else 0

    def _give_back(self, s: Driven) -> None:
        for g, window in enumerate(self.windows):
            behind = self._behind(s.done, window)
            for index in [i for i in s.pages[g] if i < behind]:
                self._free(g, s.pages[g].pop(index))
                self.given_back += 1

    def _free(self, group: int, page: int) -> None:
        for layer in self.runner.pools[group].layers:
            layer[page * self.size:(page + 1) * self.size] = self.poison
        self.free[group].append(page)

    def _cover(self, s: Driven, count: int) -> list[list[int]]:
        first, last = -(-s.done // self.size), -(-(s.done + count) // self.size)
        fresh = []
        for index in range(max(first, 1 + max(s.pages[0], default=-1)), last):
            pages = [free.pop() for free in self.free]
            for own, page in zip(s.pages, pages, strict=True):
                own[index] = page
            fresh.append([s.slot, index, *pages])
        return fresh


def _i4(values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()
