"""The body of `/v1/chat/completions`, and the shapes of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from actorium.actors.gateway.api.media_parts import content_of, unseen_parts
from actorium.actors.gateway.api.offered_tools import (
    OfferedTool,
    ToolChoiceParam,
    ToolOffer,
    offered,
    selected,
)
from actorium.actors.gateway.api.sampling_fields import SamplingFields, check_turns, effort_args
from actorium.actors.gateway.api.tool_choice import (
    Function,
    FunctionCall,
    FunctionToolCall,
    NamedFunction,
    ToolSelection,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.custom_calls import arguments_for
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart

ASSISTANT = "assistant"
ROLES = {"developer": "system", "function": "tool"}
"""What templates call those that they do not know."""


class ContentPart(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: dict[str, Any] | None = None
    file_data: str | None = None
    """What `file` has, in responses."""
    image_url: str | dict[str, Any] | None = None
    video_url: str | dict[str, Any] | None = None
    image: str | dict[str, Any] | None = None
    video: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    """As transformers and qwen-vl-utils name them; a list has frames."""
    detail: str | None = None
    """Of `image_url` in responses. Sizes are `mm_processor_kwargs`'s: it changes nothing."""


class ToolCallParam(Struct, kw_only=True):
    """A call that an earlier answer made."""

    id: str = ""
    function: FunctionCallParam | None = None
    custom: CustomCallParam | None = None


class FunctionCallParam(Struct, kw_only=True):
    name: str
    arguments: Any = None
    """JSON text or an object, as far as models and clients keep to it."""


class CustomCallParam(Struct, kw_only=True):
    name: str
    input: str = ""


class MessageParam(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart | str] | None = None
    refusal: str | None = None
    """In the place of a content."""
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: FunctionCallParam | None = None
    """What calls were before `tool_calls`."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool = False
    """Mistral's and DeepSeek's way to say that the answer goes on in it: of a last message of the
    assistant's."""

    def says(self, where: str) -> str | list[TurnPart]:
        """Its content as the engine takes it. Raises `HttpError`."""
        return content_of(self.content, f"{where}.content") or self.refusal or ""


def check_prefixes(messages: Sequence[MessageParam]) -> None:
    """Raises `HttpError` 400 on a message with `prefix` that the answer cannot go on in."""
    for i, turn in enumerate(messages):
        if turn.prefix and (turn.role != ASSISTANT or i + 1 < len(messages)):
            raise HttpError(400, f"messages[{i}].prefix: only of a last message, and of the "
                            "assistant's", "messages")


