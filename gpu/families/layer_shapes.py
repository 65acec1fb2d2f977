"""Shapes of the parts of a layer: its rope, norms, latents and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GATED = ("gate_proj", "up_proj", "down_proj")
"""The projections of a gated MLP, as most families name them."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary embedding: base frequency and scaling, names as in transformers' `rope_parameters`."""

    kind: str = "default"
    """"none": nothing is rotated (NoPE)."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    """Positions the model was trained on before scaling (llama3, yarn, dynamic, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each pair's wavelength is multiplied by where the longest sequence that is
    served is not longer than `original_max`."""
    long_factors: tuple[float, ...] = ()
    """The same where it is longer."""
    axes: tuple[int, ...] = ()
    """Which of a token's positions turns each pair: 0 that in time, 1 in height, 2 in width. Of
    text all three are one; (): so are they of everything."""
    share: float = 1.0
    """Of proportional: the part of a head's pairs that turn, the fastest ones."""


NOPE = RopeShape("none")


class QueryScaling(NamedTuple):
    """Queries are multiplied by 1 + beta * log(1 + floor((position + offset) / every)), so that
    attention over a long context stays as sharp as over a short one."""

    beta: float
    every: int
    offset: int = 0
    still_alone: bool = False
    """Only in layers that rotate nothing."""


class MixtureNames(NamedTuple):
    """What checkpoints call the tensors of a mixture."""

    at: str = "mlp."
    """What their names begin with in a layer."""
    router: str = "gate"
    expert: tuple[str, ...] = GATED
    """An expert's projections; of two, the first has no gate, and its activation is squared ReLU.
    """
    stacked: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    """Those of all experts in one, gate and up together; (): no checkpoint has them so."""
    turned: bool = False
    """Of these, each expert's rows are its inputs."""
    alternating: bool = False
    """That is so, too, and the columns of gate and up alternate."""
    shared: str = "shared_expert."
    """What the names of the expert that all tokens go through begin with."""
    bias: str = ""
    """That of the scores when experts are chosen; "": there is none."""
    bias_row: bool = False
    """It is a matrix of one row."""


class ExpertShape(NamedTuple):
    """A mixture of experts."""

    number: int
    chosen: int
    """Experts a token goes through."""
    size: int
    """Inner width of each."""
    shared: int
    """Inner width of the expert all tokens go through; 0 = there is none."""
    normalised: bool
    """The weights of the chosen ones add up to 1."""
    shared_gate: bool = True
    """A sigmoid gates what the shared expert gives."""
    names: MixtureNames = MixtureNames()
    bias: bool = False
    """The router and the experts' projections have biases."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of a clamped SwiGLU (`activation.clamped_swiglu`); None: a plain one."""
    latent: int = 0
    """Width of what the experts take and give, which two projections make of hidden states and
    back; 0 = hidden states."""
    activation: str = "silu"
    """silu or gelu (its tanh form)."""
    beside: bool = False
    """They stand beside the dense MLP of every layer, with norms and a router input of their
    own."""


class Routing(NamedTuple):
    """How experts are chosen in float32, by groups (arXiv 2412.19437, section 2.1.2)."""

    groups: int = 1
    """The experts' number is a multiple of it."""
    chosen_groups: int = 1
    """Groups whose experts may be chosen."""
    factor: float = 1.0
    """On the weights of the chosen."""
    softmax: bool = False
    """Scores are probabilities; else sigmoids."""
    best: int = 2
    """Of a group's experts, the sum of whose scores says how good the group is."""
    least: float = 0.0
    """Of the sum that weights are divided by."""
    added: float = 1e-20
    """To that sum."""
    on_input: bool = False
    """The weights multiply what goes into the experts, not what they give."""


class LatentShape(NamedTuple):
    """Multi-head latent attention (arXiv 2405.04434): widths."""

    query_rank: int
    """Of the latent that queries are made of; 0 = they are projected at once."""
    rank: int
    """Of the latent that keys and values are made of."""
    plain: int
    """Of a head's query and key without position."""
    rope: int
    """Of their rotated part, which for keys all heads share."""
    value: int
    """Of a head's value."""
    interleaved: bool
    """The pairs that are rotated lie side by side in the checkpoint, not half the part apart."""

    @property
    def query(self) -> int:
        """Of a head's query."""
        return self.plain + self.rope

    @property
    def row(self) -> int:
        """Of what a token leaves in a layer's pages: its latent, and the rotated key."""
        return self.rank + self.rope


class IndexShape(NamedTuple):
    """The indexer of layers that attend to chosen tokens (DeepSeek-V3.2, arXiv 2512.02556)."""

    chosen: int
    """Tokens that a query attends to, at most."""
    heads: int
    """Of its queries; its keys have one head."""
    dim: int
    """Of a query and of a key; the first `LatentShape.rope` numbers are rotated."""
    interleaved: bool
    """See `LatentShape`."""
    shared: tuple[int, ...] = ()
    """Layers without one, which attend to the tokens that the layer before them attends to."""


class LayerNorms(NamedTuple):
    """What checkpoints call the norms of a layer with attention; "": there is none."""

    mixer: str = "input_layernorm"
    """Of what goes into attention."""
    mlp: str = "post_attention_layernorm"
    mixer_out: str = ""
    """Of what attention gives; then of what the MLP gives as well."""
    mlp_out: str = ""

    @property
    def names(self) -> list[str]:
        """Of those that there are."""
        return [name for name in self if name]


class LayerParts(NamedTuple):
    """What the names of a layer's parts begin with in its checkpoint; "": there is no such part."""

    norm: str
    """Of the norm of what goes into the mixer; `mlp_norm`: into the MLP."""
    attention: str
    recurrent: str
    """With attention as well, both take the same input, and what they give is added."""
    mlp_norm: str = ""
    mlp: str = ""


class Multipliers(NamedTuple):
    """Factors inside the layers of a model whose widths were chosen by muP (arXiv 2203.03466)."""

    attention_in: float
    """On what goes into attention; `recurrent_in`: into the recurrent layer."""
    key: float
    attention_out: float
    recurrent_in: float
    projected: tuple[float, float, float, float, float]
    """On the parts of Mamba-2's first projection: z, x, B, C, dt."""
    recurrent_out: float
    gate: float
    """On what SiLU takes in the MLP."""
    down: float


class FullHeads(NamedTuple):
    """Heads of the layers with full attention, where windowed layers have others."""

    kv_heads: int
    head_dim: int
    keys_as_values: bool
    """Values are what the projection of keys gives, before its norm and rotation."""


class TokenInputs(NamedTuple):
    """Per-layer embeddings: what each token gives every layer by itself, of its id in a table and
    of its embedding by a projection."""

    vocab: int
    """Rows of the table."""
    size: int
    """Width for each layer."""


class AltUpShape(NamedTuple):
    """Hidden states in several streams, of which each layer transforms one and corrects all
    (alternating updates, arXiv 2301.13310)."""

    streams: int
    active: int
    """The one that layers transform."""
    scaled: bool
    """What it becomes is scaled before it takes a token's own input."""
    rank: int
    """Of the low-rank product beside attention (LAuReL, arXiv 2411.07501)."""
    sparsity: tuple[float, ...]
    """Of each layer, the share of its MLP's gates that are cut off, by mean and deviation of
    each token's."""


class LayerGroup(NamedTuple):
    """The layers of one attention window that have keys and values: they share a page pool and a
    page table."""

    window: int
    """Tokens a query sees, itself included; 0 = all."""
    layers: tuple[int, ...]
