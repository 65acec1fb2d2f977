"""Reads the arguments of a history's tool calls, which models and clients write less well than JSON
asks. What cannot be read does not refuse the conversation: each later turn would bring it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from actorium.actors.messages import ChatMessage


def arguments_of(text: str) -> dict[str, Any] | None:
    """Returns the arguments that a call's text stands for; None if it is no JSON object.

    Empty text, null and an empty list mean that there are none; line ends and other control
    characters may stand in strings as they are; an object may be written as a string of JSON.
    """
    found = _decoded(text)
    if isinstance(found, str):
        found = _decoded(found)
    if isinstance(found, dict):
        return _whole(found) if "\\u" in text else found
    return {} if found is None or found == [] else None


def for_template(text: str, as_text: bool) -> dict[str, Any] | str:
    """Returns a call's arguments as an object, which templates write in the model's own way, or as
    text. Text that cannot be read is left as it is; an object is then empty."""
    found = arguments_of(text)
    if not as_text:
        return found or {}
    if found is None or _is_object(text):
        return text
    try:
        return json.dumps(found, ensure_ascii=False)
    except RecursionError:
        return text


def unreadable(messages: Iterable[ChatMessage]) -> list[str]:
    """Returns the calls whose arguments cannot be read, by their place and the function's name."""
    return [f"messages[{i}].tool_calls[{j}] ({call.name})" for i, turn in enumerate(messages)
            for j, call in enumerate(turn.tool_calls) if arguments_of(call.arguments) is None]


def _decoded(text: str) -> Any:
    """Returns what the text is in JSON, None where it is empty; False where it is no JSON."""
    try:
        return json.loads(text, strict=False) if text.strip() else None
    except (ValueError, RecursionError):
        return False


def _whole(found: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments without halves of characters (`\\ud83d`), which no text may hold."""
    try:
        clean: dict[str, Any] = json.loads(json.dumps(found, ensure_ascii=False).encode(
            errors="replace"))
    except (ValueError, RecursionError):
        return None
    return clean


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
