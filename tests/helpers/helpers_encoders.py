"""Tiny random encoders, and steps of whole prompts over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import make_pools

VOCABULARY = 199
SPECIAL = {f"{name}_token_id": i for i, name in enumerate(("bos", "pad", "eos", "cls", "sep"))}
"""In the vocabulary, where a class's own defaults are not."""
SIZES: dict[str, dict[str, Any]] = {
    "DistilBert": {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96,
                   "max_position_embeddings": 64},
    **dict.fromkeys(("ModernBert", "EuroBert"), {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 64, **SPECIAL}),
    "": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 66},
}
"""By what a class's name begins with."""


def write_encoder(path: Path, architecture: str, seed: int = 0,
                  dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Saves a tiny random checkpoint of this class in HF format; returns transformers' model. Every
    parameter is random, so that none can be left out unnoticed."""
    import transformers

    kind = getattr(transformers, architecture)
    sizes = next(own for name, own in SIZES.items() if architecture.startswith(name))
    config = kind.config_class(**{"vocab_size": VOCABULARY, **sizes, **options})
    config.architectures = [architecture]
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.15)
    model.to(dtype).save_pretrained(str(path))
    return model


def encoded(model: LoadedModel, prompts: Sequence[Sequence[int]],
            types: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """[len(prompt), hidden] of each prompt, behind the final norm: all of them in one step."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    nowhere = torch.zeros(1, dtype=torch.int32)
    batch = ForwardBatch(
        tokens, positions, torch.zeros_like(tokens),
        [ExtendRow(i + 1, 0, length, nowhere) for i, length in enumerate(lengths)], len(tokens), 0,
        None, None, 0, torch.arange(len(tokens)), all_rows=True,
        types=None if types is None else torch.tensor([one for own in types for one in own]))
    pools = make_pools(model.shape, [1], 16, model.dtype, model.device)
    return list(model.norm_rows(model.forward([batch], pools)).split(lengths))
