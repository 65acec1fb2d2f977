"""Tiny checkpoints whose drafts are often right, though nothing was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SIZE = 1.2
"""Root mean square of an embedding's numbers, beside what random layers add to it."""
SHARP = 1.3
"""Of a head's rows: how far the likeliest token is ahead."""
ROUND = 3
"""Tokens that follow each other in a round: few, so that windows have a token twice."""


def follow_tokens(path: Path, seed: int = 2) -> None:
    """Give the checkpoint at `path` an embedding and a head by which each token has a likeliest
    successor, and its MTP layer, if it has one, a projection that lets the token's embedding
    through. Model and layer, and all models of one width, then say the same wherever their
    other, random parts do not turn it over, which happens often enough that windows are
    accepted in part, too."""
    random = torch.Generator().manual_seed(seed)
    file = path / "model.safetensors"
    tensors = load_file(str(file))
    name, = (name for name in tensors if name.endswith("embed_tokens.weight")
             and ".layers." not in name)
    vocab, hidden = tensors[name].shape
    embedding = torch.randn(vocab, hidden, generator=random)
    head = torch.empty(vocab, hidden)
    for round_ in torch.randperm(vocab, generator=random).split(ROUND):
        head[round_.roll(-1)] = embedding[round_] / hidden ** 0.5 * SHARP
    put = {name: embedding * SIZE, "lm_head.weight": head}
    for fc in (name for name in tensors if name.endswith(("mtp.fc.weight", "eh_proj.weight"))):
        rest = 0.05 * torch.randn(hidden, hidden, generator=random)
        put[fc] = torch.cat((SIZE * torch.eye(hidden), rest), 1)
    assert len(put) >= 2, sorted(tensors)
    for name, tensor in put.items():
        assert tensors[name].shape == tensor.shape, name
        tensors[name] = tensor.to(tensors[name].dtype)
    save_file(tensors, str(file), metadata={"format": "pt"})
