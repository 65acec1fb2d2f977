"""The bodies of `/v1/messages`: converts Anthropic's conversations, tools and blocks to the
engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from actorium.actors.gateway.api.chat_body import arguments_text
from actorium.actors.gateway.api.media_parts import decoded_text, joined, source_upload
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
    is_built_in,
)
from actorium.actors.gateway.api.sampling_fields import SamplingFields, check_turns, effort_args
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart

OWN = "custom"
"""Type of a tool that the caller runs."""
_UNSEEN = ("redacted_thinking", "container_upload", "tool_reference", "compaction")
_UNSEEN_ENDS = ("_tool_use", "_tool_result")
"""Blocks of tools that Anthropic's servers run, and others that they alone can read."""


class InputBlock(Struct, kw_only=True):
    """A block of a message: the fields of all kinds."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | dict[str, Any] | None = None
    source: Any = None
    """Data of an image or a document; address of a search result."""
    title: str | None = None
    is_error: bool | None = None

    @property
    def is_unseen(self) -> bool:
        """True if the model cannot be shown it."""
        if self.type == "document":
            return _document(self) is None
        return self.type in _UNSEEN or self.type.endswith(_UNSEEN_ENDS)


class AnthropicMessageParam(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock] | None


class AnthropicTool(Struct, kw_only=True):
    name: str = ""
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
    mcp_servers: list[Any] | None = None
    """Passed over, as the tools that they would have."""
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
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return self.thinking_token_budget if budget is None else budget

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables: as with Anthropic, a model thinks only if asked.
        """
        thinks = {"enable_thinking": True} if self.thinks else effort_args("none")
        return thinks | self.chat_template_kwargs

    def ignored_tools(self) -> list[str]:
        """Returns the types of the tools that the model is not shown."""
        found = [one.type for one in self.tools or () if one.is_built_in]
        return list(dict.fromkeys([*found, "mcp_servers"] if self.mcp_servers else found))

    def ignored_input(self) -> list[str]:
        """Returns the types of the blocks that the model is not shown."""
        contents = [self.system, *(turn.content for turn in self.messages)]
        return list(dict.fromkeys(block.type for content in contents for block in _each(content)
                                  if block.is_unseen))

    def choice(self) -> ToolSelection:
        """Returns the tools in the form of chats. Raises `HttpError`."""
        tools: list[Tool] = []
        for i, one in enumerate(self.tools or ()):
            if one.is_built_in:
                continue
            if one.type != OWN:
                raise bad_field(f"tools[{i}]", f"{one.type[:40]!r} is not known")
            if one.input_schema is None:
                raise bad_field(f"tools[{i}].input_schema", "is required")
            tools.append(Tool("function", Function(one.name, one.description, one.input_schema,
                                                   one.strict)))
        wanted = self.tool_choice
        if wanted is None or wanted.type == "auto":
            return ToolSelection(tools, "auto", self.parallel)
        if wanted.type == "tool":
            named = NamedTool("function", NamedFunction(wanted.name or ""))
            return ToolSelection(tools, named, self.parallel)
        return ToolSelection(tools, "required" if wanted.type == "any" else "none",
                             self.parallel)

    def turns(self) -> list[ChatMessage]:
        """Returns the conversation. Raises `HttpError` naming the block."""
        check_turns(self.messages, "messages")
        found = []
        if self.system:
            text = _shown(self.system, "system")
            if not isinstance(text, str):
                raise bad_field("system", "only text is taken")
            found.append(ChatMessage("system", text))
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

    @property
    def limit(self) -> int:
        """Returns the most tokens: in Anthropic's API there always are so many."""
        return self.max_tokens

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        if (self.n or 1) != 1:
            raise bad_field("n", "a message has one choice")
        if self.stop and self.stop_sequences:
            raise bad_field("stop", "not together with stop_sequences")
        if self.prompt_logprobs is not None:
            raise bad_field("prompt_logprobs", "not of messages")
        if self.return_routed_experts:
            raise bad_field("return_routed_experts", "not of messages")
        self.stop = self.stop or self.stop_sequences


