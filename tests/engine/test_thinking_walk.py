"""Thoughts, formats and tools together, in every API: each combination has its right answer.

The packaged model gets a template that opens a thought. It writes at random, so that a bias towards
`<`, with which its calls begin, decides whether it calls where it may.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from helpers_masking import vocabulary
from helpers_served import Served, serving

TEMPLATE = """\
{%- if tools %}{{ tools | tojson }} Calls: <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined
and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"""
BUDGET = 6
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}
PARAMETERS = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"],
              "additionalProperties": False}
NAMES = ("count", "sum")
CHOICES = ("auto", "required", "named", "none")
APIS = ("chat", "responses", "messages")
[LESS] = vocabulary()._tokens.tokenize_str("<")


class Told(NamedTuple):
    """What an answer says, whichever API told it."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]
    reason: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("template") / "thinking.jinja"
    file.write_text(TEMPLATE)
    with serving(chat_template=str(file), exact="on") as found:
        yield found


def body(api: str, thinks: bool, formatted: bool, choice: str, bias: int = 100) -> dict[str, Any]:
    """A request in an API's words."""
    common = {"temperature": 0, "seed": 1, "logit_bias": {str(LESS): bias}, "model": ""}
    if choice == "named":
        named = {"chat": {"type": "function", "function": {"name": NAMES[1]}},
                 "responses": {"type": "function", "name": NAMES[1]},
                 "messages": {"type": "tool", "name": NAMES[1]}}[api]
    else:
        named = {"type": "any" if choice == "required" else choice} if api == "messages" else choice
    functions = [{"name": name, "parameters": PARAMETERS, "strict": True} for name in NAMES]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if api == "chat":
        found = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 100,
                 "tools": [{"type": "function", "function": one} for one in functions],
                 "reasoning_effort": "high" if thinks else "none",
                 "thinking_token_budget": BUDGET}
        return common | found | {"tool_choice": named} | (
            {"response_format": wanted} if formatted else {})
    if api == "responses":
        return common | {
            "input": "Go.", "max_output_tokens": 100, "store": False, "tool_choice": named,
            "tools": [{"type": "function", **one} for one in functions],
            "reasoning": {"effort": "high" if thinks else "none"},
            "thinking_token_budget": BUDGET} | (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
            if formatted else {})
    return common | {
        "messages": [{"role": "user", "content": "Go."}], "max_tokens": 100, "tool_choice": named,
        "tools": [{"name": name, "input_schema": PARAMETERS, "strict": True} for name in NAMES]} | (
        {"thinking": {"type": "enabled", "budget_tokens": BUDGET}} if thinks else {}) | (
        {"response_format": wanted} if formatted else {})


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def ask(served: Served, api: str, asked: dict[str, Any], streamed: bool) -> Told:
    answer = httpx.post(served.url + PATHS[api], json=asked | {"stream": streamed}, timeout=60)
    assert answer.status_code == 200, answer.text
    if not streamed:
        return {"chat": whole_chat, "responses": whole_response,
                "messages": whole_message}[api](answer.json())
    events = [json.loads(line[6:]) for line in answer.text.splitlines()
              if line.startswith("data: {")]
    return {"chat": streamed_chat, "responses": streamed_response,
            "messages": streamed_message}[api](events)


def whole_chat(answer: Any) -> Told:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"])
             for one in message["tool_calls"] or ()]
    return Told(message["reasoning_content"] or "", message["content"] or "", tuple(calls),
                choice["finish_reason"])


def streamed_chat(events: list[Any]) -> Told:
    thought, text, reason = "", "", ""
    calls: list[list[str]] = []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            reason = choice["finish_reason"] or reason
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
    return Told(thought, text, tuple((name, arguments) for name, arguments in calls), reason)


def whole_response(answer: Any) -> Told:
    thought, text, calls = "", "", []
    for item in answer["output"]:
        if item["type"] == "reasoning":
            thought += "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        else:
            calls.append((item["name"], item["arguments"]))
    reason = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return Told(thought, text, tuple(calls), reason)


