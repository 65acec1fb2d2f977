"""Ollama's API over a scripted engine: lines, fields, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app
from helpers_several_models import several_models

from actorium.actors.client.requests import Request
from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig
from actorium.actors.gateway.api.ollama import AnswerText, CallAssembler
from actorium.actors.gateway.api.ollama_body import HONOURED, NEUTRAL, START_UP, OllamaOptions
from actorium.actors.gateway.engine_uses import EngineUses
from actorium.actors.gateway.http.replies import json_line
from actorium.actors.gateway.http.routes import ROUTES, ErrorStyle
from actorium.actors.gateway.parsers.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
)
from actorium.actors.model_manager.manager_messages import PullProgress
from actorium.actors.params import Structured

TEMPLATE = "<think></think>{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
PLAIN = "{{ messages[0].content }}"
USER = [{"role": "user", "content": "How is it in Riga?"}]
TOOLS = [{"type": "function", "function": {
    "name": name, "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}
    for name in ("weather", "clock")]
CALLS = ('<think>Hm.</think>Riga.\n<tool_call>\n{"name": "weather", "arguments": {"place":\n '
         '"Riga"}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')


class WithMarks(Scripted):
    """A scripted model that may have tokens for text in the middle."""

    marks: dict[str, int] | None = None

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        return await super().server_info() | {"fim_tokens": self.marks}

    async def tokenize(self, text: str, add_special_tokens: bool = True,
                       timeout: float | None = None, parse_special: bool = True) -> list[int]:
        return [10, *text.encode()]


class Asked:
    """A gateway over a script, and what it has asked the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str = "ok", template: str = TEMPLATE,
                 fim: dict[str, int] | None = None, **settings: Any) -> None:
        self.script = WithMarks([text], template=template)
        self.script.marks = fim
        config = Config(gateway=GatewayConfig(**settings), model=ModelConfig(model=""))
        self._app = scripted_app(monkeypatch, self.script, config)

    def send(self, path: str, body: Any, method: str = "POST", **headers: str) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(run())

    def lines(self, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        answer = self.send(path, body, **headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.text.endswith("\n")
        return [json.loads(line) for line in answer.text.splitlines()]

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.send(path, body | {"stream": False})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        answer = self.send(path, body)
        assert answer.status_code == status, answer.text
        (name, text), = answer.json().items()
        assert name == "error" and isinstance(text, str)
        return text

    @property
    def request(self) -> Request:
        """The last one that the engine got."""
        return self.script.asked[-1]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": USER, **more}


def test_a_chat_is_a_stream_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Asked(monkeypatch, "<think>So.</think>It rains.").lines("/api/chat", chat())
    *parts, last = lines
    assert "".join(one["message"].get("thinking", "") for one in parts) == "So."
    assert "".join(one["message"]["content"] for one in parts) == "It rains."
    assert all(one["done"] is False and one["model"] == "demo" and one["created_at"][-1] == "Z"
               and one["message"]["role"] == "assistant" for one in lines[:-1])
    assert last["done"] is True and last["done_reason"] == "stop"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 5)
    assert last["total_duration"] >= last["eval_duration"] > 0
    assert last["total_duration"] == pytest.approx(
        last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"], abs=5)


def test_a_whole_answer_is_the_stream_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, CALLS)
    lines, whole = asked.lines("/api/chat", chat(tools=TOOLS)), \
        asked.whole("/api/chat", chat(tools=TOOLS))
    message = whole["message"]
    assert message["content"].strip() == "Riga." and message["thinking"] == "Hm."
    calls = [call for one in lines for call in one["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "weather", "arguments": {"place": "Riga"}},
        {"index": 1, "name": "clock", "arguments": {}}]
    assert [call["function"] for call in message["tool_calls"]] == \
        [call["function"] for call in calls]
    assert whole["done"] is True and whole["done_reason"] == lines[-1]["done_reason"] == "stop"


def test_generate_has_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, "<think>So.</think>It rains.")
    body = {"model": "demo:latest", "prompt": "How?", "system": "Be brief."}
    *parts, last = asked.lines("/api/generate", body)
    assert "".join(one.get("thinking", "") for one in parts) == "So."
    assert "".join(one["response"] for one in parts) == "It rains." and last["response"] == ""
    assert last["model"] == "demo:latest" and "message" not in last
    turns = asked.request.messages
    assert turns is not None
    assert [(turn.role, turn.content) for turn in turns] == [("system", "Be brief."),
                                                             ("user", "How?")]
    assert asked.whole("/api/generate", body)["response"] == "It rains."


@pytest.mark.parametrize(("template", "more"), [(TEMPLATE, {"raw": True}), ("", {})])
def test_a_raw_prompt_has_no_template(monkeypatch: pytest.MonkeyPatch, template: str,
                                      more: dict[str, Any]) -> None:
    asked = Asked(monkeypatch, "<think>So.</think>", template)
    whole = asked.whole("/api/generate", {"prompt": "Once", "format": "json", **more})
    assert whole["response"] == "<think>So.</think>" and "thinking" not in whole
    assert asked.request.prompt == "Once" and asked.request.messages is None
    assert asked.request.params is not None
    assert asked.request.params.structured == Structured(json_object=True)


def test_text_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, "middle", fim={"prefix": 1, "suffix": 2, "middle": 3, "padding": 4})
    whole = asked.whole("/api/generate", {"prompt": "def f(", "suffix": "return 1"})
    assert whole["response"] == "middle" and asked.request.messages is None
    assert [token for token in asked.request.prompt if token < 5] == [1, 2, 3]
    assert asked.request.params is not None and asked.request.params.stop_token_ids == [4]
    assert "insert" in asked.send("/api/show", {"model": "demo"}).json()["capabilities"]


