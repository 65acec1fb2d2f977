"""Hidden states of completions in the client's core: asked for when a choice has ended."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
import pytest
from helpers_text import i4

from actorium.actors.client.core import QUEUE_AGAIN, ClientCore
from actorium.actors.client.media import is_loaded, load_media
from actorium.actors.client.pending import PendingRequest
from actorium.actors.client.requests import Request, Resumable, encode_request
from actorium.actors.errors import InvalidRequest, from_code
from actorium.actors.messages import (
    Abort,
    Delta,
    Generate,
    Pooled,
    PromptEmbeds,
    Rejected,
    Resume,
    TextBatch,
    Tokenized,
    Usage,
)
from actorium.actors.params import PoolingParams, SamplingParams

ROWS = Pooled([4, 1, 2], array("f", range(8)).tobytes(), weight_version=3)
WANTED = SamplingParams(hidden_states=(0, -1))


def sent(core: ClientCore, now: float = 1.0) -> list[Any]:
    return [msgspec.msgpack.decode(frame, type=Generate | Resume | Abort)
            for _, frame in core.resend(now)]


def delta(rid: str, start: int, tokens: list[int], end: str | None = None, index: int = 0,
          **more: Any) -> TextBatch:
    return TextBatch([Delta(rid, index, start, "x" * len(tokens), i4(tokens), finish_reason=end,
                            usage=Usage(2, 0, start + len(tokens)) if end else None, **more)])


def begun(streaming: bool = False, n: int = 1, **fields: Any) -> tuple[ClientCore, PendingRequest]:
    core = ClientCore("c")
    params = SamplingParams(hidden_states=(0, -1), n=n)
    pending, _ = core.submit(Request(prompt=[1, 2], params=params, cache_salt="s", adapter="a",
                                     priority=3, **fields), 0.0, streaming)
    return core, pending


@pytest.mark.parametrize("streaming", [False, True])
def test_the_whole_text_is_asked_for_before_the_end_is_told(streaming: bool) -> None:
    core, pending = begun(streaming)
    core.on_message(delta(pending.rid, 0, [7, 8]), 1.0)
    core.on_message(delta(pending.rid, 2, [9], "stop"), 1.0)
    assert not pending.done and len(pending.deltas) == streaming
    (asked,) = sent(core)
    assert array("i", asked.tokens).tolist() == [1, 2, 7, 8, 9]
    assert asked.pooling == PoolingParams(task="hidden_states", layers=(0, -1))
    assert (asked.cache_salt, asked.adapter, asked.priority) == ("s", "a", 3)
    assert asked.params == SamplingParams() and asked.rid != pending.rid
    core.on_message(delta(pending.rid, 0, [7, 8, 9], "stop"), 2.0)  # told once more
    assert not pending.done and not sent(core, 2.0)
    core.on_message(delta(asked.rid, 0, [], "stop", pooled=ROWS), 3.0)
    assert pending.done and not core.waiting
    if streaming:
        assert [(one.token_ids, one.pooled) for one in pending.deltas] == [
            ([7, 8], None), ([9], ROWS)]
    else:
        (told,) = pending.completions()
        assert (told.text, told.token_ids, told.pooled) == ("xxx", [7, 8, 9], ROWS)


def test_each_choice_has_its_own() -> None:
    core, pending = begun(n=2)
    core.on_message(delta(pending.rid, 0, [5], "length", index=1), 1.0)
    (second,) = sent(core)
    core.on_message(delta(pending.rid, 0, [6], "stop"), 1.0)
    (first,) = sent(core)
    assert [array("i", one.tokens)[-1] for one in (first, second)] == [6, 5]
    core.on_message(delta(first.rid, 0, [], "stop", pooled=ROWS), 2.0)
    assert not pending.done
    core.on_message(delta(second.rid, 0, [], "stop", pooled=ROWS), 2.0)
    assert [one.pooled for one in pending.completions()] == [ROWS, ROWS]


def test_a_full_queue_is_asked_again_and_an_error_is_the_requests() -> None:
    core, pending = begun()
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    (asked,) = sent(core)
    core.on_message(Rejected(asked.rid, "queue_full", "full"), 1.1)
    assert not pending.done and not sent(core, 1.2)
    (again,) = sent(core, 1.1 + QUEUE_AGAIN)
    assert again == asked
    core.on_message(Rejected(asked.rid, "invalid_request", "hidden_states: no", "x"), 3.0)
    with pytest.raises(InvalidRequest, match="no"):
        pending.completions()
    assert not core.waiting


def test_an_abort_reaches_them_and_the_text_stays() -> None:
    core, pending = begun()
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    (asked,) = sent(core)
    core.aborting(pending.rid, 1.5)
    assert sent(core, 1.5) == [Abort(asked.rid)]
    core.on_message(delta(asked.rid, 0, [], "abort"), 2.0)
    (told,) = pending.completions()
    assert (told.token_ids, told.pooled) == ([5], None)


def test_one_that_is_given_up_or_late_takes_them_along() -> None:
    core, pending = begun(timeout=9.0)
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    (asked,) = sent(core)
    assert asked.timeout == 8.0, "what is left"
    assert core.forget(pending.rid, 2.0) and sent(core, 2.0) == [Abort(asked.rid)]
    core, pending = begun(timeout=9.0)
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    assert {abort.rid for abort in core.expire(11.0)} >= {f"{pending.rid}-h0"}
    assert pending.error is not None and pending.error.code == "deadline"


def test_an_aborted_completion_has_none() -> None:
    core, pending = begun(streaming=True)
    core.on_message(delta(pending.rid, 0, [5], "abort"), 1.0)
    assert pending.done and not sent(core) and pending.deltas[0].pooled is None


@pytest.mark.parametrize("adopt", [False, True])
def test_they_outlive_the_client_as_their_request_does(adopt: bool) -> None:
    core, pending = begun(resumable=Resumable(rid="k7-1.body", seconds=5.0, adopt=adopt,
                                              must_exist=True))
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    (asked,) = sent(core)
    assert asked.rid == "k7-1-h0.body"
    if not adopt:
        assert asked.resume_seconds == 5.0
        return
    assert asked.adopt, "another client may have asked already"
    unknown = Rejected(asked.rid, "unknown_request", "none")
    core.on_message(delta(asked.rid, 0, [], "error", error=unknown), 2.0)
    (asked,) = sent(core, 2.0)
    assert isinstance(asked, Generate), "nobody had"


def test_the_engine_that_ends_ends_both() -> None:
    core, pending = begun()
    core.on_message(delta(pending.rid, 0, [5], "stop"), 1.0)
    core.fail_all(from_code("unavailable", "gone"))
    assert pending.done and pending.error is not None and not core.waiting


def test_a_text_is_turned_into_tokens_first() -> None:
    class Session:
        async def call(self, front: str, question: Any, timeout: float | None) -> Any:
            assert question("r").text == "Hi"
            return Tokenized("r", i4([3, 4]))

    request = Request(prompt="Hi", params=WANTED)
    assert not is_loaded(request)
    loaded = asyncio.run(load_media(Session(), request))  # type: ignore[arg-type]
    assert loaded.prompt == [3, 4] and is_loaded(loaded)


@pytest.mark.parametrize("fields", [{"messages": [{"role": "user", "content": "a"}]},
                                    {"prompt": [1], "truncate_prompt_tokens": 3},
                                    {"prompt": PromptEmbeds(1, bytes(4))}])
def test_prompts_of_other_forms_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="hidden_states: of a prompt of text or token ids"):
        encode_request("r", Request(params=WANTED, **fields))


@pytest.mark.parametrize(("layers", "why"), [((0,) * 1025, "at most"), ((5000,), "must be between"),
                                             ((True,), "must be a number")])
def test_layers_are_checked(layers: tuple[int, ...], why: str) -> None:
    with pytest.raises(InvalidRequest, match="hidden_states") as refused:
        encode_request("r", Request(prompt=[1], params=SamplingParams(hidden_states=layers)))
    assert refused.value.param == "hidden_states"
