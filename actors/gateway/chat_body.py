"""The body of `/v1/chat/completions`, and the shapes of its answers."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct, field

from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.fields import SamplingFields, check_turns
from actorium.actors.gateway.tools import Called, NamedTool, Tool
from actorium.actors.messages import ChatMessage, ToolCall

ROLES = {"developer": "system"}
"""What templates call those that they do not know."""


class Part(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class TurnCall(Struct, kw_only=True):
    """A call that an earlier answer made."""

    id: str = ""
    function: TurnFunction


class TurnFunction(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class Turn(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[TurnCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """A chat completion's request."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    """Tell the reasoning; off = leave it out."""
    separate_reasoning: bool = True
    """Off = it is a part of the content, as the model wrote it."""

    def turns(self) -> list[ChatMessage]:
        """The messages as the engine takes them. Raises `HttpError` naming the message."""
        check_turns(self.messages, "messages")
        return [ChatMessage(
            role=ROLES.get(turn.role, turn.role),
            content=text_of(turn.content, f"messages[{i}].content"), name=turn.name,
            tool_calls=[_call(call) for call in turn.tool_calls or ()],
            tool_call_id=turn.tool_call_id,
            reasoning_content=turn.reasoning_content or turn.reasoning)
            for i, turn in enumerate(self.messages)]

    def alternatives(self) -> int | None:
        """Alternatives told of each token; None = no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise HttpError(400, "top_logprobs: only with logprobs=true", "top_logprobs")
            return None
        return self.top_logprobs or 0


def _call(call: TurnCall) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(name=call.function.name, arguments=text, id=call.id)


def text_of(content: str | list[Part] | None, where: str) -> str:
    """The text of a message's content. Raises `HttpError` on other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise HttpError(400, f"{where}[{i}]: only text is taken, got {part.type[:40]!r}",
                            "messages")
    return "".join(part.text or "" for part in content)


class Usage(Struct):
    """Token counts of a request: the prompt once, all choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, int] = {}
    completion_tokens_details: dict[str, int] = {}


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """Of one alternative at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, None at the first: token id -> alternative."""


class Said(Struct, omit_defaults=True, kw_only=True):
    """What is new of a message, or all of it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Said
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class Chunk(Struct, kw_only=True):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Message(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class Choice(Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    system_fingerprint: str | None = field(default=None)
