"""What the checkpoints of both models have in common: tokenizer, weights and config files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

# One digit at a time, so that sums align; letters apart from punctuation, so that a word is
# the same token after a space, a quote or an equals sign.
_SPLIT = r"""\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"""


def trained_tokenizer(corpus: Iterable[str], special: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE; any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the table of embeddings, a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, chat_template: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "chat_template": chat_template, "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN, "extra_special_tokens": {}, "model_max_length": context,
        "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None})


def save_model(folder: Path, weights: Mapping[str, Tensor], **configs: dict[str, Any]) -> None:
    """Writes weights in bf16, and each of `configs` as a file of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().bfloat16().contiguous() for name, p in weights.items()}
    partial = folder / "model.safetensors.partial"
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    for name, content in configs.items():
        _write(folder / f"{name}.json", content)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
