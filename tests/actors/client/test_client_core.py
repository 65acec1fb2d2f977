"""The clients' pure core: deltas that come twice, late, or not at all."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers_text import i4

from actorium.actors.client.core import (
    GRACE,
    RESEND_PAUSE,
    RESENT_AT_ONCE,
    RESENT_BYTES,
    SETTLE,
    ClientCore,
)
from actorium.actors.client.pending import PendingRequest
from actorium.actors.client.requests import Request, Resumable, encode
from actorium.actors.errors import (
    Aborted,
    ActoriumError,
    DeadlineExceeded,
    EngineUnavailable,
    UnknownRequest,
)
from actorium.actors.messages import (
    Abort,
    Accepted,
    Attach,
    Attached,
    Delta,
    Info,
    Rejected,
    Resume,
    ServerInfo,
    TextBatch,
    TokenLogprob,
    Usage,
)
from actorium.actors.params import SamplingParams


def started(core: ClientCore, n: int = 1, streaming: bool = False,
            timeout: float | None = None) -> PendingRequest:
    request = Request(prompt="x", params=SamplingParams(n=n), timeout=timeout)
    return core.submit(request, 100.0, streaming)[0]


def say(core: ClientCore, pending: PendingRequest, start: int, text: str, index: int = 0,
        end: str | None = None, logprobs: list[TokenLogprob] | None = None) -> None:
    """One token a character."""
    usage = Usage(1, 0, start + len(text)) if end else None
    core.on_message(TextBatch([Delta(pending.rid, index, start, text, i4(list(text.encode())),
                                     logprobs, None, end, None, usage)]))


def lp(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, [])


def test_repeated_tokens_are_dropped() -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "ab", logprobs=[lp(97), lp(98)])
    say(core, pending, 0, "ab")
    say(core, pending, 0, "abcd", logprobs=[lp(99), lp(100)])
    say(core, pending, 4, "e", end="length", logprobs=[lp(101)])
    say(core, pending, 5, "zzz")
    (done,) = pending.completions()
    assert done.text == "abcde" and bytes(done.token_ids) == b"abcde"
    assert [p.token_id for p in done.logprobs or ()] == list(b"abcde")
    assert not core.waiting


@pytest.mark.parametrize("streaming", [False, True])
def test_log_probabilities_of_a_stream_told_again_are_taken_once(streaming: bool) -> None:
    """With all of them, as a detokenizer tells what it is asked for again."""
    core = ClientCore("c")
    pending = started(core, streaming=streaming)
    say(core, pending, 0, "ab", logprobs=[lp(97), lp(98)])
    say(core, pending, 0, "abcd", logprobs=[lp(token) for token in b"abcd"])
    say(core, pending, 0, "abcd", logprobs=[lp(token) for token in b"abcd"])
    say(core, pending, 0, "abcde", end="length", logprobs=[lp(token) for token in b"abcde"])
    told = pending.deltas if streaming else pending.completions()
    assert [one.token_id for part in told for one in part.logprobs or ()] == list(b"abcde")
    assert [token for part in told for token in part.token_ids] == list(b"abcde")


def test_a_gap_requests_the_stream_from_its_start() -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "ab")
    say(core, pending, 3, "d", end="length")
    assert not pending.done
    resume = encode(Resume(pending.rid), "rid")
    assert core.resend(core.next_resend) == [("tokenizer.front", resume)]
    say(core, pending, 2, "c")
    say(core, pending, 0, "abcd", end="length")
    assert pending.completions()[0].text == "abcd"


def test_choices_end_one_by_one() -> None:
    core = ClientCore("c")
    pending = started(core, n=2)
    ended: list[PendingRequest] = []
    pending.on_done = ended.append
    say(core, pending, 0, "yes", index=1, end="length")
    say(core, pending, 0, "again", index=1, end="length")
    say(core, pending, 0, "off", index=7)
    assert not pending.done
    say(core, pending, 0, "no", index=0, end="stop")
    assert [(c.index, c.text) for c in pending.completions()] == [(0, "no"), (1, "yes")]
    assert ended == [pending]


@pytest.mark.parametrize(("end", "error"), [("abort", Aborted), ("deadline", DeadlineExceeded),
                                            ("error", ActoriumError)])
def test_error_ends_raise(end: str, error: type[ActoriumError]) -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "ab", end=end)
    with pytest.raises(error):
        pending.completions()


def test_a_request_aborted_before_the_scheduler_had_it_ends_as_others_do() -> None:
    core = ClientCore("c")
    streamed, whole = started(core, n=2, streaming=True), started(core, n=2)
    for pending in (streamed, whole):
        core.on_message(Rejected(pending.rid, "aborted", "the request was aborted"))
    assert [delta.finish_reason for delta in streamed.deltas] == ["abort"] * 2
    assert streamed.error is None and isinstance(whole.error, Aborted) and not core.waiting


def test_rejections_reach_their_own_request() -> None:
    core = ClientCore("c")
    first, second, third = (started(core) for _ in range(3))
    core.on_message(Accepted(first.rid, 1))
    core.on_message(Rejected(third.rid, "context_overflow", "too long", "prompt"))
    core.on_message(Rejected("-", "invalid_request", "unreadable"))
    assert third.error is not None and third.error.param == "prompt"
    assert second.error is not None and "unreadable" in second.error.message
    assert first.error is None and list(core.waiting) == [first.rid]
    core.on_message(Rejected("who", "internal", "?"))
    core.on_message(Info("who", b"{}"))


def test_deadlines_and_closing_end_requests() -> None:
    core = ClientCore("c")
    patient, hasty = started(core), started(core, timeout=5.0)
    call = core.call(ServerInfo, 104.0, now=100.0)
    assert core.next_deadline == 104.0
    assert core.expire(104.0) == [] and isinstance(call.error, DeadlineExceeded)
    assert core.next_deadline == 105.0 + GRACE
    assert core.expire(105.0 + GRACE) == [Abort(hasty.rid)] and core.next_deadline == math.inf
    assert isinstance(hasty.error, DeadlineExceeded) and not patient.done
    notified = []
    patient.notify = lambda: notified.append(1)
    core.attached = True
    core.fail_all(EngineUnavailable("gone"))
    assert isinstance(patient.error, EngineUnavailable) and notified == [1]
    assert not core.attached and not core.waiting


# --- what is sent again, and when ---------------------------------------------------------------


def due(core: ClientCore, now: float) -> list[str]:
    """What is sent again now: "Generate", "Resume", ..."""
    decoded = [msgspec.msgpack.decode(frame)[0] for _, frame in core.resend(now)]
    return [str(kind) for kind in decoded]


def test_a_request_is_resent_until_it_is_accepted() -> None:
    core = ClientCore("c")
    pending = started(core)
    core.on_message(Accepted(pending.rid, 1), 100.0)
    sent = [now / 2 for now in range(200, 250) if due(core, now / 2) == ["Generate"]]
    assert sent == [101.0, 103.0, 107.0, 115.0, 123.0]
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "", b"")]), 124.0)
    assert not pending.deltas and due(core, 128.9) == []
    assert [now for now in range(124, 180) if due(core, now) == ["Resume"]] == [129, 139, 159]


def test_unaccepted_requests_are_resent_when_the_tokenizer_dies() -> None:
    core = ClientCore("c")
    waiting, told = started(core), started(core)
    call = core.call(ServerInfo, math.inf, now=100.0)
    core.on_message(TextBatch([Delta(told.rid, 0, 0, "a", i4([97]))]), 103.0)
    assert due(core, 104.0) == []
    assert core.reconnected("tokenizer.front", 104.0) == []
    assert due(core, 104.0) == ["Generate", "ServerInfo"]
    assert call.frame and waiting.frame and not told.frame


def test_what_is_sent_again_is_spread_out() -> None:
    """Of thousands under way when an actor has died: a part at once, the others soon after."""
    core = ClientCore("c")
    items = [started(core) for _ in range(2 * RESENT_AT_ONCE + 10)]
    for front in ("tokenizer.front", "detokenizer.front"):
        if front == "detokenizer.front":  # from here on, a stream is what is asked for again
            for item in items:
                say(core, item, 0, "a")
            core.on_message(Attached(1), 200.0)
        core.reconnected(front, 200.0)
        core.on_message(Attached(1), 200.0)
        now, sent = 200.0, list[list[tuple[str, bytes]]]()
        while (due := core.next_resend) < 201.0:
            now = max(now, due)
            sent.append(core.resend(now))
        assert [len(frames) for frames in sent] == [RESENT_AT_ONCE, RESENT_AT_ONCE, 10]
        assert len({frame for frames in sent for _, frame in frames}) == len(items)
        assert now == pytest.approx(200.0 + 2 * RESEND_PAUSE)


def test_bytes_that_are_sent_again_are_spread_out() -> None:
    core = ClientCore("c")
    for _ in range(9):
        core.submit(Request(prompt=RESENT_BYTES // 4 * "x", params=SamplingParams()), 100.0, False)
    core.reconnected("tokenizer.front", 200.0)
    assert [len(core.resend(200.0 + 2 * n * RESEND_PAUSE)) for n in range(4)] == [4, 4, 1, 0]


def test_a_request_that_was_taken_up_is_not_taken_back_by_asking_again() -> None:
    """Who lost it to another client, and asks since it hears nothing, would get it back."""
    core = ClientCore("c")
    pending, first = core.submit(
        Request(prompt="x", resumable=Resumable(rid="k.1", seconds=9.0)), 100.0, True)

    def asked(now: float) -> list[bool]:
        return [msgspec.msgpack.decode(frame, type=Resume).adopt for _, frame in core.resend(now)]

    assert msgspec.msgpack.decode(first, type=Resume).adopt
    assert asked(120.0) == [True], "what was sent first may be lost"
    say(core, pending, 0, "a")
    assert asked(200.0) == [False]


def test_the_first_delta_of_a_request_that_was_taken_up_brings_its_records() -> None:
    """Nobody accepts it once more: what is recorded comes with the stream."""
    core = ClientCore("c")
    pending, _ = core.submit(Request(prompt=[1, 2], resumable=Resumable(
        rid="k.1", seconds=1.0, created=20)), 0.0, True)
    assert pending.prompt_tokens is None and not pending.created
    core.on_message(TextBatch([Delta("k.1", 0, 0, "", b"", prompt_tokens=7, created=10)]))
    core.on_message(TextBatch([Delta("k.1", 0, 0, "a", i4([5]))]))
    assert (pending.prompt_tokens, pending.created) == (7, 10)


def test_the_first_token_s_time_is_not_that_of_the_receipt() -> None:
    """The first delta, which is empty, comes as soon as the request is in the ledger."""
    core = ClientCore("c")
    pending = started(core, n=2, streaming=True)
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "", b"")]), 101.0)
    assert pending.progress.first_at == 0
    core.on_message(TextBatch([Delta(pending.rid, 1, 0, "", i4([97]))]), 143.0)
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "a", i4([97]))]), 150.0)
    assert pending.progress.first_at == 143


def test_a_new_detokenizer_resends_and_a_broken_connection_asks() -> None:
    core = ClientCore("c")
    pending = started(core, streaming=True)
    core.on_message(Attached(1), 100.0)
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "ab", i4([97, 98]))]), 100.0)
    ((front, frame),) = core.reconnected("detokenizer.front", 101.0)
    assert front == "detokenizer.front" and frame == encode(Attach(), "client")
    core.on_message(Attached(1), 101.0)
    assert due(core, 101.0) == ["Resume"], "what was on its way is lost"
    core.reconnected("detokenizer.front", 103.0)
    core.on_message(Attached(2), 103.0)
    assert due(core, 103.0) == [] and due(core, 103.0 + SETTLE) == ["Resume"]


def test_an_unknown_request_is_resent_unless_it_had_tokens() -> None:
    core = ClientCore("c")
    fresh, seen = started(core), started(core)
    say(core, seen, 0, "a")
    unknown = [Delta(p.rid, 0, 0, "", b"", finish_reason="error",
                     error=Rejected(p.rid, "unknown_request", "?")) for p in (fresh, seen)]
    core.on_message(TextBatch(unknown), 100.0)
    assert due(core, 100.0) == ["Generate"] and not fresh.done
    with pytest.raises(UnknownRequest):
        seen.completions()


def test_an_abort_without_effect_is_resent() -> None:
    core = ClientCore("c")
    pending = started(core)
    assert core.forget(pending.rid, 100.0)
    delta = Delta(pending.rid, 0, 0, "a", i4([97]))
    core.on_message(TextBatch([delta]), 100.5)
    assert due(core, 100.5) == []
    core.on_message(TextBatch([delta]), 101.0)
    assert due(core, 101.0) == ["Abort"] and due(core, 101.0) == []
    core.on_message(TextBatch([Delta(pending.rid, 0, 1, "", b"", finish_reason="abort")]), 103.0)
    core.on_message(TextBatch([delta]), 105.0)
    assert due(core, 105.0) == []


def test_a_new_engine_continues_what_the_old_one_left() -> None:
    core = ClientCore("c")
    fresh, told = started(core), started(core)
    core.on_message(Attached(7), 100.0)
    say(core, told, 0, "a")
    assert [front for front, _ in core.renewed(200.0)] == ["detokenizer.front"]
    assert not core.attached and due(core, 200.0) == ["Generate", "Resume"]
    core.on_message(Attached(1), 200.0)
    say(core, told, 0, "abc", end="length")
    say(core, fresh, 0, "x", end="length")
    assert [p.completions()[0].text for p in (fresh, told)] == ["x", "abc"]


def test_a_rejected_resend_does_not_end_an_accepted_request() -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "a")
    core.on_message(Rejected(pending.rid, "unavailable", "stopping"), 101.0)
    say(core, pending, 1, "b", end="length")
    assert pending.completions()[0].text == "ab"
