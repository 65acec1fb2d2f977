"""Temperature, truncation and the draw on a CPU: twin of `sampling.truncate` + `draw`.

In C where that can be had (`sampling.c`), which with 32 rows of 49,152 tokens takes a tenth of
numpy's time, on all threads; else in numpy, whose vectorised partition and exp are many times
faster here than torch's sort, and whose calls cost a microsecond instead of five. There rows are
taken in blocks that stay in the cache, and only the likeliest tokens are put in order: a few at
first, more for rows whose kept set is larger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference.sampling import PROMPT_BIT

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

BLOCK = 1 << 18
"""Elements of the rows treated together."""
FAR = np.float32(1e38)
"""Below minus this there is nothing that could be sampled."""
GUESS = 256
"""Candidates put in order at first; then 16 times as many, ..."""
_CHUNK = 256
"""Tokens summed together in the first level of the search."""


def penalise(logits: F32, counts: NDArray[np.int32], repetition: F32, presence: F32,
             frequency: F32) -> None:
    """`sampling.penalise`, in place, touching only tokens that occur. Rows may lie apart, as where
    ranks' shares were gathered and padding cut off."""
    flat = np.flatnonzero(counts != 0)  # of booleans it is seven times as fast as of integers
    row, token = np.divmod(flat, counts.shape[1])
    values, out = logits[row, token], counts.reshape(-1)[flat] & (PROMPT_BIT - 1)
    rep = repetition[row]
    values = np.where(values > 0, values / rep, values * rep)
    logits[row, token] = values - frequency[row] * out - presence[row] * (out > 0)


def likeliest(logits: F32) -> I64:
    """The likeliest token of each row, the first of several: i64[R]. logits: f32[R, V]."""
    rows, vocab = logits.shape
    lib = library()
    if lib is None or not logits.flags.c_contiguous:
        return logits.argmax(axis=1)
    out = np.empty(rows, np.int64)
    lib.sample_rows(_at(logits), rows, vocab, None, None, None, None, None, _at(out), None,
                    torch.get_num_threads())
    return out


def sample(logits: F32, temperature: F32, top_k: NDArray[np.int32], top_p: F32, min_p: F32,
           uniform: F64) -> I64:
    """One token a row: i64[R].

    logits: f32[R, V]; temperature f32[R] > 0; top_k i32[R] (0 = all); top_p, min_p f32[R];
    uniform f64[R] in [0, 1).
    """
    lib = library()
    if lib is None:
        return sample_by_numpy(logits, temperature, top_k, top_p, min_p, uniform)
    (rows, vocab), threads = logits.shape, torch.get_num_threads()
    out, scratch = np.empty(rows, np.int64), np.empty(3 * threads * vocab, np.float32)
    held = [np.ascontiguousarray(own) for own in (logits, temperature, top_k, top_p, min_p,
                                                  uniform)]
    lib.sample_rows(_at(held[0]), rows, vocab, *map(_at, held[1:]), _at(out), _at(scratch), threads)
    return out


