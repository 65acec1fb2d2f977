"""Chat templates: found beside the model, rendered by jinja2 in a bounded sandbox.

Neither the model's template nor the messages are trusted. So a render is bounded: loop iterations
and macro calls together (`MAX_TICKS`), characters produced, and more where it shares a process with
other requests (see `template_sandbox`). Exceeding a bound refuses the request; it never hangs the
actor. What takes long within these bounds is rendered elsewhere (see `template_renderer`).
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jinja2 import TemplateError
from msgspec import Struct

from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import (
    MAX_TURNS,
    RESERVED_TEMPLATE_ARGS,
    SPECIAL_TOKENS,
    ChatMessage,
)
from actorium.actors.models.model_dir import is_jinja, read_json
from actorium.actors.models.template_files import (
    DEFAULT,
    MAX_SOURCE,
    TOOL_USE,
    template_sources,
)
from actorium.actors.tokenizer.generic_tools import (
    TemplateTraits,
    Tools,
    Turns,
    for_template,
    probe,
)
from actorium.actors.tokenizer.template_sandbox import (
    CONCAT,
    MAX_CHARS,
    MAX_TICKS,
    TICK,
    Sandbox,
    Ticks,
    TooMuch,
)

MAX_SPECIAL = 1024
"""Characters of a special token."""
PROBE_TICKS = 20_000
_MARK = "\ue0a7\ue0d3\ue0a7 "
"""Put behind a last turn that is to be continued, to find its end in what the template makes of it.
Of private characters, and a space at the end, which shows whether the template strips turns."""
_RESERVED = RESERVED_TEMPLATE_ARGS | {TICK, CONCAT}
T = TypeVar("T")


class PromptEnding(Struct, frozen=True, array_like=True):
    """How the prompt of a conversation ends."""

    add_generation_prompt: bool = True
    """The prompt ends with the beginning of the model's turn."""
    continue_final_message: bool = False
    """The prompt ends with the last turn's text, which the model continues."""


MODELS_TURN = PromptEnding()


class RenderBudgetExceeded(Exception):
    """The template needs more iterations than it was given."""


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _turn(message: ChatMessage, text_arguments: bool) -> dict[str, Any]:
    """Returns a message as templates expect it, without the fields that it lacks."""
    content = message.content if isinstance(message.content, str) else [
        {"type": "text", "text": part.text} if part.type == "text" else {"type": part.type}
        for part in message.content]
    turn: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {"type": "function", "id": call.id,
             "function": {"name": call.name,
                          "arguments": for_template(call.arguments, text_arguments)}}
            for call in message.tool_calls]
    return turn


