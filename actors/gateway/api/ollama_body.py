"""The bodies of Ollama's `/api/chat` and `/api/generate`, as those of chats.

What changes the answer is honoured or refused by name. What only concerns how Ollama starts a model
is accepted without effect (`START_UP`): here it is the engine's start that says so.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from actorium.actors.config.models_settings import parse_keep_alive
from actorium.actors.gateway.api.chat_body import (
    ASSISTANT,
    ChatBody,
    ContentPart,
    FunctionCallParam,
    MessageParam,
    ToolCallParam,
)
from actorium.actors.gateway.api.offered_tools import OfferedTool, offered
from actorium.actors.gateway.api.response_formats import ResponseFormat
from actorium.actors.gateway.api.sampling_fields import NO_LIMIT, Unsupported, effort_args
from actorium.actors.gateway.http.http_errors import bad_field

HONOURED = {
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "seed": "seed", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"}
"""Options, and their names in chats."""
PENALTIES = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Those that look back at tokens, and the values that change nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "tfs_z": (1.0,), "mirostat": (0,), "penalize_newline": (True,),
    "vocab_only": (False,)}
"""Options that are not supported, and their values that change nothing."""
START_UP = ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap",
            "use_mlock", "numa", "low_vram", "f16_kv", "logits_all", "draft_num_predict",
            "mirostat_tau", "mirostat_eta")
"""Options without effect: matters of an engine's start, and those of what is refused."""


class OllamaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`options`: how to sample, and how Ollama would start the model."""

    num_predict: int | None = None
    """Most tokens of the completion; below 0 = to the end of the context."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """-1 = a random one."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    """Tokens that penalties look back at: -1 = all, as they always do here; 0 = no penalties."""
    typical_p: Unsupported = None
    tfs_z: Unsupported = None
    mirostat: Unsupported = None
    penalize_newline: Unsupported = None
    vocab_only: Unsupported = None
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    draft_num_predict: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None

    def check(self) -> None:
        """Raises `HttpError` naming the option that would change the answer and is not supported.
        """
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise bad_field(f"options.{name}", f"not supported; {neutral[0]} changes nothing")
        penalised = [name for name, neutral in PENALTIES.items()
                     if getattr(self, name) not in (None, neutral)]
        if penalised and self.repeat_last_n not in (None, -1, 0):
            raise bad_field("options.repeat_last_n", f"{penalised[0]} looks back at all tokens "
                            "here: leave it out, or send -1 (all) or 0 (no penalties)")

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a chat's body."""
        given = {theirs: value for name, theirs in HONOURED.items()
                 if (value := getattr(self, name)) is not None
                 and not (name in PENALTIES and self.repeat_last_n == 0)}
        if (self.num_predict or 0) < 0:
            given["max_tokens"] = NO_LIMIT
        if self.seed == -1:
            del given["seed"]
        return given


class OllamaCallParam(Struct, kw_only=True):
    """A call that an earlier answer made."""

    id: str = ""
    function: FunctionCallParam


