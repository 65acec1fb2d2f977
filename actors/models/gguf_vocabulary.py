"""A GGUF file's vocabulary: the text and the type of each token, and which ones end an answer.

Files name one token that ends a turn, or none, and convert others with a wrong type. What a token
is for is therefore also known by its text, by llama.cpp's lists (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile

MAX_TOKENS = 1 << 20
"""Of a vocabulary."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
END_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<|flush|>",
    "<|calls|>", "</s>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
    # Of code that is filled in: the end of a file, and the beginning of another one.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))
"""Tokens that end an answer, whatever the metadata says."""
FILL_TOKENS = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
    "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
    "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
    "\u2581<MID>", "<|code_middle|>", "<|middle|>",
))
"""Tokens that say where code is to be filled in: control tokens, too."""
NOT_ENDS = {
    # The end of one message of several, in vocabularies that have another end of the last one.
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}),
    # Gemma's vocabularies have HTML's tags, and this is one of them.
    "</s>": ({"<eos>"},),
}
"""By text: beside all of which others it is no end, and has the type that the file says."""
NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""What the metadata calls tokens that end an answer."""


def vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    """(text, type) of each token; known control tokens have that type. Raises `BadModel` where two
    have the same text."""
    texts, types = _stored(file)
    for i in _mistyped(texts, types):
        types[i] = CONTROL
    seen: dict[str, int] = {}
    for i, text in enumerate(texts):
        if seen.setdefault(text, i) != i:
            raise file.bad("tokenizer.ggml.tokens", f"{shown(text)} is there twice")
    return texts, types


def mistyped_tokens(file: GgufFile) -> list[str]:
    """The known control tokens that have another type in the file. Raises `BadModel`."""
    texts, types = _stored(file)
    return [texts[i] for i in _mistyped(texts, types)]


def end_ids(file: GgufFile) -> list[int]:
    """Tokens that end what a model says: those that the metadata names, and those that are known by
    their texts. Raises `BadModel`."""
    found = [file.number(f"tokenizer.ggml.{name}_token_id") for name in NAMED_ENDS
             if f"tokenizer.ggml.{name}_token_id" in file]
    if "tokenizer.ggml.tokens" in file:
        texts, _ = _stored(file)
        ends = _known(texts, END_TOKENS)
        found += [i for i, text in enumerate(texts) if text in ends]
    return list(dict.fromkeys(found))


def _stored(file: GgufFile) -> tuple[list[str], list[int]]:
    """(text, type) of each token, as the file has them."""
    texts = [text or f"[EMPTY_{i}]"
             for i, text in enumerate(file.texts("tokenizer.ggml.tokens", MAX_TOKENS))]
    if "tokenizer.ggml.token_type" not in file:
        return texts, [NORMAL] * len(texts)
    types = file.numbers("tokenizer.ggml.token_type", MAX_TOKENS)
    if len(types) < len(texts):
        raise file.bad("tokenizer.ggml.token_type", f"{len(types)} types of {len(texts)} tokens")
    return texts, types[:len(texts)]


def _mistyped(texts: list[str], types: list[int]) -> list[int]:
    known = _known(texts, END_TOKENS | FILL_TOKENS)
    return [i for i, (text, kind) in enumerate(zip(texts, types, strict=True))
            if text in known and kind != CONTROL]


def _known(texts: list[str], known: frozenset[str]) -> set[str]:
    """Those of the texts that are known, and mean here what they mean elsewhere."""
    found = known.intersection(texts)
    return {text for text in found
            if not any(others <= found for others in NOT_ENDS.get(text, ()))}
