"""litellm: chats, streams, tools, text completions, and its own way to Anthropic's API."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from actorium.actors.params import SamplingParams

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for one on the net
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.conformance
PROMPT = [{"role": "user", "content": "Tell me a story about a fox."}]


def ask(served: Any, kind: str = "openai", **more: Any) -> dict[str, Any]:
    """The arguments of a call."""
    base = served.url if kind == "anthropic" else f"{served.url}/v1"
    return {"model": f"{kind}/demo", "api_base": base, "api_key": "-", "messages": PROMPT,
            "temperature": 0, "max_tokens": 24, "num_retries": 0} | more


def wanted(served: Any) -> str:
    """What the SDK says."""
    text: str = served.engine.client.chat(
        PROMPT, SamplingParams(max_tokens=24, temperature=0.0)).text
    return text


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm", "anthropic"])
def test_whole_and_streamed(served: Any, kind: str) -> None:
    want = wanted(served)
    whole = litellm.completion(**ask(served, kind))
    assert whole.choices[0].message.content == want and whole.usage.completion_tokens == 24
    said = "".join(part.choices[0].delta.content or "" for part in
                   litellm.completion(**ask(served, kind, stream=True)))
    assert said == want


def test_asynchronously(served: Any) -> None:
    found = asyncio.run(litellm.acompletion(**ask(served)))
    assert found.choices[0].message.content == wanted(served)


def test_tools(served: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"place": {"enum": ["Riga", "Oslo"]}},
        "required": ["place"], "additionalProperties": False}}}
    found = litellm.completion(**ask(served, tools=[tool], tool_choice="required"))
    call = found.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and "place" in call.arguments


def test_text_completions(served: Any) -> None:
    given = ask(served, "text-completion-openai", prompt="Once upon a time")
    del given["messages"]
    found = litellm.text_completion(**given)
    want = served.engine.client.generate("Once upon a time", SamplingParams(
        max_tokens=24, temperature=0.0)).text
    assert found.choices[0].text == want


def test_errors(served: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask(served, temperature=-1))
