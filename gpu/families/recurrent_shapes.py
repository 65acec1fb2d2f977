"""Shapes of layers with a recurrent state, and what one GPU of several has of them."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.errors import BadConfig


class StateShape(NamedTuple):
    """What one recurrent layer keeps of one sequence."""

    state: tuple[int, int, int]
    """[heads, rows, columns] of the state proper, in the state dtype; of 0 where there is none."""
    columns: tuple[int, int]
    """(W - 1, channels): the last inputs of a convolution of width W, in the model's dtype."""
    inputs: int
    """What a token brings to both, of the layer's first projection: the convolution's channels and
    the gates' inputs (dt). Kept, in the model's dtype, of drafts that may be accepted."""


class DeltaShape(NamedTuple):
    """A GatedDeltaNet layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Of the convolution."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "GatedDeltaNet"

    @property
    def key_size(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.value_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [HV, V, K], and columns; its inputs are those and b and a."""
        return StateShape((self.value_heads, self.value_dim, self.key_dim),
                          (self.width - 1, self.channels), self.channels + 2 * self.value_heads)

    def split(self, tp: int) -> DeltaShape:
        """One GPU's heads; see `ModelShape.split`."""
        return self._replace(key_heads=shared(self.key_heads, tp, "key heads"),
                             value_heads=part(self.value_heads, tp, "value heads"))


class MambaShape(NamedTuple):
    """A Mamba-2 layer."""

    heads: int
    groups: int
    """Of B and C: each is shared by heads in a row."""
    head_dim: int
    state_dim: int
    width: int
    """Of the convolution."""
    conv_bias: bool
    proj_bias: bool
    time_limit: tuple[float, float]
    """Least and largest time step."""
    norm_eps: float
    """Of the layer's own norm."""
    shared_by: int = 1
    """GPUs that have heads of one group between them, so that its norm goes over all of theirs."""
    out_bias: bool = False
    """Of the second projection; `proj_bias`: of the first."""
    norm: str = "after"
    """When the heads' outputs are normed: after they are gated, before, or "none"."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Mamba-2"

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [H, P, N], and columns; its inputs are those and dt."""
        return StateShape((self.heads, self.head_dim, self.state_dim),
                          (self.width - 1, self.channels), self.channels + self.heads)

    def split(self, tp: int) -> MambaShape:
        """One GPU's heads; see `ModelShape.split`."""
        if self.norm == "before" and tp > self.groups:
            raise BadConfig(f"--tp: {tp} GPUs cannot share the norm before the gate of "
                            f"{self.groups} groups of Mamba-2's heads", "tp")
        return self._replace(groups=shared(self.groups, tp, "key heads"),
                             heads=part(self.heads, tp, "value heads"),
                             shared_by=max(1, tp // self.groups))


class ConvShape(NamedTuple):
    """A gated short convolution (LFM2): it keeps columns, and no state beside them."""

    channels: int
    width: int
    """Of the convolution."""
    bias: bool
    """Of the convolution and of both projections."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "short convolution"

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.channels

    @property
    def state(self) -> StateShape:
        """What the layer keeps: columns; its inputs are the gated channels."""
        return StateShape((0, 0, 0), (self.width - 1, self.channels), self.channels)

    def split(self, tp: int) -> ConvShape:
        """One GPU's channels; see `ModelShape.split`."""
        return self._replace(channels=part(self.channels, tp, "channels of a convolution"))


class ScanShape(NamedTuple):
    """A Mamba layer: a state of a few numbers for each channel."""

    channels: int
    state_dim: int
    rank: int
    """Of the latent that time steps are made of."""
    width: int
    """Of the convolution."""
    conv_bias: bool
    proj_bias: bool
    norms: str = "none"
    """Of the latent, b and c: "none", "plain" (without weights) or "weighted"."""
    norm_eps: float = 1e-6

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Mamba"

    @property
    def inner(self) -> int:
        """Width of what the second projection takes."""
        return self.channels

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [1, C, N], and columns; its inputs are the channels."""
        return StateShape((1, self.channels, self.state_dim), (self.width - 1, self.channels),
                          self.channels)

    def split(self, tp: int) -> ScanShape:
        """One GPU's channels; see `ModelShape.split`."""
        return self._replace(channels=part(self.channels, tp, "channels of Mamba"))


class KdaShape(NamedTuple):
    """A layer of Kimi Delta Attention."""

    heads: int
    head_dim: int
    width: int
    """Of the convolution."""

    @property
    def kind(self) -> str:
        """Name of the layer, for people."""
        return "Kimi Delta Attention"

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 3 * self.inner

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [H, V, K], and columns; its inputs are those, beta, and the latent
        of the decays."""
        return StateShape((self.heads, self.head_dim, self.head_dim),
                          (self.width - 1, self.channels),
                          self.channels + self.heads + self.head_dim)

    def split(self, tp: int) -> KdaShape:
        """One GPU's heads; see `ModelShape.split`."""
        return self._replace(heads=part(self.heads, tp, "heads of Kimi Delta Attention"))


RecurrentShape = DeltaShape | MambaShape | ConvShape | ScanShape | KdaShape
"""Of the layers with a recurrent state: every kind has a `width`, of its convolution, and a
`state`, what a layer keeps of a sequence."""


def part(count: int, tp: int, what: str) -> int:
    """Of heads that each GPU has its own of."""
    if count % tp:
        raise BadConfig(f"--tp: {tp} GPUs cannot share {count} {what} evenly", "tp")
    return count // tp


def shared(count: int, tp: int, what: str) -> int:
    """Of heads that several GPUs may have copies of."""
    if count % tp and tp % count:
        raise BadConfig(f"--tp: {count} {what} cannot be shared out to {tp} GPUs", "tp")
    return max(1, count // tp)
