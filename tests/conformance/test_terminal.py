"""Codex CLI and Claude Code, the programs themselves: a question, commands that they run, what they
show, and a conversation that goes on. Each lives in a home of its own, led to the engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from between import Between, Script, between, calls, says
from thinking import CLOSE, LESS
from wire import Json, Server

pytestmark = pytest.mark.conformance
PROGRAMS = Path(__file__).parents[2] / "build" / "terminal" / "node_modules" / ".bin"
ASK = "What does this repository do?"
READS = {"cmd": "cat README.md"}
DONE = says("It is an engine.")
PLAIN: Json = {"chat_template_kwargs": {"enable_thinking": False, "most": 60}}
THINKS: Json = {"chat_template_kwargs": {"enable_thinking": True, "most": 60}}
"""Their prompts are longer than the context of a small model: its template cuts each message."""
CODEX = """
model = "{model}"
model_provider = "engine"
[model_providers.engine]
name = "engine"
base_url = "{url}/v1"
env_key = "ENGINE_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def script(more: Json, *each: Json) -> Script:
    """One after the other to the agent itself; what it asks beside that has no tools."""
    told = list(each)

    def fields(body: Json, _at: int) -> Json:
        if not body.get("tools"):
            return says("A title") | more
        return (told.pop(0) if len(told) > 1 else told[0]) | more

    return fields


class Desk:
    """A home and a repository, with an agent's program in them."""

    def __init__(self, folder: Path, wire: Between, model: str) -> None:
        self.home, self.work, self.model = folder / "home", folder / "work", model
        self.work.mkdir()
        (self.home / "codex").mkdir(parents=True)
        (self.work / "README.md").write_text("An engine.\n")
        (self.home / "codex" / "config.toml").write_text(CODEX.format(model=model, url=wire.url))
        self._given = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(folder),
            "LANG": "C.UTF-8", "TERM": "dumb", "CODEX_HOME": str(self.home / "codex"),
            "ENGINE_KEY": "-", "ANTHROPIC_BASE_URL": wire.url, "ANTHROPIC_API_KEY": "-",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}

    def run(self, program: str, *words: str) -> str:
        """What it printed."""
        assert (PROGRAMS / program).exists(), "see setup.sh terminal"
        done = subprocess.run(
            [PROGRAMS / program, *words], env=self._given, cwd=self.work, capture_output=True,
            text=True, timeout=180, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def codex(self, *words: str) -> list[Json]:
        """The events that it prints."""
        said = self.run("codex", "exec", *words[:-1], "--skip-git-repo-check", "--json",
                        "--dangerously-bypass-approvals-and-sandbox", words[-1])
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def claude(self, *words: str) -> Json:
        """What it tells at the end."""
        said = self.run("claude", "-p", *words, "--model", self.model, "--output-format", "json",
                        "--allowedTools", "Bash", "--max-turns", "6")
        told: Json = json.loads(said)
        return told


def items(events: list[Json], kind: str) -> list[Json]:
    """What Codex shows of a kind."""
    return [one["item"] for one in events
            if one["type"] == "item.completed" and one["item"]["type"] == kind]


def sent_items(body: Json, kind: str) -> list[Json]:
    """The input's items of a kind."""
    return [one for one in body["input"] if one["type"] == kind]


def blocks(body: Json, kind: str) -> list[Json]:
    """The messages' blocks of a kind."""
    return [one for message in body["messages"] if isinstance(message["content"], list)
            for one in message["content"] if one["type"] == kind]


def test_codex_runs_a_command(thinking_server: Server, tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("exec_command", READS)), DONE)
    with between(thinking_server, told) as wire:
        events = Desk(tmp_path, wire, thinking_server.model).codex(ASK)
    assert not wire.refused()
    (ran,) = items(events, "command_execution")
    assert (ran["aggregated_output"], ran["exit_code"]) == ("An engine.\n", 0)
    assert [one["text"] for one in items(events, "agent_message")] == [
        "One moment.", "It is an engine."]
    (spent,) = [one["usage"] for one in events if one["type"] == "turn.completed"]
    assert spent["input_tokens"] > 100 and spent["output_tokens"] > 20
    (call,) = sent_items(wire.sent[1], "function_call")
    (output,) = sent_items(wire.sent[1], "function_call_output")
    assert json.loads(call["arguments"]) == READS and call["call_id"] == output["call_id"]
    assert "An engine." in output["output"]


def test_codex_calls_a_function_of_a_namespace(thinking_server: Server, tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("multi_agent_v1__close_agent", {"target": "nobody"})), DONE)
    with between(thinking_server, told) as wire:
        events = Desk(tmp_path, wire, thinking_server.model).codex(ASK)
    assert not wire.refused()
    (call,) = sent_items(wire.sent[1], "function_call")
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    assert items(events, "agent_message")[-1]["text"] == "It is an engine."


