"""Drafts from a sequence's own text, on a device, in two launches: see
`kernels.reference.text_drafts`. Programs of the first each look through a block of one sequence's
text; the second reads what they found, and follows on it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.reference.text_drafts import PLACES, TextRules

BLOCK, PARTS = 1024, 64
"""Tokens that a program looks through at least, and blocks of a text at most."""


@triton.jit(do_not_specialize=["longest"], do_not_specialize_on_alignment=["slots"])
def _matches(history: tensor, width: tensor, lens: tensor, slots: tensor, keys: tensor,
             longest: tensor, PLACES: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """keys: i64[n, parts, PLACES], of each block's longest matches the latest ones first: the
    length, then in 32 bits the index of the token behind; 0 where there are no more."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    last = tl.load(lens + slot) - 1
    if part * BLOCK < last:
        text = history + slot * width
        at = part * BLOCK + tl.arange(0, BLOCK)
        alive = at < last
        length = tl.zeros((BLOCK,), tl.int32)
        k, going = 0, 1
        while going > 0:
            # Where some are alive, the text's end has a k-th token.
            alive = alive & (at >= k)
            wanted = tl.load(text + last - k)
            alive = alive & (tl.load(text + at - k, mask=alive, other=0) == wanted)
            length += alive.to(tl.int32)
            k += 1
            going = tl.where(k < longest, tl.max(alive.to(tl.int32), 0), 0)
        most = tl.max(length, 0)
        found = (length == most) & (length > 0)
        number = tl.cumsum(found.to(tl.int32), 0, reverse=True) - 1
        own = keys + (row.to(tl.int64) * tl.num_programs(1) + part) * PLACES
        key = (length.to(tl.int64) << 32) | (at + 1)
        tl.store(own + number, key, mask=found & (number < PLACES))
        place = tl.arange(0, PLACES)
        tl.store(own + place, place.to(tl.int64) * 0, mask=place >= tl.sum(found.to(tl.int32), 0))


@triton.jit(do_not_specialize=["parts", "shortest", "per_match", "share", "count"],
            do_not_specialize_on_alignment=["slots"])
def _follow(history: tensor, width: tensor, lens: tensor, slots: tensor, keys: tensor,
            parts: tensor, drafts: tensor, most: tensor, count: tensor, shortest: tensor,
            per_match: tensor, share: tensor, PLACES: tl.constexpr, BLOCK: tl.constexpr,
            PARTS: tl.constexpr, MOST: tl.constexpr) -> None:
    """drafts: i64[slots, most], of which `count` are written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    n = tl.load(lens + slot)
    text = history + slot * width
    each = tl.arange(0, PARTS * PLACES)
    key = tl.load(keys + row * parts * PLACES + each,
                  mask=each < (n - 1 + BLOCK - 1) // BLOCK * PLACES, other=0)
    number, place = tl.arange(0, PLACES), tl.zeros((PLACES,), tl.int32)
    top = tl.max(key, 0)
    matched, found = (top >> 32).to(tl.int32), tl.full((), 0, tl.int32)
    while (found < PLACES) & ((top >> 32) == tl.maximum(matched, shortest)):  # the latest first
        place = tl.where(number == found, top.to(tl.int32), place)
        key = tl.where(key == top, 0, key)
        top = tl.max(key, 0)
        found += 1
    alive, step = number < found, tl.arange(0, MOST)
    fewest = share * tl.sum(alive.to(tl.float32), 0)
    limit = per_match * matched.to(tl.float32)
    out = tl.zeros((MOST,), tl.int32)
    made, going = 0, tl.max(alive.to(tl.int32), 0)
    while going > 0:
        at = place + made
        token = tl.load(text + at, mask=alive & (at < n), other=0)
        # Behind the text lies what was drafted already.
        token += tl.sum(tl.where((at - n)[:, None] == step[None, :], out[None, :], 0), 1)
        same = (token[:, None] == token[None, :]) & alive[None, :]
        votes = tl.where(alive, tl.sum(same.to(tl.int32), 1), 0)
        highest = tl.max(votes, 0)
        first = tl.min(tl.where(votes == highest, number, PLACES), 0)
        chosen = tl.sum(tl.where(number == first, token, 0), 0)
        agreed = tl.where(highest.to(tl.float32) >= fewest, 1, 0)
        out = tl.where(step == tl.where(agreed > 0, made, -1), chosen, out)
        alive = alive & (token == chosen)
        made += 1
        going = tl.where(made < count, tl.where(made < limit, agreed, 0), 0)
    tl.store(drafts + slot * most + step, out.to(tl.int64), mask=step < count)


def text_drafts(history: Tensor, lens: Tensor, slots: Tensor, bound: int, rules: TextRules,
                drafts: Tensor, count: int) -> None:
    """Writes `count` guesses of what follows on each of these slots' text to `drafts`, 0 behind the
    last of each.

    history: i32[slots, L]; lens: i32[slots], at most `bound` of them tokens; slots: i32[n]; drafts:
    i64[slots, most].
    """
    places, width = PLACES if rules.votes else 1, history.shape[1]
    block = max(BLOCK, triton.next_power_of_2(triton.cdiv(width, PARTS)))
    n, parts = len(slots), triton.cdiv(bound, block)
    keys = torch.empty(n, parts, places, dtype=torch.int64, device=history.device)
    _matches[(n, parts)](history, width, lens, slots, keys, rules.longest, PLACES=places,
                         BLOCK=block, num_warps=min(16, block // 256))
    _follow[(n,)](history, width, lens, slots, keys, parts, drafts, drafts.shape[1], count,
                  rules.shortest, rules.per_match, rules.share, PLACES=places, BLOCK=block,
                  PARTS=triton.next_power_of_2(triton.cdiv(width, block)),
                  MOST=triton.next_power_of_2(drafts.shape[1]), num_warps=4)
