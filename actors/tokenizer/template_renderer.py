"""Long conversations, and templates that a request brings, are rendered in a process that can be
killed.

A render is bounded in its loops and its length, but not in what a filter or a sum of strings does
to a long text: some templates take time by the square of the conversation. Templates of requests
are compiled there, too: constant expressions in them are computed then.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from actorium.actors.config.retention import TEMPLATES
from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage
from actorium.actors.tokenizer.bounded_process import MEMORY, BoundedProcess, hello, serve
from actorium.actors.tokenizer.chat_template import MODELS_TURN, ChatTemplate, PromptEnding

CPU_SECONDS = 2.0

T = TypeVar("T")


class TemplateSource(Struct, array_like=True):
    """A template; without a text, conversations bring their own."""

    text: str
    special: dict[str, str]


class Conversation(Struct, array_like=True):
    """What is rendered."""

    messages: list[ChatMessage]
    args: msgspec.Raw
    tools: msgspec.Raw
    defaults: dict[str, Any]
    """The engine's own variables, below `args`."""
    ending: PromptEnding = MODELS_TURN
    template: str = ""
    """Of its own; empty = the one that the process was started with."""


class Rendered(Struct, array_like=True):
    """What became of it."""

    text: str = ""
    error: str = ""
    param: str | None = None


class TemplateRenderer:
    """The process, as its parent sees it. For one thread at a time."""

    def __init__(self, text: str, special: dict[str, str]) -> None:
        """text: of the template, empty where requests bring theirs; special: the tokens that
        templates may name."""
        self.child = BoundedProcess(__name__,
                                    hello=msgspec.msgpack.encode(TemplateSource(text, special)))

    def render(self, messages: list[ChatMessage], args: msgspec.Raw, tools: msgspec.Raw,
               defaults: dict[str, Any], ending: PromptEnding = MODELS_TURN,
               template: str = "") -> str:
        """As `ChatTemplate.render`, of variables and tools as they came. Waits. Raises
        `InvalidRequest`, also where it takes too long, or where a `template` of the request's own
        does not compile."""
        answer = self.child.ask(msgspec.msgpack.encode(
            Conversation(messages, args, tools, defaults, ending, template)))
        if answer is None:
            field = "chat_template" if template else "messages"
            raise InvalidRequest(f"{field}: the chat template takes more than {CPU_SECONDS:g} s "
                                 f"or {MEMORY >> 30} GiB for them", field)
        found = msgspec.msgpack.decode(answer, type=Rendered)
        if found.error:
            raise InvalidRequest(found.error, found.param)
        return found.text

    def close(self) -> None:
        """End the process."""
        self.child.close()


def unpacked_args(raw: msgspec.Raw) -> dict[str, Any]:
    """Variables of a template. Raises `InvalidRequest`."""
    return _unpacked(raw, dict[str, Any], "template_args")


def unpacked_tools(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """Tools for a template. Raises `InvalidRequest`."""
    return _unpacked(raw, list[dict[str, Any]], "tools")


def _unpacked(raw: msgspec.Raw, kind: type[T], field: str) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{field}: {error}", field) from None


# --- the process ----------------------------------------------------------------------------------

class Templates:
    """Compiled ones: the process's own, and those of the last requests."""

    def __init__(self, source: TemplateSource) -> None:
        self._special = source.special
        self._own = ChatTemplate(source.text, source.special) if source.text else None
        self._kept: dict[str, ChatTemplate] = {}

    def get(self, text: str) -> ChatTemplate:
        """The one of this text, empty = the own. Raises `BadModel` if it does not compile."""
        if not text and self._own is not None:
            return self._own
        found = self._kept.pop(text, None) or ChatTemplate(text, self._special)
        self._kept[text] = found
        if len(self._kept) > TEMPLATES:
            del self._kept[next(iter(self._kept))]
        return found


def main() -> None:
    """Answer until nobody asks any more."""
    templates = Templates(msgspec.msgpack.decode(hello(), type=TemplateSource))

    def answer(frame: bytes) -> bytes:
        given = msgspec.msgpack.decode(frame, type=Conversation)
        try:
            args, tools = unpacked_args(given.args), unpacked_tools(given.tools)
            found = Rendered(templates.get(given.template).render(
                given.messages, given.defaults | args, tools, ending=given.ending))
        except (InvalidRequest, BadModel) as error:
            found = Rendered(error=error.message, param=error.param)
        except Exception as error:  # too deep, too large
            field = "chat_template" if given.template else "messages"
            found = Rendered(error=f"{field}: {type(error).__name__}: {error}"[:500], param=field)
        return msgspec.msgpack.encode(found)

    serve(answer, CPU_SECONDS)


if __name__ == "__main__":
    main()
