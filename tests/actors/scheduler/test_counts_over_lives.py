"""Everything is counted once, whoever dies in between: what a scheduler reports, against all that
was ever committed to the ledger, over random deaths, aborts, deadlines, refusals, preemptions,
several choices and failures of single requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_examples import examples
from helpers_lives import Lives
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.errors import EngineUnavailable
from actorium.actors.ledger.records import ADMISSION, BATCH, NO_MARKS, AdmissionRecord
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.messages import Submit, TokenBatch
from actorium.actors.recorder.replay import AnyGrammar
from actorium.actors.runtime.beat_gauges import read

REASONS = ("stop", "length", "abort", "deadline", "error")


class Breaking(AnyGrammar):
    """A vocabulary whose grammars say when the work on them raises: "0" as the request comes."""

    def matcher(self, grammar: str) -> Breaking:
        if grammar == "0":
            raise EngineUnavailable("structured: no vocabulary")
        made = Breaking()
        made.left = int(grammar)
        return made

    left = 10**9

    def accept(self, tokens: Any) -> bool:
        self.left -= len(tokens)
        if self.left < 0:
            raise RuntimeError("it breaks")
        return True


class CountedLives(Lives):
    """Lives whose counts are checked at each wake, and over each death of a scheduler."""

    load = Breaking

    def __init__(self, seed: int) -> None:
        self.reported: dict[str, float] = {}
        self.admissions: dict[int, int] = {}
        """Tokens of the prompt by sid, of all that was ever admitted."""
        self.tokens: defaultdict[int, int] = defaultdict(int)
        self.arrivals: Counter[int] = Counter()
        """How many batches had tokens of each sequence."""
        self.ends: dict[int, str] = {}
        self.torn = False
        """A write was cut short: histograms lack what it was about."""
        self.tears = seed % 3 == 0
        super().__init__(seed, force_preempt_every=seed % 5 and 3 + seed % 20)

    def cut_short(self, records: list[LedgerRecord]) -> list[LedgerRecord]:
        left = len(records) - self.chance.choice((0, 0, 1, 2)) if self.tears else len(records)
        self.torn = self.torn or left < len(records)
        return records[:max(left, 0)]

    def _commit(self, records: list[LedgerRecord]) -> None:
        super()._commit(records)
        for kind, payload in records:
            if kind == ADMISSION:
                admission = msgspec.msgpack.decode(payload, type=AdmissionRecord)
                for i in range(admission.submit.n):
                    self.admissions[admission.sid + i] = len(admission.submit.prompt) // 4
            elif kind == BATCH:
                self._on_batch(msgspec.msgpack.decode(payload, type=TokenBatch))

    def _on_batch(self, batch: TokenBatch) -> None:
        sids, starts = (np.frombuffer(batch.sids, np.int64), np.frombuffer(batch.starts, np.int32))
        for sid, start, count in zip(sids.tolist(), starts.tolist(), batch.counts, strict=True):
            assert self.tokens[sid] == start, "tokens of a sequence are committed once"
            self.tokens[sid] += count
            self.arrivals[sid] += 1
        for event in batch.events:
            if event.finish_reason is not None:
                assert event.sid not in self.ends
                self.ends[event.sid] = event.finish_reason

    def _retry(self) -> None:
        """There is room again: all that is alive is written anew, as the committer does it."""
        if self.fills <= 1:
            self.ledger = [self.ledger[0], *chain.from_iterable(self.scheduler.live_records())]
            self.compacting = None
        super()._retry()

    def new_scheduler(self) -> None:
        super().new_scheduler()
        self.check()

    def wake(self) -> None:
        super().wake()
        self.check()

    def check(self) -> None:
        """Nothing that was reported is taken back, and all sequences are accounted for."""
        counts = self.scheduler.health().gauges
        for name, count in self.reported.items():
            assert counts.get(name, 0.0) >= count, f"{name} was {count}, is {counts.get(name)}"
        self.reported = self.scheduler.requests.metrics.tally.written.copy()
        ended = sum(counts.get(f"finished_{reason}", 0.0) for reason in REASONS)
        assert counts["started_sequences"] == ended + counts["open_sequences"]
        if self.held is None:
            assert counts["open_sequences"] == counts["running"] + counts["waiting"]
            self._compare(counts)

    def _compare(self, counts: dict[str, float]) -> None:
        refused = sum(n for name, n in counts.items() if name.startswith("rejected_"))
        assert counts["started_sequences"] == len(self.admissions) + refused
        ends = Counter(self.ends.values())
        ends["error"] += int(refused)
        assert {reason: counts.get(f"finished_{reason}", 0.0) for reason in REASONS} == {
            reason: ends[reason] for reason in REASONS}
        assert counts["tokens"] == sum(self.tokens.values())

    def check_histograms(self) -> None:
        """At rest: each sequence is in each histogram once."""
        counts = self.scheduler.health().gauges
        began = [sid for sid, tokens in self.tokens.items() if tokens]
        assert sum(read(counts, "first_token")[0]) == len(began)
        assert sum(read(counts, "between_tokens")[0]) == sum(
            n - 1 for n in self.arrivals.values() if n)
        admitted = sum(read(counts, "queued")[0])
        assert len(began) <= admitted == sum(read(counts, "request")[0]) <= len(self.ends)
        assert read(counts, "generation_tokens")[1] == sum(self.tokens.values())
        prompts = read(counts, "prompt_tokens")[1]
        assert sum(self.admissions[sid] for sid in began) <= prompts == counts[
            "cache_lookup_tokens"]
        assert read(counts, "prefill_tokens")[1] == prompts - counts["cache_hit_tokens"]
        assert sum(read(counts, "preemptions")[0]) == admitted

    def submit(self) -> None:
        super().submit()
        submit: Submit = self.to_scheduler[-1]
        if self.chance.random() < 0.2:
            submit = msgspec.structs.replace(
                submit, grammar=str(self.chance.choice((0, 4, 15, 99))),
                params=msgspec.structs.replace(submit.params, masked=True))
            self.submits[submit.rid] = self.to_scheduler[-1] = submit


def live(seed: int, moves: int = 250) -> CountedLives:
    lives = CountedLives(seed)
    lives.play(moves)
    lives.finish()
    if not lives.torn:
        lives.check_histograms()
    return lives


@settings(max_examples=examples(12, 2500), deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_counted_once(seed: int) -> None:
    live(seed)


@pytest.mark.parametrize("tooth", ["unwritten", "prompts", "numbers"])
def test_it_has_teeth(tooth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the rules, something is counted twice, or not at all."""
    from actorium.actors.ledger.records import LedgerHistory
    from actorium.actors.scheduler.recovery import recovery_log
    from actorium.actors.scheduler.request_metrics import RequestMetrics

    if tooth == "unwritten":  # what is counted is not written down
        monkeypatch.setattr(recovery_log.RecoveryLog, "counted", lambda self, counts: None)
    elif tooth == "prompts":  # what an earlier life has seen of a sequence is forgotten
        monkeypatch.setattr(RequestMetrics, "marks_of", lambda self, sequence: NO_MARKS)
    else:  # what is part of all that was written anew is added to it
        apply = LedgerHistory._on_counts
        monkeypatch.setattr(LedgerHistory, "_on_counts", lambda self, record: (
            setattr(self, "counted", 0), apply(self, record)))
    with pytest.raises(Exception):  # noqa: B017  (whatever breaks first)
        for seed in range(60):
            live(seed)


def test_a_seed_counts_the_same() -> None:
    assert live(3).reported == live(3).reported
