"""Sampling, the torch reference: per row, on the tensors' device, without a host synchronisation.

The order is that of transformers' processors and warpers: repetition penalty, presence and
frequency penalties, logit bias, held-back end tokens, temperature, top_k, top_p, min_p; then one
uniform number a row goes through the inverse distribution function in token-id order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actorium.kernels.reference.philox import uniform
from actorium.kernels.sampling_tables import (
    COUNT_ROW,
    FREQUENCY,
    MIN_LEN,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RowLayout,
    SamplingTables,
)

PROMPT_BIT = 1 << 30
"""In a count table: the token occurs in the prompt. The lower bits count it in the output."""
_COUNT = PROMPT_BIT - 1


def penalise(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor,
             frequency: Tensor) -> None:
    """Applies the three penalties in place.

    logits: f32[R, V]; counts: i32[R, V] with `PROMPT_BIT`; the penalties: f32[R]. Repetition
    (Keskar et al. 2019, CTRL) looks at prompt and output, the others at the output alone.
    """
    rep = torch.where(counts != 0, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / rep, logits * rep))
    out = counts & _COUNT
    logits -= frequency[:, None] * out
    logits -= presence[:, None] * (out > 0)


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values f32[R, B] to the tokens ids i64[R, B], in place; padding adds 0 to token 0."""
    logits.scatter_add_(1, ids, values)


def hold_back(logits: Tensor, ids: Tensor, active: Tensor) -> None:
    """Makes the tokens ids i64[R, E] (-1 = none) impossible in rows where active bool[R]."""
    held = active[:, None] & (ids >= 0)
    value = torch.where(held, float("-inf"), 0.0).to(logits.dtype)
    logits.scatter_add_(1, ids.clamp(min=0), value)


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
             min_p: Tensor) -> Tensor:
    """Temperature and the three truncations.

    logits: f32[R, V]; temperature f32[R] > 0; top_k i64[R] (0 = all); top_p, min_p f32[R].
    Returns f32[R, V]: logits / temperature, -inf where a token is out. Tokens tied with the last
    one kept are kept. The likeliest token always stays.
    """
    scaled = logits / temperature[:, None]
    ordered, _ = scaled.sort(dim=-1, descending=True)
    return scaled.masked_fill_(scaled < _threshold(ordered, top_k, top_p, min_p), float("-inf"))


def _threshold(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """f32[R, 1]: the least logit kept, given the logits from high to low."""
    vocab = ordered.shape[1]
    last = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)[:, None] - 1
    threshold = ordered.gather(1, last)
    weights = (ordered - ordered[:, :1]).double().exp_()
    weights.masked_fill_(ordered < threshold, 0.0)
    sums = weights.cumsum(dim=-1)
    outside = (sums - weights) >= top_p[:, None].double() * sums[:, -1:]
    outside &= top_p[:, None] < 1
    outside |= weights < min_p[:, None]
    outside[:, 0] = False
    outside |= ordered < threshold
    return torch.where(outside, float("inf"), ordered).amin(dim=-1, keepdim=True)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token a row from softmax(logits), by inverse distribution function in token-id order.

    logits: f32[R, V], -inf = impossible; uniform: f64[R] in [0, 1). Returns i64[R].
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_().double()
    sums = weights.cumsum_(dim=-1)
    target = uniform[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


# --- rows as they lie in the tables ---------------------------------------------------------------

def adjust(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables,
           layout: RowLayout, penalises: bool, biases: bool, holds: bool) -> None:
    """Applies penalties, bias and held-back end tokens, in place, to the rows whose slots ask for
    them.

    logits: f32[R, V]; slots: i32[R]; positions: i32[R], index of the token that each row samples.
    The row at place i of a window is penalised as if i drafts were output. penalises, biases,
    holds: False skips what no row wants.
    """
    record = tables.record[slots]
    real = record.view(torch.float32)
    if penalises and tables.counts is not None:
        own = record[:, COUNT_ROW] > 0
        counts = tables.counts[record[:, COUNT_ROW]]
        _count_drafts(counts, tables.drafts[slots], layout)
        penalise(logits, counts, torch.where(own, real[:, REPETITION], 1.0),
                 torch.where(own, real[:, PRESENCE], 0.0),
                 torch.where(own, real[:, FREQUENCY], 0.0))
    if biases and tables.bias_ids is not None and tables.bias_values is not None:
        add_bias(logits, tables.bias_ids[slots].long(),
                 tables.bias_values[slots].view(torch.float32))
    if holds:
        hold_back(logits, tables.eos[slots].long(), positions < record[:, MIN_LEN])


def _count_drafts(counts: Tensor, drafts: Tensor, layout: RowLayout) -> None:
    """Count the drafts i64[R, most] before each row in counts i32[R, V]."""
    windows = counts[layout.single:].unflatten(0, (-1, layout.q_len))
    own = drafts[layout.single:].unflatten(0, (-1, layout.q_len))
    for i in range(1, layout.q_len if len(windows) else 1):
        behind, draft = windows[:, i:], own[:, i:, i - 1:i]
        behind.scatter_add_(2, draft, torch.ones_like(draft, dtype=counts.dtype))


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Make all tokens of some rows impossible whose bit is not set, in place.

    logits: f32[R, V]; rows: i32[n], distinct; words: i32[n, ceil(V / 32)], low bits first.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    barred = (words[:, token // 32] >> (token % 32)) & 1 == 0
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(barred, float("-inf"))


def choose(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, samples: bool,
           truncates: bool) -> Tensor:
    """Returns one token per row, i64[R]: drawn with its slot's seed and parameters at its position,
    or the likeliest where temperature is 0.

    logits: f32[R, V]; slots, positions: i32[R]. samples, truncates: whether any row does.
    """
    greedy = logits.argmax(dim=1)
    if not samples:
        return greedy
    record = tables.record[slots]
    real = record.view(torch.float32)
    u = uniform(record[:, SEED_LOW].long(), record[:, SEED_HIGH].long(), positions.long())
    drawn = real[:, TEMPERATURE] > 0
    temperature = torch.where(drawn, real[:, TEMPERATURE], 1.0)
    if truncates:
        shaped = truncate(logits, temperature, record[:, TOP_K].long(), real[:, TOP_P],
                          real[:, MIN_P])
    else:
        shaped = logits / temperature[:, None]
    return torch.where(drawn, draw(shaped, u), greedy)
