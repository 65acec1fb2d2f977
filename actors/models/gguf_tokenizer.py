"""What a GGUF file says of a model's tokenizer, as the `tokenizer.json` and `tokenizer_config.json`
that the model's own directory would have.

Kinds: `gpt2`, byte-level BPE whose texts are cut first as `tokenizer.ggml.pre` names it, and
`llama`, SentencePiece's BPE: pairs are joined by the score of what they make, and bytes stand for
characters that have no token. `gemma4` is BPE of the first kind, spelt as the second. `bert` is
WordPiece: the longest token that a word begins with, and so on.

Files name one token that ends a turn, or none, and convert others with a wrong type. What a token
is for is therefore also known by its text, by llama.cpp's lists (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import Any

from actorium.actors.errors import shown
from actorium.actors.models.fim_tokens import GGUF_NAMES, KEY, TEXTS
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_pre import PRE_TOKENIZERS, PreTokenizer

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
    *TEXTS["padding"], *TEXTS["repository"], *TEXTS["file"],
))
"""Tokens that end an answer, whatever the metadata says."""
FILL_TOKENS = frozenset(TEXTS["prefix"] + TEXTS["suffix"] + TEXTS["middle"])
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


KINDS = ("gpt2", "llama", "gemma4", "bert")
"""Values of `tokenizer.ggml.model`."""
MAX_MERGES = 4 << 20
MAX_PIECE = 256
"""Characters of a SentencePiece token that is made of two others: each place to cut it is tried."""
SPACE = "\u2581"
"""What stands for a space in SentencePiece."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names of special tokens in tokenizer_config.json and in the metadata."""
TEMPLATE = "tokenizer.chat_template"
"""The default chat template. Where there are more, `tokenizer.chat_templates` has their names, and
each lies behind this key, a dot and its name."""
MAX_TEMPLATES = 16
"""Chat templates of one model: the most there are have three or four."""
_PADDING = re.compile(r"\[PAD\d+\]")


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template. Raises `BadModel`."""
    texts = file.texts("tokenizer.ggml.tokens", MAX_TOKENS)
    settings: dict[str, Any] = {}
    for name, own in SPECIAL.items():
        key = f"tokenizer.ggml.{own}_token_id"
        if key in file and (token := file.number(key)) < len(texts):
            settings[name] = texts[token]
    settings[KEY] = {kind: texts[token] for kind, own in GGUF_NAMES.items()
                     if (key := f"tokenizer.ggml.{own}_token_id") in file
                     and (token := file.number(key)) < len(texts)}
    keys = {"default": TEMPLATE}
    if f"{TEMPLATE}s" in file:
        keys |= {name: f"{TEMPLATE}.{name}"
                 for name in file.texts(f"{TEMPLATE}s", MAX_TEMPLATES) if name != "default"}
    settings["chat_template"] = [{"name": name, "template": file.text(key)}
                              for name, key in keys.items() if key in file]
    return settings


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json. Raises `BadModel`."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise file.bad("tokenizer.ggml.model", f"{shown(kind)} is not served; served are "
                       f"{', '.join(KINDS)}")
    texts, types = vocabulary(file)
    if kind == "llama":
        return _sentencepiece(file, texts, types)
    if kind == "bert":
        return _wordpiece(file, texts, types)
    name = "gemma4" if kind == "gemma4" else file.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        near = get_close_matches(name, PRE_TOKENIZERS, 1)
        raise file.bad("tokenizer.ggml.pre", f"{shown(name)} is not served"
                       f"{f'; near it is {near[0]}' if near else ''}")
    pre = PRE_TOKENIZERS[name]
    return (_byte_level if pre.bytes else _spelt)(file, texts, types, pre)


def _byte_level(file: GgufFile, texts: list[str], types: list[int],
                pre: PreTokenizer) -> dict[str, Any]:
    splits = [{"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
              for cut in pre.cuts]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    model = _bpe(texts, types, _merges(file, texts, types)) | {"ignore_merges": pre.whole}
    return _tokenizer(file, texts, types, model, pre.bos) | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level}


def _spelt(file: GgufFile, texts: list[str], types: list[int],
           pre: PreTokenizer) -> dict[str, Any]:
    """BPE by merges whose tokens are spelt as SentencePiece's."""
    model = _bpe(texts, types, _merges(file, texts, types)) | {
        "byte_fallback": True, "fuse_unk": True, "unk_token": _unknown(file, texts, len(texts))}
    return _tokenizer(file, texts, types, model, pre.bos) | _spaces(False)


def _merges(file: GgufFile, texts: list[str], types: list[int]) -> list[list[str]]:
    """The file's, but for those that join or make what is no token."""
    vocab, merges = _ids(texts, types), []
    for merge in file.texts("tokenizer.ggml.merges", MAX_MERGES):
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left in vocab and right in vocab and left + right in vocab:
            merges.append([left, right])
    return merges


