"""What a GGUF file says of a model's tokenizer, as the `tokenizer.json` and `tokenizer_config.json`
that the model's own directory would have.

Two kinds: `gpt2`, byte-level BPE whose texts are cut first as `tokenizer.ggml.pre` names it, and
`llama`, SentencePiece's BPE: pairs are joined by the score of what they make, and bytes stand for
characters that have no token. How texts are cut: llama.cpp's `src/llama-vocab.cpp` has the list of
names, the expressions are those of the models' own tokenizers.
"""

from __future__ import annotations

import math
import re
from typing import Any

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_vocabulary import (
    CONTROL,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    vocabulary,
)

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

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_APOSTROPHE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
QWEN35 = (rf"{_APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
          r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
GPT4O = (rf"{_UPPER}*{_LOWER}+{_APOSTROPHE}?|{_UPPER}+{_LOWER}*{_APOSTROPHE}?|\p{{N}}{{1,3}}"
         rf"|{_REST_SLASH}")
DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
             r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"""
             r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling",
                     "exaone4", "gigachat", "a.x-4.0", "mellum", "roberta-bpe"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone",
                     "minerva-7b", "mellum2"), (r"\p{N}", GPT2)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral",
                     "midm-2.0", "lfm2", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "f2llmv2", "megrez",
                     "hunyuan", "solar-open", "grok-2"), (QWEN2,)),
    "qwen35": (QWEN35,), "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
}
"""How texts are cut before BPE, by `tokenizer.ggml.pre`: each expression cuts the parts that those
before it have left."""
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
               "lfm2", "tekken"}
"""A word that is a token stays one, whatever its merges say; and texts begin with bos."""


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template. Raises `BadModel`."""
    texts = file.texts("tokenizer.ggml.tokens", MAX_TOKENS)
    found: dict[str, Any] = {}
    for name, own in SPECIAL.items():
        key = f"tokenizer.ggml.{own}_token_id"
        if key in file and (token := file.number(key)) < len(texts):
            found[name] = texts[token]
    keys = {"default": TEMPLATE}
    if f"{TEMPLATE}s" in file:
        keys |= {name: f"{TEMPLATE}.{name}"
                 for name in file.texts(f"{TEMPLATE}s", MAX_TEMPLATES) if name != "default"}
    found["chat_template"] = [{"name": name, "template": file.text(key)}
                              for name, key in keys.items() if key in file]
    return found


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json. Raises `BadModel`."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise file.bad("tokenizer.ggml.model", f"{shown(kind)} is not served; served are gpt2 and "
                       "llama")
    texts, types = vocabulary(file)
    if kind == "gpt2":
        return _byte_level(file, texts, types)
    return _sentencepiece(file, texts, types)


def _byte_level(file: GgufFile, texts: list[str], types: list[int]) -> dict[str, Any]:
    pre = file.text("tokenizer.ggml.pre", "default")
    if pre not in CUTS:
        raise file.bad("tokenizer.ggml.pre", f"{shown(pre)} is not served; served are "
                       f"{', '.join(CUTS)}")
    vocab = _ids(texts, types)
    merges = []
    for merge in file.texts("tokenizer.ggml.merges", MAX_MERGES):
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left in vocab and right in vocab and left + right in vocab:
            merges.append([left, right])
    splits = [{"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
              for cut in CUTS[pre]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    whole = pre in WHOLE_WORDS
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": _added(texts, types), "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _ends(file, texts, whole), "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole,
                  "vocab": vocab, "merges": merges}}


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
    vocab = _ids(texts, types)
    space = file.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = file.number("tokenizer.ggml.unknown_token_id", 3 if gemma else 0)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}]
    if space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prepend = [{"type": "Prepend", "prepend": SPACE}] if space else []
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": _added(texts, types),
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None, "post_processor": _ends(file, texts, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": None,
                  "unk_token": texts[unknown] if unknown < len(texts) else None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocab, "merges": _scored_merges(texts, types, scores)}}


def _scored_merges(texts: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """The pairs of tokens that make another one, the highest score first."""
    pieces = {text: score for text, kind, score in zip(texts, types, scores, strict=False)
              if kind in (NORMAL, USER_DEFINED) and len(text) <= MAX_PIECE}
    found = [(-score, at, len(text) - at, text) for text, score in pieces.items()
             for at in range(1, len(text)) if text[:at] in pieces and text[at:] in pieces]
    # Of pairs that make the same token, in the order of transformers' `generate_merges`.
    found.sort(key=lambda own: (own[0], -own[1], -own[2]))
    return [[text[:at], text[at:]] for _, at, _, text in found]


def _ids(texts: list[str], types: list[int]) -> dict[str, int]:
    """Id by text; but for those that only pad the embedding."""
    return {text: i for i, (text, kind) in enumerate(zip(texts, types, strict=True))
            if kind != UNUSED or not _PADDING.fullmatch(text)}


def _added(texts: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in texts before anything else."""
    return [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": kind != USER_DEFINED}
            for i, (text, kind) in enumerate(zip(texts, types, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)]


def _ends(file: GgufFile, texts: list[str], bos: bool) -> dict[str, Any] | None:
    """What is put before and behind a text; bos: where the metadata does not say."""
    found: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default in (("bos", bos), ("eos", False)):
        key = f"tokenizer.ggml.{name}_token_id"
        if file.flag(f"tokenizer.ggml.add_{name}_token", default) and key in file:
            token = file.number(key)
            if token >= len(texts):
                raise file.bad(key, f"{token} is outside the vocabulary of {len(texts)}")
            text = texts[token]
            special[text] = {"id": text, "ids": [token], "tokens": [text]}
            part = {"SpecialToken": {"id": text, "type_id": 0}}
            found = [part, *found] if name == "bos" else [*found, part]
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": found, "special_tokens": special,
            "pair": [*found, {"Sequence": {"id": "B", "type_id": 1}}]}
