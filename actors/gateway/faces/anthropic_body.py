"""The bodies of `/v1/messages`: converts Anthropic's conversations, tools and blocks to the
engine's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from actorium.actors.gateway.faces.media_parts import joined, source_upload
from actorium.actors.gateway.faces.sampling_fields import SamplingFields, check_turns, effort_args
from actorium.actors.gateway.faces.tool_choice import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
    is_built_in,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart

OWN = "custom"
"""Type of a tool that the caller runs."""


class InputBlock(Struct, kw_only=True):
    """A block of a message: the fields of all kinds."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    source: dict[str, Any] | None = None
    """Of an image."""
    is_error: bool | None = None


class AnthropicMessageParam(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class AnthropicTool(Struct, kw_only=True):
    name: str
    type: str = OWN
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_built_in(self) -> bool:
        """True if the caller does not run it."""
        return self.type != OWN and is_built_in(self.type)


class AnthropicToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountTokensBody(SamplingFields, kw_only=True):
    """The body of `/v1/messages/count_tokens`, and the part of a message's request that makes the
    prompt."""

    messages: list[AnthropicMessageParam]
    system: str | list[InputBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def parallel(self) -> bool:
        """True if several calls may be made at once."""
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def thinks(self) -> bool:
        """True if reasoning is shown."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thought_budget(self) -> int | None:
        """Returns the most tokens of the reasoning."""
        told = None if self.thinking is None else self.thinking.budget_tokens
        return self.thinking_token_budget if told is None else told

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables: as with Anthropic, a model thinks only if asked.
        """
        thinks = {"enable_thinking": True} if self.thinks else effort_args("none")
        return thinks | self.chat_template_kwargs

    def ignored_tools(self) -> list[str]:
        """Returns the types of the tools that the model is not shown."""
        return list(dict.fromkeys(one.type for one in self.tools or () if one.is_built_in))

    def choice(self) -> ToolSelection:
        """Returns the tools in the form of chats. Raises `HttpError`."""
        tools = []
        for i, one in enumerate(self.tools or ()):
            if one.is_built_in:
                continue
            if one.type != OWN:
                raise HttpError(400, f"tools[{i}]: {one.type[:40]!r} is not known", "tools")
            if one.input_schema is None:
                raise HttpError(400, f"tools[{i}].input_schema: is required", "tools")
            tools.append(Tool("function", Function(one.name, one.description, one.input_schema,
                                                   one.strict)))
        wanted = self.tool_choice
        if wanted is None or wanted.type == "auto":
            return ToolSelection(tools or None, "auto" if tools else None, self.parallel)
        if wanted.type == "tool":
            named = NamedTool("function", NamedFunction(wanted.name or ""))
            return ToolSelection(tools or None, named, self.parallel)
        return ToolSelection(tools or None, "required" if wanted.type == "any" else "none",
                             self.parallel)

    def turns(self) -> list[ChatMessage]:
        """Returns the conversation. Raises `HttpError` naming the block."""
        check_turns(self.messages, "messages")
        found = []
        if self.system:
            found.append(ChatMessage("system", _text(self.system, "system")))
        names: dict[str, str] = {}
        for i, turn in enumerate(self.messages):
            found += _turns(turn, f"messages[{i}].content", names)
        return found


def prefill(turns: list[ChatMessage]) -> str | None:
    """Returns the text of a last turn that is the assistant's, which the answer continues; None if
    there is none."""
    last = turns[-1]
    if last.role != "assistant" or last.tool_calls or not isinstance(last.content, str):
        return None
    return last.content or None


class MessagesBody(CountTokensBody, kw_only=True):
    """The body of a message's request."""

    max_tokens: int  # type: ignore[assignment]  # here it must be given
    stop_sequences: list[str] | None = None

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        if (self.n or 1) != 1:
            raise HttpError(400, "n: a message has one choice", "n")
        if self.stop and self.stop_sequences:
            raise HttpError(400, "stop: not together with stop_sequences", "stop")
        if self.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs: not of messages", "prompt_logprobs")
        self.stop = self.stop or self.stop_sequences


def _turns(turn: AnthropicMessageParam, where: str, names: dict[str, str]) -> list[ChatMessage]:
    """Converts a message to turns: results of tools are turns of their own. names: of the tools
    that were called, by the calls' ids."""
    if isinstance(turn.content, str):
        return [ChatMessage(turn.role, turn.content)]
    found: list[ChatMessage] = []
    parts: list[TurnPart] = []
    thought = ""
    calls: list[ToolCall] = []
    for i, block in enumerate(turn.content):
        place = f"{where}[{i}]"
        if block.type == "text":
            parts.append(TurnPart("text", block.text or ""))
        elif block.type == "image":
            parts.append(source_upload(block.source, f"{place}.source"))
        elif block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "tool_use":
            calls.append(_call(block, place))
            names[calls[-1].id] = calls[-1].name
        elif block.type == "tool_result":
            found.append(_result(block, place, names))
        elif block.type != "redacted_thinking":
            raise HttpError(400, f"{place}: {block.type[:40]!r} is not taken", "messages")
    text = joined(parts)
    if text or calls or thought or not found:
        found.append(ChatMessage(turn.role, text, tool_calls=calls,
                                 reasoning_content=thought or None))
    return found


def _call(block: InputBlock, where: str) -> ToolCall:
    if not block.name or not block.id:
        raise HttpError(400, f"{where}: id and name are required", "messages")
    return ToolCall(block.name, msgspec.json.encode(block.input or {}).decode(), block.id)


def _result(block: InputBlock, where: str, names: dict[str, str]) -> ChatMessage:
    if not block.tool_use_id:
        raise HttpError(400, f"{where}.tool_use_id: is required", "messages")
    result = _text_and_images(block.content, f"{where}.content")
    if block.is_error:
        result = f"Error: {result}" if isinstance(result, str) \
            else [TurnPart("text", "Error: "), *result]
    return ChatMessage("tool", result,
                       tool_call_id=block.tool_use_id, name=names.get(block.tool_use_id))


def _text_and_images(content: str | list[InputBlock] | None, where: str) -> str | list[TurnPart]:
    """Of a tool's result. Raises `HttpError`."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([source_upload(block.source, f"{where}[{i}].source") if block.type == "image"
                   else TurnPart("text", _text([block], f"{where}[{i}]"))
                   for i, block in enumerate(content)])


def _text(content: str | list[InputBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            raise HttpError(400, f"{where}[{i}]: only text is taken, got {block.type[:40]!r}",
                            where.split("[")[0])
    return "".join(block.text or "" for block in content)