def _sentencepiece(file: GgufFile, texts: list[str], types: list[int]) -> dict[str, Any]:
    gemma = file.text("general.architecture").startswith("gemma")
    # What is spaces in the file are the model's own pieces of them.
    texts = [SPACE * len(text) if text.strip(" ") == "" else text for text in texts]
    types = [NORMAL if kind == USER_DEFINED and text.strip(SPACE) == "" else kind
             for text, kind in zip(texts, types, strict=True)]
    scores = [float(-i) for i in range(len(texts))]
    # Gemma's own merges go by the order of its tokens.
    if not gemma:
        scores = [float(own) for own in file.numbers("tokenizer.ggml.scores", MAX_TOKENS)]
        if len(scores) < len(texts) or not all(map(math.isfinite, scores)):
            raise file.bad("tokenizer.ggml.scores", f"must be {len(texts)} finite numbers")
    model = _bpe(texts, types, _scored_merges(texts, types, scores)) | {
        "byte_fallback": True, "fuse_unk": True, "unk_token": _unknown(file, texts, 3 * gemma)}
    return _tokenizer(file, texts, types, model, True) | _spaces(
        file.flag("tokenizer.ggml.add_space_prefix", True))


def _unknown(file: GgufFile, texts: list[str], default: int) -> str | None:
    """The token of what has none; None where there is no such."""
    number = file.number("tokenizer.ggml.unknown_token_id", default)
    return texts[number] if number < len(texts) else None


def _spaces(prefix: bool) -> dict[str, Any]:
    """How SentencePiece's spaces are made and unmade; prefix: texts begin with one."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {"normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "decoder": {"type": "Sequence", "decoders": decoders}}


FIRST, LAST, UNKNOWN_WORD = "[CLS]", "[SEP]", "[UNK]"
"""Tokens around texts, and in the place of words that have none."""
_MARKED = re.compile(r"\[.+\]")


def _wordpiece(file: GgufFile, texts: list[str], types: list[int]) -> dict[str, Any]:
    """BERT's. Files mark the tokens that begin words, its own vocabulary those that do not. A
    vocabulary without capital letters is of texts in small letters, without accents."""
    vocab = {}
    for i, (text, kind) in enumerate(zip(texts, types, strict=True)):
        own = text[1:] if text.startswith(SPACE) else text if (
            kind != NORMAL or _MARKED.fullmatch(text)) else f"##{text}"
        vocab[own] = i
    for name in (FIRST, LAST, UNKNOWN_WORD):
        if name not in vocab:
            raise file.bad("tokenizer.ggml.tokens", f"{name} must be among them")
    cased = any(text != text.lower() for text in vocab if not _MARKED.fullmatch(text))
    special = {name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in (FIRST, LAST)}
    single = [_token(FIRST, 0), {"Sequence": {"id": "A", "type_id": 0}}, _token(LAST, 0)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, _token(LAST, 1)]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [_added_token(i, text, True) for text, i in vocab.items()
                         if text in (FIRST, LAST, UNKNOWN_WORD, "[PAD]", "[MASK]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": not cased},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair,
                           "special_tokens": special},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": UNKNOWN_WORD, "vocab": vocab,
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}}


def _token(name: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": kind}}


def _bpe(texts: list[str], types: list[int], merges: list[list[str]]) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": _ids(texts, types), "merges": merges}


def _tokenizer(file: GgufFile, texts: list[str], types: list[int], model: dict[str, Any],
               bos: bool) -> dict[str, Any]:
    """What all kinds share; bos: whether texts begin with one where the metadata does not say."""
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": _added(texts, types), "normalizer": None, "pre_tokenizer": None,
            "post_processor": _ends(file, texts, bos), "decoder": None, "model": model}


def _scored_merges(texts: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """The pairs of tokens that make another one, the highest score first."""
    pieces = {text: score for text, kind, score in zip(texts, types, scores, strict=False)
              if kind in (NORMAL, USER_DEFINED) and len(text) <= MAX_PIECE}
    merges = [(-score, at, len(text) - at, text) for text, score in pieces.items()
             for at in range(1, len(text)) if text[:at] in pieces and text[at:] in pieces]
    # Of pairs that make the same token, in the order of transformers' `generate_merges`.
    merges.sort(key=lambda own: (own[0], -own[1], -own[2]))
    return [[text[:at], text[at:]] for _, at, _, text in merges]


def _ids(texts: list[str], types: list[int]) -> dict[str, int]:
    """Id by text; but for those that only pad the embedding."""
    return {text: i for i, (text, kind) in enumerate(zip(texts, types, strict=True))
            if kind != UNUSED or not _PADDING.fullmatch(text)}


def _added(texts: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in texts before anything else."""
    return [_added_token(i, text, kind != USER_DEFINED)
            for i, (text, kind) in enumerate(zip(texts, types, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)]


def _added_token(i: int, text: str, special: bool) -> dict[str, Any]:
    return {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special}


def _ends(file: GgufFile, texts: list[str], bos: bool) -> dict[str, Any] | None:
    """What is put before and behind a text; bos: where the metadata does not say."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default in (("bos", bos), ("eos", False)):
        key = f"tokenizer.ggml.{name}_token_id"
        if file.flag(f"tokenizer.ggml.add_{name}_token", default) and key in file:
            token = file.number(key)
            if token >= len(texts):
                raise file.bad(key, f"{token} is outside the vocabulary of {len(texts)}")
            text = texts[token]
            special[text] = {"id": text, "ids": [token], "tokens": [text]}
            part = _token(text, 0)
            single = [part, *single] if name == "bos" else [*single, part]
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": single, "special_tokens": special,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}]}