class OllamaMessageParam(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    """In base64."""
    tool_calls: list[OllamaCallParam] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_chat(self) -> MessageParam:
        """Returns it as a message of a chat: images stand before the text."""
        content: str | list[ContentPart | str] = self.content
        if self.images:
            shown = [ContentPart("image_url", image_url=_data_url(one)) for one in self.images]
            content = [*shown, ContentPart("text", text=self.content)]
        return MessageParam(
            role=self.role.lower(), content=content, name=self.tool_name,
            tool_call_id=self.tool_call_id, reasoning_content=self.thinking,
            tool_calls=[ToolCallParam(id=call.id, function=call.function)
                        for call in self.tool_calls or ()])


class OllamaBody(Struct, kw_only=True):
    """The fields that both routes have."""

    model: str | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    """json, or a JSON schema."""
    options: OllamaOptions = OllamaOptions()
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """None = as the chat template has it."""
    keep_alive: float | str | None = None
    """How long the model stays loaded afterwards: seconds, or as "5m"; below 0 = for good."""
    truncate: bool | None = None
    shift: bool | None = None
    """Neither has an effect: a prompt that does not fit the context is refused, and an answer ends
    with it."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    debug_render_only: Unsupported = field(default=None, name="_debug_render_only")

    @property
    def keep_seconds(self) -> float | None:
        """Returns `keep_alive` in seconds, `FOR_GOOD` for any below 0, None if it is not given.
        Raises `HttpError`."""
        try:
            return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)
        except ValueError as error:
            raise bad_field("keep_alive", str(error)) from None

    def check(self) -> None:
        """Raises `HttpError` for what is not supported."""
        self.options.check()
        _ = self.keep_seconds
        if self.debug_render_only:
            raise bad_field("_debug_render_only", "not supported; /v1/chat/completions/render "
                            "shows prompts")

    def chat_fields(self) -> dict[str, Any]:
        """Returns these fields as those of a chat's body."""
        return {"model": self.model, "stream": self.stream, "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs, "response_format": self._response_format(),
                "chat_template_kwargs": think_args(self.think), **self.options.fields()}

    def _response_format(self) -> ResponseFormat | None:
        if self.format == "json":
            return ResponseFormat(type="json_object")
        return ResponseFormat(type="json_schema", schema_=self.format) \
            if isinstance(self.format, dict) else None


class OllamaChatBody(OllamaBody, kw_only=True):
    """The body of `/api/chat`."""

    messages: list[OllamaMessageParam] = []
    tools: list[OfferedTool] | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be completed: the model is to be loaded, or unloaded."""
        return not self.messages

    def check(self) -> None:
        super().check()
        if ignored := offered(self.tools).ignored:
            raise bad_field("tools", f"{ignored[0]!r} is not run here")

    def as_chat(self) -> ChatBody:
        """Returns the body of the chat that this asks for."""
        turns = [turn.as_chat() for turn in self.messages]
        # As Ollama has it: the answer goes on with a last message of the assistant's.
        goes_on = bool(turns) and turns[-1].role == ASSISTANT and bool(turns[-1].content) \
            and not turns[-1].tool_calls
        return ChatBody(messages=turns, tools=self.tools, continue_final_message=goes_on,
                        **self.chat_fields())


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The body of `/api/generate`."""

    prompt: str = ""
    suffix: str | None = None
    """The answer is the text between the prompt and this, where the model has tokens for it."""
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool = False
    """The prompt is what the model gets, without a chat template."""
    images: list[str] | None = None

    @property
    def is_empty(self) -> bool:
        """As of `OllamaChatBody`."""
        return not self.prompt

    def check(self) -> None:
        super().check()
        if self.template:
            raise bad_field("template", "templates in Go's language are not read: send the whole "
                            "prompt with raw, or messages to /api/chat")
        if self.context:
            raise bad_field("context", "is not kept: send the conversation to /api/chat")
        if self.raw and self.suffix:
            raise bad_field("suffix", "not with raw")
        if without := "raw" if self.raw else "suffix" if self.suffix else "":
            for name in ("system", "images", "think"):
                if getattr(self, name):
                    raise bad_field(name, f"not with {without}: there is no conversation")

    def as_chat(self) -> ChatBody:
        """As of `OllamaChatBody`."""
        system = [MessageParam(role="system", content=self.system)] if self.system else []
        user = OllamaMessageParam(role="user", content=self.prompt, images=self.images)
        return ChatBody(messages=[*system, user.as_chat()], **self.chat_fields())


def think_args(think: bool | str | None) -> dict[str, Any]:
    """Returns the chat template's variables for `think`."""
    if think is None:
        return {}
    if think is False:
        return effort_args("none")
    level = effort_args(think) if isinstance(think, str) else {}
    return {"enable_thinking": True, "thinking": True} | level


def _data_url(image: str) -> str:
    """Returns the URL of an image in base64: anything else is no such URL, and is refused."""
    return image if image.startswith("data:") else f"data:;base64,{image}"