def streamed_response(events: list[Any]) -> Told:
    texts = {"response.output_text.delta": "", "response.reasoning_text.delta": "",
             "response.function_call_arguments.delta": ""}
    for event in events:
        if event["type"] in texts:
            texts[event["type"]] += event["delta"]
    told = whole_response(events[-1]["response"])
    text, thought, arguments = texts.values()
    assert (text, thought) == (told.text, told.thought)
    assert arguments == "".join(one for _, one in told.calls)
    return told


def whole_message(answer: Any) -> Told:
    blocks = answer["content"]
    calls = tuple((one["name"], json.dumps(one["input"])) for one in blocks
                  if one["type"] == "tool_use")
    reason = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}
    return Told("".join(one["thinking"] for one in blocks if one["type"] == "thinking"),
                "".join(one["text"] for one in blocks if one["type"] == "text"), calls,
                reason[answer["stop_reason"]])


def streamed_message(events: list[Any]) -> Told:
    blocks: list[dict[str, Any]] = []
    reason = None
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
        elif event["type"] == "content_block_delta":
            for key in ("thinking", "text"):
                if key in event["delta"]:
                    blocks[-1][key] += event["delta"][key]
            blocks[-1]["input"] += event["delta"].get("partial_json", "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for one in blocks:
        if one["type"] == "tool_use":
            one["input"] = json.loads(one["input"])
    return whole_message({"content": blocks, "stop_reason": reason})


def right(told: Told, thinks: bool, formatted: bool, choice: str) -> None:
    """Checks an answer against what is right for its combination."""
    assert bool(told.thought) is thinks
    assert "think>" not in told.thought + told.text
    called = choice in ("required", "named") or (choice == "auto" and formatted)
    assert bool(told.calls) is called
    for name, arguments in told.calls:
        assert name in NAMES and json.loads(arguments)["n"] in (1, 2, 3)
    if called:
        assert told.text == "" and told.reason in ("tool_calls", "length")
        assert choice != "named" or [name for name, _ in told.calls] == [NAMES[1]]
        assert choice != "named" or told.reason == "tool_calls"
    elif formatted:
        assert json.loads(told.text).keys() == {"ok"} and told.reason == "stop"
    else:
        assert told.text


WALK = list(product((True, False), (True, False), CHOICES))
Streamed = Callable[[str, bool, bool, str], Told]


@pytest.fixture(scope="module")
def streamed(served: Served) -> Streamed:
    """The streamed answer to a combination, which is asked for once."""
    return functools.cache(lambda api, *asked: ask(served, api, body(api, *asked), True))


@pytest.mark.parametrize(("api", "thinks", "formatted", "choice"), [
    pytest.param(api, *asked, marks=[pytest.mark.slow] * ((i + j) % len(APIS) > 0))
    for i, asked in enumerate(WALK) for j, api in enumerate(APIS)])
def test_every_combination(served: Served, streamed: Streamed, api: str, thinks: bool,
                           formatted: bool, choice: str) -> None:
    told = [ask(served, api, body(api, thinks, formatted, choice), False),
            streamed(api, thinks, formatted, choice)]
    right(told[0], thinks, formatted, choice)
    assert told[0].calls and [(name, json.loads(one)) for name, one in told[0].calls] == [
        (name, json.loads(one)) for name, one in told[1].calls] or not told[0].calls
    assert told[0]._replace(calls=()) == told[1]._replace(calls=())


@pytest.mark.parametrize(("api", "thinks"), list(product(APIS, (True, False))))
def test_a_format_is_kept_where_nothing_is_called(served: Served, api: str, thinks: bool) -> None:
    told = ask(served, api, body(api, thinks, True, "auto", bias=-100), streamed=True)
    assert json.loads(told.text).keys() == {"ok"} and not told.calls
    assert bool(told.thought) is thinks and told.reason == "stop"


def test_the_apis_say_the_same(streamed: Streamed) -> None:
    """Streamed; whole answers are compared with these above, in `make test` of one API each."""
    for asked in WALK:
        first, *others = (streamed(api, *asked) for api in APIS)
        right(first, *asked)
        for other in others:
            assert other.text == first.text and other.thought == first.thought


@pytest.mark.parametrize("wanted", [
    {"guided_choice": ["yes", "no"]}, {"guided_regex": "[0-9]{3}"},
    {"response_format": {"type": "json_object"}}, {"guided_grammar": 'root ::= "a" | "b"'},
    {"structured_outputs": {"json": {"type": "integer", "maximum": 9, "minimum": 0}}}])
def test_formats_of_every_kind_begin_behind_the_thought(served: Served, wanted: dict[str, Any]
                                                        ) -> None:
    asked = body("chat", True, False, "none", bias=0) | wanted | {"n": 2, "temperature": 1,
                                                                  "max_tokens": 300}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).json()
    for choice in answer["choices"]:
        message = choice["message"]
        assert message["reasoning_content"] and choice["finish_reason"] == "stop"
        assert len(message["content"]) < 40 or "json_object" in str(wanted)
        assert message["content"][0] in "yn0123456789{ab"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 2 * BUDGET


