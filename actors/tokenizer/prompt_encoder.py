"""Encodes a request's prompt as token ids: short ones at once, long ones on a thread.

Tokenizing takes about a millisecond per kilobyte, and a template time per message: a long prompt
would delay all other requests, so it is encoded on a thread, its template in a separate process.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from actorium.actors import prompt_embeds
from actorium.actors.errors import InvalidRequest, context_overflow
from actorium.actors.media.prompt_media import cut
from actorium.actors.messages import (
    Detokenize,
    Generate,
    MediaItem,
    PromptEmbeds,
    Tokenize,
    TurnPart,
)
from actorium.actors.tokenizer import defaults
from actorium.actors.tokenizer.chat_template import (
    PromptEnding,
    RenderBudgetExceeded,
    unpacked_args,
    unpacked_tools,
)
from actorium.actors.tokenizer.generic_tools import unreadable
from actorium.actors.tokenizer.template_renderer import TemplateRenderer
from actorium.actors.tokenizer.text_model import TextModel, TokenIds

LOG = logging.getLogger("actorium.tokenizer")
SHORT_CHARS = 1 << 14
SHORT_TURNS = 128
SHORT_IDS = 1 << 13
"""Token ids above which a prompt is encoded on a thread; shorter ones take at most some 20 ms."""
EMBEDS_BYTES = 512
"""Bytes of embeddings that are checked and hashed in the time that a character takes."""
SHORT_TICKS = 20_000
SHOWN = 4
"""Calls of a conversation that a line of the log names."""
PromptRequest: TypeAlias = Generate | Tokenize


class EncodedPrompt(NamedTuple):
    """A prompt as the scheduler takes it."""

    ids: TokenIds
    media: list[MediaItem]
    """Its images and videos, in order."""
    pair_start: int = 0
    """Index of the first token of a second text; 0 = there is none."""
    embeds: PromptEmbeds | None = None
    """What takes the place of the ids, which are 0."""

    @property
    def column(self) -> bytes:
        """The ids, i4. Not copied where the prompt came as ids and was not cut."""
        given = self.ids.obj if isinstance(self.ids, memoryview) else None
        whole = isinstance(given, bytes) and len(given) == 4 * len(self.ids)
        return given if isinstance(given, bytes) and whole else self.ids.tobytes()

    def last(self, keep: int | None) -> EncodedPrompt:
        """Returns the same of its last tokens; None = all. Raises `InvalidRequest` where an image
        would be cut off."""
        dropped = 0 if keep is None else max(0, len(self.ids) - keep)
        if not dropped:
            return self
        return EncodedPrompt(self.ids[dropped:], cut(self.media, dropped))

    def first(self, keep: int | None) -> EncodedPrompt:
        """Returns the same of its first tokens; None = all. Raises `InvalidRequest` where it has
        images."""
        if keep is None or len(self.ids) <= keep:
            return self
        if self.media:
            raise InvalidRequest("truncate_prompt_tokens: not with images where the prompt is "
                                 "pooled", "truncate_prompt_tokens")
        return EncodedPrompt(self.ids[:keep], [], self.pair_start)


class PromptEncoder:
    """Encodes prompts for one model. Several threads may call `encode_slow` at a time."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._renderers: dict[str, TemplateRenderer] = {}
        """The renderer of each of the model's templates, and ("") of those that requests bring: a
        process each, so that no request's template delays the model's."""
        self._rendering: dict[str, threading.Lock] = {}

    def size(self, message: PromptRequest | Detokenize) -> int:
        """Estimates the cost in characters. Above `SHORT_CHARS` other requests should not wait for
        it."""
        if isinstance(message, Detokenize):
            return len(message.tokens) * SHORT_CHARS // (4 * SHORT_IDS)
        if isinstance(message, Generate) and message.embeds is not None:
            return len(message.embeds.data) // EMBEDS_BYTES
        if message.messages is None:
            pair = message.text_pair if isinstance(message, Generate) else None
            return len(message.text or "") + len(pair or "")
        if message.chat_template is not None or len(message.messages) > SHORT_TURNS:
            return SHORT_CHARS + 1
        return self._chars(message)

    def encode_now(self, message: PromptRequest) -> EncodedPrompt:
        """Returns the prompt, checked. Raises `RenderBudgetExceeded` where it takes longer
        than estimated."""
        return self._prompt(message, self._render_bounded)

    def encode_slow(self, message: PromptRequest) -> EncodedPrompt:
        """Returns the same as `encode_now` without its time limit."""
        return self._prompt(message, self._rendered)

    def _prompt(self, message: PromptRequest,
                render: Callable[[PromptRequest], str]) -> EncodedPrompt:
        _check_options(message)
        found = self._checked(message, render) if isinstance(message, Generate) \
            else self._tokenized(message, render)
        if calls := unreadable(message.messages or ()):
            LOG.warning("a conversation has arguments of calls that are no JSON object; a template "
                        "that wants an object gets an empty one: %s", ", ".join(calls[:SHOWN]))
        return found

    def _tokenized(self, message: Tokenize, render: Callable[[PromptRequest], str]
                   ) -> EncodedPrompt:
        if message.messages is not None:
            prompt = self._encoded(message, render(message), False, "messages")
        elif message.parse_special:
            prompt = self._encoded(message, message.text, message.add_special_tokens, "text")
        else:
            prompt = EncodedPrompt(self._model.encode(
                message.text, message.add_special_tokens, "text", literal=True), [])
        return prompt.last(self._keep(message, 1))

    def _checked(self, message: Generate, render: Callable[[PromptRequest], str]) -> EncodedPrompt:
        model = self._model
        given = [name for name in ("text", "tokens", "messages", "embeds")
                 if getattr(message, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt: exactly one of text, tokens, messages and embeds must be "
                                 f"set, got {' and '.join(given) or 'none'}", "prompt")
        if message.embeds is not None:
            return self._of_embeds(message, message.embeds)
        pooled = message.pooling is not None
        room = 0 if pooled else 1
        keep = self._keep(message, room and (message.params.max_tokens or 1))
        limit = model.facts.max_model_len if keep is None else None
        field = given[0] if given[0] == "messages" else "prompt"
        if message.tokens is not None:
            prompt = self._of_tokens(message, message.tokens)
        elif message.text is not None and pooled and not message.media:
            prompt = EncodedPrompt(*model.encode_pair(message.text, message.text_pair, keep, limit))
            if model.media is not None:
                model.media.check_none(prompt.ids, field)
        elif message.text is not None:
            prompt = self._encoded(message, message.text, True, field, limit)
        else:
            prompt = self._encoded(message, render(message), False, field, limit)
        prompt = prompt.first(keep) if pooled else prompt.last(keep)
        defaults.check_prompt(prompt.ids, model.facts, field, room)
        return prompt

    def _encoded(self, message: PromptRequest, text: str, special: bool, field: str,
                 limit: int | None = None) -> EncodedPrompt:
        """Returns the ids of a text, with the placeholders of the message's media. special, limit:
        as of `TextModel.encode`. Raises `InvalidRequest`, `ContextOverflow`, `MediaExpired`."""
        model, media = self._model, self._model.media
        if message.media:
            if media is None:
                raise InvalidRequest("media: the model takes text alone", "media")
            return EncodedPrompt(*media.expand(
                text, message.media, lambda part: model.encode(part, special, field, limit), field))
        ids = model.encode(text, special, field, limit)
        if media is not None and isinstance(message, Generate):
            media.check_none(ids, field)
        return EncodedPrompt(ids, [])

    def _of_tokens(self, message: Generate, tokens: bytes) -> EncodedPrompt:
        """Returns the prompt of a message that has tokens. Raises `InvalidRequest`."""
        if message.media:
            raise InvalidRequest("media: with messages or text, not with token ids", "media")
        ids = self._model.ids(tokens, "prompt", check=False)
        if self._model.media is not None:
            self._model.media.check_none(ids, "prompt")
        return EncodedPrompt(ids, [])

    def _of_embeds(self, message: Generate, embeds: PromptEmbeds) -> EncodedPrompt:
        """Returns the prompt of a message that has embeddings. Raises `InvalidRequest`."""
        facts = self._model.facts
        for name, asked in (("media", message.media), ("pooling", message.pooling),
                            ("truncate_prompt_tokens", message.truncate_prompt_tokens),
                            ("prompt_logprobs", message.params.prompt_logprobs)):
            if asked not in ([], None):
                raise InvalidRequest(f"{name}: not with {prompt_embeds.FIELD}", name)
        embeds = prompt_embeds.checked(embeds, facts.embeds_hidden)
        ids = array("i", bytes(4 * embeds.rows))
        defaults.check_prompt(ids, facts, prompt_embeds.FIELD, 1)
        return EncodedPrompt(ids, [], embeds=embeds)

    def _keep(self, message: PromptRequest, room: int) -> int | None:
        """Returns how many last tokens make up the prompt; None = all. room: tokens to follow."""
        wanted, most = message.truncate_prompt_tokens, self._model.facts.max_model_len
        if wanted is None:
            return None
        if not wanted or wanted > most:
            raise InvalidRequest(f"truncate_prompt_tokens: must be -1 or between 1 and "
                                 f"max_model_len={most}, got {wanted}", "truncate_prompt_tokens")
        if wanted < 0 and room >= most:
            raise context_overflow(most, 1, room, "max_tokens")
        return most - room if wanted < 0 else wanted

    def _render_bounded(self, message: PromptRequest) -> str:
        tools = unpacked_tools(message.tools)
        template = self._model.templates.pick(message.chat_template, bool(tools))
        if template is None:  # the conversation brings its own
            raise RenderBudgetExceeded
        args = self._model.default_args | unpacked_args(message.template_args)
        return template.render(message.messages or [], args, tools, SHORT_TICKS, _ending(message))

    def _rendered(self, message: PromptRequest) -> str:
        tools = bool(unpacked_tools(message.tools))
        template = self._model.templates.pick(message.chat_template, tools)
        text = "" if template is None else template.source
        with self._rendering.setdefault(text, threading.Lock()):
            if text not in self._renderers:
                self._renderers[text] = TemplateRenderer(text, self._model.templates.special)
            own = (message.chat_template or "") if template is None else ""
            return self._renderers[text].render(
                message.messages or [], message.template_args, message.tools,
                self._model.default_args, _ending(message), own)

    def _chars(self, message: PromptRequest) -> int:
        """Estimates how many characters a template has to process."""
        return len(message.template_args) + len(message.tools) + sum(
            chars_of(turn.content) + len(turn.reasoning_content or "")
            + sum([len(call.arguments) for call in turn.tool_calls])
            for turn in message.messages or ())

    def text(self, message: Detokenize) -> str:
        """Decodes token ids. Raises `InvalidRequest`."""
        ids = self._model.ids(message.tokens, "tokens")
        return self._model.decode(ids.tolist(), message.skip_special_tokens)

    def close(self) -> None:
        """Ends the rendering processes."""
        for renderer in self._renderers.values():
            renderer.close()


def _check_options(message: PromptRequest) -> None:
    """Raises `InvalidRequest` for options that only a conversation can have."""
    if message.messages is not None:
        return
    for name, given in (("chat_template", message.chat_template is not None),
                        ("continue_final_message", message.continue_final_message),
                        ("add_generation_prompt", not message.add_generation_prompt)):
        if given:
            raise InvalidRequest(f"{name}: for messages alone", name)


def chars_of(content: str | list[TurnPart]) -> int:
    """Returns the characters of a turn's text."""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _ending(message: PromptRequest) -> PromptEnding:
    return PromptEnding(message.add_generation_prompt, message.continue_final_message)
