"""The vision towers of Qwen2.5-VL and Qwen3-VL, in plain torch: patches of several images and
videos in, rows for the decoder out. See `VisionShape` for what sets the two apart.

An image's rows do not depend on what else is in the call, but for the last bits of products whose
size does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.families.vision_tensors import TOWER, merger_names, mlp_names
from actorium.gpu.vision.grids import (
    I64,
    Grid,
    check_grid,
    frame_segments,
    learned_positions,
    places,
    window_segments,
)
from actorium.gpu.weights.lazy_tensors import WeightTensors, materialised
from actorium.kernels.reference.rope import apply_rope, turned_by

EPS = 1e-6
"""Of all norms, whatever the config says of the decoder's."""
Norm = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Tensor]


class VisionRows(NamedTuple):
    """What a tower makes of a call's images and videos, one after the other, each in the order of
    its squares of patches."""

    embeddings: Tensor
    """[R, out_hidden]: take the place of the placeholders' embeddings."""
    deep: tuple[Tensor, ...]
    """[R, out_hidden] each: added at the same places behind the decoder's first layers."""


@dataclass(slots=True)
class _Attention:
    """Of all patches, by segments."""

    heads: int
    qkv: Product
    out: Product

    def __call__(self, x: Tensor, turn: Tensor, segments: Sequence[Tensor]) -> Tensor:
        """x: [P, hidden]; turn: see `turns`; segments: i64[n, length] each, which hold every patch
        once."""
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k, y = _turned(q, turn), _turned(k, turn), torch.empty_like(v)
        for own in segments:
            heads = [rows[own].transpose(1, 2) for rows in (q, k, v)]
            part = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
            y[own.flatten()] = part.transpose(1, 2).flatten(0, 1)
        return self.out(y.flatten(1))


@dataclass(slots=True)
class _Block:
    attention_norm: Norm
    attention: _Attention
    mlp_norm: Norm
    mlp: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, turn: Tensor, segments: Sequence[Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, segments)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(slots=True)
class _Merger:
    """Squares of patches to rows of the decoder's width."""

    width: int
    norm: Norm
    first: bool
    """The patches are normed one by one; else each square is as a whole."""
    into: Product
    out: Product

    def __call__(self, x: Tensor) -> Tensor:
        squares = self.norm(x).view(-1, self.width) if self.first else self.norm(
            x.view(-1, self.width))
        return self.out(F.gelu(self.into(squares)))