def _at(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def sample_by_numpy(logits: F32, temperature: F32, top_k: NDArray[np.int32], top_p: F32,
                    min_p: F32, uniform: F64) -> I64:
    """`sample` where there is no C."""
    rows, vocab = logits.shape
    out = np.empty(rows, np.int64)
    cuts = (top_k > 0) & (top_k < vocab) | (top_p < 1) | (min_p > 0)
    step = max(1, BLOCK // vocab)
    for wanted, cut in ((np.flatnonzero(~cuts), False), (np.flatnonzero(cuts), True)):
        for at in range(0, len(wanted), step):
            pick = wanted[at:at + step]
            block = logits if len(pick) == rows else logits[pick]
            t, u = temperature[pick], uniform[pick]
            if cut:
                scaled = block / t[:, None]
                least = threshold(scaled, top_k[pick], top_p[pick], min_p[pick])
                out[pick] = _draw_kept(scaled, least, u)
            else:
                out[pick] = _draw_all(block, t, u)
    return out


def threshold(scaled: F32, top_k: NDArray[np.int32], top_p: F32, min_p: F32) -> F32:
    """f32[R]: the least scaled logit that is kept in each row of f32[R, V]."""
    vocab = scaled.shape[1]
    top = scaled.max(axis=1)
    least = np.full_like(top, -np.inf)
    last = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k).astype(np.int64)
    rows = np.flatnonzero((last < vocab) | (top_p < 1))
    mass = np.full(len(top), np.nan)
    free = np.flatnonzero((last == vocab) & (top_p < 1))
    if len(free):
        mass[free] = np.exp(scaled[free] - top[free, None]).sum(axis=1, dtype=np.float64)
    scaled = _apart(scaled)
    guess = GUESS
    while len(rows):
        limits = last[rows]
        guess = min(vocab, max(guess, int(limits[limits < vocab].max(initial=0)) + 1))
        block = scaled if len(rows) == len(top) else scaled[rows]
        ordered = np.sort(np.partition(block, vocab - guess, axis=1)[:, vocab - guess:], axis=1)
        found = _cut(ordered[:, ::-1], np.minimum(limits, guess), top_p[rows], mass[rows])
        least[rows] = found
        # Had the lowest candidate been kept, there could be more below it.
        rows = rows[found <= ordered[:, 0]] if guess < vocab else rows[:0]
        guess *= 16
    with np.errstate(divide="ignore"):
        return np.maximum(least, top + np.log(min_p))


def _apart(scaled: F32) -> F32:
    """The same, its infinitely unlikely tokens in some order below all others: a partition takes
    ten times as long where most values are equal, as they are behind a mask."""
    vocab = scaled.shape[1]
    return np.maximum(scaled, np.arange(-2 * vocab, -vocab, dtype=np.float32) * (FAR / vocab))


def _cut(ordered: F32, last: I64, top_p: F32, mass: F64) -> F32:
    """Where top_k and top_p cut, from the K highest logits f32[R, K], falling.

    last: i64[R], the rank that top_k keeps, at most K; mass: f64[R], sum of the exponentials over
    the whole row, or NaN where top_p looks only at what top_k keeps.
    """
    rows = np.arange(len(last))
    kth = ordered[rows, last - 1]
    weights = np.exp(ordered - ordered[:, :1], dtype=np.float64)
    weights[ordered < kth[:, None]] = 0
    sums = weights.cumsum(axis=1)
    mass = np.where(np.isnan(mass), sums[:, -1], mass)
    outside = (sums - weights >= top_p[:, None] * mass[:, None]) & (top_p < 1)[:, None]
    outside |= ordered < kth[:, None]
    outside[:, 0] = False
    return ordered[rows, ordered.shape[1] - outside.sum(axis=1) - 1]


def _draw_kept(scaled: F32, least: F32, uniform: F64) -> I64:
    """Draw among tokens at or above the threshold: they come in token-id order from nonzero.

    A row without any (its logits are NaN) gets some token, and disturbs no other row.
    """
    rows = len(least)
    flat = np.flatnonzero(scaled >= least[:, None])
    row, ids = np.divmod(flat, scaled.shape[1])
    starts = np.searchsorted(row, np.arange(rows + 1))
    values = scaled.reshape(-1)[flat]
    weights = np.exp(values - scaled.max(axis=1)[row], dtype=np.float64)
    sums = weights.cumsum()
    before = np.concatenate(([0.0], sums))[starts]
    target = before[:-1] + uniform * (before[1:] - before[:-1])
    target = np.minimum(target, np.nextafter(before[1:], 0))
    at = np.searchsorted(sums, target, side="right")
    at = np.clip(at, starts[:-1], np.maximum(starts[1:] - 1, starts[:-1]))
    return np.append(ids, 0)[at]


def _draw_all(logits: F32, temperature: F32, uniform: F64) -> I64:
    """Draw from the whole softmax: first among chunks of tokens, then within the chunk."""
    rows, vocab = logits.shape
    chunks = -(-vocab // _CHUNK)
    weights = np.empty((rows, chunks * _CHUNK), np.float32)
    weights[:, vocab:] = 0
    inner = weights[:, :vocab]
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=inner)
    if (temperature != 1).any():
        np.divide(inner, temperature[:, None], out=inner)
    np.exp(inner, out=inner)
    by_chunk = weights.reshape(rows, chunks, _CHUNK)
    sums = by_chunk.sum(axis=2).cumsum(axis=1, dtype=np.float64)
    target = uniform * sums[:, -1]
    chunk = (sums <= target[:, None]).sum(axis=1)
    index = np.arange(rows)
    rest = target - np.where(chunk > 0, sums[index, chunk - 1], 0.0)
    picked = by_chunk[index, chunk].astype(np.float64)
    inside = picked.cumsum(axis=1)
    rest = np.minimum(rest, np.nextafter(inside[:, -1], 0))
    return chunk * _CHUNK + (inside <= rest[:, None]).sum(axis=1)
