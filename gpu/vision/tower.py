"""The vision towers of Qwen2.5-VL and Qwen3-VL: patches of several images and videos in, rows for
the decoder out. See `VisionShape` for what sets the two apart.

Patches are laid so that those that attend to one another lie one after the other: window by window
where there are windows. What computes is a `TowerOps`; with C's an image's rows have the same bits
whatever else is in the call, with torch's but for the last of them. So angles and learned
positions, which are made here, are made number by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actorium.gpu.families.tensor_specs import TOWER, merger_names, mlp_names
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.vision.grids import (
    Grid,
    angles,
    check_grid,
    frame_segments,
    learned_positions,
    window_segments,
)
from actorium.gpu.weights.lazy_tensors import WeightTensors, materialised
from actorium.kernels.linear import Linear
from actorium.kernels.tower_ops import ERF, TANH, PatchAttention, TowerOps, Weight

EPS = 1e-6
"""Of all norms, whatever the config says of the decoder's."""
Norm = Callable[[Tensor], Tensor]


class VisionRows(NamedTuple):
    """What a tower makes of a call's images and videos, one after the other, each in the order of
    its squares of patches."""

    embeddings: Tensor
    """[R, out_hidden]: take the place of the placeholders' embeddings."""
    deep: tuple[Tensor, ...]
    """[R, out_hidden] each: added at the same places behind the decoder's first layers."""


@dataclass(slots=True)
class _Block:
    attention_norm: Norm
    attention: PatchAttention
    mlp_norm: Norm
    into: Callable[[Tensor], Tensor]
    out: Linear

    def __call__(self, x: Tensor, turns: Tensor, segments: Any) -> Tensor:
        x = self.attention(self.attention_norm(x), x, turns, segments)
        return self.out.add(self.into(self.mlp_norm(x)), x)


@dataclass(slots=True)
class _Merger:
    """Squares of patches to rows of the decoder's width."""

    width: int
    norm: Norm
    first: bool
    """The patches are normed one by one; else each square is as a whole."""
    into: Linear
    gelu: Callable[[Tensor], Tensor]
    out: Linear

    def __call__(self, x: Tensor) -> Tensor:
        squares = self.norm(x).view(-1, self.width) if self.first else self.norm(
            x.view(-1, self.width))
        return self.out(self.gelu(self.into(squares)))


