"""An engine that is a few lines of arithmetic, with the parts in which engines have their faults: a
recurrent state over a prompt in chunks, pages by prefix, drafts that are verified, masks, rows of a
batch, choices, streams. One fault can be planted."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from actorium.tools.verify.conditions import PLAIN, VALUES, Condition
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer
from actorium.tools.verify.http_readers import cut_of
from actorium.tools.verify.verify_cases import VerifyCase
from actorium.tools.verify.verify_run import EngineCounts, EngineNotStartedError, Received

VOCAB, PAGE = 1000, 8
FAULTS: dict[str, set[str]] = {
    "a state is committed twice where all drafts are accepted": {"drafts"},
    "drafts behind the first are verified a position too early": {"drafts"},
    "a mask comes one step late in windows": {"drafts"},
    "a page is read that was evicted": {"pool", "cache"},
    "a prefix hit reads one token too far": {"cache"},
    "rows have the seed of the first": {"neighbours"},
    "batches of 16 and more round otherwise": {"neighbours"},
    "choices share their last page": {"choices"},
    "log-probabilities are those of the row before": {"neighbours"},
    "a stream that is taken up repeats a token": {"reading"},
    "a connection that is lost costs an event": {"reading"},
    "a chunk's last token is lost at every second cut": {"tokens_per_step"},
    "what was preempted forgets its last token": {"preempt_every"},
    "a rank sums its share twice": {"ranks"},
    "a worker that died forgets the seed": {"worker"},
    "what was preempted beside others is never taken up": {"neighbours", "preempt_every"},
    "an aborted row leaves its page to the next": {"neighbours", "neighbours_leave"},
    "drafts beside a grammar that is preempted lose the mask": {"drafts", "preempt_every"}}
"""Fault -> the axes that it takes; a smaller pair shows nothing, a larger one is too large."""


def mixed(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


class SimulatedEngine:
    """See `VerifyAsker`."""

    def __init__(self, fault: str = "", flaky: int = 0, refuses: str = "") -> None:
        """flaky: the fault shows in one of so many answers. refuses: an engine's axis with which it
        does not start."""
        assert not fault or fault in FAULTS
        self.plain: Condition = PLAIN
        self.values: Mapping[str, Sequence[Any]] = VALUES
        self.held: Mapping[str, str] = {}
        self.counts = EngineCounts()
        self.fault, self._flaky, self._refuses, self._asked = fault, flaky, refuses, 0
        self.lanes = 1

    def renewed(self, case: VerifyCase, _condition: Condition) -> VerifyCase:
        return case

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
        if self._refuses and getattr(condition, self._refuses) != getattr(PLAIN, self._refuses):
            raise EngineNotStartedError(f"not with {self._refuses}")
        self._asked += 1
        self._on = not self._flaky or mixed(self._asked) % self._flaky == 0
        found = [tuple(self._choice(cases, row, number, condition)
                       for number in range(condition.choices)) for row in range(len(cases))]
        if (self._has("what was preempted beside others is never taken up")
                and condition.preempt_every and len(cases) > 1):
            return [*found[1:], NoAnswer(60.0)]
        if self._has("log-probabilities are those of the row before"):
            return [tuple(CaseAnswer(tokens=one.tokens, finish="length", died=one.died,
                                     logprobs=found[max(row - 1, 0)][0].logprobs)
                          for one in found[row]) for row in range(len(found))]
        return list(found)

    def _has(self, fault: str) -> bool:
        return self.fault == fault and self._on

    def _choice(self, cases: Sequence[VerifyCase], row: int, number: int, condition: Condition
                ) -> CaseAnswer:
        case, has = cases[row], self._has
        seed = 0 if case.greedy else mixed(case.seed, number) if number else case.seed
        if has("rows have the seed of the first"):
            seed = cases[0].seed
        if (has("a worker that died forgets the seed") and condition.worker == "killed"
                and case.seed % 16):
            seed += 1
        state = self._read(case, condition)
        if has("choices share their last page") and number < condition.choices - 1:
            state += condition.choices
        if has("a rank sums its share twice"):
            state *= condition.ranks
        if has("an aborted row leaves its page to the next") and condition.neighbours_leave and row:
            state += 1
        tokens = self._decode(case, condition, state, seed)
        rough = 1e-7 if has("batches of 16 and more round otherwise") and len(cases) > 15 else 0.0
        logprobs = tuple(-(mixed(token, i) % 997) / 100 - rough for i, token in enumerate(tokens))
        if has("a stream that is taken up repeats a token") and condition.reading == "cut":
            cut = len(tokens) // 3
            tokens = (tokens[:cut] + tokens[max(cut - 1, 0):])[:len(tokens)]
        if (has("a connection that is lost costs an event") and condition.reading == "http-cut"
                and (cut := cut_of(case, condition)) and not cut.anew):
            tokens.pop(min(cut.tokens, len(tokens) - 1))
        return CaseAnswer(tokens=tuple(tokens), finish="length",
                          died=condition.worker == "killed" and case.seed % 16 > 0,
                          logprobs=logprobs if condition.logprobs else None)

    def _read(self, case: VerifyCase, condition: Condition) -> int:
        """The state behind the prompt, from cached pages and in chunks."""
        prompt, has = list(case.prompt), self._has
        full = (len(prompt) - 1) // PAGE * PAGE
        held = {"cold": 0, "together": full // 2, "shared": full // 2}.get(condition.cache, full)
        held = held // PAGE * PAGE
        state, step = 0, condition.tokens_per_step or 10**6
        for place, token in enumerate(prompt):
            if (place == held and held and has("a prefix hit reads one token too far")):
                state = mixed(state, token)
            if (place < held and place % PAGE == 3 and condition.cache == "evicted"
                    and condition.pool == "tight" and has("a page is read that was evicted")):
                token += 1
            lost = place % (2 * step) == 2 * step - 1
            if not (lost and has("a chunk's last token is lost at every second cut")):
                state = mixed(state, token)
        return state

    def _decode(self, case: VerifyCase, condition: Condition, state: int, seed: int) -> list[int]:
        """Windows of drafts: as many of a window are accepted as its state says."""
        tokens: list[int] = []
        has, mask = self._has, case.allowed
        k = 0 if condition.drafts == "off" else int(condition.drafts.partition(":")[2])
        every = condition.preempt_every
        steps = 0
        while len(tokens) < case.max_tokens:
            accepted, steps = mixed(state, "accepts") % (k + 1) if k else 0, steps + 1
            forgets = bool(every) and steps % every == 0
            for i in range(accepted + 1):
                place = len(tokens)
                if i > 1 and has("drafts behind the first are verified a position too early"):
                    place -= 1
                masked = not (i and has("a mask comes one step late in windows")) and not (
                    i and every
                    and has("drafts beside a grammar that is preempted lose the mask"))
                chosen = mixed(state, seed, place) % VOCAB
                token = mask[chosen % len(mask)] if mask and masked else chosen
                tokens.append(token)
                if not (forgets and has("what was preempted forgets its last token")):
                    state = mixed(state, token)
            if k and accepted == k and has(
                    "a state is committed twice where all drafts are accepted"):
                state = mixed(state, tokens[-1])
        return tokens[:case.max_tokens]
