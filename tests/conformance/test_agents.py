"""Coding agents: what Codex CLI and Claude Code send (`bodies/`) is answered, whole or streamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from wire import Json, Server

pytestmark = pytest.mark.conformance
BODIES = sorted(Path(__file__).with_name("bodies").glob("*.json"))


@pytest.mark.parametrize("file", BODIES, ids=lambda file: file.stem)
@pytest.mark.parametrize("streamed", [True, False])
def test_an_agent_is_answered(server: Server, file: Path, streamed: bool) -> None:
    asked: Json = json.loads(file.read_text())
    # An answer to the end of the context would take its time.
    body = asked["body"] | {"stream": streamed, "stop": ["e"]}
    answer = server.post(asked["path"], body, headers=asked["headers"])
    assert answer.status == 200, answer.text[:400]
    if streamed:
        told = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines()
                if line.startswith("data: {")]
        assert told[-1]["type"] in ("response.completed", "message_stop")
        found = told[-1]["response"] if "response" in told[-1] else told[0]["message"]
    else:
        found = answer.json
    assert found["ignored_tools"] == asked["ignored"]
    assert found["ignored_input"] == asked.get("ignored_input", [])


def test_references_are_the_items_that_they_name(server: Server) -> None:
    """As the AI SDK sends its second turn."""
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    first = server.post("/v1/responses", {"input": [user], "max_output_tokens": 8}).ok()
    more = {"role": "user", "content": "Why?"}
    used = []
    for items in ([{"type": "item_reference", "id": one["id"]} for one in first["output"]],
                  first["output"]):
        found = server.post("/v1/responses", {"input": [user, *items, more], "temperature": 0,
                                              "max_output_tokens": 4}).ok()
        used.append((found["usage"]["input_tokens"], found["output"][0]["content"]))
        assert found["ignored_input"] == []
    assert used[0] == used[1]
