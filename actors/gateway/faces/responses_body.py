"""The body of `/v1/responses`: converts its input to a conversation and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, Struct, UnsetType, field

from actorium.actors.client.requests import Request
from actorium.actors.gateway.faces.chat_protocol import ROLES, ContentPart
from actorium.actors.gateway.faces.media_parts import content_of
from actorium.actors.gateway.faces.response_formats import JsonSchema, ResponseFormat, structured_of
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
from actorium.actors.params import Structured

LOGPROBS = "message.output_text.logprobs"


class InputItem(Struct, kw_only=True):
    """An item of the input: a message, or a part of an earlier answer."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    namespace: str | None = None
    """Of a called function."""
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class ResponseTool(Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | UnsetType = UNSET
    """Of a namespace: its functions."""


class NamespacedName(NamedTuple):
    """The name of a function in a namespace."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Returns the name that the model sees: Codex names the namespaces of MCP servers so that
        this comes to `mcp__SERVER__TOOL`."""
        return f"{self.namespace.removesuffix('__')}__{self.name}"


class ResponseToolChoice(Struct, kw_only=True):
    type: str
    name: str | None = None


class TextFormat(Struct, kw_only=True):
    type: str = "text"
    name: str = "schema"
    schema_: dict[str, Any] | bool | None = field(default=None, name="schema")


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class InputBody(SamplingFields, kw_only=True):
    """The fields that make a response's prompt; alone, the body of `/v1/responses/input_tokens`."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    """The stored response that this input follows."""
    conversation: Any = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        for name, instead in (("conversation", "previous_response_id goes on with one"),
                              ("prompt", "there are no stored prompts")):
            if getattr(self, name) is not None:
                raise HttpError(400, f"{name}: not supported; {instead}", name)
        if self.truncation == "auto":
            raise HttpError(400, "truncation: not supported; leave items out of the input",
                            "truncation")

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return effort_args(effort) | self.chat_template_kwargs

    def _each_tool(self) -> Iterator[tuple[str, str, ResponseTool]]:
        """Yields (place, namespace, tool) of every tool, those of namespaces one by one. Raises
        `HttpError`."""
        for i, one in enumerate(self.tools or ()):
            place = f"tools[{i}]"
            if one.type != "namespace":
                yield place, "", one
            elif not one.name:
                raise HttpError(400, f"{place}.name: is required of a namespace", "tools")
            else:
                for j, inner in enumerate(() if one.tools is UNSET else one.tools):
                    yield f"{place}.tools[{j}]", one.name, inner

    def ignored_tools(self) -> list[str]:
        """Returns the types of the tools that the model is not shown. Raises `HttpError`."""
        return list(dict.fromkeys(one.type for _, _, one in self._each_tool()
                                  if is_built_in(one.type)))

    def namespaces(self) -> dict[str, NamespacedName]:
        """Returns the functions of namespaces by the names that the model sees. Raises
        `HttpError`."""
        names = [NamespacedName(space, one.name or "") for _, space, one in self._each_tool()
                 if space]
        return {str(name): name for name in names}

    def choice(self) -> ToolSelection:
        """Returns the tools in the form of chats: functions, those of namespaces among them.
        Raises `HttpError`."""
        tools = []
        for place, space, one in self._each_tool():
            if is_built_in(one.type):
                continue
            if one.type != "function" or not one.name:
                raise HttpError(400, f"{place}: only functions with a name, namespaces of them and "
                                f"known built-in tools are taken, got {one.type[:40]!r}", "tools")
            name = str(NamespacedName(space, one.name)) if space else one.name
            tools.append(Tool("function", Function(name, one.description, one.parameters,
                                                   one.strict)))
        wanted = self.tool_choice
        if wanted == "auto" and not tools:
            wanted = None  # many clients always send it
        if isinstance(wanted, ResponseToolChoice):
            if wanted.type != "function" or not wanted.name:
                raise HttpError(400, "tool_choice: only functions can be named, got "
                                f"{wanted.type[:40]!r}", "tool_choice")
            return ToolSelection(tools or None, NamedTool("function", NamedFunction(wanted.name)),
                          self.parallel)
        return ToolSelection(tools or None, wanted, self.parallel)

    @property
    def parallel(self) -> bool:
        """True if several calls may be made at once."""
        return self.parallel_tool_calls is not False

    def turns(self, context: list[InputItem]) -> list[ChatMessage]:
        """Returns the conversation: the items of `context`, then its own. Raises `HttpError` naming
        the item."""
        items = self.input if isinstance(self.input, list) else \
            [InputItem(role="user", content=self.input)] if self.input else []
        check_turns([*context, *items], "input")
        turns = ConversationBuilder()
        if self.instructions:
            turns.say("system", self.instructions)
        for i, item in enumerate(context):
            turns.add(item, f"previous_response_id: item {i}")
        for i, item in enumerate(items):
            turns.add(item, f"input[{i}]")
        return turns.found

    def prompted(self, context: list[InputItem]) -> Request:
        """Returns a request with the prompt alone. Raises `HttpError`."""
        return Request(messages=list(self.turns(context)), tools=self.choice().shown,
                       template_args=self.template_args(),
                       mm_processor_kwargs=self.mm_processor_kwargs)


class ResponsesBody(InputBody, kw_only=True):
    """The body of a response's request."""

    input: str | list[InputItem]
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    background: bool = False
    """Answer at once; the response is retrieved later."""
    store: bool = True
    """Store the response, to be retrieved or continued. The answer says whether it is stored."""

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        super().check()
        if self.background and self.stream:
            raise HttpError(400, "background: not together with stream; ask for the response by "
                            "its id", "background")
        if self.background and not self.store:
            raise HttpError(400, "background: only with store=true", "background")
        if (self.n or 1) != 1:
            raise HttpError(400, "n: a response has one choice", "n")
        if self.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs: not of responses", "prompt_logprobs")

    def alternatives(self) -> int | None:
        """Returns how many alternatives are shown for each token; None = no log-probabilities."""
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    def structured(self) -> Structured | None:
        """Returns the constraint on the text. Raises `HttpError`."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return structured_of(self)
        schema = JsonSchema(name=wanted.name, schema_=wanted.schema_)
        try:
            found = structured_of(SamplingFields(
                response_format=ResponseFormat(type=wanted.type, json_schema=schema)))
        except HttpError as error:
            raise HttpError(400, error.message.replace("response_format", "text.format", 1),
                            "text") from None
        if found is not None and structured_of(self) is not None:
            raise HttpError(400, "text.format: not together with another format", "text")
        return found or structured_of(self)


class ConversationBuilder:
    """Converts items to a conversation: an assistant's reasoning, text and calls become one turn.
    """

    def __init__(self) -> None:
        self.found: list[ChatMessage] = []
        self._reasoning: str | None = None
        self._names: dict[str, str] = {}
        """Names of the called functions by the calls' ids."""

    def add(self, item: InputItem, where: str) -> None:
        """Adds an item. Raises `HttpError`."""
        try:
            self._add(item, where)
        except HttpError as error:
            place = error.param if (error.param or "").startswith("input[") else "input"
            raise HttpError(400, error.message, place) from None

    def _add(self, item: InputItem, where: str) -> None:
        if item.type == "message":
            if not item.role:
                raise HttpError(400, f"{where}.role: is required")
            role = ROLES.get(item.role, item.role)
            self.say(role, content_of(item.content, f"{where}.content"))
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) and item.content else \
                item.summary or []
            self._reasoning = "\n".join(part.text or "" for part in parts) or None
        elif item.type == "function_call":
            self._call(item, where)
        elif item.type == "function_call_output":
            if not item.call_id:
                raise HttpError(400, f"{where}.call_id: is required")
            self.found.append(ChatMessage(
                "tool", content_of(item.output, f"{where}.output"), tool_call_id=item.call_id,
                name=self._names.get(item.call_id)))
        else:
            raise HttpError(400, f"{where}: {item.type[:40]!r} is not taken")

    def say(self, role: str, text: str | list[TurnPart]) -> None:
        """Adds a message's content."""
        last = self.found[-1] if self.found else None
        if role == "system" and last is not None and last.role == "system":
            self.found[-1] = ChatMessage("system", f"{last.content}\n\n{text}")
            return
        self.found.append(ChatMessage(role, text, reasoning_content=self._thought(role)))

    def _call(self, item: InputItem, where: str) -> None:
        if not item.name or not item.call_id:
            raise HttpError(400, f"{where}: call_id and name are required")
        name = str(NamespacedName(item.namespace, item.name)) if item.namespace else item.name
        self._names[item.call_id] = name
        call = ToolCall(name, item.arguments or "", item.call_id)
        last = self.found[-1] if self.found else None
        if last is None or last.role != "assistant" or self._reasoning is not None:
            self.found.append(ChatMessage("assistant", "", tool_calls=[call],
                                          reasoning_content=self._thought("assistant")))
        else:
            self.found[-1] = ChatMessage("assistant", last.content,
                                         tool_calls=[*last.tool_calls, call],
                                         reasoning_content=last.reasoning_content)

    def _thought(self, role: str) -> str | None:
        if role != "assistant":
            return None
        thought, self._reasoning = self._reasoning, None
        return thought
