"""Temperature, truncation and the draw on a CPU, in numpy: twin of `sampling.truncate` + `draw`.

numpy's vectorised partition and exp are several times faster here than torch's sort, and its calls
cost a microsecond instead of five. Rows are taken in blocks that stay in the cache. A full sort
runs only for rows whose kept set is larger than the first guess.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

BLOCK = 1 << 18
"""Elements of the rows treated together."""
GUESS = 256
"""Candidates looked at first when only top_p says where to cut."""
_CHUNK = 256
"""Tokens summed together in the first level of the search."""


def sample(logits: F32, temperature: F32, top_k: NDArray[np.int32], top_p: F32, min_p: F32,
           uniform: F64) -> I64:
    """One token a row: i64[R].

    logits: f32[R, V]; temperature f32[R] > 0; top_k i32[R] (0 = all); top_p, min_p f32[R];
    uniform f64[R] in [0, 1).
    """
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
    last = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k).astype(np.int64)
    limited = last < vocab
    guess = min(vocab, max(GUESS, int(last[limited].max(initial=0)) + 1))
    top = scaled.max(axis=1)
    total = np.zeros(len(last))
    need = ~limited & (top_p < 1)
    if need.any():
        total[need] = np.exp(scaled[need] - top[need, None]).sum(axis=1, dtype=np.float64)
    ordered = np.partition(scaled, vocab - guess, axis=1)[:, vocab - guess:]
    ordered = np.sort(ordered, axis=1)[:, ::-1]
    least, sure = _cut(ordered, np.minimum(last, guess), limited, top_p, min_p, total)
    if guess < vocab and not sure.all():
        again = np.flatnonzero(~sure)
        ordered = np.sort(scaled[again], axis=1)[:, ::-1]
        least[again], _ = _cut(ordered, last[again], limited[again], top_p[again], min_p[again],
                               total[again])
    return least


def _cut(ordered: F32, last: I64, limited: NDArray[np.bool_], top_p: F32, min_p: F32,
         total: F64) -> tuple[F32, NDArray[np.bool_]]:
    """Thresholds from the highest logits, f32[R, K] falling, and whether K were enough."""
    rows = np.arange(len(last))
    kth = ordered[rows, last - 1]
    weights = np.exp(ordered - ordered[:, :1], dtype=np.float64)
    weights[ordered < kth[:, None]] = 0
    sums = weights.cumsum(axis=1)
    mass = np.where(limited | (total == 0), sums[:, -1], total)
    outside = (sums - weights >= top_p[:, None] * mass[:, None]) & (top_p < 1)[:, None]
    outside |= (weights < min_p[:, None]) | (ordered < kth[:, None])
    outside[:, 0] = False
    kept = ordered.shape[1] - outside.sum(axis=1)
    least = ordered[rows, kept - 1]
    sure = ordered[:, -1] < least
    return least, sure


def _draw_kept(scaled: F32, least: F32, uniform: F64) -> I64:
    """Draw among tokens at or above the threshold: they come in token-id order from nonzero."""
    rows = len(least)
    flat = np.flatnonzero(scaled >= least[:, None])
    row, ids = np.divmod(flat, scaled.shape[1])
    starts = np.searchsorted(row, np.arange(rows + 1))
    values = scaled.reshape(-1)[flat]
    weights = np.exp(values - scaled.max(axis=1)[row], dtype=np.float64)
    sums = weights.cumsum()
    before = np.concatenate(([0.0], sums))[starts]
    target = before[:-1] + uniform * (before[1:] - before[:-1])
    at = np.searchsorted(sums, target, side="right")
    return ids[np.clip(at, starts[:-1], starts[1:] - 1)]


def _draw_all(logits: F32, temperature: F32, uniform: F64) -> I64:
    """Draw from the whole softmax: first among chunks of tokens, then within the chunk."""
    rows, vocab = logits.shape
    chunks = -(-vocab // _CHUNK)
    weights = np.zeros((rows, chunks * _CHUNK), np.float32)
    inner = weights[:, :vocab]
    np.subtract(logits, logits.max(axis=1, keepdims=True), out=inner)
    np.divide(inner, temperature[:, None], out=inner)
    np.exp(inner, out=inner)
    by_chunk = weights.reshape(rows, chunks, _CHUNK)
    sums = by_chunk.sum(axis=2, dtype=np.float64).cumsum(axis=1)
    target = uniform * sums[:, -1]
    chunk = (sums <= target[:, None]).sum(axis=1)
    index = np.arange(rows)
    rest = target - np.where(chunk > 0, sums[index, chunk - 1], 0.0)
    picked = by_chunk[index, chunk].astype(np.float64)
    inside = picked.cumsum(axis=1)
    rest = np.minimum(rest, np.nextafter(inside[:, -1], 0))
    return chunk * _CHUNK + (inside <= rest[:, None]).sum(axis=1)