def plain(served: Served, path: str, **fields: Any) -> Any:
    """The whole answer to a question without tools."""
    asked = {"model": "", "temperature": 1, "seed": 4, **fields}
    answer = httpx.post(served.url + path, json=asked, timeout=60)
    return answer.json() if answer.status_code == 200 else answer.json()["error"]


@pytest.mark.parametrize("budget", [0, 5])
def test_every_name_of_a_budget(served: Served, budget: int) -> None:
    """The thought has so many tokens, as the usage says, and the answer goes on behind it."""
    chat = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 30, "ignore_eos": True}
    reply = {"input": "Go.", "max_output_tokens": 30, "store": False, "ignore_eos": True}
    text = {"prompt": "Go. <think>", "max_tokens": 30, "ignore_eos": True}
    named, routed = {"thinking_token_budget": budget}, {"reasoning": {"max_tokens": budget}}
    chats = [plain(served, PATHS["chat"], **chat, **more) for more in (named, routed)]
    replies = [plain(served, PATHS["responses"], **reply, **more) for more in (named, routed)]
    for answer in chats:
        message = answer["choices"][0]["message"]
        assert bool(message["reasoning_content"]) is (budget > 0) and message["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
        assert message == chats[0]["choices"][0]["message"]
    for answer in replies:
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == budget
        assert whole_response(answer).text == chats[0]["choices"][0]["message"]["content"]
    assert replies[1]["reasoning"]["max_tokens"] == budget
    hidden = plain(served, PATHS["chat"], **chat,
                   reasoning={"max_tokens": budget, "exclude": True})["choices"][0]["message"]
    assert not hidden["reasoning_content"]
    assert hidden["content"] == chats[0]["choices"][0]["message"]["content"]
    completion = plain(served, "/v1/completions", **text, **named)["choices"][0]["text"]
    assert "</think>" in completion and (budget or completion.startswith("</think>"))


def test_budgets_that_contradict_each_other(served: Served) -> None:
    error = plain(served, PATHS["chat"], messages=[{"role": "user", "content": "Go."}],
                  thinking_token_budget=3, reasoning={"max_tokens": 3})
    assert error["message"].startswith("reasoning.max_tokens: not together with")
    error = plain(served, PATHS["chat"], messages=[{"role": "user", "content": "Go."}],
                  reasoning={"max_tokens": -3})
    assert "reasoning.max_tokens" in error["message"]


def test_a_thought_that_is_turned_off_has_no_budget(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 12}
    answers = [plain(served, PATHS["chat"], **asked, reasoning=reasoning)["choices"][0]["message"]
               for reasoning in ({"enabled": False, "max_tokens": 0}, {"effort": "none"})]
    assert answers[0] == answers[1] and not answers[0]["reasoning_content"]
