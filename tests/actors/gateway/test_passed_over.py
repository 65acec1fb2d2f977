"""Tools, items and blocks that cannot be run or shown are passed over and named in the answer."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_client

HERMES = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
USER: dict[str, Any] = {"role": "user", "content": "?"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def asked(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], text: str = "ok"
          ) -> tuple[httpx.Response, Scripted]:
    script = Scripted([text], 3, HERMES)
    client = scripted_client(monkeypatch, script)
    given = {CHAT: {"messages": [USER]}, RESPONSES: {"input": [USER]},
             MESSAGES: {"messages": [USER], "max_tokens": 9}}[path.removesuffix("/count_tokens")]
    answer = asyncio.run(client._client.post(f"http://gateway{path}", json=given | body))
    return answer, script


def taken(monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], text: str = "ok"
          ) -> tuple[dict[str, Any], Scripted]:
    """The whole answer, and what the engine was asked."""
    answer, script = asked(monkeypatch, path, body, text)
    assert answer.status_code == 200, answer.text
    return answer.json(), script


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines()
            if line.startswith("data: {")]


def contents(script: Scripted) -> list[Any]:
    return [(turn.role, turn.content) for turn in script.asked[0].messages or ()]


# --- tools ----------------------------------------------------------------------------------------

BUILT_INS = [{"type": "web_search"}, {"type": "web_search_preview"}, {"type": "local_shell"},
             {"type": "mcp", "server_label": "x"}, {"type": "code_interpreter", "container": {}},
             {"type": "image_generation"}, {"type": "tool_search"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "own"), [
    (CHAT, {"type": "function", "function": FUNCTION}), (RESPONSES, FUNCTION | {
        "type": "function"})])
def test_built_in_tools_are_passed_over(monkeypatch: pytest.MonkeyPatch, path: str,
                                        own: dict[str, Any], stream: bool) -> None:
    body = {"tools": [*BUILT_INS, own, BUILT_INS[0]], "stream": stream}
    answer, script = asked(monkeypatch, path, body)
    assert [tool["function"]["name"] for tool in script.asked[0].tools] == ["f"]
    found = events(answer)[0] if stream else answer.json()
    found = found.get("response", found)
    assert found["ignored_tools"] == [one["type"] for one in BUILT_INS]


def test_a_chat_says_nothing_where_nothing_was_passed_over(monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    answer, _ = taken(monkeypatch, CHAT, {})
    assert not {"ignored_tools", "ignored_input"} & answer.keys()


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_anthropics_built_in_tools_are_passed_over(monkeypatch: pytest.MonkeyPatch,
                                                   path: str) -> None:
    given = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
             {"type": "bash_20250124", "name": "bash"},
             {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
             {"type": "mcp_toolset", "mcp_server_name": "x"}]
    answer, script = taken(monkeypatch, path, {
        "tools": given, "tool_choice": {"type": "auto"}, "mcp_servers": [{"url": "u"}]})
    if path == MESSAGES:
        assert answer["ignored_tools"] == [*(one["type"] for one in given), "mcp_servers"]
        assert script.asked[0].tools == []


@pytest.mark.parametrize("choice", ["auto", "none", None, {"type": "auto"}, {"type": "none"}])
@pytest.mark.parametrize("tools", [[], None])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_no_tools_and_a_choice_that_asks_for_none(monkeypatch: pytest.MonkeyPatch, path: str,
                                                  tools: list[Any] | None, choice: Any) -> None:
    _, script = taken(monkeypatch, path, {"tools": tools, "tool_choice": choice})
    assert script.asked[0].tools == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", [
    "required", {"type": "required"}, {"type": "function", "name": "f"}, {"type": "web_search"},
    {"type": "function", "function": {"name": "f"}},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    {"type": "allowed_tools", "tools": []}, {"type": "allowed_tools", "mode": "any", "tools": []}])
def test_a_choice_of_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, path: str,
                                                  choice: Any) -> None:
    answer, _ = asked(monkeypatch, path, {"tools": BUILT_INS, "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_many_tools_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [{"type": "function", "function": FUNCTION | {"name": f"f{i}"}} for i in range(1000)]
    for choice in ("auto", "required"):
        _, script = taken(monkeypatch, CHAT, {"tools": many, "tool_choice": choice}, "[]")
        assert len(script.asked[0].tools) == 1000


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_model_is_shown_the_tools_that_are_allowed(monkeypatch: pytest.MonkeyPatch, path: str,
                                                       mode: str) -> None:
    flat = [FUNCTION | {"type": "function", "name": name} for name in "abc"]
    named: list[Any] = [{"type": "function", "name": name} for name in "ca"]
    if path == CHAT:
        flat = [{"type": "function", "function": FUNCTION | {"name": name}} for name in "abc"]
        named = [{"type": "function", "function": {"name": name}} for name in "ca"]
    choice: dict[str, Any] = {"mode": mode, "tools": [*named, {"type": "web_search"}]}
    choice = {"allowed_tools": choice} if path == CHAT else choice
    _, script = taken(monkeypatch, path, {
        "tools": [*flat, {"type": "web_search"}],
        "tool_choice": {"type": "allowed_tools"} | choice}, "[]")
    [request] = script.asked
    assert [tool["function"]["name"] for tool in request.tools] == ["a", "c"]
    assert request.params is not None
    assert (request.params.structured is not None) == (mode == "required")


# --- the input ------------------------------------------------------------------------------------

@pytest.mark.parametrize("stream", [False, True])
def test_items_of_servers_tools_are_passed_over(monkeypatch: pytest.MonkeyPatch, stream: bool
                                                ) -> None:
    given: list[dict[str, Any]] = [{"type": kind, "id": "x_1", "status": "completed"} for kind in (
        "item_reference", "web_search_call", "file_search_call", "code_interpreter_call",
        "image_generation_call", "computer_call", "computer_call_output", "local_shell_call",
        "local_shell_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
        "tool_search_call", "tool_search_output", "compaction")]
    given[6]["output"] = {"type": "computer_screenshot", "image_url": "data:"}
    given[8]["output"] = [{"stdout": "", "outcome": {"type": "exit", "exit_code": 0}}]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    answer, script = asked(monkeypatch, RESPONSES, {
        "input": [*given, reasoning, {"id": "msg_x"}, USER], "stream": stream})
    assert contents(script) == [("user", "?")]
    found = events(answer)[-1]["response"] if stream else answer.json()
    assert found["ignored_input"] == [*(one["type"] for one in given), "reasoning"]


def test_a_reference_is_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(["First."], 1, HERMES)
    client = scripted_client(monkeypatch, script)._client

    async def run() -> list[dict[str, Any]]:
        async def post(**body: Any) -> dict[str, Any]:
            answer = await client.post("http://gateway/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        one = await post(input=[USER | {"content": "Hi"}])
        listed = (await client.get(
            f"http://gateway/v1/responses/{one['id']}/input_items")).json()["data"]
        named = [{"type": "item_reference", "id": item["id"]}
                 for item in (*listed, *one["output"])]
        two = await post(input=[*named, USER])
        # What the context has is not told twice.
        three = await post(input=[*named, USER], previous_response_id=one["id"])
        four = await post(input=USER["content"], previous_response_id=two["id"])
        counted = await client.post("http://gateway/v1/responses/input_tokens",
                                    json={"input": [*named, USER]})
        assert counted.status_code == 200
        return [one, two, three, four]

    answers = asyncio.run(run())
    turns = [[(turn.role, turn.content) for turn in request.messages or ()]
             for request in script.asked]
    assert turns[1] == turns[2] == [("user", "Hi"), ("assistant", "First."), ("user", "?")]
    assert turns[3] == [*turns[1], ("assistant", "First."), ("user", "?")]
    assert [one["ignored_input"] for one in answers] == [[]] * 4


def test_a_reference_to_another_tenants_item_finds_nothing(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first a\nsecond b\n")
    keys.chmod(0o600)
    script = Scripted(["Secret."], 1, HERMES)
    client = scripted_client(monkeypatch, script, api_keys_file=str(keys))._client

    async def run() -> dict[str, Any]:
        first = await client.post("http://gateway/v1/responses", json={"input": "Hi"},
                                  headers={"authorization": "Bearer a"})
        answer = await client.post("http://gateway/v1/responses", json={"input": [
            {"type": "item_reference", "id": first.json()["output"][0]["id"]}, USER]},
            headers={"authorization": "Bearer b"})
        found: dict[str, Any] = answer.json()
        return found

    assert asyncio.run(run())["ignored_input"] == ["item_reference"]
    assert "Secret" not in str(script.asked[1].messages)


def test_a_refusal_is_what_the_model_said(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "refusal", "refusal": "No."}
    for path, body in ((CHAT, {"messages": [{"role": "assistant", "content": [part]}]}),
                       (CHAT, {"messages": [{"role": "assistant", "content": ["No", "."]}]}),
                       (CHAT, {"messages": [{"role": "assistant", "content": None,
                                             "refusal": "No."}]}),
                       (RESPONSES, {"input": [{"role": "assistant", "content": [part]}]})):
        answer, script = taken(monkeypatch, path, body)
        assert contents(script) == [("assistant", "No.")] and not answer.get("ignored_input")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_among_a_chats_parts_are_passed_over(monkeypatch: pytest.MonkeyPatch,
                                                      stream: bool) -> None:
    given = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    answer, script = asked(monkeypatch, CHAT, {"stream": stream, "messages": [
        {"role": "assistant", "content": given}, USER]})
    assert contents(script) == [("assistant", "Yes."), ("user", "?")]
    found = events(answer)[0] if stream else answer.json()
    assert found["ignored_input"] == ["thinking"]


TEXT = base64.b64encode("Ünder".encode()).decode()


def test_a_file_of_text_is_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    data = f"data:text/plain;base64,{TEXT}"
    for path, name, part in (
            (CHAT, "messages", {"type": "file", "file": {"filename": "a", "file_data": data}}),
            (RESPONSES, "input", {"type": "input_file", "filename": "a", "file_data": data})):
        _, script = taken(monkeypatch, path, {name: [{"role": "user", "content": [part]}]})
        assert contents(script) == [("user", "Ünder")]
        for wrong in (data.replace("text/plain", "application/pdf"), "data:text/plain;base64,?",
                      "data:text/plain;base64,/w==", TEXT, None, 3):
            bad = {"file": {"file_data": wrong}} if path == CHAT else {"file_data": wrong}
            answer, _ = asked(monkeypatch, path, {name: [
                {"role": "user", "content": [part | bad]}]})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name


BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
        {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e"}]},
    {"type": "code_execution_tool_result", "tool_use_id": "s",
     "content": {"type": "code_execution_result", "stdout": ""}},
    {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
    {"type": "container_upload", "file_id": "f"}, {"type": "redacted_thinking", "data": "x"},
    {"type": "tool_reference", "tool_name": "x"},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf",
                                    "data": "JVBE"}}]


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_blocks_that_only_anthropic_can_read_are_passed_over(monkeypatch: pytest.MonkeyPatch,
                                                             path: str) -> None:
    say = {"type": "text", "text": "Hi"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [*BLOCKS[-2:], say]}
    for role, blocks in (("assistant", [*BLOCKS, say]), ("user", [*BLOCKS, say]),
                         ("user", [result])):
        answer, script = taken(monkeypatch, path, {"messages": [
            USER, {"role": role, "content": blocks}, USER]})
        if path == MESSAGES:
            assert contents(script)[1][1] == "Hi"
            assert answer["ignored_input"] == [one["type"] for one in (
                BLOCKS[-2:] if blocks == [result] else BLOCKS)]
    streamed, _ = asked(monkeypatch, MESSAGES, {"stream": True, "messages": [
        {"role": "user", "content": [*BLOCKS, say]}]})
    assert events(streamed)[0]["message"]["ignored_input"] == [one["type"] for one in BLOCKS]


@pytest.mark.parametrize("source", [
    {"type": "text", "media_type": "text/plain", "data": "Ünder"},
    {"type": "base64", "media_type": "text/plain", "data": TEXT},
    {"type": "content", "content": "Ünder"},
    {"type": "content", "content": [{"type": "text", "text": "Ünder"}]}], ids=str)
def test_documents_of_text_are_shown(monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    block = {"type": "document", "title": "A", "source": source, "citations": {"enabled": True}}
    for content in ([block], [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]):
        answer, script = taken(monkeypatch, MESSAGES, {"messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": "Why?"}]}]})
        assert contents(script)[0][1].startswith("A\nÜnder\n\n") and not answer["ignored_input"]


def test_results_of_a_search_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"type": "search_result", "source": "https://x", "title": "A",
             "content": [{"type": "text", "text": "b"}]}
    answer, script = taken(monkeypatch, MESSAGES, {"messages": [
        {"role": "user", "content": [block]}]})
    assert contents(script) == [("user", "A\nhttps://x\nb\n\n")] and not answer["ignored_input"]


@pytest.mark.parametrize("block", [
    {"type": "hologram"}, {"type": "tool_result", "tool_use_id": "t", "content": {"a": 1}},
    {"type": "document", "source": {"type": "content", "content": 3}},
    {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "?"}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "hologram"}]}], ids=str)
def test_blocks_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch, block: Any) -> None:
    answer, _ = asked(monkeypatch, MESSAGES, {"messages": [{"role": "user", "content": [block]}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages")
