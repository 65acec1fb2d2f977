"""The detokenizer's core when others die, clients vanish, or do not read."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_text import attached, i4, i8, ints, write_model

from actorium.actors.core import Send
from actorium.actors.detokenizer import client_connections as module
from actorium.actors.detokenizer.client_connections import (
    IDLE_CHECK_INTERVAL,
    PROBE_INTERVAL,
    RECONNECT,
)
from actorium.actors.detokenizer.core import ASK_AGAIN, DetokenizerCore
from actorium.actors.messages import (
    AbortRequest,
    Attach,
    Attached,
    Delta,
    Hello,
    Open,
    RowLogprobs,
    SequenceEvent,
    Stop,
    TextBatch,
    TokenBatch,
    Unknown,
)
from actorium.actors.params import TextParams

A, B = b"a", b"b"
HELLO = Hello("tokenizer", 3)


@pytest.fixture
def core(tmp_path: Path) -> DetokenizerCore:
    return attached(write_model(tmp_path / "m"), A)


def open_(core: DetokenizerCore, sid: int = 1, rid: str = "r", said: bytes = b"", now: float = 0.0,
          client: bytes = A, stop: tuple[str, ...] = (), **more: Any) -> None:
    core.on_message(Open(sid, rid, 0, client, i4(list(b"hi")), TextParams(stop=stop),
                         emitted=i4(list(said)), **more), now)


def say(core: DetokenizerCore, start: int, text: bytes, sid: int = 1, now: float = 0.0,
        epoch: int = 0, end: SequenceEvent | None = None) -> None:
    core.on_message(TokenBatch(1, i8([sid]), i4([start]), bytes([len(text)]), i4(list(text)),
                               [end] if end else [], epoch), now)


def wake(core: DetokenizerCore, now: float = 0.0) -> tuple[list[Delta], list[Any]]:
    """(all deltas, other messages)"""
    deltas, others = [], []
    for send in core.on_wake(now):
        if isinstance(send.message, TextBatch) and send.message.deltas:
            deltas += send.message.deltas
        else:
            others.append(send.message)
    return deltas, others


def shown(core: DetokenizerCore, now: float = 0.0) -> list[tuple[int, str]]:
    deltas, others = wake(core, now)
    assert others == []
    return [(d.start, d.text) for d in deltas]


def test_the_receipt_comes_before_the_first_token(core: DetokenizerCore) -> None:
    open_(core)
    ((receipt,), _) = wake(core)
    assert (receipt.rid, receipt.tokens, receipt.finish_reason) == ("r", b"", None)
    open_(core)
    assert wake(core) == ([], []), "known"


def test_an_older_scheduler_is_fenced_off(core: DetokenizerCore) -> None:
    open_(core, epoch=1)
    say(core, 0, b"ab", epoch=1)
    open_(core, said=b"abc", epoch=2)
    say(core, 3, b"X", epoch=1)
    open_(core, sid=2, rid="old", epoch=1)
    say(core, 3, b"d", epoch=2)
    assert shown(core) == [(0, "abcd")]


def test_a_new_scheduler_gets_earlier_stops_again(core: DetokenizerCore) -> None:
    open_(core, stop=("cd",))
    say(core, 0, b"abcd")
    assert wake(core)[1] == [Stop(1, 4)]
    open_(core, said=b"abcdef", stop=("cd",), epoch=2)
    assert wake(core) == ([], [Stop(1, 4)])
    open_(core, sid=1, rid="other", said=b"x", epoch=3)
    assert shown(core) == [(0, "x")], "a scheduler without a ledger numbers from 1 again"


def test_a_scheduler_that_did_not_read_gets_what_it_missed(core: DetokenizerCore) -> None:
    core.on_client(B, Attach(), 0.0)
    open_(core, stop=("cd",))
    open_(core, 2, "lost", client=B)
    say(core, 0, b"abcd")
    wake(core)
    core.on_client_lost(B, 0.0)
    wake(core, 0.0)
    core.on_client_lost(B, 0.1)
    aborts = [m for m in wake(core, 1.0)[1] if isinstance(m, AbortRequest)]
    assert aborts == [AbortRequest("lost", B)]
    assert core.on_peer_stuck("scheduler", 1.0) and not core.on_peer_stuck("watchdog", 1.0)
    core.on_peer_back("scheduler", 1.0)
    assert wake(core, 1.0)[1] == [HELLO]
    open_(core, said=b"abcdef", stop=("cd",))
    open_(core, 2, "lost", said=b"xyz", client=B)
    assert wake(core, 1.0)[1] == [Stop(1, 4), AbortRequest("lost", B)]


def test_what_was_missed_is_asked_for_once(core: DetokenizerCore) -> None:
    missed = Hello("tokenizer", 3, [1])
    open_(core)
    open_(core, 2, "other")
    for start in (2, 3):
        say(core, start, b"x")
    assert wake(core)[1] == [missed], "and nothing of other sequences"
    say(core, 4, b"x", now=ASK_AGAIN / 2)
    assert wake(core)[1] == [], "the scheduler is at it"
    open_(core, said=b"abxxx")
    wake(core)
    say(core, 7, b"x", now=ASK_AGAIN / 2)
    assert wake(core)[1] == [missed], "it has answered, and something else was missed"
    open_(core, said=b"ab")
    say(core, 7, b"x", now=ASK_AGAIN)
    assert wake(core)[1] == [missed]
    say(core, 8, b"x", now=2 * ASK_AGAIN, end=SequenceEvent(1, "length"))
    assert wake(core)[1] == [missed] and not core.done, "an end beyond a gap is no end"
    say(core, 0, b"", now=ASK_AGAIN, end=SequenceEvent(1, "abort"))
    assert wake(core) == ([], []) and not core.done, "nor one that comes alone"
    open_(core, said=b"abxxxx", end=SequenceEvent(1, "length"))
    ((delta,), _) = wake(core)
    assert (delta.start, delta.text, delta.finish_reason) == (5, "x", "length")


def test_all_tokens_are_resent_on_request(core: DetokenizerCore) -> None:
    open_(core)
    say(core, 0, b"abc")
    assert shown(core) == [(0, "abc")]
    open_(core, said=b"abcd", again=True)
    assert shown(core) == [(0, "abcd")]
    open_(core, said=b"ab", again=True)
    assert shown(core) == [], "older than what is known"
    say(core, 4, b"e", end=SequenceEvent(1, "length"))
    assert shown(core) == [(4, "e")]
    open_(core, said=b"abcde", end=SequenceEvent(1, "length"), cached_tokens=2, again=True)
    ((delta,), _) = wake(core)
    assert (delta.start, delta.text, delta.finish_reason) == (0, "abcde", "length")
    assert delta.usage is not None and delta.usage.cached_tokens == 2


def test_an_unknown_request_is_an_error_of_its_stream(core: DetokenizerCore) -> None:
    open_(core)
    core.on_message(Unknown("r", A), 0.0)
    ((delta,), _) = wake(core)
    assert delta.error is not None and delta.error.code == "unknown_request" and core.done


def test_a_new_incarnation_probes_clients_before_sending(core: DetokenizerCore) -> None:
    open_(core, said=b"abc", client=B, now=10.0)
    assert core.next_timer() == 10.0
    assert core.on_wake(10.0) == [Send("client", TextBatch([]), B)]
    core.on_client_lost(B, 10.0)
    assert core.next_timer() == 10.0 + PROBE_INTERVAL and core.on_wake(10.01) == []
    say(core, 3, b"d", now=10.1)
    assert core.on_wake(10.1) == [Send("client", TextBatch([]), B)]
    assert core.next_timer() == 0.0
    assert shown(core, 10.1) == [(0, "abcd")], "nothing was lost by speaking too early"
    say(core, 4, b"", now=10.1, end=SequenceEvent(1, "length"))
    assert wake(core, 10.1)[0] and core.next_timer() is None


def test_a_client_that_does_not_reconnect_is_dropped(core: DetokenizerCore) -> None:
    open_(core, said=b"abc", client=B, now=10.0)
    now = 10.0
    while now < 10.0 + RECONNECT:
        deltas, others = wake(core, now)
        assert not deltas and others in ([], [TextBatch([])]), "at the most it is probed"
        core.on_client_lost(B, now)
        due = core.next_timer()
        assert due is not None and due > now
        now = due
    assert wake(core, now)[1] == [AbortRequest("r", B)] and core.done
    open_(core, said=b"abcd", client=B, epoch=2)
    assert wake(core, now)[1] == [AbortRequest("r", B)], "the new scheduler has not heard of it"
    core.on_client(B, Attach(), now)
    deltas, others = wake(core, now)
    assert others == [Attached(3)] and deltas[0].error is not None
    assert deltas[0].error.code == "aborted"


def test_a_client_that_vanishes_while_waiting_is_noticed_within_a_second(
        core: DetokenizerCore) -> None:
    open_(core, now=10.0)
    open_(core, 2, "busy", client=B, now=10.0)
    core.on_client(B, Attach(), 10.0)
    wake(core, 10.0)
    now, knocks, cancels = 10.0, 0, []
    while not cancels:
        due = core.next_timer()
        assert due is not None and due > now
        now = due
        for send in core.on_wake(now):
            if send.client == A:
                core.on_client_lost(A, now)
            elif send.client == B:
                knocks += 1
                assert send.message == TextBatch([])
            else:
                cancels.append(send.message)
    assert cancels == [AbortRequest("r", A)] and now < 11.0
    assert knocks > 1, "who is there has found empty messages"
    say(core, 0, b"x", sid=2, now=now)
    assert shown(core, now) == [(0, "x")]


def test_clients_that_get_deltas_are_not_probed(core: DetokenizerCore) -> None:
    open_(core)
    for n in range(50):
        say(core, n, b"x", now=n * IDLE_CHECK_INTERVAL / 2)
        assert shown(core, n * IDLE_CHECK_INTERVAL / 2) == [(n, "x")]
    due = core.next_timer()
    assert due is not None and core.on_wake(due) == []
    assert core.on_wake(due + IDLE_CHECK_INTERVAL) == [Send("client", TextBatch([]), A)]
    say(core, 50, b"y", end=SequenceEvent(1, "length"))
    wake(core, due + IDLE_CHECK_INTERVAL)
    core.on_wake(due + IDLE_CHECK_INTERVAL)
    assert core.next_timer() is None, "nothing is going on"


def test_duplicates_are_counted(core: DetokenizerCore) -> None:
    def dropped() -> float:
        return core.health().gauges["duplicates_dropped"]

    open_(core, epoch=2)
    say(core, 0, b"abc", epoch=2)
    assert dropped() == 0
    say(core, 0, b"abc", epoch=2)
    say(core, 1, b"bcd", epoch=2)
    assert dropped() == 5
    open_(core, said=b"abcdef", epoch=2)
    assert dropped() == 9
    say(core, 6, b"xy", epoch=1)
    assert dropped() == 11, "fenced off"
    assert shown(core) == [(0, "abcdef")]


def test_log_probabilities_count_for_what_a_slow_client_may_have_waiting(
        core: DetokenizerCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of twenty alternatives is as much as twenty-two without."""
    monkeypatch.setattr(module, "MERGED", 50)
    open_(core, logprobs=20)
    wake(core)
    core.on_client_slow(A, True, 0.0)
    row = RowLogprobs(0, 0, array("f", [-1.0]).tobytes(), i4([1]), i4([5] * 20),
                      array("f", [-1.0] * 20).tobytes())
    for n in range(3):
        assert core._sequences, "within the bound"
        core.on_message(TokenBatch(1, i8([1]), i4([n]), b"\x01", i4([97]),
                                   [SequenceEvent(1, logprobs=row)]), 0.0)
        others = wake(core)[1]
    assert AbortRequest("r", A) in others and not core._sequences


