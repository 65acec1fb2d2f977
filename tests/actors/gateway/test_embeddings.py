"""Routes of vectors, in every project's shape, over an engine whose vectors a test can compute."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers_gateway import Scripted
from helpers_pooled import WIDTH, PooledEngine, pooled_app, post, vector

from actorium.actors.errors import ContextOverflow, QueueFull
from actorium.actors.gateway.api.pooled_answers import MAX_INPUTS
from actorium.actors.gateway.batch.batch_lines import LineContext, parse_line
from actorium.actors.gateway.batch.line_caller import answered, asking
from actorium.actors.messages import BACKGROUND
from actorium.actors.params import PoolingParams

TEXTS = ["a fox", "the dog", "¿qué?"]


def embed(body: Any, path: str = "/v1/embeddings") -> Any:
    """The answer of an engine that embeds."""
    answer = post(PooledEngine("embed"), path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(body: Any, path: str = "/v1/embeddings", engine: Scripted | None = None) -> str:
    answer = post(engine or PooledEngine("embed"), path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("given", "prompts"), [
    ("a fox", ["a fox"]), (TEXTS, TEXTS), ([3, 1, 4], [[3, 1, 4]]), ([[3, 1], [4]], [[3, 1], [4]])])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_inputs_have_their_vectors_in_order(path: str, given: Any, prompts: Any) -> None:
    answer = embed({"model": "demo", "input": given}, path)
    assert [one["embedding"] for one in answer["data"]] == [vector(prompt) for prompt in prompts]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (i, "embedding") for i in range(len(prompts))]
    tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0,
                               "total_tokens": tokens}
    assert (answer["object"], answer["model"]) == ("list", "demo")
    assert answer["id"].startswith("embd-")


def test_base64_has_the_same_numbers() -> None:
    answer = embed({"input": TEXTS, "encoding_format": "base64", "dimensions": 3})
    for one, text in zip(answer["data"], TEXTS, strict=True):
        assert array("f", base64.b64decode(one["embedding"])).tolist() == vector(text, 3)


def test_floats_are_those_of_float32_to_the_bit() -> None:
    [one] = embed({"input": "x"})["data"]
    assert array("f", one["embedding"]).tobytes() == array("f", vector("x")).tobytes()


def test_fields_reach_the_engine() -> None:
    engine = PooledEngine("embed")
    post(engine, "/v1/embeddings", {
        "input": ["a", [7]], "dimensions": 2, "normalize": False, "truncate_prompt_tokens": 5,
        "priority": 3, "timeout": 9, "user": "u", "add_special_tokens": False})
    first, second = engine.asked
    assert (first.prompt, second.prompt) == ([97], [7])
    for request in engine.asked:
        assert request.pooling == PoolingParams(task="embed", dimensions=2, use_activation=False)
        assert (request.truncate_prompt_tokens, request.priority, request.timeout) == (5, 3, 9)
    post(engine, "/v1/embeddings", {"messages": [{"role": "user", "content": "Hi"}]})
    last = engine.asked[-1]
    assert last.messages is not None and not last.add_generation_prompt


def test_prompts_of_sentence_transformers_by_name() -> None:
    [one] = embed({"input": "x", "prompt_name": "query"})["data"]
    assert one["embedding"] == vector("Find: x")
    engine = PooledEngine("embed", "token_embed")
    for path, task in (("/v1/embeddings", "embed"), ("/pooling", "token_embed")):
        post(engine, path, {"input": "x", "prompt_name": "query", "task": task})
    assert [request.pooling.instruction for request in engine.asked if request.pooling] == [
        "Find: ", ""]
    assert refusal({"input": "x", "prompt_name": "none"}) == \
        "prompt_name: 'none' is none of the model's: query"
    assert refusal({"input": [1], "prompt_name": "query"}) == \
        "prompt_name: only where input is texts"


def test_many_inputs_are_one_batch() -> None:
    engine = PooledEngine("embed")
    texts = [f"text {i}" for i in range(MAX_INPUTS)]
    answer = post(engine, "/v1/embeddings", {"input": texts}).json()
    assert engine.calls == [MAX_INPUTS]
    assert [one["embedding"] for one in answer["data"]] == [vector(text) for text in texts]
    assert refusal({"input": [*texts, "x"]}).startswith(
        f"input: 1 to {MAX_INPUTS} of them, got {MAX_INPUTS + 1}")


@pytest.mark.parametrize(("body", "message"), [
    ({"input": []}, "input: 1 to 2048 of them, got 0"),
    ({"input": [1, "a"]}, "input: token ids are mixed"),
    ({"input": [[1], 2]}, "input: token ids are mixed"),
    ({"input": {"a": 1}}, "input: "),
    ({}, "input: exactly one of input and messages"),
    ({"input": "a", "messages": []}, "input: exactly one of"),
    ({"messages": []}, "messages: must not be empty"),
    ({"input": "a", "content": "b"}, "content: not together with input"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format: "),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype: "),
    ({"input": "a", "endianness": "big"}, "endianness: "),
    ({"input": "a", "truncation_side": "left"}, "truncation_side: "),
    ({"input": "a", "embd_normalize": 0}, "embd_normalize: must be 2"),
    ({"input": "a", "dimensions": "x"}, "dimensions: ")])
def test_what_cannot_be_embedded_is_refused_by_name(body: Any, message: str) -> None:
    assert refusal(body).startswith(message)


def test_an_error_says_which_input_it_is_of() -> None:
    engine = PooledEngine("embed")
    engine.failing[2] = ContextOverflow("prompt: is too long", "prompt")
    answer = post(engine, "/v1/embeddings", {"input": ["a", "b", "c"]})
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == ("input[2]: is too long", "input")
    engine.failing = {0: ContextOverflow("prompt: is too long", "prompt")}
    assert refusal({"input": "a"}, engine=engine) == "input: is too long"
    engine.failing = {0: QueueFull("the queue is full")}
    assert post(engine, "/v1/embeddings", {"input": "a"}).status_code == 429


def test_a_model_without_the_task_says_what_it_is_for() -> None:
    judge = PooledEngine("generate")
    assert refusal({"input": "a"}, engine=judge) == \
        "model: 'demo' does not embed texts; it is for generate"
    assert refusal({"input": "a"}, "/classify", judge) == \
        "model: 'demo' does not classify texts; it is for generate"
    assert refusal({"input": "a"}, "/pooling", judge).startswith("model: 'demo' does none of")
    for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                       ("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"}),
                       ("/api/generate", {"prompt": "a"}),
                       ("/v1/messages", {"max_tokens": 5, "messages": [
                           {"role": "user", "content": "a"}]})):
        assert refusal(body, path, PooledEngine("embed")) == \
            "model: 'demo' does not generate text; it is for embed"


def test_an_idempotency_key_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes another way through the gateway, as a stream that others may read as well."""
    from actorium.actors.client.requests import StreamDelta
    from actorium.actors.messages import Pooled, Usage

    class OneDelta:
        prompt_tokens, created, progress = 3, 0, None

        def __init__(self, _client: Any, request: Any) -> None:
            self._left = [StreamDelta(
                text="", token_ids=[], finish_reason="stop", usage=Usage(3, 0, 0),
                pooled=Pooled([WIDTH], array("f", vector(request.prompt)).tobytes()))]

        def more(self) -> list[StreamDelta]:
            return []

        async def aclose(self) -> None:
            pass

        def __aiter__(self) -> OneDelta:
            return self

        async def __anext__(self) -> StreamDelta:
            if not self._left:
                raise StopAsyncIteration
            return self._left.pop()

    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", OneDelta)
    answer = post(PooledEngine("embed"), "/v1/embeddings", {"input": TEXTS},
                  {"idempotency-key": "k"}).json()
    assert [one["embedding"] for one in answer["data"]] == [vector(text) for text in TEXTS]