class VisionTower:
    """A tower with its weights on one device."""

    def __init__(self, shape: VisionShape, tensors: WeightTensors) -> None:
        """tensors: as `vision_tensors` names them, in the model's dtype; they are taken out of the
        dict."""
        self.shape = shape
        w = _Weights(tensors, shape.gated)
        patch = w.pop("patch_embed.proj.weight").flatten(1)
        bias = None if shape.gated else w.pop("patch_embed.proj.bias")
        self.embed: Product = partial(F.linear, weight=patch, bias=bias)
        self.positions = w.pop("pos_embed.weight") if shape.positions else None
        self.blocks = [self._block(w, f"blocks.{i}.") for i in range(shape.depth)]
        self.merger = self._merger(w, "merger.", True)
        self.deep = [self._merger(w, f"deepstack_merger_list.{i}.", False)
                     for i in range(len(shape.deepstack))]
        self.dtype, self.device = patch.dtype, patch.device

    def _block(self, w: _Weights, at: str) -> _Block:
        products = [w.product(f"{at}mlp.{name}") for name in mlp_names(self.shape)]
        return _Block(
            w.norm(f"{at}norm1"),
            _Attention(self.shape.heads, w.product(f"{at}attn.qkv"), w.product(f"{at}attn.proj")),
            w.norm(f"{at}norm2"), partial(_gated if self.shape.gated else _plain, products))

    def _merger(self, w: _Weights, at: str, first: bool) -> _Merger:
        norm, into, out = merger_names(self.shape)
        return _Merger(self.shape.merged, w.norm(f"{at}{norm}"), first, w.product(f"{at}{into}"),
                       w.product(f"{at}{out}"))

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
        """[P, hidden]: what goes into the first block."""
        x = self.embed(pixels.to(self.device, self.dtype))
        return x if self.positions is None else x + self._learned(grids, self.positions)

    def segments(self, grids: Sequence[Grid]) -> tuple[list[Tensor], list[Tensor]]:
        """i64[n, length] each: the patches that attend to one another, in blocks with windows and
        in the others."""
        whole = self._segments(frame_segments(grids).by_length())
        if not self.shape.window:
            return whole, whole
        return self._segments(window_segments(grids, self.shape).by_length()), whole

    def _learned(self, grids: Sequence[Grid], table: Tensor) -> Tensor:
        """[P, hidden]: learned positions, stretched over each frame."""
        parts = []
        for grid in grids:
            index, weights = (torch.from_numpy(each).to(self.device)
                              for each in learned_positions(grid, self.shape))
            own = (table[index].float() * weights.unsqueeze(-1)).sum(1)
            parts.append(own.to(self.dtype).repeat(grid.frames, 1))
        return torch.cat(parts)

    def turns(self, grids: Sequence[Grid]) -> Tensor:
        """f32[P, 2, 1, head_dim], as `rope_rows`: half of each head's pairs are turned by the
        patch's row, the others by its column, with the same frequencies."""
        s = self.shape
        pairs = torch.arange(0, s.head_dim // 2, 2, dtype=torch.float32) / (s.head_dim // 2)
        at = torch.cat([torch.from_numpy(places(grid, s.merge)).repeat(grid.frames, 1)
                        for grid in grids])
        angles = (at.float().unsqueeze(-1) / s.theta**pairs).flatten(1)
        return turned_by(angles).to(self.device)

    def _segments(self, found: Sequence[I64]) -> list[Tensor]:
        return [torch.from_numpy(each).to(self.device) for each in found]


class TowerRun:
    """Images and videos on their way through a tower, a block at a time."""

    def __init__(self, tower: VisionTower, pixels: Tensor, grids: Sequence[Grid]) -> None:
        """See `VisionTower.forward`."""
        s = tower.shape
        for grid in grids:
            check_grid(grid, s)
        want = (sum(grid.patches for grid in grids), s.pixels)
        if not grids or tuple(pixels.shape) != want:
            raise ValueError(f"pixels: {tuple(pixels.shape)}: {len(grids)} grids ask for {want}")
        self._tower, self._block = tower, 0
        self._x, self._turn = tower.entered(pixels, grids), tower.turns(grids)
        self._windows, self._whole = tower.segments(grids)
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
        self._x = tower.blocks[i](self._x, self._turn, segments)
        if i in s.deepstack:
            self._deep.append(tower.deep[s.deepstack.index(i)](self._x))
        self._block += 1

    @torch.inference_mode()
    def rows(self) -> VisionRows:
        """What came out, once it is done."""
        return VisionRows(self._tower.merger(self._x), tuple(self._deep))


class _Weights:
    """Tensors of the tower, each of which is taken once."""

    def __init__(self, tensors: WeightTensors, rms: bool) -> None:
        """rms: norms are root mean squares alone."""
        self.tensors, self.rms = tensors, rms

    def pop(self, name: str) -> Tensor:
        return materialised(self.tensors.pop(TOWER + name))

    def product(self, name: str) -> Product:
        return partial(F.linear, weight=self.pop(f"{name}.weight"), bias=self.pop(f"{name}.bias"))

    def norm(self, name: str) -> Norm:
        weight = self.pop(f"{name}.weight")
        if self.rms:
            return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=EPS)
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight,
                       bias=self.pop(f"{name}.bias"), eps=EPS)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Heads [P, H, D], rotated in float32."""
    return apply_rope(x.float(), turn).to(x.dtype)


def _gated(products: Sequence[Product], x: Tensor) -> Tensor:
    gate, up, down = products
    return down(F.silu(gate(x)) * up(x))


def _plain(products: Sequence[Product], x: Tensor) -> Tensor:
    into, out = products
    return out(F.gelu(into(x), approximate="tanh"))
