"""Renders long conversations, and templates that come with a request, in a process that can be
killed.

A render is bounded in its loops and its length, but not in what a filter or a sum of strings does
to a long text: some templates take time quadratic in the conversation. Templates of requests are
compiled there, too, since compiling evaluates constant expressions.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.retention import TEMPLATES
from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage
from actorium.actors.tokenizer.bounded_process import MEMORY, BoundedProcess, hello, serve
from actorium.actors.tokenizer.chat_template import (
    MODELS_TURN,
    ChatTemplate,
    PromptEnding,
    unpacked_args,
    unpacked_tools,
)

CPU_SECONDS = 2.0


class TemplateSource(Struct, array_like=True):
    """A template; without a text, conversations bring their own."""

    text: str
    special: dict[str, str]


class Conversation(Struct, array_like=True):
    """One render's input."""

    messages: list[ChatMessage]
    args: msgspec.Raw
    tools: msgspec.Raw
    defaults: dict[str, Any]
    """The engine's own variables; `args` override them."""
    ending: PromptEnding = MODELS_TURN
    template: str = ""
    """The request's own template; empty = the one that the process was started with."""


class Rendered(Struct, array_like=True):
    """One render's result."""

    text: str = ""
    error: str = ""
    param: str | None = None


_decode_rendered = msgspec.msgpack.Decoder(Rendered).decode
"""Made at import, since each of the tokenizer's threads has a renderer: see
`client/connection.py`."""


class TemplateRenderer:
    """The parent's side of the process. For one thread at a time."""

    def __init__(self, text: str, special: dict[str, str]) -> None:
        """text: the template, empty where requests bring theirs; special: the tokens that templates
        may use."""
        self.child = BoundedProcess(__name__,
                                    hello=msgspec.msgpack.encode(TemplateSource(text, special)))

    def render(self, messages: list[ChatMessage], args: msgspec.Raw, tools: msgspec.Raw,
               defaults: dict[str, Any], ending: PromptEnding = MODELS_TURN,
               template: str = "") -> str:
        """Renders as `ChatTemplate.render`, with variables and tools as packed JSON. Waits. Raises
        `InvalidRequest`, also where it takes too long, or where a `template` of the request's own
        does not compile."""
        answer = self.child.ask(msgspec.msgpack.encode(
            Conversation(messages, args, tools, defaults, ending, template)))
        if answer is None:
            field = "chat_template" if template else "messages"
            raise InvalidRequest(f"{field}: the chat template takes more than {CPU_SECONDS:g} s "
                                 f"or {MEMORY >> 30} GiB for them", field)
        rendered: Rendered = _decode_rendered(answer)
        if rendered.error:
            raise InvalidRequest(rendered.error, rendered.param)
        return rendered.text

    def close(self) -> None:
        """Ends the process."""
        self.child.close()


# --- the process ----------------------------------------------------------------------------------

class Templates:
    """Compiled templates: the process's own, and those of the last requests."""

    def __init__(self, source: TemplateSource) -> None:
        self._special = source.special
        self._own = ChatTemplate(source.text, source.special) if source.text else None
        self._kept: dict[str, ChatTemplate] = {}

    def get(self, text: str) -> ChatTemplate:
        """Returns the compiled template of this text, empty = the process's own. Raises `BadModel`
        if it does not compile."""
        if not text and self._own is not None:
            return self._own
        found = self._kept.pop(text, None) or ChatTemplate(text, self._special)
        self._kept[text] = found
        if len(self._kept) > TEMPLATES:
            del self._kept[next(iter(self._kept))]
        return found


def main() -> None:
    """Answers frames until the parent closes the pipe."""
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