def test_the_openai_package_reads_both_formats() -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app=pooled_app(PooledEngine("embed")))
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="-", max_retries=0,
                                    http_client=httpx.AsyncClient(transport=transport))
        for more in ({}, {"encoding_format": "float"}):
            answer = await client.embeddings.create(model="demo", input=TEXTS, dimensions=4,
                                                    **more)  # type: ignore[call-overload]
            assert [one.embedding for one in answer.data] == [vector(text, 4) for text in TEXTS]
            assert answer.usage.total_tokens == sum(map(len, TEXTS))

    asyncio.run(run())


# --- other projects' routes -----------------------------------------------------------------------

def test_llama_servers_shape() -> None:
    wanted = [{"index": i, "embedding": [vector(text)]} for i, text in enumerate(TEXTS)]
    assert embed({"content": TEXTS}, "/embedding") == wanted
    assert embed({"input": TEXTS}, "/embedding") == wanted
    assert embed({"content": TEXTS}, "/embeddings") == wanted
    [raw] = embed({"content": "x", "embd_normalize": -1}, "/embedding")
    assert raw["embedding"] == [vector("x", normalise=False)]


def test_sglangs_shape() -> None:
    one = embed({"text": "x", "rid": "mine"}, "/encode")
    assert one["embedding"] == vector("x") and one["meta_info"]["prompt_tokens"] == 1
    assert one["meta_info"]["id"] == "mine"
    several = embed({"text": TEXTS, "rid": "mine"}, "/encode")
    assert [one["embedding"] for one in several] == [vector(text) for text in TEXTS]
    assert [one["meta_info"]["id"] for one in several] == ["mine_0", "mine_1", "mine_2"]
    assert embed({"input_ids": [5, 6]}, "/encode")["embedding"] == vector([5, 6])
    assert embed({"input_ids": [[5, 6]]}, "/encode")[0]["embedding"] == vector([5, 6])
    for body, message in (({"text": "a", "image_data": ["x"]}, "image_data: not supported"),
                          ({}, "text: exactly one of text and input_ids"),
                          ({"text": TEXTS, "rid": ["a"]}, "rid: one for each prompt: 3, got 1"),
                          ({"text": "a", "none": 1}, "none: there is no such field")):
        assert refusal(body, "/encode").startswith(message)