def test_codex_is_told_of_arguments_that_do_not_fit(thinking_server: Server,
                                                    tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("exec_command", {"command": 5})),
                  says(calls("exec_command", READS)), DONE)
    with between(thinking_server, told) as wire:
        events = Desk(tmp_path, wire, thinking_server.model).codex(ASK)
    assert not wire.refused() and len(wire.sent) == 3
    assert items(events, "agent_message")[-1]["text"] == "It is an engine."


def test_codex_goes_on(thinking_server: Server, tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("exec_command", READS)), DONE, says("Nothing else."))
    with between(thinking_server, told) as wire:
        desk = Desk(tmp_path, wire, thinking_server.model)
        desk.codex(ASK)
        events = desk.codex("resume", "--last", "What else?")
    assert not wire.refused()
    assert items(events, "agent_message")[-1]["text"] == "Nothing else."
    assert sent_items(wire.sent[2], "function_call_output")


def test_codex_and_thoughts(thinking_server: Server, tmp_path: Path) -> None:
    """It sends the thoughts back with the calls."""
    # By a bias alone the thought might end where it begins: what Codex sends is never the same.
    budget = {"thinking_token_budget": 12, "logit_bias": {str(CLOSE): -100, str(LESS): -100}}
    told = script(THINKS, says(calls("exec_command", READS)) | budget, DONE)
    with between(thinking_server, told) as wire:
        events = Desk(tmp_path, wire, thinking_server.model).codex(ASK)
    assert not wire.refused()
    assert items(events, "agent_message")[-1]["text"] == "It is an engine."
    (thought, *_) = sent_items(wire.sent[1], "reasoning")
    assert thought.get("content") or thought["summary"]


def test_claude_code_runs_a_command(thinking_server: Server, tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("Bash", {"command": "cat README.md"})), DONE)
    with between(thinking_server, told) as wire:
        found = Desk(tmp_path, wire, thinking_server.model).claude(ASK)
    assert not wire.refused()
    assert (found["result"], found["is_error"], found["num_turns"]) == (
        "It is an engine.", False, 2)
    assert found["usage"]["output_tokens"] > 20
    (use,), (result,) = blocks(wire.sent[1], "tool_use"), blocks(wire.sent[1], "tool_result")
    assert use["input"]["command"] == "cat README.md" and use["id"] == result["tool_use_id"]
    assert result["content"] == "An engine."


def test_claude_code_goes_on(thinking_server: Server, tmp_path: Path) -> None:
    told = script(PLAIN, says(calls("Bash", {"command": "cat README.md"})), DONE,
                  says("Nothing else."))
    with between(thinking_server, told) as wire:
        desk = Desk(tmp_path, wire, thinking_server.model)
        desk.claude(ASK)
        found = desk.claude("-c", "What else?")
    assert not wire.refused() and found["result"] == "Nothing else."
    assert blocks(wire.sent[-1], "tool_result")


def test_claude_code_looks_for_tools(thinking_server: Server, tmp_path: Path) -> None:
    """The result of its search refers to tools that it declares from then on."""
    told = script(PLAIN, says(calls("ToolSearch", {"query": "select:WebFetch"})), DONE)
    with between(thinking_server, told) as wire:
        found = Desk(tmp_path, wire, thinking_server.model).claude(ASK)
    assert not wire.refused() and found["result"] == "It is an engine."
    assert len(wire.sent) == 2 and blocks(wire.sent[1], "tool_result")


def test_claude_code_and_a_schema(thinking_server: Server, tmp_path: Path) -> None:
    """It makes a tool of the schema."""
    told = script(PLAIN, says(calls("StructuredOutput", {"happy": True})), DONE)
    with between(thinking_server, told) as wire:
        found = Desk(tmp_path, wire, thinking_server.model).claude(ASK, "--json-schema", json.dumps(
            {"type": "object", "properties": {"happy": {"type": "boolean"}}, "required": ["happy"],
             "additionalProperties": False}))
    assert not wire.refused() and found["structured_output"] == {"happy": True}


def test_claude_code_and_thoughts(thinking_server: Server, tmp_path: Path) -> None:
    told = script(THINKS, says(calls("Bash", {"command": "cat README.md"})), DONE)
    with between(thinking_server, told) as wire:
        found = Desk(tmp_path, wire, thinking_server.model).claude(ASK)
    assert not wire.refused() and found["result"] == "It is an engine."
    (result,) = blocks(wire.sent[1], "tool_result")
    assert result["content"] == "An engine."