class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """Raises `BadModel` if the source does not compile."""
        if len(source) > MAX_SOURCE:
            raise BadModel(f"chat_template: more than {MAX_SOURCE:,} characters", "chat_template")
        self.source = source
        self._env = env = Sandbox(shared=True)
        env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = env.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise BadModel(f"chat_template: does not compile: {error}", "chat_template") from None
        self.special = special
        self._traits: TemplateTraits | None = None

    def traits(self, ticks: int = PROBE_TICKS) -> TemplateTraits:
        """Returns what the template shows of tools, which is found out at the first call. Raises
        `RenderBudgetExceeded` where that takes more than `ticks`."""
        if self._traits is None:
            self._traits = probe(lambda turns, tools: self._probed(turns, tools, ticks))
        return self._traits

    def _probed(self, turns: Turns, tools: Tools | None, ticks: int) -> str:
        try:
            return self._text({"tools": tools, "documents": None, **self.special, "messages": turns,
                               "add_generation_prompt": True, TICK: Ticks(ticks)}, ticks)
        except InvalidRequest:
            return ""

    def render(self, messages: list[ChatMessage], args: dict[str, Any],
               tools: list[dict[str, Any]] | None = None, ticks: int = MAX_TICKS,
               ending: PromptEnding = MODELS_TURN) -> str:
        """Returns the prompt, which ends as `ending` says (args may set `add_generation_prompt`,
        too). Turns and tools look to the template as transformers hands them over.

        What the template has no place for is written into the texts of the turns (`generic_tools`).

        Raises `InvalidRequest` naming `messages`, `template_args` or `continue_final_message`, and
        `RenderBudgetExceeded` after `ticks` iterations, where that is fewer than a template may
        take.
        """
        if not messages or len(messages) > MAX_TURNS:
            raise InvalidRequest(f"messages: 1 to {MAX_TURNS} are needed, got {len(messages)}",
                                 "messages")
        for name in args:
            if name in _RESERVED or not name.isidentifier():
                raise InvalidRequest(f"template_args: {name!r} may not be set", "template_args")
        traits = self.traits(ticks) if tools or _needs_traits(messages) else TemplateTraits()
        turns = traits.described([_turn(one, traits.text_arguments) for one in messages], tools)
        opens = args.get("add_generation_prompt", ending.add_generation_prompt)
        if ending.continue_final_message:
            if opens:
                raise InvalidRequest("continue_final_message: not with add_generation_prompt, "
                                     "which begins another turn", "continue_final_message")
            turns[-1]["content"] = _marked(turns[-1]["content"])
        variables = {"tools": tools or None, "documents": None, **self.special, **args,
                     "add_generation_prompt": opens, TICK: Ticks(ticks), "messages": turns}
        text = self._text(variables, ticks)
        return _left_open(text) if ending.continue_final_message else text

    def _text(self, variables: dict[str, Any], ticks: int) -> str:
        self._env.shared = ticks < MAX_TICKS
        try:
            text = self._join(variables)
            text.encode()  # raises on half a character
            return text
        except Exception as error:  # a template can raise anything at all
            if isinstance(error, TooMuch) and ticks < MAX_TICKS:
                raise RenderBudgetExceeded from None
            text = str(error) or type(error).__name__
            raise InvalidRequest(f"messages: the chat template refused them: {text[:500]}",
                                 "messages") from None

    def _join(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        chars = 0
        for part in self._template.generate(variables):
            variables[TICK].look()
            chars += len(part)
            if chars > MAX_CHARS:
                raise TemplateError(f"more than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)


def _needs_traits(messages: list[ChatMessage]) -> bool:
    """Returns whether it has what some templates have no place for."""
    return any(message.tool_calls or message.role == "tool" or (i and message.role == "system")
               for i, message in enumerate(messages))


def _marked(content: Any) -> Any:
    """Returns the content of a turn with the mark behind its last text."""
    if isinstance(content, str):
        return content + _MARK
    return [*content, {"type": "text", "text": _MARK}]


def _left_open(text: str) -> str:
    """Returns the text before the end of the last turn: as transformers' `continue_final_message`,
    it loses its trailing spaces where the template strips turns."""
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidRequest("continue_final_message: the chat template leaves the last turn out",
                             "continue_final_message")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


class ChatTemplates:
    """A model's templates by name."""

    def __init__(self, sources: dict[str, str], special: dict[str, str]) -> None:
        """Raises `BadModel` if one does not compile."""
        self.special = special
        self._named = {name: ChatTemplate(source, special) for name, source in sources.items()}

    def pick(self, given: str | None, tools: bool) -> ChatTemplate | None:
        """Returns the template of a conversation: the one that `given` names, else "tool_use" where
        there are tools and the model has it, else "default", as transformers does; None = `given`
        is a template itself. Raises `InvalidRequest` where there is none."""
        if given is not None and given not in self._named:
            if is_jinja(given) or not self._named:
                return None
            names = ", ".join(sorted(self._named))
            raise InvalidRequest(f"chat_template: neither a template nor one of the model's own: "
                                 f"{names}", "chat_template")
        found = self._named.get(given or (TOOL_USE if tools else DEFAULT)) \
            or self._named.get(DEFAULT)
        if found is not None:
            return found
        if self._named:
            raise InvalidRequest("messages: the model has no default chat template; chat_template "
                                 f"names one of {', '.join(sorted(self._named))}", "messages")
        raise InvalidRequest("messages: the model has no chat template (--chat-template FILE sets "
                             "one)", "messages")

    @property
    def shown(self) -> str:
        """Returns the sources of the templates of conversations without and with tools."""
        return "".join(own.source for name, own in self._named.items()
                       if name in (DEFAULT, TOOL_USE))

    def info(self) -> dict[str, Any]:
        """Returns what ServerInfo says of them."""
        sources = {name: own.source for name, own in self._named.items()}
        return {"has_chat_template": bool(sources), "chat_template": sources.get(DEFAULT),
                "chat_templates": sources,
                "generic_tools": [name for name, own in self._named.items() if not _shows(own)]}


def _shows(template: ChatTemplate) -> bool:
    """Returns whether it has a place for tools; yes, where finding out takes long."""
    try:
        return template.traits().tools
    except RenderBudgetExceeded:
        return True


def load(path: Path, override: str | None) -> ChatTemplates:
    """Returns the templates of the model directory `path`, or `override`, which is a file or the
    template itself. Raises `BadModel`."""
    config = read_json(path / "tokenizer_config.json", optional=True)
    return ChatTemplates(template_sources(path, override), special_tokens(path, config))


def special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the text of bos_token, eos_token, ... from tokenizer_config.json /
    special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for source in (read_json(path / "special_tokens_map.json", optional=True), config):
        for name in SPECIAL_TOKENS:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                if len(value) > MAX_SPECIAL:
                    raise BadModel(f"model: {path}: {name}: more than {MAX_SPECIAL} characters",
                                   "model")
                tokens[name] = value
    return tokens


def unpacked_args(raw: msgspec.Raw) -> dict[str, Any]:
    """Decodes a template's variables. Raises `InvalidRequest`."""
    return _unpacked(raw, dict[str, Any], "template_args")


def unpacked_tools(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """Decodes tools for a template. Raises `InvalidRequest`."""
    return _unpacked(raw, list[dict[str, Any]], "tools")


def _unpacked(raw: msgspec.Raw, kind: type[T], field: str) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{field}: {error}", field) from None
