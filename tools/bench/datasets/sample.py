"""One request of a load, and what turns tokens into text and back while a load is made."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir as models

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIXING_ROUNDS = 10
"""Times that a random text is cut or lengthened until it has the tokens that it should."""


class SampleRequest(NamedTuple):
    """One request: a prompt (token ids or text) or the messages of a chat."""

    prompt: list[int] | str | None
    messages: list[Any] | None
    output_len: int
    """Tokens to generate at most; exactly so many where the end of sequence is ignored."""
    prompt_len: int = 0
    """Tokens of the prompt as counted here; 0 = not counted."""


class TokenVocabulary(NamedTuple):
    """The ids that random prompts are drawn from: all below `size` but the special ones."""

    size: int
    special: frozenset[int] = frozenset()

    def draw(self, rng: random.Random, number: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < number:
            token = rng.randrange(self.size)
            if token not in self.special:
                ids.append(token)
        return ids


class LocalTokenizer:
    """The tokenizer of a model directory on this machine."""

    def __init__(self, path: Path) -> None:
        """Raises `BadModel`."""
        from actorium.actors.tokenizer.text_model import load_tokenizer

        self._tokenizer: Tokenizer = load_tokenizer(path)
        added = self._tokenizer.get_added_tokens_decoder()
        special = frozenset(number for number, token in added.items() if token.special)
        self.vocabulary = TokenVocabulary(self._tokenizer.get_vocab_size(), special)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids; `special`: with those that the model wants around a prompt."""
        ids: list[int] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def text_of(self, ids: Sequence[int], rng: random.Random) -> tuple[str, int]:
        """A text of as many tokens as `ids` are, made from them, and its tokens.

        Random ids rarely come back as they were when their text is encoded: it is cut or
        lengthened, as vLLM does, until the number is right or after some rounds near enough.
        """
        wanted, now = len(ids), list(ids)
        for _ in range(FIXING_ROUNDS):
            text = self.decode(now)
            now = self.encode(text)
            if len(now) == wanted:
                break
            now = now[:wanted] + self.vocabulary.draw(rng, wanted - len(now))
        text = self.decode(now)
        return text, len(self.encode(text))


class Tokens:
    """The tokenizer and the vocabulary that a load is made with, found when they are needed."""

    def __init__(self, model: str | None, vocabulary: TokenVocabulary) -> None:
        """model: the directory, or the id in the HF cache, whose tokenizer is used; None = none.
        vocabulary: of random ids where there is no tokenizer; their limit where there is one."""
        self._model, self._vocabulary = model, vocabulary

    @functools.cached_property
    def _loaded(self) -> LocalTokenizer | str:
        """The tokenizer, or why there is none."""
        if self._model is None:
            return "no model is named"
        try:
            return LocalTokenizer(models.resolve(self._model))
        except BadModel as error:
            return error.message

    @property
    def tokenizer(self) -> LocalTokenizer | None:
        """None if it is not on this machine."""
        return None if isinstance(self._loaded, str) else self._loaded

    def need(self, what: str) -> LocalTokenizer:
        """The tokenizer. Raises `BadConfig`: `what` cannot be had without."""
        if isinstance(self._loaded, str):
            raise BadConfig(f"{what} needs a tokenizer on this machine (--tokenizer DIR): "
                            f"{self._loaded}", "tokenizer")
        return self._loaded

    def vocabulary(self) -> TokenVocabulary:
        """Returns the vocabulary that random ids are drawn from."""
        if self.tokenizer is None:
            return self._vocabulary
        own = self.tokenizer.vocabulary
        return TokenVocabulary(min(own.size, self._vocabulary.size), own.special)
