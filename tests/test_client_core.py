"""The clients' pure core: deltas that come twice, late, or not at all."""

from __future__ import annotations

import math

import pytest
from helpers_text import i4

from actorium.actors.client_calls import requests
from actorium.actors.client_core import GRACE, ClientCore, Pending
from actorium.actors.client_requests import Request, encode
from actorium.actors.errors import (
    Aborted,
    ActoriumError,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
)
from actorium.actors.messages import (
    Abort,
    Accepted,
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
            timeout: float | None = None) -> Pending:
    request = Request(prompt="x", params=SamplingParams(n=n), timeout=timeout)
    return core.submit(request, 100.0, streaming)[0]


def say(core: ClientCore, pending: Pending, start: int, text: str, index: int = 0,
        end: str | None = None, logprobs: list[TokenLogprob] | None = None) -> None:
    """One token a character."""
    usage = Usage(1, 0, start + len(text)) if end else None
    core.on_message(TextBatch([Delta(pending.rid, index, start, text, i4(list(text.encode())),
                                     logprobs, None, end, None, usage)]))


def lp(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, [])


def test_what_comes_again_is_cut() -> None:
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


def test_a_gap_is_asked_for_from_the_start() -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "ab")
    say(core, pending, 3, "d", end="length")
    assert not pending.done
    assert core.resend(core.due) == [("tokenizer.front", encode(Resume(pending.rid), "rid"))]
    say(core, pending, 2, "c")
    say(core, pending, 0, "abcd", end="length")
    assert pending.completions()[0].text == "abcd"


def test_choices_end_one_by_one() -> None:
    core = ClientCore("c")
    pending = started(core, n=2)
    ended: list[Pending] = []
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
def test_ends_that_are_errors(end: str, error: type[ActoriumError]) -> None:
    core = ClientCore("c")
    pending = started(core)
    say(core, pending, 0, "ab", end=end)
    with pytest.raises(error):
        pending.completions()


def test_refusals_go_to_whom_they_belong() -> None:
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


def test_deadlines_and_the_end_of_everything() -> None:
    core = ClientCore("c")
    patient, hasty = started(core), started(core, timeout=5.0)
    call = core.call(ServerInfo, 104.0, now=100.0)
    assert core.soonest == 104.0
    assert core.expire(104.0) == [] and isinstance(call.error, DeadlineExceeded)
    assert core.soonest == 105.0 + GRACE
    assert core.expire(105.0 + GRACE) == [Abort(hasty.rid)] and core.soonest == math.inf
    assert isinstance(hasty.error, DeadlineExceeded) and not patient.done
    notified = []
    patient.notify = lambda: notified.append(1)
    core.attached = True
    core.fail_all(EngineUnavailable("gone"))
    assert isinstance(patient.error, EngineUnavailable) and notified == [1]
    assert not core.attached and not core.waiting


def test_shapes_and_lists_of_parameters() -> None:
    made, shape = requests([1, 2], None, None)
    assert len(made) == 1 and shape([["c"]]) == "c" and shape([["a", "b"]]) == "a"
    two = SamplingParams(n=2)
    made, shape = requests(["a", [1]], [two, None], 3.0)
    assert [r.prompt for r in made] == ["a", [1]] and made[0].params is two
    assert shape([["a", "b"], ["c"]]) == [["a", "b"], ["c"]]
    error = EngineUnavailable("x")
    assert requests(["a", "b"], None, None)[1]([["a"], error]) == ["a", error]
    with pytest.raises(InvalidRequest, match="1 for 2"):
        requests(["a", "b"], [two], None)
