"""Hidden states that requests ask for, of each token of their prompts: taken between the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from actorium.actors.messages import Pooled
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.step.batch import HiddenTap
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pooled_rows import PooledPrompt, PooledRows
from actorium.gpu.weights.dtypes import TORCH_DTYPES

DTYPES: dict[torch.dtype, Literal["F32", "F16", "BF16"]] = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Safetensors' names."""


def hidden_sizes(shape: ModelShape) -> tuple[int, int, int]:
    """What `Ready.hidden_states` says of a model."""
    return shape.layers, shape.hidden, TORCH_DTYPES[shape.dtype].itemsize


def hidden_tap(step: InputBatch, prompts: Mapping[int, PooledPrompt], last: int
               ) -> HiddenTap | None:
    """What keeps the hidden states of a step's prompts; None where none wants them. prompts: by
    slot; last: the number of the rows behind the final norm, which the model gives itself."""
    layers = frozenset(layer for own in step.pooled
                       for layer in _from_zero(prompts[own.slot], last))
    if not layers:
        return None
    return HiddenTap(layers, step.batches[0].logit_rows[-sum(own.rows for own in step.pooled):])


def hidden_results(tap: HiddenTap, pooled: Sequence[PooledRows], normed: Tensor,
                   prompts: Mapping[int, PooledPrompt], last: int) -> list[tuple[int, Pooled]]:
    """Slots of the prompts that end, and all of their hidden states. pooled: all of the step;
    normed: [R, hidden], theirs behind the final norm; prompts: by slot, which keep the chunks of
    those that go on."""
    kept, at, out = tap.kept | {last: normed.cpu()}, 0, list[tuple[int, Pooled]]()
    for own in pooled:
        prompt, end = prompts[own.slot], at + own.rows
        if prompt.pooling.layers:
            prompt.parts.append(torch.stack([
                kept[layer][at:end].to(normed.dtype) for layer in _from_zero(prompt, last)], 1))
            if own.ends:
                whole = torch.cat(prompt.parts)
                data = whole.view(torch.uint8).numpy().tobytes()
                out.append((own.slot, Pooled([*whole.shape], data, DTYPES[whole.dtype])))
        at = end
    return out


def _from_zero(prompt: PooledPrompt, last: int) -> list[int]:
    """The layers that are wanted, of which some may be numbered from the end."""
    return [layer % (last + 1) for layer in prompt.pooling.layers]