OPTIONS = {"num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7,
           "stop": ["x"], "repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def test_every_option_that_changes_the_answer_reaches_the_engine(monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    assert set(OPTIONS) == set(HONOURED)
    asked = Asked(monkeypatch)
    asked.whole("/api/chat", chat(options=OPTIONS | dict.fromkeys(START_UP, 1) | {
        name: values[0] for name, values in NEUTRAL.items()} | {"repeat_last_n": -1}))
    params = asked.request.params
    assert {name: getattr(params, theirs) for name, theirs in HONOURED.items()} == OPTIONS
    rest = set(OllamaOptions.__struct_fields__) - set(HONOURED) - set(NEUTRAL) - set(START_UP)
    assert rest == {"repeat_last_n"}


def test_options_that_stand_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.whole("/api/chat", chat(options=OPTIONS | {
        "num_predict": -2, "seed": -1, "stop": [], "repeat_last_n": 0}))
    params = asked.request.params
    assert params is not None
    assert (params.max_tokens, params.seed, params.stop) == (None, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == \
        (None, 0.0, 0.0)


@pytest.mark.parametrize(("think", "args"), [
    (None, {}), (False, {"enable_thinking": False, "thinking": False}),
    (True, {"enable_thinking": True, "thinking": True}),
    ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"})])
def test_think(monkeypatch: pytest.MonkeyPatch, think: Any, args: dict[str, Any]) -> None:
    asked = Asked(monkeypatch)
    asked.whole("/api/chat", chat(think=think))
    assert asked.request.template_args == args
    plain = Asked(monkeypatch, template=PLAIN)
    if think:
        assert plain.refused("/api/chat", chat(think=think)) == \
            "think: 'demo' does not support thinking"
    else:
        plain.whole("/api/chat", chat(think=think))


def test_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, template=PLAIN)
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for given, wanted in ((None, None), ("", None), ("json", Structured(json_object=True)),
                          (schema, Structured(json_schema=json.dumps(schema)))):
        asked.whole("/api/chat", chat(format=given))
        assert asked.request.params is not None and asked.request.params.structured == wanted


def test_a_conversation_with_calls_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.whole("/api/chat", chat(messages=[
        {"role": "User", "content": "See", "images": ["aGk="]},
        {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": [
            {"function": {"name": "clock", "arguments": {"zone": 3}}}]},
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "assistant", "content": "It is"}]))
    request = asked.request
    assert request.messages is not None
    user, call, tool, begun = request.messages
    assert user.role == "user" and [part.type for part in user.content] == ["image", "text"]
    assert user.content[0].urls == ["data:;base64,aGk="]
    assert (call.content, call.reasoning_content) == ("", "Hm.")
    assert (call.tool_calls[0].name, call.tool_calls[0].arguments) == ("clock", '{"zone":3}')
    assert (tool.role, tool.name, tool.content) == ("tool", "clock", "noon")
    assert begun.content == "It is" and request.continue_final_message
    assert not request.add_generation_prompt


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_loads_the_model(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    asked = Asked(monkeypatch)
    for keep in ({}, {"keep_alive": "5m"}, {"keep_alive": -1}, {"keep_alive": None}):
        loaded = asked.send(path, {"model": "demo", **keep}).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert not asked.script.asked
    text = asked.refused(path, {"model": "demo", "keep_alive": 0}, 501)
    assert "keep_alive" in text and "stays loaded" in text
    asked.whole(path, {"model": "demo", "keep_alive": 0, "messages": USER, "prompt": "a"})


def test_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.refused("/api/chat", chat(top_logprobs=2)) == \
        "top_logprobs: only with logprobs=true"
    assert "top_logprobs" in asked.refused("/api/chat", chat(logprobs=True, top_logprobs=21))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": 5}, "messages"), ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
     "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "images": "x"}]}, "messages[0].images"),
    ({"options": {"temperature": "hot"}}, "options.temperature"),
    ({"options": {"no_such": 1}}, "options.no_such: there is no such field"),
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"typical_p": 0.7}}, "options.typical_p"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
    ({"options": 5}, "options"), ({"format": "yaml"}, "format"), ({"format": 5}, "format"),
    ({"think": "hard"}, "think"), ({"think": 5}, "think"), ({"keep_alive": "soon"}, "keep_alive"),
    ({"keep_alive": True}, "keep_alive"), ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "function"}]}, "tools[0]"), ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": 5}, "tools"), ({"_debug_render_only": True}, "_debug_render_only"),
]


