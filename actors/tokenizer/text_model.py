"""The model's text side: its tokenizer, chat template and the facts that requests are checked
against.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from actorium.actors import params
from actorium.actors.config import tree as configs
from actorium.actors.config.reasoning_formats import NONE, format_chosen
from actorium.actors.config.tree import Config
from actorium.actors.errors import ContextOverflow, InvalidRequest
from actorium.actors.media.prompt_media import open_prompt_media
from actorium.actors.messages import MAX_CLIENT_MESSAGE_BYTES, MAX_TURNS, MediaItem
from actorium.actors.models import model_dir as models
from actorium.actors.models.fim_tokens import KEY, FimTokens, fim_tokens
from actorium.actors.models.pooling_shape import pooling_info, read_pooling
from actorium.actors.plugins.entry_points import usable
from actorium.actors.plugins.logits_processors import ProcessorCalls, load_processors
from actorium.actors.structured.grammar_validator import GrammarValidator
from actorium.actors.tokenizer import chat_template as chat
from actorium.actors.tokenizer.defaults import ModelFacts
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer

assert sys.byteorder == "little" and array("i").itemsize == 4, "columns are little-endian int32"

TokenIds: TypeAlias = "array[int] | memoryview[int]"
SLACK = 64
"""Tokens by which cutting a text may change its count (merges across the cut)."""


class TextModel:
    """Everything the tokenizer actor reads of a model directory. Raises `BadModel`/`BadConfig`."""

    def __init__(self, config: Config, run_dir: Path | None = None) -> None:
        """run_dir: where prepared images and videos are found."""
        self._config = config
        self.path = models.resolve(config.model.model)
        self._json = models.read_config(self.path)
        generation = models.sampling_defaults(self.path, config.model.generation_config,
                                              config.model.override_generation_config)
        self._tokenizer: Tokenizer | None = None
        self._literal_tokenizer: Tokenizer | None = None
        self._special_ids: frozenset[int] = frozenset()
        self.fim: FimTokens | None = None
        self._templates = chat.ChatTemplates({}, {})
        self._end_id, self._adds_end = 0, False
        """The token that ends a text that is pooled, where tokenizer.json does not add it though
        tokenizer_config.json says so."""
        size = models.vocab_size(self._json)
        eos = models.known_eos_ids(self.path, self._json, generation, size)
        if not config.model.skip_tokenizer:
            self._tokenizer = load_tokenizer(self.path)
            self._special_ids = frozenset(
                i for i, token in self._tokenizer.get_added_tokens_decoder().items()
                if token.special)
            self._templates = chat.load(self.path, config.model.chat_template)
            settings = models.read_json(self.path / "tokenizer_config.json", optional=True)
            self.fim = fim_tokens(self._tokenizer.token_to_id, settings.get(KEY))
            eos = self._with_tokenizer_eos(eos, size)
            end = self._tokenizer.token_to_id(str(self._templates.special.get("eos_token")))
            if settings.get("add_eos_token") is True and end is not None:
                self._end_id, self._adds_end = end, _encode(self._tokenizer, "a",
                                                             True)[-1:] != [end]
        wanted = config.model.max_model_len
        pooling = read_pooling(self.path, self._json, config.model)
        longest = models.longest_sequence(self.path, self._json, wanted)
        if pooling is not None and pooling.longest is not None and wanted is None:
            longest = min(longest, pooling.longest)
        self.facts = ModelFacts(
            vocab_size=size, max_model_len=longest, eos_ids=eos, pooling=pooling,
            strict_max_tokens=config.model.strict_max_tokens,
            embeds_hidden=models.embedding_width(self._json)
            if config.model.enable_prompt_embeds else 0,
            generation=models.usable_defaults(self.path, generation),
            has_tokenizer=self._tokenizer is not None,
            reasoning=format_chosen(config.gateway.reasoning_parser,
                                    config.gateway.tool_call_parser, self._templates.shown)
            if self._tokenizer is not None else NONE, max_n=config.scheduler.max_n,
            max_new_tokens=models.max_new_tokens(config.model.generation_config,
                                                 config.model.override_generation_config))
        self.processors = ProcessorCalls(usable(load_processors(config.runtime.plugins)))
        self.grammars = GrammarValidator(self.path, self.facts)
        self.media = open_prompt_media(config, self.path, self._tokenizer, run_dir)

    def _with_tokenizer_eos(self, eos: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Returns the model's end ids and the tokenizer's eos_token (fine-tunes often name it there
        alone)."""
        assert self._tokenizer is not None
        token = self._templates.special.get("eos_token")
        found = self._tokenizer.token_to_id(token) if token else None
        return eos if found is None or found in eos or found >= size else (*eos, found)

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(f"{field}: the engine runs without a tokenizer (skip_tokenizer); "
                                 "only token ids are taken", field)
        return self._tokenizer

    def encode(self, text: str, special: bool, field: str, limit: int | None = None,
               literal: bool = False) -> array[int]:
        """Returns the token ids of `text`, i4. literal: special tokens that the text writes are
        text like any other.

        With a `limit`, a text that is too long is refused by the count of a prefix, so that the
        time spent is bounded by the context, not by the text. Raises `InvalidRequest`,
        `ContextOverflow`.
        """
        tokenizer = self._need_tokenizer(field)
        if limit is not None:
            self._refuse_long(tokenizer, text, field, limit)
        if literal:
            tokenizer = self._literal(tokenizer, text)
        try:
            return array("i", _encode(tokenizer, text, special))
        except OverflowError:
            raise InvalidRequest(f"{field}: the tokenizer gives ids outside the vocabulary of "
                                 f"{self.facts.vocab_size}", field) from None

    def encode_pair(self, text: str, pair: str | None, keep: int | None,
                    limit: int | None) -> tuple[array[int], list[MediaItem], int]:
        """Returns the token ids of one text or of a pair, no media, and the index of the second
        text's first token where the tokenizer tells them apart (else 0).

        Of more than `keep` tokens the texts' ends are cut off, of a pair the longer text's first;
        special tokens stay (transformers' `longest_first`). limit: as of `encode`.
        """
        tokenizer, texts = self._need_tokenizer("prompt"), [text] if pair is None else [text, pair]
        if self.facts.pooling is not None and self.facts.pooling.lower_case:
            texts = [one.lower() for one in texts]
        for one in texts if limit is not None else ():
            assert limit is not None
            self._refuse_long(tokenizer, one, "prompt", limit)
        parts = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if keep is not None:
            added = tokenizer.num_special_tokens_to_add(pair is not None) + self._adds_end
            for part, length in zip(parts, _cut_lengths([len(part) for part in parts],
                                                        max(keep - added, 0)), strict=True):
                part.truncate(length)
        whole = tokenizer.post_process(parts[0], parts[1] if pair is not None else None)
        ids = array("i", whole.ids)
        if self._adds_end:
            ids.append(self._end_id)
        return ids, [], whole.type_ids.index(1) if 1 in whole.type_ids else 0

    def leading_tokens(self, text: str, special: bool) -> int:
        """Returns how many tokens a prompt that begins with the text has for it, as
        sentence-transformers counts them: those of the text alone, without a special token at their
        end. special: the tokenizer adds its own."""
        limit = self.facts.max_model_len
        ids = self.encode_pair(text, None, None, limit)[0] if special else self.encode(
            text, False, "instruction", limit)
        return len(ids) - any(last in self._special_ids for last in ids[-1:])

    def _literal(self, tokenizer: Tokenizer, text: str) -> Tokenizer:
        """Returns a tokenizer to which special tokens in a text are text: the same one, unless the
        text has some."""
        if self._special_ids.isdisjoint(_encode(tokenizer, text, False)):
            return tokenizer
        if self._literal_tokenizer is None:
            # Another one: the switch cannot be turned while a thread encodes.
            self._literal_tokenizer = load_tokenizer(self.path)
            self._literal_tokenizer.encode_special_tokens = True
        return self._literal_tokenizer

    def encode_all(self, texts: list[str], field: str) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens. Raises `InvalidRequest`
        naming `field` where there is no tokenizer."""
        if not texts:
            return []
        tokenizer = self._need_tokenizer(field)
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @staticmethod
    def _refuse_long(tokenizer: Tokenizer, text: str, field: str, limit: int) -> None:
        size = 8 * limit
        while size < len(text):
            count = len(_encode(tokenizer, text[:size], False)) - SLACK
            if count >= limit:
                raise ContextOverflow(
                    f"{field}: This model's maximum context length is {limit} tokens. However, "
                    f"these {len(text)} characters are more than {count} tokens.", field)
            size *= 2

    def ids(self, column: bytes, field: str, check: bool = True) -> memoryview[int]:
        """Returns a view of a message's column of ids; with `check`, they must lie within the
        vocabulary."""
        if len(column) % 4:
            raise InvalidRequest(f"{field}: {len(column)} bytes are no list of int32", field)
        ids = memoryview(column).cast("i")
        if check and len(ids) and not (min(ids) >= 0 and max(ids) < self.facts.vocab_size):
            raise InvalidRequest(f"{field}: ids must lie within the vocabulary of "
                                 f"{self.facts.vocab_size}", field)
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Returns the text of ids (ids between the tokenizer's size and the embedding's have none).
        """
        tokenizer = self._need_tokenizer("tokens")
        # As a batch, which releases the GIL.
        return str(tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])

    @property
    def templates(self) -> chat.ChatTemplates:
        """Returns the chat templates. Raises `InvalidRequest` without a tokenizer."""
        self._need_tokenizer("messages")
        return self._templates

    @property
    def default_args(self) -> dict[str, Any]:
        """Returns the template variables that apply where a request does not set them."""
        return self._config.model.default_chat_template_kwargs

    def info(self) -> dict[str, Any]:
        """Returns the model's fields of ServerInfo."""
        from actorium import __version__

        model = self._config.model
        name = Path(model.model).name.removesuffix(".gguf") or self.path.name
        default = name if model.model else "demo"
        return {
            "version": __version__,
            "engine": self._config.runtime.name,
            "model": next(iter(model.served_model_name), default),
            "model_path": str(self.path),
            "architecture": models.architecture(self._json),
            "vocab_size": self.facts.vocab_size,
            "max_model_len": self.facts.max_model_len,
            "dtype": model.dtype if model.dtype != "auto" else _dtype(self._json),
            "eos_ids": list(self.facts.eos_ids),
            "has_tokenizer": self._tokenizer is not None,
            "fim_tokens": self.fim,
            **self._templates.info(),
            **pooling_info(self.facts.pooling),
            "media": None if self.media is None else self.media.info(),
            "prompt_embeds": self.facts.embeds_hidden > 0,
            "generation_defaults": self.facts.generation,
            "limits": {
                "message_bytes": MAX_CLIENT_MESSAGE_BYTES, "n": self.facts.max_n,
                "max_new_tokens": self.facts.max_new_tokens,
                "logprobs": params.MAX_LOGPROBS, "stop": params.MAX_STOPS,
                "stop_chars": params.MAX_STOP_CHARS, "logit_bias": params.MAX_LOGIT_BIAS,
                "messages": MAX_TURNS},
            "config": configs.with_secrets_hidden(self._config),
        }


def _cut_lengths(lengths: list[int], keep: int) -> list[int]:
    """Returns how many tokens of each text stay where `keep` do in all: the longer one is cut until
    both are of a length, then both are."""
    if sum(lengths) <= keep:
        return lengths
    if len(lengths) == 1:
        return [keep]
    short = min(min(lengths), keep // 2)
    return [short, keep - short] if lengths[0] <= lengths[1] else [keep - short, short]


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """Returns token ids. Encodes as a batch, which releases the GIL and keeps no offsets."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def _dtype(config: dict[str, Any]) -> str:
    text = models.text_config(config)
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(source.get(key), str):
                return str(source[key])
    return "auto"
