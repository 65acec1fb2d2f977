"""Which trace the tokenizer gives to a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_text import context, loaded, write_model

from actorium.actors.client.requests import Request, encode_request
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import ChatMessage, Generate, Submit, TraceContext
from actorium.actors.params import PoolingParams, SamplingParams
from actorium.actors.tokenizer.core import TokenizerCore

TRACE = TraceContext(bytes(range(16)), bytes(range(1, 9)))
PARENT = f"00-{bytes(range(16)).hex()}-{bytes(range(1, 9)).hex()}-01"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


def submitted(model: Path, endpoint: str | None = "http://a:1", now: float = 1.0, **fields: Any
              ) -> TraceContext | None:
    ctx = context(model)
    runtime = msgspec.structs.replace(ctx.config.runtime, otlp_traces_endpoint=endpoint)
    core: TokenizerCore = loaded(TokenizerCore(ctx._replace(
        config=msgspec.structs.replace(ctx.config, runtime=runtime))))
    core.on_client(b"c", Generate("r", SamplingParams(), **fields), now)
    (submit,) = [send.message for send in core.on_wake(now) if isinstance(send.message, Submit)]
    return submit.trace


def test_the_callers_trace_goes_on(model: Path) -> None:
    assert submitted(model, text="hi", trace=TRACE) == msgspec.structs.replace(
        TRACE, operation="text_completion")
    chat = submitted(model, messages=[ChatMessage("user", "hi")], trace=TRACE)
    assert chat is not None and chat.operation == "chat"
    vector = submitted(model, text="hi", trace=TRACE, pooling=PoolingParams(task="embed"))
    assert vector is not None and vector.operation == "embeddings"


def test_a_request_without_one_begins_one(model: Path) -> None:
    one, two = submitted(model, text="hi"), submitted(model, text="hi", now=2.0)
    assert one is not None and two is not None and one.parent is None
    assert one.trace_id != two.trace_id


def test_no_spans_of_what_the_caller_does_not_sample_nor_without_a_collector(model: Path) -> None:
    assert submitted(model, text="hi", trace=msgspec.structs.replace(TRACE, sampled=False)) is None
    assert submitted(model, endpoint=None, text="hi", trace=TRACE) is None


def test_a_caller_of_the_sdk_names_its_span() -> None:
    frame, _ = encode_request("r", Request(prompt="hi", traceparent=PARENT, tracestate="a=b"))
    message = msgspec.msgpack.decode(frame, type=Generate)
    assert message.trace == msgspec.structs.replace(TRACE, state="a=b")
    with pytest.raises(InvalidRequest, match="^traceparent: must be as in W3C Trace Context"):
        encode_request("r", Request(prompt="hi", traceparent="00-12-34-01"))
