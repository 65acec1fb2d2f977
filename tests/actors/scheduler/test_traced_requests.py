"""What the scheduler reports to the tracer: once of each traced request, whoever dies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from helpers_lives import Lives
from helpers_scheduler import CLIENT, Ring, column, config
from msgspec.structs import replace

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import LEDGER, Send
from actorium.actors.ledger.records import AdmissionRecord
from actorium.actors.messages import Submit, TraceContext
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.tracing.trace_messages import TracedRequest

TRACE = TraceContext(bytes(range(16)), bytes(range(8)), operation="chat")


class TracedRing(Ring):
    """A ring that hands the tracer's messages to the test."""

    def wake(self) -> None:
        whole, self.order = self.scheduler.on_wake, list[str]()

        def without_tracer(now: float) -> list[Send]:
            sends = list(whole(now))
            self.order += [send.to for send in sends]
            self.traced += [msgspec.msgpack.decode(msgspec.msgpack.encode(send.message),
                                                   type=TracedRequest)
                            for send in sends if send.to == "tracer"]
            return [send for send in sends if send.to != "tracer"]

        self.scheduler.on_wake = without_tracer  # type: ignore[method-assign, assignment]
        try:
            super().wake()
        finally:
            self.scheduler.on_wake = whole  # type: ignore[method-assign]

    def ask(self, rid: str, trace: TraceContext | None = TRACE, n: int = 1, tokens: int = 5,
            **more: Any) -> None:
        """Has a traced request submitted."""
        submit = self.submits[rid] = Submit(
            rid, CLIENT, column([7, 8, 9]), n, ResolvedParams(tokens), TextParams(), 3,
            arrival=self.now - 1.0, trace=trace, **more)
        self.tell(submit)
        self.wake()

    def settle(self) -> None:
        """Runs until nothing moves; a step takes a second."""
        while self.work():
            self.now += 1.0
            self.deliver()

    traced: list[TracedRequest]

    def __init__(self, **settled: Any) -> None:
        self.traced = []
        super().__init__(config(**settled))


def test_when_a_request_came_ran_and_ended() -> None:
    ring = TracedRing(overlap=False)
    ring.ask("r", n=2)
    ring.settle()
    (one,) = ring.traced
    assert (one.trace, one.rid, one.arrival, one.queued) == (TRACE, "r", 99.0, 100.0)
    assert (one.prompt_tokens, one.max_tokens) == (3, 5)
    for index, choice in enumerate(one.choices):
        assert (choice.index, choice.admitted, choice.first_token, choice.ended) == (
            index, 100.0, 101.0, 105.0)
        assert (choice.finish_reason, choice.tokens, choice.recoveries) == ("length", 5, [])
    assert ring.order[-1] == "tracer", "behind all that it is about"


def test_nothing_of_one_that_is_not_traced() -> None:
    ring = TracedRing()
    ring.ask("r", trace=None)
    ring.settle()
    assert not ring.traced


def test_one_that_is_aborted_while_it_waits_and_one_while_it_runs() -> None:
    ring = TracedRing(seqs=1, overlap=False)
    ring.ask("runs", tokens=50)
    ring.ask("waits")
    ring.work()
    ring.now += 1.0
    ring.deliver()
    ring.cancel("waits")
    ring.cancel("runs")
    ring.wake()
    by_rid = {one.rid: one.choices[0] for one in ring.traced}
    assert {rid: choice.finish_reason for rid, choice in by_rid.items()} == {
        "runs": "abort", "waits": "abort"}
    assert (by_rid["waits"].admitted, by_rid["waits"].ended) == (0.0, 101.0)
    assert (by_rid["runs"].admitted, by_rid["runs"].first_token) == (100.0, 101.0)


def test_a_new_worker_is_a_recovery() -> None:
    ring = TracedRing(overlap=False)
    ring.ask("r")
    for _ in range(2):
        ring.work()
        ring.now += 1.0
        ring.deliver()
    ring.now += 7.0
    ring.lose_worker()
    ring.wake()
    ring.settle()
    (one,) = ring.traced
    assert one.choices[0].recoveries == [(109.0, "worker-0")]
    assert (one.choices[0].admitted, one.choices[0].first_token) == (100.0, 101.0)
    assert one.choices[0].preemptions == 1


class TracedLives(Lives):
    """Lives, all requests of which are traced."""

    def __init__(self, seed: int) -> None:
        self.traced: defaultdict[str, list[TracedRequest]] = defaultdict(list)
        super().__init__(seed)
        self.settings = replace(self.settings, recovery=RecoveryConfig(restart=True, retain=1e6))
        self.new_scheduler()

    def submit(self) -> None:
        super().submit()
        submit = replace(self.to_scheduler.pop(), trace=TRACE)
        self.submits[submit.rid] = submit
        self.to_scheduler.append(submit)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            if send.to == "tracer":
                self.traced[send.message.rid].append(send.message)
        super()._send([send for send in sends if send.to != "tracer"])


def test_once_whoever_dies() -> None:
    """Over random deaths, some of them between the ledger's commit and what is sent behind it; what
    is reported agrees with what the client was told."""
    recoveries = defaultdict[str, int](int)
    asked = reported = 0
    for seed in range(7):
        lives = TracedLives(seed)
        lives.play(200)
        lives.finish()
        admitted = {record.submit.rid for record in _admissions(lives)}
        asked, reported = asked + len(admitted), reported + len(lives.traced)
        for rid, reports in lives.traced.items():
            assert len(reports) == 1, f"seed {seed}: {rid}"
            (one,) = reports
            assert len(one.choices) == lives.submits[rid].n
            for choice in one.choices:
                told = lives.received.get((rid, choice.index))
                times = [one.arrival, one.queued, choice.admitted, choice.first_token,
                         choice.ended]
                assert sorted(filter(None, times)) == list(filter(None, times)), f"seed {seed}"
                if told is not None and told.reason in ("length", "abort", "deadline"):
                    assert choice.finish_reason == told.reason, f"seed {seed}: {rid}"
                if told is not None and told.reason == "length":
                    assert choice.tokens == len(told.tokens)
                for at, role in choice.recoveries:
                    recoveries[role] += 1
                    assert choice.admitted <= at <= choice.ended
    assert min(recoveries["worker-0"], recoveries["scheduler"]) > 0
    assert asked * 0.8 < reported <= asked, "some die with a scheduler between ledger and tracer"


def _admissions(lives: Lives) -> list[AdmissionRecord]:
    return [msgspec.msgpack.decode(payload, type=AdmissionRecord)
            for kind, payload in lives.ledger if kind == 2]


def test_the_report_waits_for_the_ledger() -> None:
    lives = TracedLives(1)
    orders = []
    whole = lives.scheduler.on_wake

    def watched(now: float) -> list[Send]:
        sends = list(whole(now))
        orders.append([send.to for send in sends])
        return sends

    lives.scheduler.on_wake = watched  # type: ignore[method-assign, assignment]
    lives.submit()
    lives._settle()
    with_report = [order for order in orders if "tracer" in order]
    assert with_report and all(
        order.index("tracer") > max(i for i, to in enumerate(order) if to == LEDGER)
        for order in with_report)
