"""The body of `/v1/responses`: converts its input to a conversation and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert, field

from actorium.actors.client.requests import Request
from actorium.actors.gateway.api.chat_body import ROLES, ContentPart, arguments_text
from actorium.actors.gateway.api.media_parts import content_of, unseen_parts
from actorium.actors.gateway.api.offered_tools import (
    NamespacedName,
    OfferedTool,
    ToolChoiceParam,
    ToolOffer,
    ToolSelection,
    offered,
    selected,
)
from actorium.actors.gateway.api.response_formats import JsonSchema, ResponseFormat
from actorium.actors.gateway.api.sampling_fields import (
    SamplingFields,
    check_turns,
    effort_args,
    structured_of,
    thought_budget,
)
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.parsers.custom_calls import arguments_for
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart
from actorium.actors.params import Structured

LOGPROBS = "message.output_text.logprobs"
REFERENCE = "item_reference"
_UNSEEN = (REFERENCE, "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
           "tool_search_output", "additional_tools", "compaction")
_UNSEEN_ENDS = ("_call", "_call_output")
"""Items of tools that OpenAI's servers run, or whose form only their models know."""
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class InputItem(Struct, kw_only=True):
    """An item of the input: a message, or a part of an earlier answer."""

    type: str = ""
    """Messages, and references in the short form, may have none."""
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart | str] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    """Input of a custom tool."""
    namespace: str | None = None
    """Namespace of a called function."""
    output: Any = None
    """Text or parts, of a function; of other tools any JSON."""
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """Returns its type."""
        if self.type:
            return self.type
        return REFERENCE if self.id and not self.role and self.content is None else "message"

    @property
    def is_unseen(self) -> bool:
        """True if the model cannot be shown it."""
        if self.kind == "reasoning":
            return self.encrypted_content is not None and not (self.content or self.summary)
        return self.kind in _UNSEEN or (
            self.kind.endswith(_UNSEEN_ENDS) and self.kind not in (*_CALLS, *_OUTPUTS))


class TextFormat(Struct, kw_only=True):
    type: str = "text"
    name: str = "schema"
    schema_: dict[str, Any] | bool | None = field(default=None, name="schema")


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(Struct, kw_only=True, omit_defaults=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """OpenAI's older name of the same."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """OpenRouter's name of `thinking_token_budget`."""


class InputBody(SamplingFields, kw_only=True):
    """The fields that make a response's prompt; alone, the body of `/v1/responses/input_tokens`."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceParam | None = None
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
                raise bad_field(name, f"not supported; {instead}")
        if self.truncation == "auto":
            raise bad_field("truncation", "not supported; leave items out of the input")

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return effort_args(effort) | self.chat_template_kwargs

    @property
    def thought_budget(self) -> int | None:
        """Returns the most tokens of the reasoning. Raises `HttpError`."""
        return thought_budget(self, None if self.reasoning is None else self.reasoning.max_tokens)

    def offer(self) -> ToolOffer:
        """Returns the tools. Raises `HttpError`."""
        return offered(self.tools)

    def choice(self) -> ToolSelection:
        """Returns the tools in the form of chats. Raises `HttpError`."""
        return selected(self.offer(), self.tool_choice, self.parallel)

    @property
    def parallel(self) -> bool:
        """True if several calls may be made at once."""
        return self.parallel_tool_calls is not False

    @property
    def summarises(self) -> bool:
        """True if reasoning is answered as its summary."""
        asked = self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)
        return bool(asked) and asked != "none"

    def items(self) -> list[InputItem]:
        """Returns the items of its input."""
        if isinstance(self.input, list):
            return self.input
        return [InputItem(role="user", content=self.input)] if self.input else []

    def turns(self, context: list[InputItem]) -> list[ChatMessage]:
        """Returns the conversation: the items of `context`, then its own. Raises `HttpError` naming
        the item."""
        items = self.items()
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
            raise bad_field("background", "not together with stream; ask for the response by its "
                            "id")
        if self.background and not self.store:
            raise bad_field("background", "only with store=true")
        if (self.n or 1) != 1:
            raise bad_field("n", "a response has one choice")
        if self.prompt_logprobs is not None:
            raise bad_field("prompt_logprobs", "not of responses")
        if self.return_routed_experts:
            raise bad_field("return_routed_experts", "not of responses")

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
            raise bad_field("text.format", "not together with another format")
        return found or structured_of(self)


def ignored_input(items: list[InputItem]) -> list[str]:
    """Returns the types of the items, and of the parts of items, that the model is not shown."""
    unseen = [item.kind for item in items if item.is_unseen]
    parts = unseen_parts(item.content if item.kind == "message" else _output(item, "input")
                         for item in items if item.kind in ("message", *_OUTPUTS))
    return list(dict.fromkeys([*unseen, *parts]))


def _output(item: InputItem, where: str) -> str | list[ContentPart | str] | None:
    """Returns what a called function gave. Raises `HttpError`."""
    try:
        return convert(item.output, str | list[ContentPart | str] | None)
    except ValidationError as error:
        raise HttpError(400, f"{where}.output: {error}") from None


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
        kind = item.kind
        if kind == REFERENCE and not item.id:
            raise HttpError(400, f"{where}.id: is required")
        if item.is_unseen:
            return
        if kind == "message":
            if not item.role:
                raise HttpError(400, f"{where}.role: is required")
            role = ROLES.get(item.role, item.role)
            self.say(role, content_of(item.content, f"{where}.content"))
        elif kind == "reasoning":
            parts = item.content if isinstance(item.content, list) and item.content else \
                item.summary or []
            self._reasoning = "\n".join(part if isinstance(part, str) else part.text or ""
                                        for part in parts) or None
        elif kind in _CALLS:
            self._call(item, where)
        elif kind in _OUTPUTS:
            if item.call_id is None:
                raise HttpError(400, f"{where}.call_id: is required")
            self.found.append(ChatMessage(
                "tool", content_of(_output(item, where), f"{where}.output"),
                tool_call_id=item.call_id,
                name=self._names.get(item.call_id)))
        else:
            raise HttpError(400, f"{where}: {kind[:40]!r} is not taken")

    def say(self, role: str, text: str | list[TurnPart]) -> None:
        """Adds a message's content."""
        last = self.found[-1] if self.found else None
        if role == "system" and last is not None and last.role == "system":
            self.found[-1] = ChatMessage("system", f"{last.content}\n\n{text}")
            return
        self.found.append(ChatMessage(role, text, reasoning_content=self._thought(role)))

    def _call(self, item: InputItem, where: str) -> None:
        if not item.name or item.call_id is None:
            raise HttpError(400, f"{where}: call_id and name are required")
        name = str(NamespacedName(item.namespace, item.name)) if item.namespace else item.name
        self._names[item.call_id] = name
        arguments = arguments_for(item.input or "") if item.kind == "custom_tool_call" \
            else arguments_text(item.arguments)
        call = ToolCall(name, arguments, item.call_id)
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
