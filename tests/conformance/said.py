"""What an answer says, read alike from chats, responses and messages, whole and streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from wire import CHAT, MESSAGES, RESPONSES, Json, Server, events

BLOCKS = {"text_delta": "text", "input_json_delta": "tool_use", "thinking_delta": "thinking",
          "signature_delta": "thinking"}
"""Messages: the deltas and the blocks that they belong to."""


@dataclass
class Said:
    """A choice of an answer."""

    thought: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names with the arguments' text."""
    finish: str | None = None
    """In the words of its API."""
    usage: Json = field(default_factory=dict)

    @property
    def arguments(self) -> list[Any]:
        """Of all calls, as JSON."""
        return [json.loads(given) for _, given in self.calls]


def ask(server: Server, path: str, body: Json, streamed: bool) -> list[Said]:
    """The choices of an answer; a stream's form is checked on the way."""
    answer = server.post(path, body | ({"stream": True} if streamed else {}))
    assert answer.status == 200, (answer.status, answer.text[:600])
    if path == CHAT:
        return _chat_stream(answer.body) if streamed else [
            _chat(one, answer.json["usage"]) for one in answer.json["choices"]]
    if path == RESPONSES:
        return [_response(_told(answer.text) if streamed else answer.json)]
    assert path == MESSAGES
    return [_message(_assembled(answer.text) if streamed else answer.json)]


def _chat(choice: Json, usage: Json) -> Said:
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"])
             for one in message.get("tool_calls") or ()]
    return Said(message.get("reasoning_content") or "", message["content"] or "", calls,
                choice["finish_reason"], usage)


def _chat_stream(body: bytes) -> list[Said]:
    told = events(body)
    assert told[-1] == "[DONE]"
    found: dict[int, Said] = {}
    usage: Json = {}
    for chunk in map(json.loads, told[:-1]):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            said, delta = found.setdefault(choice["index"], Said()), choice["delta"]
            if said.finish is not None:
                raise AssertionError(f"after the end of a choice: {chunk}")
            said.thought += delta.get("reasoning_content") or ""
            said.text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(said.calls):
                    assert part["id"] and part["type"] == "function", part
                    said.calls.append((part["function"]["name"], ""))
                name, given = said.calls[part["index"]]
                given += part["function"].get("arguments") or ""
                said.calls[part["index"]] = (name, given)
            said.finish = choice["finish_reason"]
    for said in found.values():
        said.usage = usage
    return [found[index] for index in sorted(found)]


def _response(found: Json) -> Said:
    said = Said(finish=found["status"], usage=found["usage"])
    for item in found["output"]:
        if item["type"] == "reasoning":
            said.thought += "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            said.text += "".join(part["text"] for part in item["content"])
        else:
            assert item["type"] == "function_call", item
            said.calls.append((item["name"], item["arguments"]))
    return said


def _told(text: str) -> Json:
    """The response at the end; what its events told must come to the same."""
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines()
            if line.startswith("data: {")]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    last: Json = told[-1]["response"]
    parts: dict[int, str] = {}
    begun: list[str] = []
    for one in told:
        kind = one["type"]
        if kind == "response.output_item.added":
            assert one["output_index"] == len(begun), "items come in order"
            begun.append(one["item"]["id"])
        elif kind.endswith(".delta"):
            assert one["output_index"] == len(begun) - 1 and one["item_id"] == begun[-1], one
            assert one.get("content_index", 0) == 0, one
            parts[one["output_index"]] = parts.get(one["output_index"], "") + one["delta"]
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert done == last["output"] and [one["id"] for one in done] == begun
    for index, item in enumerate(done):
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert parts.get(index, "") == whole, (index, item)
    return last


def _message(found: Json) -> Said:
    said = Said(finish=found["stop_reason"], usage=found["usage"])
    for block in found["content"]:
        if block["type"] == "tool_use":
            said.calls.append((block["name"], json.dumps(block["input"])))
        elif block["type"] == "thinking":
            said.thought += block["thinking"]
        else:
            assert block["type"] == "text", block
            said.text += block["text"]
    return said


def _assembled(text: str) -> Json:
    """The message that the events make."""
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines()
            if line.startswith("data: {")]
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop", told[-1]
    found: Json = told[0]["message"]
    blocks: list[Json] = []
    open_ = False
    for one in told[1:]:
        if one["type"] == "content_block_start":
            assert not open_ and one["index"] == len(blocks), one
            blocks.append(one["content_block"] | {"json": ""})
            open_ = True
        elif one["type"] == "content_block_delta":
            delta, block = one["delta"], blocks[-1]
            assert open_ and one["index"] == len(blocks) - 1, one
            assert BLOCKS[delta["type"]] == block["type"], (delta, block)
            for name in ("text", "thinking"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
        elif one["type"] == "content_block_stop":
            open_ = False
        elif one["type"] == "message_delta":
            found |= {"stop_reason": one["delta"]["stop_reason"],
                      "usage": found["usage"] | one["usage"]}
    assert not open_
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return found | {"content": blocks}