def test_log_probabilities_are_told_once(core: DetokenizerCore) -> None:
    """By a scheduler that tells again what is known in part, before and after it was sent."""
    def rows(*values: float) -> RowLogprobs:
        return RowLogprobs(0, 0, array("f", values).tobytes(), i4([1] * len(values)), b"", b"")

    def told(delta: Delta) -> list[tuple[int, float]]:
        return [(one.token_id, one.logprob) for one in delta.logprobs or ()]

    prompt = msgspec.structs.replace(rows(-9.0), start=1)
    open_(core, logprobs=0)
    core.on_message(TokenBatch(1, i8([1]), i4([0]), b"\x02", i4([97, 98]),
                               [SequenceEvent(1, logprobs=rows(-1.0, -2.0),
                                              prompt_logprobs=prompt)]), 0.0)
    open_(core, logprobs=0, said=b"abc", emitted_logprobs=[rows(-1.0), rows(-2.0, -3.0)],
          prompt_logprobs=[prompt])
    ((first,), _) = wake(core)
    assert (first.text, told(first)) == ("abc", [(97, -1.0), (98, -2.0), (99, -3.0)])
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 2
    open_(core, logprobs=0, said=b"abcde", prompt_logprobs=[prompt],
          emitted_logprobs=[rows(-1.0, -2.0), rows(-3.0, -4.0), rows(-5.0)])
    core.on_message(TokenBatch(1, i8([1]), i4([4]), b"\x02", i4([101, 102]),
                               [SequenceEvent(1, logprobs=rows(-5.0, -6.0))]), 0.0)
    ((rest,), _) = wake(core)
    assert (rest.start, rest.text, rest.prompt_logprobs) == (3, "def", None)
    assert told(rest) == [(100, -4.0), (101, -5.0), (102, -6.0)]
    open_(core, logprobs=0, said=b"abcdef", again=True,
          emitted_logprobs=[rows(-1.0, -2.0, -3.0, -4.0), rows(-5.0, -6.0)])
    ((whole,), _) = wake(core)
    assert whole.start == 0 and told(whole) == [(97 + i, -1.0 - i) for i in range(6)]


