"""From allowed tokens and bad words, as a caller names them, to rules about token ids."""

from __future__ import annotations

from array import array
from typing import Protocol

from actorium.actors.messages import TokenRules
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.defaults import ModelFacts


class Encoder(Protocol):
    """A model's text side (`model.TextModel`)."""

    facts: ModelFacts

    def encode_all(self, texts: list[str], field: str) -> list[list[int]]: ...


def token_rules(params: SamplingParams, model: Encoder) -> TokenRules | None:
    """Of a request that was checked; None where it has none.

    A bad word counts as at the start of a text and as after a space: most tokenizers have different
    tokens for the two. (vLLM leaves the second one out where its tokens are not as many.)
    """
    if not (params.allowed_token_ids or params.bad_words):
        return None
    words = [word.lstrip(" ") or word for word in params.bad_words or ()]
    found = model.encode_all([*words, *(f" {word}" for word in words)], "bad_words")
    sequences = dict.fromkeys(array("i", ids).tobytes() for ids in found if ids)
    return TokenRules(model.facts.vocab_size, array("i", params.allowed_token_ids or ()).tobytes(),
                      list(sequences))
