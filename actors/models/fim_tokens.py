"""Tokens with which a model fills in text between a prefix and a suffix ("fill in the middle").

A GGUF file may name them by id; else, and in other checkpoints, they are known by their texts, as
llama.cpp knows them (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

TEXTS: dict[str, tuple[str, ...]] = {
    "prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>",
               "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
               "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>",
               "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "padding": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
"""By what a token is for: its texts in different models."""
GGUF_NAMES = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid", "padding": "fim_pad",
              "repository": "fim_rep", "file": "fim_sep"}
"""What the same are called in a GGUF file's `tokenizer.ggml.*_token_id`."""
KEY = "fim_tokens"
"""In the tokenizer_config.json that is made of a GGUF file: texts of the tokens that it names."""


class FimTokens(Struct, frozen=True):
    """Token ids; None = the model has no such token."""

    prefix: int
    suffix: int
    middle: int
    padding: int | None = None
    repository: int | None = None
    """Comes before a repository's name."""
    file: int | None = None
    """Comes before each file's name."""

    @property
    def ends(self) -> list[int]:
        """Returns the tokens that end what is filled in, beside the model's own end tokens."""
        return [token for token in (self.padding, self.repository, self.file) if token is not None]


def fim_tokens(token_id: Callable[[str], int | None], named: Any) -> FimTokens | None:
    """Returns a tokenizer's tokens; None = it cannot mark prefix, suffix and middle.

    token_id: returns the id of a token's text, None where there is none; named: the value of `KEY`
    in the checkpoint's tokenizer_config.json, None where it has none.
    """
    ids: dict[str, int] = {}
    for kind, texts in TEXTS.items():
        own = named.get(kind) if isinstance(named, dict) else None
        given = (own,) if isinstance(own, str) else texts
        token = next((i for i in map(token_id, given) if i is not None), None)
        if token is not None:
            ids[kind] = token
    if not {"prefix", "suffix", "middle"} <= ids.keys():
        return None
    return FimTokens(**ids)
