"""Bodies of agents and SDKs that other servers were reported to refuse, shortened to what was at
fault: each is answered here, and the model is told what it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from helpers_gateway import Scripted, scripted_client

from actorium.actors.tokenizer.chat_template import ChatTemplate

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARSERS = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('Unexpected message role.') }}
{%- elif m.content is not string %}
{{- raise_exception('Unexpected content.') }}
{%- endif %}
{{- '[' + m.role[0] + ']' }}
{%- if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}
{%- endfor %}"""
"""A template of Qwen3.5's kind, which refuses what it does not expect."""


class Report(NamedTuple):
    """A public report, and what must come of its body."""

    source: str
    """Repository and number."""
    client: str
    path: str
    body: dict[str, Any]
    prompt: str
    tools: list[str] = []
    ignored: list[str] = []
    """Both of tools and of the input."""


def call(arguments: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    made = {"name": name, "arguments": arguments}
    return {"id": "c", "type": "function", "function": made} | more


USER = {"role": "user", "content": "?"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "ok"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = FUNCTION | {"type": "function"}
OWN = {"name": "f", "input_schema": {"type": "object"}}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "ok"}


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns)} | more


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made)} | more


def said(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def made(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments} | more


def messages(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"max_tokens": 32_000, "messages": list(turns)} | more


REPORTS = [
    # --- calls in a history ---
    Report("vllm-project/vllm#48922", "any", CHAT,
           chat(USER, calls(call('{"contents": "a')), RESULT, USER), "[u]?[a]f()[t]ok[u]?"),
    Report("local-inference-lab/vllm#684", "Codex", RESPONSES,
           {"input": [made('{"value": '), OUTPUT, USER]}, "[a]f()[t]ok[u]?"),
    Report("sgl-project/sglang#28035", "any", CHAT,
           chat(USER, calls(call('"Beijing"')), RESULT), "[u]?[a]f()[t]ok"),
    Report("sgl-project/sglang#28035", "any", CHAT,
           chat(USER, calls(call('["Beijing"]')), RESULT), "[u]?[a]f()[t]ok"),
    Report("router-for-me/CLIProxyAPI#2001", "VS Code agents", CHAT,
           chat(USER, calls(call('{"a": "x\ny" "b": 1}')), RESULT), "[u]?[a]f()[t]ok"),
    Report("huggingface/physics-intern#6", "physics-intern", CHAT,
           chat(USER, calls(call('{"a": "\\d"}')), RESULT), "[u]?[a]f()[t]ok"),
    Report("bojieli/ai-agent-book#102", "openai", CHAT,
           chat(USER, calls(call("")), USER), "[u]?[a]f()[u]?"),
    Report("ggml-org/llama.cpp#13471", "xsai", CHAT,
           chat(USER, calls(call('{"a": 1}')), RESULT), "[u]?[a]f(a=1)[t]ok"),
    Report("abetlen/llama-cpp-python#1805", "LangChain4j", CHAT,
           chat(USER, {"role": "assistant", "tool_calls": [call('{"a": 1}')]}, RESULT),
           "[u]?[a]f(a=1)[t]ok"),
    Report("ggml-org/llama.cpp#12279", "Semantic Kernel", CHAT,
           chat(USER, calls(call('{"a": 1}', id="")), RESULT | {"tool_call_id": ""}),
           "[u]?[a]f(a=1)[t]ok"),
    Report("ollama/ollama-python#569", "ollama", CHAT,
           chat(USER, calls(call("{}")), USER), "[u]?[a]f()[u]?"),
    # --- contents ---
    Report("pydantic/pydantic-ai#5206", "pydantic-ai", CHAT,
           chat(USER, calls(call("{}")), RESULT, calls(call("{}", "g")), RESULT),
           "[u]?[a]f()[t]ok[a]g()[t]ok"),
    Report("OpenHands/OpenHands#10869", "OpenHands", CHAT,
           chat(USER, calls(content=""), USER), "[u]?[a][u]?"),
    Report("simonw/llm-anthropic#37", "llm", MESSAGES,
           messages(USER, {"role": "assistant", "content": ""}, USER), "[u]?[a][u]?"),
    Report("langchain-ai/langchain#34751", "deepagents", CHAT,
           chat(USER, said("assistant", text("Hi", "output_text")), USER), "[u]?[a]Hi[u]?"),
    Report("BerriAI/litellm#11273", "LiteLLM", CHAT,
           chat(USER, calls(call("{}"), content=[text("Hm.")]),
                RESULT | {"content": [text("ok")]}), "[u]?[a]Hm.f()[t]ok"),
    Report("OpenCoworkAI/open-cowork#254", "pi", CHAT,
           chat(USER, said("assistant", {"type": "thinking", "thinking": "Hm."}, text("Hi")), USER),
           "[u]?[a]Hi[u]?", ignored=["thinking"]),
    Report("vllm-project/vllm#41114", "Hermes Agent", CHAT,
           chat(USER, {"role": "assistant", "content": "Hi"}, USER | {"role": "system"}, USER),
           "[u]?[a]Hi[u]?\n\n?"),
    Report("BerriAI/litellm#39282", "Codex", RESPONSES,
           {"instructions": "Be.", "input": [USER | {"role": "developer"}, USER,
                                             USER | {"role": "developer"}, USER]},
           "[s]Be.\n\n?[u]?\n\n?\n\n?"),
    # --- items of responses ---
    Report("vllm-project/vllm#29175", "openai", RESPONSES,
           {"input": [said("user", text("Hi", "input_text")), said(
               "assistant", text("Hello", "output_text")), USER]}, "[u]Hi[a]Hello[u]?"),
    Report("openai/codex#12669", "Codex", RESPONSES,
           {"input": [USER, said("assistant", text("Hi!", "output_text")) | {"type": "message"},
                      made("{}"), OUTPUT]}, "[u]?[a]Hi!f()[t]ok"),
    Report("vllm-project/vllm#45273", "Cursor", RESPONSES,
           {"tools": [], "input": [USER, said("assistant") | {"type": "message"},
                                   made('{"a": 1}{"a": 1}'), OUTPUT]}, "[u]?[a]f()[t]ok"),
    Report("pydantic/pydantic-ai#3246", "pydantic-ai", RESPONSES,
           {"input": [USER, made("{}", status=None), OUTPUT]}, "[u]?[a]f()[t]ok"),
    Report("BerriAI/litellm#13420", "openai-agents", RESPONSES,
           {"include": ["reasoning.encrypted_content"], "input": [
               USER, {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": None,
                      "content": [text("Hm.", "reasoning_text")], "status": None},
               made("{}", id="fc_1", status="completed"), OUTPUT]}, "[u]?[a]<Hm.>f()[t]ok"),
    Report("sgl-project/sglang#33867", "any", RESPONSES,
           {"input": [USER, OUTPUT | {"output": [text("a", "input_text"), text("b", "input_text")]}
                      ]}, "[u]?[t]ab"),
    Report("vllm-project/vllm#55974", "AI SDK, openai-agents", RESPONSES,
           {"input": [USER, {"type": "item_reference", "id": "msg_none"}, {
               "type": "computer_call_output", "call_id": "c", "output": {
                   "type": "computer_screenshot", "image_url": "data:"}}, {
               "type": "mcp_call", "id": "m", "name": "f", "server_label": "s", "arguments": "{}",
               "output": "ok"}, USER]},
           "[u]?[u]?", ignored=["item_reference", "computer_call_output", "mcp_call"]),
    Report("BerriAI/litellm#15470", "any", RESPONSES,
           {"tools": [{"type": "web_search"}], "input": [
               USER, {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {
                   "type": "search", "query": "x"}}, said("assistant", text("Hi", "output_text") | {
                       "annotations": [{"type": "url_citation", "url": "u", "start_index": 0}]})]},
           "[u]?[a]Hi", ignored=["web_search", "web_search_call"]),
    Report("antirez/ds4#745", "Codex", RESPONSES,
           {"tools": [{"type": "custom", "name": "apply_patch", "format": {
               "type": "grammar", "syntax": "lark", "definition": "start: /x/"}}], "input": [
               USER, {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch",
                      "input": "***"},
               {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}]},
           "[u]?[a]apply_patch(input=***)[t]ok", tools=["apply_patch"]),
    Report("router-for-me/CLIProxyAPI#4219", "Codex", RESPONSES,
           {"input": [USER, made("{}", call_id=""), OUTPUT | {"call_id": ""}]}, "[u]?[a]f()[t]ok"),
    # --- tools ---
    Report("ggml-org/llama.cpp#20156", "Codex", RESPONSES,
           {"input": "?", "tools": [FLAT, {"type": "web_search", "external_web_access": False},
                                    {"type": "image_generation"},
                                    {"type": "namespace", "name": "mcp__a", "tools": [FLAT]}]},
           "[u]?", ["f", "mcp__a__f"], ["web_search", "image_generation"]),
    Report("vllm-project/vllm#28173", "openai", RESPONSES,
           {"input": "?", "tool_choice": "auto", "tools": [{
               "type": "mcp", "server_label": "1", "server_url": "http://x",
               "require_approval": "never"}]}, "[u]?", ignored=["mcp"]),
    Report("BerriAI/litellm#27276", "Codex", RESPONSES,
           {"input": "?", "tools": [TOOL, {"type": "shell"}]}, "[u]?", ["f"], ["shell"]),
    Report("BerriAI/litellm#34029", "Cursor", CHAT,
           chat(USER, tools=[TOOL, FLAT | {"name": "g"}, {
               "type": "custom", "name": "ApplyPatch", "format": {
                   "type": "grammar", "syntax": "lark", "definition": "start: /x/"}}]),
           "[u]?", ["f", "g", "ApplyPatch"]),
    Report("langchain-ai/langchain-litellm#197", "LangChain", CHAT,
           chat(USER, tools=[TOOL, {"type": "web_search"}], tool_choice="auto"),
           "[u]?", ["f"], ["web_search"]),
    Report("ggml-org/llama.cpp#22389", "any", CHAT,
           chat(USER, tools=[{"function": FUNCTION}]), "[u]?", ["f"]),
    Report("BerriAI/litellm#6228", "LiteLLM", CHAT,
           chat(USER, tools=None, tool_choice="auto"), "[u]?"),
    Report("vllm-project/vllm#9426", "Semantic Kernel", CHAT,
           chat(USER, tool_choice="none"), "[u]?"),
    Report("evalstate/fast-agent#781", "fast-agent", CHAT, chat(USER, tools=[]), "[u]?"),
    Report("BerriAI/litellm#26107", "Claude Code", MESSAGES,
           messages(USER, tool_choice={"type": "auto"}, tools=[
               {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]),
           "[u]?", ignored=["web_search_20250305"]),
    # --- Claude Code ---
    Report("vllm-project/vllm#44000", "Claude Code", MESSAGES,
           messages(USER, {"role": "system", "content": "Now."}, system=[
               text("Be.") | {"cache_control": {"type": "ephemeral"}}]), "[s]Be.[u]?\n\nNow."),
    Report("intel/llm-scaler#341", "Claude Code", MESSAGES,
           messages(USER, said("assistant", {"type": "thinking", "thinking": "Hm.\n",
                                             "signature": ""}, text("Hi\n"),
                               {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}),
                    said("user", {"type": "tool_result", "tool_use_id": "c", "content": "ok"}),
                    tools=[OWN]), "[u]?[a]<Hm.\n>Hi\nf(a=1)[t]ok", ["f"]),
    Report("inflaborg/ccrelay#104", "Claude Code", MESSAGES,
           messages(USER, said("assistant", {"type": "thinking", "thinking": " "}, text("Hi")),
                    USER, context_management={"edits": [{"type": "clear_thinking_20251015"}]},
                    output_config={"effort": "high"}, thinking={"type": "adaptive"}),
           "[u]?[a]< >Hi[u]?"),
    Report("farion1231/cc-switch#1022", "Claude Code", MESSAGES, messages(USER), "[u]?"),
    Report("AnswerDotAI/lisette#66", "LiteLLM", MESSAGES,
           messages(USER, said("assistant", {"type": "server_tool_use", "id": "srvtoolu_1",
                                             "name": "web_search", "input": {}},
                               {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1",
                                "content": []}, text("Hi")), USER),
           "[u]?[a]Hi[u]?", ignored=["server_tool_use", "web_search_tool_result"]),
    # --- limits ---
    Report("langchain-ai/langchain#10822", "LangChain", CHAT,
           chat(USER, max_tokens=-1), "[u]?"),
    Report("ggml-org/llama.cpp#13700", "any", CHAT,
           chat(USER, max_completion_tokens=50), "[u]?"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.source)
def test_what_was_refused_elsewhere_is_answered(monkeypatch: pytest.MonkeyPatch, report: Report,
                                                stream: bool) -> None:
    script = Scripted(["ok"], template=PARSERS)
    client = scripted_client(monkeypatch, script)
    answer = asyncio.run(client._client.post(
        f"http://gateway{report.path}", json={"model": "demo"} | report.body | {"stream": stream}))
    assert answer.status_code == 200, answer.text
    [request] = script.asked
    prompt = ChatTemplate(STRICT, {}).render(request.messages or [], {})
    assert prompt == report.prompt
    assert [tool["function"]["name"] for tool in request.tools] == report.tools
    told = [answer.json()] if not stream else [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines()
        if line.startswith("data: {")]
    found = told[-1].get("response") or told[0].get("message") or told[0]
    assert [*found.get("ignored_tools", []), *found.get("ignored_input", [])] == report.ignored


@pytest.mark.parametrize(("path", "counting"), [
    (MESSAGES, f"{MESSAGES}/count_tokens"), (RESPONSES, f"{RESPONSES}/input_tokens"),
    (CHAT, "/tokenize"), (CHAT, "/invocations")])
def test_what_counts_takes_the_same(monkeypatch: pytest.MonkeyPatch, path: str,
                                    counting: str) -> None:
    script = Scripted(["ok"], template=PARSERS)
    client = scripted_client(monkeypatch, script)

    async def run() -> None:
        for report in REPORTS:
            if report.path == path:
                answer = await client._client.post(f"http://gateway{counting}", json=report.body)
                assert answer.status_code == 200, (report.source, answer.text)

    asyncio.run(run())