@pytest.mark.parametrize(("more", "name"), BAD, ids=str)
def test_a_bad_field_is_named(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], name: str
                              ) -> None:
    asked = Asked(monkeypatch)
    assert asked.refused("/api/chat", chat() | more).startswith(name)
    assert not asked.script.asked


@pytest.mark.parametrize(("more", "name"), [
    ({"template": "{{ .Prompt }}"}, "template"), ({"context": [1, 2]}, "context"),
    ({"suffix": "end"}, "suffix: this model has no tokens"), ({"prompt": 5}, "prompt"),
    ({"raw": True, "suffix": "end"}, "suffix"), ({"suffix": "end", "system": "a"}, "system"),
    ({"raw": True, "system": "a"}, "system"), ({"raw": True, "images": ["a"]}, "images"),
    ({"raw": True, "think": True}, "think")], ids=str)
def test_a_bad_field_of_generate_is_named(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any],
                                          name: str) -> None:
    asked = Asked(monkeypatch)
    assert asked.refused("/api/generate", {"prompt": "a"} | more).startswith(name)
    asked.whole("/api/generate", {"prompt": "a", "template": "", "context": [], "suffix": "",
                                  "images": [], "raw": False})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b'{"messages": [' * 2000])
def test_a_body_that_is_none(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    async def run() -> httpx.Response:
        app = scripted_app(monkeypatch, Scripted(["ok"]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://gateway") as client:
            return await client.post("/api/chat", content=content)

    answer = asyncio.run(run())
    assert answer.status_code == 400 and isinstance(answer.json()["error"], str)


def test_errors_have_ollamas_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, api_key="secret")
    for path in [path for route in ROUTES if route.errors is ErrorStyle.OLLAMA
                 and route.name != "ollama_version" for path in route.paths]:
        answer = asked.send(path, {}, "PATCH")
        assert answer.status_code == 401 and isinstance(answer.json()["error"], str)
    asked = Asked(monkeypatch)
    assert "'x' is not served here" in asked.refused("/api/chat", chat(model="x"), 404)
    assert asked.refused("/api/nothing", {}, 404).startswith("POST /api/nothing")
    for path in ("/api/create", "/api/copy", "/api/push"):
        assert "supported" in asked.refused(path, {"model": "demo"}, 501)
    answer = asked.send("/api/delete", {"model": "demo"}, "DELETE")
    assert answer.status_code == 501 and "deleted" in answer.json()["error"]


def test_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    tags = asked.send("/api/tags", None, "GET").json()["models"]
    assert [one["name"] for one in tags] == ["demo:latest"]
    assert set(tags[0]["details"]) >= {"format", "family", "families", "parameter_size",
                                       "quantization_level"}
    loaded, = asked.send("/api/ps", None, "GET").json()["models"]
    assert loaded["name"] == "demo:latest" and loaded["context_length"] == 4096
    assert loaded["expires_at"].startswith("9999")
    shown = asked.send("/api/show", {"name": "demo:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == TEMPLATE and shown["model_info"]["general.basename"] == "demo"
    assert asked.refused("/api/show", {}).startswith("model: is required")
    assert asked.refused("/api/show", {"model": "x"}, 404)
    assert asked.lines("/api/pull", {"model": "demo"})[-1] == {"status": "success"}
    assert asked.send("/api/pull", {"name": "demo", "stream": False}).json() == {
        "status": "success"}
    assert "fetches none" in asked.refused("/api/pull", {"model": "llama3"}, 403)
    assert asked.send("/api/version", None, "GET").json()["version"].count(".") == 2


@pytest.mark.parametrize("text", ["a\u0085b\u2028c\u2029d", "\x0b\x0c\x1c\x1d\x1e\r\n"])
def test_a_line_has_no_end_in_it(text: str) -> None:
    line = json_line({"text": text}).decode()
    assert line.splitlines(keepends=True) == [line] and json.loads(line) == {"text": text}


def assembled(*parts: Any) -> AnswerText:
    calls, text = CallAssembler(lambda begun: f"call_{begun.call}"), AnswerText()
    for part in parts:
        calls.add(part, text)
    calls.end(text)
    return text


def test_calls_are_whole() -> None:
    text = assembled(ReasoningPart("hm"), ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a": '),
                     ToolCallArguments(0, "1}"), TextPart("x"), ToolCallBegin(1, "g"),
                     ToolCallBegin(2, "h"), ToolCallArguments(2, '{"a": '))
    assert (text.thinking, text.content) == ("hm", 'x{"a": ')
    assert [(call.id, call.function.name, bytes(call.function.arguments)) for call in text.calls
            ] == [("call_0", "f", b'{"a": 1}'), ("call_1", "g", b"{}")]


@pytest.mark.parametrize("arguments", ["[1]", "5", "{", "[" * 100_000, '{"a": "\n"}'])
def test_arguments_that_are_no_object_are_text(arguments: str) -> None:
    text = assembled(ToolCallBegin(0, "f"), ToolCallArguments(0, arguments))
    assert (text.calls, text.content) == ([], arguments)


# --- several models ---

def test_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant", "bee", delay=0.05) as one:
            async def post(path: str, status: int = 200, **body: Any) -> Any:
                answer = await one.client.post(path, json=body)
                assert answer.status_code == status, answer.text
                return [json.loads(line) for line in answer.text.splitlines()]

            async def loaded() -> list[str]:
                models = (await one.client.get("/api/ps")).json()["models"]
                return [model["name"] for model in models]

            tags = (await one.client.get("/api/tags")).json()["models"]
            assert [model["name"] for model in tags] == [
                "ant:latest", "ant-alias:latest", "bee:latest", "bee-alias:latest"]
            assert await loaded() == []
            lines = await post("/api/chat", model="ant:latest", messages=USER)
            assert "".join(line["message"]["content"] for line in lines) == "I am ant."
            assert lines[-1]["load_duration"] > 0.04e9
            whole, = await post("/api/generate", model="bee", prompt="Who?", stream=False)
            assert whole["response"] == "I am bee." and await loaded() == [
                "ant:latest", "bee:latest"]
            for path, model in (("/api/generate", "bee"), ("/api/chat", "ant-alias:latest")):
                ended, = await post(path, model=model, keep_alive=0)
                assert (ended["done_reason"], ended["model"]) == ("unload", model)
            await one.until(lambda: not one.manager.running)
            assert await loaded() == []
            begun, = await post("/api/generate", model="bee", keep_alive="5m")
            assert begun["done_reason"] == "load" and await loaded() == ["bee:latest"]
            await post("/api/chat", model="bee", messages=USER, keep_alive=0)
            await one.until(lambda: not one.manager.running)
            shown, = await post("/api/show", model="ant:latest")
            assert shown["capabilities"] == ["completion"] and not one.manager.running
            for path, body in (("/api/chat", {"messages": USER}), ("/api/show", {}),
                               ("/api/generate", {"keep_alive": 0})):
                error, = await post(path, 404, model="cat", **body)
                assert "'cat'" in error["error"]
            error, = await post("/api/chat", 400, messages=USER)
            assert "model" in error["error"]
            error, = await post("/api/chat", 400, model="ant", messages=USER, keep_alive="soon")
            assert error["error"].startswith("keep_alive")

    asyncio.run(run())


def test_what_several_models_do_is_listed_before_they_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"ant": ("generate", "embed"), "bee": ("embed", "token_embed"), "cow": ("classify",)}

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, *tasks, tasks=tasks) as one:
            cards = (await one.client.get("/v1/models")).json()["data"]
            assert {card["id"]: tuple(card["tasks"]) for card in cards} == tasks
            tags = (await one.client.get("/api/tags")).json()["models"]
            able = {"ant": ["completion"], "bee": ["embedding"], "cow": []}
            for card in tags[::2]:
                name = card["name"].removesuffix(":latest")
                shown = await one.client.post("/api/show", json={"model": name})
                assert card["capabilities"] == shown.json()["capabilities"] == able[name]
            assert len(tags) == 6 and not one.manager.running

    asyncio.run(run())


def test_a_model_whose_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            one.manager.faults["ant"] = "no such file"
            answer = await one.client.post("/api/chat", json={"model": "ant", "messages": USER})
            assert answer.status_code == 500 and "no such file" in answer.json()["error"]

    asyncio.run(run())


def test_a_pull_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [PullProgress("", "fetching a/b", 5, 10), PullProgress("", "success", done=True)]

    async def pull(self: EngineUses, name: str) -> AsyncGenerator[PullProgress, None]:
        for step in steps if name == "a/b" else [PullProgress("", "failed", done=True, error="no")]:
            yield step

    async def run() -> None:
        async with several_models(monkeypatch, tmp_path, "ant") as one:
            answer = await one.client.post("/api/pull", json={"model": "a/b:latest"})
            assert [json.loads(line) for line in answer.text.splitlines()] == [
                {"status": "fetching a/b", "completed": 5, "total": 10}, {"status": "success"}]
            for stream in (False, True):
                answer = await one.client.post("/api/pull", json={"name": "c", "stream": stream})
                assert (answer.status_code, answer.json()) == (400, {"error": "no"})
            answer = await one.client.post("/api/pull", json={"name": "a/b", "stream": False})
            assert answer.json() == {"status": "success"}

    monkeypatch.setattr(EngineUses, "pull", pull)
    asyncio.run(run())
