"""The prompt of a request, as token ids: short ones at once, long ones on the side.

Tokenizing takes a millisecond by the kilobyte, and a template by the message: what is not short
would keep all others waiting, so it is done on a thread, its template in a process of its own.
"""

from __future__ import annotations

import threading
from array import array
from typing import Any, TypeAlias

import msgspec

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Detokenize, Generate, Tokenize
from actorium.actors.tokenizer import defaults
from actorium.actors.tokenizer.model import TextModel
from actorium.actors.tokenizer.renderer import Renderer

SHORT_CHARS = 1 << 14
SHORT_TURNS = 128
SHORT_IDS = 1 << 13
"""Text, a conversation, and token ids that take no more than some 20 ms."""
SHORT_TICKS = 20_000
Asked: TypeAlias = Generate | Tokenize


class Prompts:
    """Of one model. `long` ones are for several threads at a time."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._renderer: Renderer | None = None
        self._rendering = threading.Lock()

    def is_long(self, message: Asked | Detokenize) -> bool:
        """It takes so long that others should not wait for it."""
        if isinstance(message, Detokenize):
            return len(message.tokens) > 4 * SHORT_IDS
        if message.messages is None:
            return len(message.text or "") > SHORT_CHARS
        return len(message.messages) > SHORT_TURNS or _chars(message) > SHORT_CHARS

    def short(self, message: Asked) -> array[int]:
        """The prompt as ids, checked. Raises `Unfinished` where it takes longer than it looked."""
        return self._ids(message, lambda: self._model.template.render(
            message.messages or [], message.template_args, message.tools, SHORT_TICKS))

    def long(self, message: Asked) -> array[int]:
        """The same, which may take its time."""
        return self._ids(message, lambda: self._rendered(message))

    def _ids(self, message: Asked, render: Any) -> array[int]:
        model = self._model
        if isinstance(message, Tokenize):
            if message.messages is None:
                return model.encode(message.text, message.add_special_tokens, "text")
            return model.encode(render(), False, "messages")
        given = [name for name in ("text", "tokens", "messages")
                 if getattr(message, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt: exactly one of text, tokens and messages must be set, "
                                 f"got {' and '.join(given) or 'none'}", "prompt")
        limit = model.facts.max_model_len
        if message.tokens is not None:
            ids = model.ids(message.tokens, "prompt", check=False)
        elif message.text is not None:
            ids = model.encode(message.text, True, "prompt", limit)
        else:
            ids = model.encode(render(), False, "messages", limit)
        defaults.check_prompt(ids, model.facts, given[0] if given[0] == "messages" else "prompt")
        return ids

    def _rendered(self, message: Asked) -> str:
        template = self._model.template
        with self._rendering:
            if self._renderer is None:
                self._renderer = Renderer(template)
            return self._renderer.render(message.messages or [], message.template_args,
                                         message.tools)

    def text(self, message: Detokenize) -> str:
        """Of token ids. Raises `InvalidRequest`."""
        ids = self._model.ids(message.tokens, "tokens")
        return self._model.decode(ids.tolist(), message.skip_special_tokens)

    def close(self) -> None:
        """End the process."""
        if self._renderer is not None:
            self._renderer.close()


def _chars(message: Asked) -> int:
    """About what a template has to go through."""
    others = len(msgspec.json.encode((message.template_args, message.tools)))
    return others + sum(
        len(turn.content) + len(turn.reasoning_content or "")
        + sum([len(call.arguments) for call in turn.tool_calls])
        for turn in message.messages or ())