def test_teis_shape() -> None:
    assert embed({"inputs": TEXTS}, "/embed") == [vector(text) for text in TEXTS]
    assert embed({"inputs": "x", "normalize": False, "dimensions": 2}, "/embed") == [
        vector("x", 2, normalise=False)]
    assert embed({"inputs": "x", "prompt_name": "query"}, "/embed") == [vector("Find: x")]


def test_ollamas_shapes() -> None:
    engine = PooledEngine("embed")
    answer = post(engine, "/api/embed", {"model": "demo:latest", "input": TEXTS,
                                         "dimensions": 3, "options": {"num_ctx": 512}}).json()
    assert answer["embeddings"] == [vector(text, 3) for text in TEXTS]
    assert (answer["model"], answer["prompt_eval_count"]) == ("demo:latest", sum(map(len, TEXTS)))
    assert answer["total_duration"] >= answer["load_duration"] >= 0
    assert {one.truncate_prompt_tokens for one in engine.asked} == {-1}
    post(engine, "/api/embed", {"input": "x", "truncate": False})
    assert engine.asked[-1].truncate_prompt_tokens is None
    assert embed({"model": "demo", "input": ""}, "/api/embed")["embeddings"] == []
    old = embed({"model": "demo", "prompt": "x"}, "/api/embeddings")
    assert old == {"embedding": vector("x", normalise=False)}
    assert embed({"prompt": ""}, "/api/embeddings") == {"embedding": []}
    assert refusal({"input": "x", "options": {"mirostat": 1}}, "/api/embed") == \
        "options.mirostat: not supported; 0 changes nothing"
    assert refusal({"input": "x"}, "/api/embed", PooledEngine("generate")) == \
        "model: 'demo' does not embed texts; it is for generate"


# --- pooling and classes --------------------------------------------------------------------------

def test_pooling_by_task() -> None:
    engine = PooledEngine("token_embed", "embed")
    [one] = post(engine, "/pooling", {"input": "ab"}).json()["data"]
    assert one == {"index": 0, "object": "pooling", "data": vector("ab")}
    tokens = post(engine, "/pooling", {"input": [[5, 6, 7]], "task": "token_embed"}).json()
    assert tokens["data"][0]["data"] == [vector([5]), vector([6]), vector([7])]
    assert tokens["id"].startswith("pool-") and tokens["usage"]["total_tokens"] == 3
    assert refusal({"input": "a", "task": "classify"}, "/pooling", engine) == \
        "model: 'demo' does not classify texts; it is for token_embed, embed"
    assert refusal({"input": "a", "task": "none"}, "/pooling", engine).startswith("task: ")


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes(path: str) -> None:
    engine = PooledEngine("classify", labels=["bad", "good", "dull"])
    answer = post(engine, path, {"input": TEXTS, "use_activation": True}).json()
    for i, (one, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
        wanted = vector(text)[:3]
        assert one == {"index": i, "probs": wanted, "num_classes": 3,
                       "label": ["bad", "good", "dull"][wanted.index(max(wanted))]}
    assert answer["id"].startswith("classify-")
    assert {one.pooling for one in engine.asked} == {
        PoolingParams(task="classify", use_activation=True)}


# --- bodies of any kind ---------------------------------------------------------------------------

@pytest.mark.parametrize(("url", "body"), [
    ("/v1/embeddings", {"input": TEXTS}), ("/v1/rerank", {"query": "a", "documents": TEXTS}),
    ("/v1/score", {"text_1": "a", "text_2": TEXTS}), ("/api/embed", {"input": TEXTS})])
def test_lines_of_batches_are_answered_as_requests_are(url: str, body: Any) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    engine = PooledEngine("embed")
    result = json.loads(asyncio.run(answered(
        parse_line(1, line.encode()), LineContext("", 60.0, "key"), "batch_1",
        asking(pooled_app(engine)))))
    alone, changing = embed(body, url), ("id", "created", "total_duration", "load_duration")
    answer = result["response"]["body"]
    assert result["error"] is None and {one.priority for one in engine.asked} == {BACKGROUND}
    for name in changing:
        alone.pop(name, None), answer.pop(name, None)
    assert answer == alone


def test_invocations_go_by_what_the_model_does() -> None:
    found = embed({"model": "demo", "input": "x"}, "/invocations")
    assert found["data"][0]["embedding"] == vector("x")
    ranked = embed({"query": "x", "documents": ["xy", "z"]}, "/invocations")
    assert len(ranked["results"]) == 2
    scored = embed({"text_1": "x", "text_2": "x"}, "/invocations")
    assert scored["data"][0]["score"] == pytest.approx(1)
