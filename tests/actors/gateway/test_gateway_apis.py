"""Token counts, prompts' log-probabilities and the other APIs over a whole engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from helpers_gateway import Served
from pydantic import BaseModel

from actorium.actors.params import SamplingParams

PROMPT: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
STREAM: dict[str, Any] = {"stream": True, "stream_options": {
    "include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture(scope="module")
def served(packaged: Served) -> Served:
    return packaged


def check_running(usages: list[Any], told: list[bool]) -> None:
    """told: whether the event had tokens. The counts run up to the last ones."""
    assert all(one is not None for one in usages)
    last = usages[-1]
    assert {one.prompt_tokens for one in usages} == {last.prompt_tokens}
    done = [one.completion_tokens for one in usages]
    assert done == sorted(done) and done[0] < done[-1] == done[-2]
    assert all(b > a for a, b, more in zip(done, done[1:], told[1:-1], strict=False) if more)
    assert all(one.total_tokens == one.prompt_tokens + one.completion_tokens for one in usages)


def counts(usage: Any) -> tuple[int, int, int]:
    """Without how much of the prompt was cached, which the second time is more."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_running_counts_of_a_chat(served: Served) -> None:
    chunks = list(served.client.chat.completions.create(
        model="demo", messages=PROMPT, max_tokens=20, temperature=0, **STREAM))
    check_running([chunk.usage for chunk in chunks],
                  [bool(c.choices and c.choices[0].delta.content) for c in chunks])
    whole = served.client.chat.completions.create(
        model="demo", messages=PROMPT, max_tokens=20, temperature=0)
    assert counts(whole.usage) == counts(chunks[-1].usage)


def test_running_counts_of_several_choices(served: Served) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": PROMPT, "max_tokens": 12, "n": 3, "seed": 1}
    chunks = list(served.client.chat.completions.create(**ask, **STREAM))
    done = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert done == sorted(done) and len(done) == len(chunks)
    assert counts(chunks[-1].usage) == counts(
        served.client.chat.completions.create(**ask).usage)


def test_running_counts_of_several_prompts(served: Served) -> None:
    ask: dict[str, Any] = {"model": "demo", "prompt": ["Once upon a time", "A"], "max_tokens": 9,
                           "temperature": 0}
    chunks = list(served.client.completions.create(**ask, **STREAM))
    check_running([chunk.usage for chunk in chunks], [False] * len(chunks))
    assert counts(chunks[-1].usage) == counts(served.client.completions.create(**ask).usage)


def test_prompts_logprobs(served: Served) -> None:
    ids = served.engine.client.tokenize("Once upon a time")
    want = served.engine.client.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=2))
    done = served.client.completions.create(model="demo", prompt=ids, max_tokens=1,
                                            extra_body={"prompt_logprobs": 2})
    told: Any = done.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert told[0] is None and len(told) == len(ids)
    for token, mine, one in zip(ids[1:], told[1:], want.prompt_logprobs[1:], strict=True):
        assert mine[str(token)]["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert mine[str(token)]["rank"] == one.rank and len(mine) in (2, 3)
    chat = served.client.chat.completions.create(
        model="demo", messages=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert chat.usage is not None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        served.client.completions.create(model="demo", prompt=ids, stream=True,
                                         extra_body={"prompt_logprobs": 0})


def test_a_request_id_names_the_answer(served: Served) -> None:
    chat = served.client.chat.completions.create(
        model="demo", messages=PROMPT, max_tokens=1, extra_body={"request_id": "mine"})
    assert chat.id == "chatcmpl-mine"
    with pytest.raises(openai.BadRequestError, match="request_id"):
        served.client.chat.completions.create(model="demo", messages=PROMPT, max_tokens=1,
                                              extra_body={"request_id": "a b"})


class Fox(BaseModel):
    name: str
    legs: int


def test_responses(served: Served) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": PROMPT, "temperature": 0,
                           "max_output_tokens": 24}
    whole = served.client.responses.create(**ask)
    chat = served.client.chat.completions.create(model="demo", messages=PROMPT, temperature=0,
                                                 max_tokens=24)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == \
        (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    with served.client.responses.stream(**ask) as stream:
        said = "".join(event.delta for event in stream
                       if event.type == "response.output_text.delta")
    assert said == whole.output_text and whole.status == "incomplete"


def test_responses_parse(served: Served) -> None:
    done = served.client.responses.parse(
        model="demo", input=PROMPT, text_format=Fox, max_output_tokens=256, temperature=0,
        extra_body={"logit_bias": {}})
    if done.status == "completed":
        assert isinstance(done.output_parsed, Fox)
    else:  # a small model may go on inside a string
        assert done.output_text.startswith("{")


def test_asynchronous_responses(served: Served) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
            found = await asyncio.gather(*(client.responses.create(
                model="demo", input=f"Tell me about {what}.", max_output_tokens=8, top_logprobs=2,
                include=["message.output_text.logprobs"]) for what in ("cats", "dogs", "rain")))
        logprobs = [one.output[0].content[0].logprobs for one in found]  # type: ignore[union-attr]
        assert all(1 <= len(each) <= 8 and len(each[0].top_logprobs) == 2 for each in logprobs)
        return [one.output_text for one in found]

    assert all(asyncio.run(run()))


def test_messages(served: Served) -> None:
    body = {"model": "demo", "max_tokens": 24, "messages": PROMPT, "temperature": 0}
    with httpx.Client(base_url=f"{served.url}/v1") as client:
        whole = client.post("/messages", json=body).json()
        count = client.post("/messages/count_tokens", json=body).json()
        events = [json.loads(line[6:]) for line in
                  client.post("/messages", json=body | {"stream": True}).text.split("\n")
                  if line.startswith("data: ")]
    chat = served.engine.client.chat(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))
    assert whole["content"] == [{"type": "text", "text": chat.text}]
    assert whole["stop_reason"] == "max_tokens"
    used = whole["usage"]
    prompt = used["input_tokens"] + used["cache_read_input_tokens"]
    assert prompt == chat.usage.prompt_tokens == count["input_tokens"]
    assert used["output_tokens"] == 24 and events[0]["message"]["usage"]["input_tokens"] == prompt
    assert "".join(one["delta"]["text"] for one in events
                   if one["type"] == "content_block_delta") == chat.text
    assert events[-2]["usage"]["output_tokens"] == 24


def test_the_sdk_tokenizes_chats(served: Served) -> None:
    ids = served.engine.client.tokenize_chat(PROMPT)
    done = served.engine.client.generate(ids, SamplingParams(max_tokens=5, temperature=0.0))
    assert done.text == served.engine.client.chat(
        PROMPT, SamplingParams(max_tokens=5, temperature=0.0)).text