class ChatBody(SamplingFields, kw_only=True):
    """A chat completion's request."""

    messages: list[MessageParam]
    max_completion_tokens: int | None = None
    """The same as `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = \
        None
    add_generation_prompt: bool | None = None
    """Default: unless the final message is continued."""
    continue_final_message: bool = False
    echo: bool = False
    """Begin the answer with the last message, if it is of the same role."""
    return_prompt_token_ids: bool = False
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    """What tools were before, with `function_call`: the answer is in that shape, too."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: bool = True
    """Tell the reasoning; off = leave it out."""
    separate_reasoning: bool = True
    """Off = it is a part of the content, as the model wrote it."""

    def turns(self) -> list[ChatMessage]:
        """The messages as the engine takes them. Raises `HttpError` naming the message."""
        check_turns(self.messages, "messages")
        return [ChatMessage(
            role=ROLES.get(turn.role, turn.role),
            content=turn.says(f"messages[{i}]"), name=turn.name,
            tool_calls=_calls(turn, f"messages[{i}]"), tool_call_id=turn.tool_call_id,
            reasoning_content=turn.reasoning_content or turn.reasoning)
            for i, turn in enumerate(self.messages)]

    def ignored_input(self) -> list[str]:
        """Types of the parts that the model is not shown."""
        return unseen_parts(turn.content for turn in self.messages)

    def check(self) -> None:
        """Raise `HttpError` on fields that do not fit together."""
        if self.stream and self.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs: not in a stream", "prompt_logprobs")
        check_prefixes(self.messages)
        if self.continues and self.add_generation_prompt:
            raise HttpError(400, "continue_final_message: not with add_generation_prompt",
                            "continue_final_message")
        for name, older in (("tools", "functions"), ("tool_choice", "function_call")):
            if getattr(self, name) is not None and getattr(self, older) is not None:
                raise HttpError(400, f"{older}: not together with {name}", older)

    @property
    def continues(self) -> bool:
        """The answer goes on in the last message."""
        return self.continue_final_message or bool(self.messages and self.messages[-1].prefix)

    @property
    def opens_turn(self) -> bool:
        """The prompt ends with the beginning of the model's turn."""
        return not self.continues if self.add_generation_prompt is None \
            else self.add_generation_prompt

    @property
    def wants_prompt_ids(self) -> bool:
        """The answer has the prompt's tokens."""
        return self.return_token_ids or self.return_prompt_token_ids

    def template_args(self) -> dict[str, Any]:
        """What the chat template learns beside the conversation."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return documents | effort_args(self.reasoning_effort) | self.chat_template_kwargs

    def answer_role(self) -> str:
        """Whose message the answer is, or continues."""
        return ASSISTANT if self.opens_turn or not self.messages else self.messages[-1].role

    def last_text(self) -> str:
        """Of the last message. Raises `HttpError`."""
        if not self.messages:
            return ""
        found = self.messages[-1].says(f"messages[{len(self.messages) - 1}]")
        return found if isinstance(found, str) else "".join([part.text for part in found])

    def echoed(self) -> str:
        """What the answer begins with. Raises `HttpError`."""
        if not self.echo or not self.messages or self.messages[-1].role != self.answer_role():
            return ""
        return self.last_text()

    @property
    def legacy(self) -> bool:
        """Calls are answered as `function_call`."""
        return self.functions is not None

    def offer(self) -> ToolOffer:
        """The tools. Raises `HttpError`."""
        if self.functions is None:
            return offered(self.tools)
        return offered([OfferedTool(type="function", function=one) for one in self.functions])

    def choice(self) -> ToolSelection:
        """The tools, and what is demanded of them. Raises `HttpError`."""
        wanted = self.tool_choice
        if isinstance(self.function_call, NamedFunction):
            wanted = ToolChoiceParam(type="function", function=self.function_call)
        elif self.function_call is not None:
            wanted = self.function_call
        try:
            return selected(self.offer(), wanted, self.parallel)
        except HttpError as error:
            older = {"tools": "functions", "tool_choice": "function_call"}.get(error.param or "")
            if not self.legacy or older is None:
                raise
            text = error.message.removeprefix(f"{error.param}: ")
            raise HttpError(400, f"{older}: {text}", older) from None

    @property
    def parallel(self) -> bool:
        """Several calls may be made at once."""
        return self.parallel_tool_calls is not False and not self.legacy

    def alternatives(self) -> int | None:
        """Alternatives shown for each token; None = no log-probabilities."""
        if not self.logprobs and self.logprob_token_ids is None:
            if self.top_logprobs:
                raise HttpError(400, "top_logprobs: only with logprobs=true", "top_logprobs")
            return None
        # Tokens that are named come instead of the likeliest.
        return 0 if self.logprob_token_ids is not None else self.top_logprobs or 0


def _calls(turn: MessageParam, where: str) -> list[ToolCall]:
    found = []
    for i, call in enumerate(turn.tool_calls or ()):
        if call.custom is not None:
            own = ToolCall(call.custom.name, arguments_for(call.custom.input), call.id)
        elif call.function is not None:
            own = ToolCall(call.function.name, arguments_text(call.function.arguments), call.id)
        else:
            raise HttpError(400, f"{where}.tool_calls[{i}].function: is required", "messages")
        found.append(own)
    older = turn.function_call
    return found if older is None else [
        *found, ToolCall(older.name, arguments_text(older.arguments))]


def arguments_text(given: Any) -> str:
    """The arguments of an earlier call as text; what is no JSON object is the tokenizer's to see
    to, which knows what the template does with it."""
    if given is None or isinstance(given, str):
        return given or ""
    return msgspec.json.encode(given).decode()


class ApiObject(Struct, kw_only=True):
    """What an answer of OpenAI's begins with, and each event of a stream."""

    id: str
    object: str
    created: int
    """Unix time, seconds."""
    model: str


class CompletionUsage(Struct):
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


class DeltaMessage(Struct, omit_defaults=True, kw_only=True):
    """What is new of a message, or all of it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(ApiObject, kw_only=True):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """With the first event."""
    ignored_tools: list[str] | UnsetType = UNSET
    ignored_input: list[str] | UnsetType = UNSET
    """With the first event."""


class AssistantMessage(Struct, kw_only=True):
    role: str = ASSISTANT
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionToolCall] | None = None
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Where SGLang has them."""


class ChatCompletion(ApiObject, kw_only=True):
    """The whole answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    system_fingerprint: None = None
    ignored_tools: list[str] | UnsetType = UNSET
    """Types of those that are not run here, and that the model was not shown, if there are any."""
    ignored_input: list[str] | UnsetType = UNSET
    """Types of the parts of messages that the model was not shown, if there are any."""
