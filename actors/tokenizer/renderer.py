"""Long conversations are rendered in a process that can be killed.

A render is bounded in its loops and its length, but not in what a filter or a sum of strings does
to a long text: some templates take time by the square of the conversation.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage
from actorium.actors.tokenizer.chat import ChatTemplate
from actorium.actors.tokenizer.child import MEMORY, Child, hello, serve

CPU_SECONDS = 2.0


class Source(Struct, array_like=True):
    """A template."""

    text: str
    special: dict[str, str]


class Conversation(Struct, array_like=True):
    """What is rendered."""

    messages: list[ChatMessage]
    args: dict[str, Any]
    tools: list[dict[str, Any]]


class Rendered(Struct, array_like=True):
    """What became of it."""

    text: str = ""
    error: str = ""
    param: str | None = None


class Renderer:
    """The process, as its parent sees it. For one thread at a time."""

    def __init__(self, template: ChatTemplate) -> None:
        source = msgspec.msgpack.encode(Source(template.source, template.special))
        self.child = Child(__name__, hello=source)

    def render(self, messages: list[ChatMessage], args: dict[str, Any],
               tools: list[dict[str, Any]]) -> str:
        """As `ChatTemplate.render`. Waits. Raises `InvalidRequest`, also where it takes too
        long."""
        answer = self.child.ask(msgspec.msgpack.encode(Conversation(messages, args, tools)))
        if answer is None:
            raise InvalidRequest(f"messages: the chat template takes more than {CPU_SECONDS:g} s "
                                 f"or {MEMORY >> 30} GiB for them", "messages")
        found = msgspec.msgpack.decode(answer, type=Rendered)
        if found.error:
            raise InvalidRequest(found.error, found.param)
        return found.text

    def close(self) -> None:
        """End the process."""
        self.child.close()


# --- the process ----------------------------------------------------------------------------------

def main() -> None:
    """Answer until nobody asks any more."""
    source = msgspec.msgpack.decode(hello(), type=Source)
    template = ChatTemplate(source.text, source.special)

    def answer(frame: bytes) -> bytes:
        try:
            given = msgspec.msgpack.decode(frame, type=Conversation)
            found = Rendered(template.render(given.messages, given.args, given.tools))
        except (InvalidRequest, BadModel) as error:
            found = Rendered(error=error.message, param=error.param)
        except Exception as error:  # too deep, too large
            found = Rendered(error=f"messages: {type(error).__name__}: {error}"[:500],
                             param="messages")
        return msgspec.msgpack.encode(found)

    serve(answer, CPU_SECONDS)


if __name__ == "__main__":
    main()
