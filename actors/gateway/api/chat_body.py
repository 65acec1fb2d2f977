"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from actorium.actors.config.reasoning_formats import SWITCHES
from actorium.actors.gateway.api.media_parts import content_of, unseen_parts
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    OfferedTool,
    ToolChoiceParam,
    ToolOffer,
    ToolSelection,
    offered,
    selected,
)
from actorium.actors.gateway.api.sampling_fields import (
    SamplingFields,
    check_turns,
    effort_args,
    thought_budget,
)
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.parsers.custom_calls import arguments_for
from actorium.actors.messages import ChatMessage, ToolCall, TurnPart

ASSISTANT = "assistant"
ROLES = {"developer": "system", "function": "tool"}
"""Roles that templates do not know -> those that stand for them."""


class ContentPart(Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: dict[str, Any] | None = None
    file_data: str | None = None
    """The file's data, in responses."""
    image_url: str | dict[str, Any] | None = None
    video_url: str | dict[str, Any] | None = None
    image: str | dict[str, Any] | None = None
    video: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    """Names of transformers and qwen-vl-utils; a list has frames."""
    detail: str | None = None
    """Detail of `image_url` in responses. Ignored: `mm_processor_kwargs` has the sizes."""


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
    """OpenAI's older form of `tool_calls`."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool = False
    """True if the answer continues this message, which must be the last, and the assistant's
    (Mistral, DeepSeek)."""

    def says(self, where: str) -> str | list[TurnPart]:
        """Returns its content for the engine. Raises `HttpError`."""
        return content_of(self.content, f"{where}.content") or self.refusal or ""


def check_prefixes(messages: Sequence[MessageParam]) -> None:
    """Raises `HttpError` 400 on a message with `prefix` that the answer cannot go on in."""
    for i, turn in enumerate(messages):
        if turn.prefix and (turn.role != ASSISTANT or i + 1 < len(messages)):
            raise bad_field(f"messages[{i}].prefix", "only of a last message, and of the "
                            "assistant's")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningParam(Struct, kw_only=True):
    """OpenRouter's options of reasoning."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Another name of `thinking_token_budget`."""
    exclude: bool = False
    """Leave the reasoning out of the answer."""
    enabled: bool | None = None

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables."""
        if self.enabled is False or self.effort == "none":
            return effort_args("none")
        asks = self.enabled or self.max_tokens is not None
        return effort_args(self.effort) | (dict.fromkeys(SWITCHES, True) if asks else {})


class ChatBody(SamplingFields, kw_only=True):
    """A chat completion's request."""

    messages: list[MessageParam]
    max_completion_tokens: int | None = None
    """Another name of `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningParam | None = None
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
    """OpenAI's older form of tools, with `function_call`; the answer has that form, too."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: bool = True
    """Off = the reasoning is left out."""
    separate_reasoning: bool = True
    """Off = it is a part of the content, as the model wrote it."""

    def turns(self) -> list[ChatMessage]:
        """Returns the messages for the engine. Raises `HttpError` naming the message."""
        check_turns(self.messages, "messages")
        return [ChatMessage(
            role=ROLES.get(turn.role, turn.role),
            content=turn.says(f"messages[{i}]"), name=turn.name,
            tool_calls=_calls(turn, f"messages[{i}]"), tool_call_id=turn.tool_call_id,
            reasoning_content=turn.reasoning_content or turn.reasoning)
            for i, turn in enumerate(self.messages)]

    def ignored_input(self) -> list[str]:
        """Returns the types of the parts that the model is not shown."""
        return unseen_parts(turn.content for turn in self.messages)

    def check(self) -> None:
        """Raises `HttpError` on fields that do not fit together."""
        if self.stream and self.prompt_logprobs is not None:
            raise bad_field("prompt_logprobs", "not in a stream")
        if self.stream and self.return_routed_experts:
            raise bad_field("return_routed_experts", "not in a stream")
        check_prefixes(self.messages)
        if self.continues and self.add_generation_prompt:
            raise bad_field("continue_final_message", "not with add_generation_prompt")
        for name, older in (("tools", "functions"), ("tool_choice", "function_call")):
            if getattr(self, name) is not None and getattr(self, older) is not None:
                raise bad_field(older, f"not together with {name}")

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message."""
        return self.continue_final_message or bool(self.messages and self.messages[-1].prefix)

    @property
    def opens_turn(self) -> bool:
        """True if the prompt ends with the beginning of the model's turn."""
        return not self.continues if self.add_generation_prompt is None \
            else self.add_generation_prompt

    @property
    def wants_prompt_ids(self) -> bool:
        """True if the answer has the prompt's tokens."""
        return self.return_token_ids or self.return_prompt_token_ids

    def template_args(self) -> dict[str, Any]:
        """Returns the chat template's variables beside the conversation."""
        documents = {} if self.documents is None else {"documents": self.documents}
        asked = {} if self.reasoning is None else self.reasoning.template_args()
        return documents | asked | effort_args(self.reasoning_effort) | self.chat_template_kwargs

    @property
    def thought_budget(self) -> int | None:
        """Returns the most tokens of the reasoning. Raises `HttpError`."""
        return thought_budget(self, None if self.reasoning is None else self.reasoning.max_tokens)

    @property
    def shows_reasoning(self) -> bool:
        """True if the answer has the reasoning."""
        return self.include_reasoning and not (self.reasoning and self.reasoning.exclude)

    def answer_role(self) -> str:
        """Returns the role of the message that the answer is, or continues."""
        return ASSISTANT if self.opens_turn or not self.messages else self.messages[-1].role

    def last_text(self) -> str:
        """Returns the text of the last message. Raises `HttpError`."""
        if not self.messages:
            return ""
        found = self.messages[-1].says(f"messages[{len(self.messages) - 1}]")
        return found if isinstance(found, str) else "".join([part.text for part in found])

    def echoed(self) -> str:
        """Returns the text that the answer begins with. Raises `HttpError`."""
        if not self.echo or not self.messages or self.messages[-1].role != self.answer_role():
            return ""
        return self.last_text()

    @property
    def legacy(self) -> bool:
        """True if calls are answered as `function_call`."""
        return self.functions is not None

    def offer(self) -> ToolOffer:
        """Returns the tools. Raises `HttpError`."""
        if self.functions is None:
            return offered(self.tools)
        return offered([OfferedTool(type="function", function=one) for one in self.functions])

    def choice(self) -> ToolSelection:
        """Returns the tools, and what `tool_choice` requires of them. Raises `HttpError`."""
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
            raise bad_field(older, text) from None

    @property
    def parallel(self) -> bool:
        """True if several calls may be made at once."""
        return self.parallel_tool_calls is not False and not self.legacy

    def alternatives(self) -> int | None:
        """Returns how many alternatives are shown for each token; None = no log-probabilities."""
        if not self.logprobs and self.logprob_token_ids is None:
            if self.top_logprobs:
                raise bad_field("top_logprobs", "only with logprobs=true")
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
    """Returns the arguments of an earlier call as text. The tokenizer, which knows the template,
    handles those that are no JSON object."""
    if given is None or isinstance(given, str):
        return given or ""
    return msgspec.json.encode(given).decode()
