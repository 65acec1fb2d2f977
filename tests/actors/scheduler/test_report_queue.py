"""A detokenizer that is new, or has missed something, hears of it, a bounded part at a time; steps
go on meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from helpers_scheduler import CLIENT, Ring, assert_whole, config

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.messages import Hello, Open, ResumeRequest
from actorium.actors.scheduler.outgoing import AT_ONCE

REQUESTS = 5 * AT_ONCE
HELLO = Hello("detokenizer", 2)


def waiting_ring(requests: int = REQUESTS) -> Ring:
    """Eight run, many wait."""
    ring = Ring(msgspec.structs.replace(
        config(), recovery=RecoveryConfig(restart=True, ledger=False)))
    for _ in range(requests):
        ring.submit(4, max_tokens=200)
    ring.wake()
    return ring


def step(ring: Ring) -> tuple[list[Open], int]:
    """A wake and, if a plan waits, a step of the worker: the reports of requests that were heard of
    before, and the plans made."""
    opens, usual = list[Open](), ring._hear

    def hear(message: Any) -> None:
        if isinstance(message, Open):
            opens.append(message)
        else:
            usual(message)

    ring._hear = hear  # type: ignore[method-assign]
    before = len(ring.sent)
    if ring.results:
        ring.tell(ring.results.popleft())
    ring.wake()
    plans = len(ring.sent) - before
    ring._hear = usual  # type: ignore[method-assign]
    if ring.plans:
        ring.work()
    return opens, plans


def test_reports_to_a_new_detokenizer_are_spread_over_wakes() -> None:
    ring = waiting_ring()
    ring.tell(HELLO)
    heard: list[str] = []
    plans = 0
    while ring.scheduler.next_timer() == 0.0 or not heard:
        opens, made = step(ring)
        assert 0 < len(opens) <= AT_ONCE
        heard += [each.rid for each in opens]
        plans += made
    assert sorted(heard) == sorted(f"r{i}" for i in range(REQUESTS)) and plans > 1
    assert step(ring)[0] == []


def test_asking_again_meanwhile_does_not_begin_anew() -> None:
    """Whoever asks at every wake gets to the end of it, and hears what was told before once more.
    """
    ring = waiting_ring()
    heard: list[str] = []
    for _ in range(REQUESTS // AT_ONCE):
        ring.tell(HELLO)
        opens, _ = step(ring)
        assert len(opens) == AT_ONCE
        heard += [each.rid for each in opens]
    assert len(set(heard)) == REQUESTS


def test_of_what_was_missed_alone_it_is_told_again() -> None:
    ring = waiting_ring(20)
    for _ in range(3):
        step(ring)
    ring.tell(msgspec.structs.replace(HELLO, sids=[2, 5, 99]))
    opens, _ = step(ring)
    assert [each.sid for each in opens] == [2, 5] and not opens[0].again
    ring.cancel("r4")
    step(ring)
    ring.tell(msgspec.structs.replace(HELLO, sids=[5]))
    opens = step(ring)[0] + step(ring)[0]
    assert [(each.sid, each.end is not None) for each in opens] == [(5, True)], "it has ended"


def test_what_ends_before_its_turn_is_reported_with_its_end() -> None:
    ring = waiting_ring()
    ring.tell(HELLO)
    step(ring)
    last = f"r{REQUESTS - 1}"
    ring.cancel(last)
    told: list[Open] = []
    while not told or ring.scheduler.next_timer() == 0.0:
        told += step(ring)[0]
    ends = [each.end for each in told if each.rid == last]
    assert ends and all(end is not None and end.finish_reason == "abort" for end in ends)


def test_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.scheduler.outgoing.BYTES_AT_ONCE", 4000)
    ring = waiting_ring(8)
    for _ in range(150):
        step(ring)
    ring.tell(HELLO)
    sizes: list[int] = []
    while sum(sizes) < 8:
        sizes.append(len(step(ring)[0]))
    assert max(sizes) < 6, "some 700 bytes each"
    ring.run()
    assert_whole(ring)


def test_recalls_are_answered_a_part_at_a_time() -> None:
    ring = waiting_ring()
    for number in range(REQUESTS):
        ring.tell(ResumeRequest(f"r{number}", CLIENT))
    opens, _ = step(ring)
    assert len(opens) == AT_ONCE and all(each.again for each in opens)
    while ring.scheduler.next_timer() == 0.0:
        more, _ = step(ring)
        opens += more
    assert len(opens) == REQUESTS