def _turns(turn: AnthropicMessageParam, where: str, names: dict[str, str]) -> list[ChatMessage]:
    """Converts a message to turns: results of tools are turns of their own. names: of the tools
    that were called, by the calls' ids."""
    if not isinstance(turn.content, list):
        return [ChatMessage(turn.role, turn.content or "")]
    turns: list[ChatMessage] = []
    parts: list[TurnPart] = []
    thought = ""
    calls: list[ToolCall] = []
    for i, block in enumerate(turn.content):
        place = f"{where}[{i}]"
        if block.type == "thinking":
            thought += block.thinking or ""
        elif block.type == "tool_use":
            calls.append(_call(block, place))
            names[calls[-1].id] = calls[-1].name
        elif block.type == "tool_result":
            turns.append(_result(block, place, names))
        else:
            parts += _parts(block, place)
    text = joined(parts)
    if text or calls or thought or not turns:
        turns.append(ChatMessage(turn.role, text, tool_calls=calls,
                                 reasoning_content=thought or None))
    return turns


def _call(block: InputBlock, where: str) -> ToolCall:
    if not block.name or not block.id:
        raise HttpError(400, f"{where}: id and name are required", "messages")
    return ToolCall(block.name, arguments_text(block.input), block.id)


def _result(block: InputBlock, where: str, names: dict[str, str]) -> ChatMessage:
    if not block.tool_use_id:
        raise HttpError(400, f"{where}.tool_use_id: is required", "messages")
    result = _shown(block.content, f"{where}.content")
    if block.is_error:
        result = f"Error: {result}" if isinstance(result, str) \
            else [TurnPart("text", "Error: "), *result]
    return ChatMessage("tool", result,
                       tool_call_id=block.tool_use_id, name=names.get(block.tool_use_id))


def _each(content: Any) -> Iterator[InputBlock]:
    """Yields the blocks of a content, and those within them."""
    for block in content if isinstance(content, list) else ():
        yield block
        if block.type == "tool_result":
            yield from _each(block.content)


def _shown(content: str | list[InputBlock] | dict[str, Any] | None, where: str
           ) -> str | list[TurnPart]:
    """Returns a content that has neither thoughts nor calls. Raises `HttpError`."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise HttpError(400, f"{where}: must be text or a list of blocks", where.split("[")[0])
    return joined([part for i, block in enumerate(content)
                   for part in _parts(block, f"{where}[{i}]")])


def _parts(block: InputBlock, where: str) -> list[TurnPart]:
    """Returns what the model is shown of a block. Raises `HttpError`."""
    if block.type == "text":
        return [TurnPart("text", block.text or "")]
    if block.type == "image":
        return [source_upload(block.source, f"{where}.source")]
    if block.type == "document":
        return _document(block) or []
    if block.type == "search_result":
        return _titled([block.title, block.source], _shown(block.content, f"{where}.content"))
    if block.is_unseen:
        return []
    raise HttpError(400, f"{where}: {block.type[:40]!r} is not taken", where.split("[")[0])


def _document(block: InputBlock) -> list[TurnPart] | None:
    """Returns a document as text; None if it is none, as a PDF or one that is stored elsewhere.
    Raises `HttpError`."""
    source = block.source if isinstance(block.source, dict) else {}
    kind, data = source.get("type"), source.get("data")
    shown: str | list[TurnPart] | None = None
    if kind == "text" and isinstance(data, str):
        shown = data
    elif kind == "base64" and isinstance(data, str):
        shown = decoded_text(str(source.get("media_type")), data)
    elif kind == "content":
        try:
            content = convert(source.get("content"), str | list[InputBlock])
        except ValidationError as error:
            raise bad_field("messages", f"a document's source.content: {error}") from None
        shown = _shown(content, "messages: a document's source.content")
    return None if shown is None else _titled([block.title], shown)


def _titled(head: Sequence[Any], shown: str | list[TurnPart]) -> list[TurnPart]:
    """Returns a text of its own beneath the lines that say what it is."""
    lines = [one for one in head if isinstance(one, str) and one]
    parts = [TurnPart("text", shown)] if isinstance(shown, str) else shown
    return [TurnPart("text", "".join(f"{line}\n" for line in lines)), *parts,
            TurnPart("text", "\n\n")]
