"""Where the training of the demo model begins: with a rough form of copying.

Saying again what stood before is what most tasks wait for, and what a small model finds last: of
all pairs of tokens it has to learn which are equal. From random weights, 300 steps taught it
nothing of that. So it begins with an induction head (Olsson et al., 2022, arXiv 2209.11895):

- The first recurrent layer that an attention layer follows tells each token of the one before it,
  turned into other directions of the hidden state.
- That attention layer looks for tokens that were told of what its own token is.
- All attention layers hand on what they look at, as those of trained models nearly do (Trockman and
  Kolter, 2023, arXiv 2305.09828).

Gates, activations and rotation blur all of that: of tokens said again it guesses one in seven, of
1,920 that there are, and training sharpens it from the first step on.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from actorium.tools.train_demo_delta import DemoGatedDelta
from actorium.tools.train_demo_model import DemoAttention, DemoModel

_HANDED_ON = 1.0
"""How much an attention layer adds of what it looks at, which has unit elements."""
_TOLD = 0.07
"""The same for the token before."""
_SHARPNESS = 3.0
"""Of attention: scale of normed queries and of normed keys."""


@torch.no_grad()
def begin_copying(model: DemoModel) -> None:
    """Sets weights of a new model."""
    mixers = [layer.mixer for layer in model.model.layers]  # type: ignore[union-attr]
    for mixer in mixers:
        if isinstance(mixer, DemoAttention):
            _hand_on(mixer)
    for before, behind in pairwise(mixers):
        if isinstance(before, DemoGatedDelta) and isinstance(behind, DemoAttention):
            turn = _orthogonal(model.shape.hidden, model.shape.hidden)
            _tell_of_the_token_before(before, turn)
            _look_for_it(behind, turn)
            break


def _hand_on(attention: DemoAttention) -> None:
    """Output is the transpose of values, for every head of a group."""
    s = attention.s
    values = _orthogonal(s.kv_heads * s.head_dim, s.hidden)
    attention.v_proj.weight.copy_(values)
    heads = values.view(s.kv_heads, s.head_dim, s.hidden).repeat_interleave(
        s.heads // s.kv_heads, 0)
    attention.o_proj.weight.copy_(_HANDED_ON * heads.flatten(0, 1).t())


def _tell_of_the_token_before(delta: DemoGatedDelta, turn: Tensor) -> None:
    """Values are the token before; a query is its own token's key, and finds that value."""
    keys, now = delta.keys * delta.key_dim, delta.conv1d.weight.shape[-1] - 1
    values = _orthogonal(delta.out_proj.in_features, delta.out_proj.out_features)
    q, k, v = delta.in_proj_qkv.weight.split((keys, keys, len(values)))
    k.copy_(q)
    v.copy_(values)
    taps = delta.conv1d.weight[:, 0]
    nn.init.normal_(taps, std=0.05)
    taps[: 2 * keys, now] += 1
    taps[2 * keys :, now - 1] += 1
    delta.in_proj_z.weight.mul_(2)  # a gate's mean over its spread grows with it
    delta.out_proj.weight.copy_(_TOLD * turn @ values.t())


def _look_for_it(attention: DemoAttention, turn: Tensor) -> None:
    """A query is its own token, a key the one before it."""
    s = attention.s
    seen = _orthogonal(s.kv_heads * s.head_dim, s.hidden)
    attention.k_proj.weight.copy_(seen @ turn.t())
    queries = attention.q_proj.weight.view(s.kv_heads, -1, 2, s.head_dim, s.hidden)
    queries[:, :, 0] = seen.view(s.kv_heads, 1, s.head_dim, s.hidden)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(_SHARPNESS - 1)


def _orthogonal(rows: int, columns: int) -> Tensor:
    """[rows, columns]: its rows, or else its columns, are orthonormal."""
    return nn.init.orthogonal_(torch.empty(rows, columns))