def test_drafts_are_counted_across_deaths(core: DetokenizerCore) -> None:
    open_(core, said=b"abcd", draft_tokens=6, accepted_tokens=3, stop=("h",))
    core.on_message(TokenBatch(1, i8([1]), i4([4]), b"\x02", i4(list(b"ef")), drafts=2), 0.0)
    open_(core, said=b"abcd", draft_tokens=6, accepted_tokens=3, stop=("h",))
    core.on_message(TokenBatch(1, i8([1]), i4([6]), b"\x03", i4(list(b"ghi")), drafts=2), 0.0)
    ((delta,), _) = wake(core)
    assert delta.usage is not None and delta.text == "abcdefg"
    assert (delta.usage.draft_tokens, delta.usage.accepted_tokens) == (10, 5)


def test_unread_deltas_of_a_slow_client_are_merged(core: DetokenizerCore) -> None:
    open_(core)
    wake(core)
    core.on_client_slow(A, True, 0.0)
    for n in range(100):
        say(core, n, b"x")
        assert wake(core) == ([], [])
    say(core, 100, b"y", end=SequenceEvent(1, "length"))
    assert wake(core) == ([], []) and not core.done
    core.on_client_slow(A, False, 1.0)
    ((delta,), _) = wake(core)
    assert (delta.start, len(ints(delta.tokens)), delta.finish_reason) == (0, 101, "length")
    assert core.done


def test_a_client_far_behind_is_disconnected(core: DetokenizerCore,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED", 50)
    open_(core)
    open_(core, 2, "q", client=B)
    core.on_client(B, Attach(), 0.0)
    wake(core)
    core.on_client_slow(A, True, 0.0)
    sent = []
    for n in range(60):
        say(core, n, b"x")
        say(core, n, b"z", sid=2)
        deltas, others = wake(core)
        sent += others
        assert [d.rid for d in deltas] == ["q"], "the others read on"
    assert sent == [AbortRequest("r", A)]
    core.on_client_slow(A, False, 1.0)
    ((delta,), _) = wake(core)
    assert delta.error is not None and "did not read" in delta.error.message