class VisionTower:
    """A tower with its weights on one device."""

    def __init__(self, shape: VisionShape, tensors: WeightTensors, ops: TowerOps) -> None:
        """tensors: as `vision_tensors` names them, in the model's dtype; they are taken out of the
        dict."""
        self.shape, self.ops = shape, ops
        w = _Weights(tensors, ops, shape.gated)
        patch = w.pop("patch_embed.proj.weight").flatten(1)
        self.dtype, self.device = patch.dtype, patch.device
        bias = None if shape.gated else w.pop("patch_embed.proj.bias")
        self.embed = ops.linear(Weight(patch, bias))
        self.positions = w.pop("pos_embed.weight") if shape.positions else None
        self.blocks = [self._block(w, f"blocks.{i}.") for i in range(shape.depth)]
        self.merger = self._merger(w, "merger.", True)
        self.deep = [self._merger(w, f"deepstack_merger_list.{i}.", False)
                     for i in range(len(shape.deepstack))]

    def _block(self, w: _Weights, at: str) -> _Block:
        ops = self.ops
        *first, last = (f"{at}mlp.{name}" for name in mlp_names(self.shape))
        into = ops.gated if self.shape.gated else partial(_plain, ops)
        return _Block(
            w.norm(f"{at}norm1"),
            ops.attention(self.shape.heads, w.weight(f"{at}attn.qkv"), w.weight(f"{at}attn.proj")),
            w.norm(f"{at}norm2"), into(*map(w.weight, first)), w.linear(last))

    def _merger(self, w: _Weights, at: str, first: bool) -> _Merger:
        norm, into, out = merger_names(self.shape)
        return _Merger(self.shape.merged, w.norm(f"{at}{norm}"), first, w.linear(f"{at}{into}"),
                       partial(self.ops.gelu, kind=ERF), w.linear(f"{at}{out}"))

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> VisionRows:
        """The rows of these images and videos.

        pixels: float[P, `VisionShape.pixels`], normalised, the patches of each grid one after the
        other, in the order that `grids` describes; on any device. Raises `ValueError` where they do
        not fit the grids.
        """
        run = TowerRun(self, pixels, grids)
        while not run.done:
            run.advance()
        return run.rows()

    def entered(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[P, hidden]: what goes into the first block, in the order in which patches come."""
        x = self.embed(pixels.to(self.device, self.dtype))
        return x if self.positions is None else x + self._learned(grids, self.positions)

    def _learned(self, grids: Sequence[Grid], table: Tensor) -> Tensor:
        """[P, hidden]: learned positions, stretched over each frame."""
        parts = []
        for grid in grids:
            index, weights = (torch.from_numpy(each).to(self.device)
                              for each in learned_positions(grid, self.shape))
            own = table[index[:, 0]].float() * weights[:, :1]
            for i in range(1, 4):  # one after the other: a sum over a dimension may go otherwise
                own += table[index[:, i]].float() * weights[:, i:i + 1]
            parts.append(own.to(self.dtype).repeat(grid.frames, 1))
        return torch.cat(parts)

    def turns(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """f32[P, head_dim / 2] each, cosines and sines: half of each head's pairs are turned by the
        patch's row, the others by its column, with the same frequencies."""
        parts = [np.tile(angles(grid, self.shape), (1, grid.frames, 1)) for grid in grids]
        cos, sin = torch.from_numpy(np.concatenate(parts, 1)).to(self.device)
        return cos, sin


class TowerRun:
    """Images and videos on their way through a tower, a block at a time."""

    def __init__(self, tower: VisionTower, pixels: Tensor, grids: Sequence[Grid]) -> None:
        s = tower.shape
        for grid in grids:
            check_grid(grid, s)
        want = (sum(grid.patches for grid in grids), s.pixels)
        if not grids or tuple(pixels.shape) != want:
            raise ValueError(f"pixels: {tuple(pixels.shape)}: {len(grids)} grids ask for {want}")
        self._tower, self._block = tower, 0
        x, turns = tower.entered(pixels, grids), tower.turns(grids)
        whole = frame_segments(grids)
        own = window_segments(grids, s) if s.window else whole
        self._back: Tensor | None = None
        """Where each patch lies, where that is not as they come."""
        if s.window:
            order = torch.from_numpy(own.order).to(tower.device)
            x, turns = x[order], (turns[0][order], turns[1][order])
            self._back = order.argsort()
        self._x, self._turns = x, tower.ops.turns(*turns)
        # Windows of a frame follow one another, so that a frame is a segment as well.
        self._windows, self._whole = (
            tower.ops.segments(each.lengths.tolist(), tower.device) for each in (own, whole))
        self._deep: list[Tensor] = []

    @property
    def done(self) -> bool:
        """Whether all blocks are behind."""
        return self._block == len(self._tower.blocks)

    @torch.inference_mode()
    def advance(self) -> None:
        """The next block."""
        tower, s, i = self._tower, self._tower.shape, self._block
        segments = self._whole if i in s.full else self._windows
        self._x = tower.blocks[i](self._x, self._turns, segments)
        if i in s.deepstack:
            self._deep.append(tower.deep[s.deepstack.index(i)](self._patches()))
        self._block += 1

    @torch.inference_mode()
    def rows(self) -> VisionRows:
        """What came out, once it is done."""
        return VisionRows(self._tower.merger(self._patches()), tuple(self._deep))

    def _patches(self) -> Tensor:
        """[P, hidden], in the order in which they came."""
        return self._x if self._back is None else self._x[self._back]


class _Weights:
    """Tensors of the tower, each of which is taken once."""

    def __init__(self, tensors: WeightTensors, ops: TowerOps, rms: bool) -> None:
        """rms: norms are root mean squares alone."""
        self.tensors, self.ops, self.rms = tensors, ops, rms

    def pop(self, name: str) -> Tensor:
        return materialised(self.tensors.pop(TOWER + name))

    def weight(self, name: str) -> Weight:
        return Weight(self.pop(f"{name}.weight"), self.pop(f"{name}.bias"))

    def linear(self, name: str) -> Linear:
        return self.ops.linear(self.weight(name))

    def norm(self, name: str) -> Norm:
        weight = self.pop(f"{name}.weight")
        if self.rms:
            return partial(self.ops.rms_norm, weight=weight, eps=EPS)
        return partial(self.ops.layer_norm, weight=weight, bias=self.pop(f"{name}.bias"), eps=EPS)


def _plain(ops: TowerOps, weight: Weight) -> Callable[[Tensor], Tensor]:
    into = ops.linear(weight)
    return lambda x: ops.gelu(into(x), TANH)
