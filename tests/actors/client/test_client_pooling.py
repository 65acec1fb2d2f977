"""Requests for vectors and scores in the SDK: what is sent, what comes back, what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from actorium.actors.client.core import ClientCore
from actorium.actors.client.requests import Request, encode_request
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Delta, Generate, Pooled, Rejected, TextBatch, Usage
from actorium.actors.params import PoolingParams, SamplingParams

EMBED, CLASSIFY = PoolingParams(task="embed"), PoolingParams(task="classify")
VECTOR = Pooled([3], array("f", [1.0, -2.5, 0.25]).tobytes())


def end(rid: str, start: int = 0) -> TextBatch:
    return TextBatch([Delta(rid, 0, start, "", b"", finish_reason="stop", usage=Usage(4, 0, 0),
                            prompt_tokens=4, pooled=VECTOR)])


def test_a_pair_and_its_task_are_sent() -> None:
    frame, n = encode_request("r", Request(prompt="a", text_pair="b", pooling=CLASSIFY))
    message = msgspec.msgpack.decode(frame, type=Generate)
    assert (message.text, message.text_pair, message.pooling, n) == ("a", "b", CLASSIFY, 1)


def test_the_completion_has_the_vector_and_no_text() -> None:
    core = ClientCore("c")
    pending, _ = core.submit(Request(prompt=[1, 2], pooling=EMBED), 0.0, streaming=False)
    core.on_message(end(pending.rid), 1.0)
    core.on_message(end(pending.rid), 2.0)
    (told,) = pending.completions()
    assert told.pooled == VECTOR and (told.text, told.token_ids) == ("", [])
    assert told.finish_reason == "stop" and told.usage.prompt_tokens == 4
    stream, _ = core.submit(Request(prompt=[1, 2], pooling=EMBED), 3.0, streaming=True)
    core.on_message(end(stream.rid), 4.0)
    (delta,) = stream.deltas
    assert delta.pooled == VECTOR and stream.done


def test_one_that_the_engine_has_lost_is_sent_again() -> None:
    """As after a scheduler's death: its ledger has the end of a request, and not the vector."""
    core = ClientCore("c")
    pending, frame = core.submit(Request(prompt=[1, 2], pooling=EMBED), 0.0, streaming=False)
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "", b"", prompt_tokens=2)]), 1.0)
    unknown = Rejected(pending.rid, "unknown_request", "the engine does not know it")
    core.on_message(TextBatch([Delta(pending.rid, 0, 0, "", b"", finish_reason="error",
                                     error=unknown)]), 2.0)
    assert [sent for _, sent in core.resend(2.0)] == [frame] and not pending.done
    core.on_message(end(pending.rid), 3.0)
    assert pending.completions()[0].pooled == VECTOR


def test_numbers_of_each_token_are_rows() -> None:
    numbers = array("f", range(6)).tobytes()
    assert Pooled([2, 3], numbers).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert Pooled([6], numbers).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert Pooled([0, 3], b"").tolist() == []


@pytest.mark.parametrize(("fields", "why"), [
    ({"pooling": "embed"}, "pooling: must be PoolingParams, got str"),
    ({"pooling": PoolingParams(task="rank")}, "pooling: Invalid enum value 'rank'"),  # type: ignore[arg-type]
    ({"pooling": PoolingParams(task="embed", dimensions=0)}, "dimensions: must be between 1 and"),
    ({"pooling": PoolingParams(task="classify", dimensions=4)}, "dimensions: for embed alone"),
    ({"pooling": EMBED, "params": SamplingParams(max_tokens=3)}, "params: nothing is sampled"),
    ({"text_pair": "b"}, "text_pair: with a prompt of text and pooling for classify"),
    ({"text_pair": "b", "pooling": EMBED}, "text_pair: with a prompt of text and pooling for"),
    ({"text_pair": "b", "pooling": CLASSIFY, "prompt": [1]}, "text_pair: with a prompt of text"),
    ({"text_pair": 3, "pooling": CLASSIFY}, "text_pair: must be text, got int")])
def test_what_cannot_be_sent_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_request("r", Request(**{"prompt": "a", **fields}))
    assert str(caught.value).startswith(why)
