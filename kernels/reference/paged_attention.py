"""Attention over paged keys and values, in torch.

One layer's pages are [pages * page_size, 2 * kv_heads, head_dim], keys first. Reads are by token
indices (page * page_size + offset), so the kernels do not depend on the page size. Query heads
share key heads in groups (grouped-query attention, arXiv 2305.13245). Over pages in INT8 all is
fp32 until the result is rounded: codes times scales have more digits than bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.reference.attention_blocks import BYTES, READ, attend_blocks
from actorium.kernels.reference.kv import key_and_value_scales, read_rows, scaled_heads


class ExtendChunk(Protocol):
    """Tokens start..start + count of one sequence, and its page table (i32)."""

    start: int
    count: int
    pages: Tensor


class Attend(Protocol):
    """Attention of some rows of a step, made once and called for every layer: (q [N, H, D], the
    layer's pages, which include the step's own keys and values) -> [N, H, D], in `out` if given.
    scales: of the pages, see `kv.write_kv`. sinks: f32[H], a score of each head that no value goes
    with: the layer's attention sinks; None, and always of a backend that has none: no sinks."""

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor: ...


def token_index(pages: Tensor, lens: Tensor, page_size: int, span: int, begin: int = 0) -> Tensor:
    """Returns i64[B, span - begin]: the indices of each row's tokens begin..span; places beyond a
    row's length repeat its token 0, so that what is masked later is still the row's own (NaN from
    another sequence would survive the mask).

    pages: i32[B, P] with P * page_size >= span; lens: i32[B], >= 1.
    """
    place = torch.arange(begin, span, device=pages.device)
    index = pages[:, place // page_size].long() * page_size + place % page_size
    return torch.where(place < lens[:, None], index, pages[:, :1].long() * page_size)


def seen_pages(
    pages: Tensor, lens: Tensor, page_size: int, seen: int, step: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns page tables and lengths that begin with the page of each row's `seen`-th last token,
    or before it, at a multiple of `step` tokens, a power of two.

    Pages behind a window may belong to other sequences and need not be read. pages: i32[B, P];
    lens: i32[B] -> i32[B, W], i32[B]; a row's tokens up to its length lie within the W pages.
    """
    several = max(1, step // page_size)
    first = (lens - seen).clamp(min=0) // (several * page_size) * several
    width = min(pages.shape[1], -(-(seen - 1) // page_size) + several)
    place = first[:, None] + torch.arange(width, device=pages.device)
    return pages.gather(1, place.clamp(max=pages.shape[1] - 1)), lens - first * page_size


def decode_mask(lens: Tensor, q_len: int, span: int, window: int) -> Tensor:
    """Returns bool[B, 1, q_len, span]: what each of a row's last q_len tokens sees.

    lens: i32[B], including those tokens; window: tokens seen at most, 0 = all.
    """
    place = torch.arange(span, device=lens.device)
    query = lens[:, None] - q_len + torch.arange(q_len, device=lens.device)
    seen = place <= query[..., None]
    if window:
        seen &= place > query[..., None] - window
    return seen[:, None]


def extend_mask(start: int, count: int, window: int, device: torch.device) -> Tensor:
    """Returns bool[count, start + count]: what tokens start..start+count see of everything up to
    them."""
    query = torch.arange(start, start + count, device=device)[:, None]
    place = torch.arange(start + count, device=device)
    seen = place <= query
    if window:
        seen &= place > query - window
    return seen


def split_kv(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, 2 * KVH, D] -> keys and values, both [B, KVH, S, D] (views)."""
    keys, values = kv.transpose(1, 2).chunk(2, dim=1)
    return keys, values


def paged_decode(q: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of B sequences.

    q: [B, Q, H, D]; kv: what was read of the pages, [B, S, 2 * kv_heads, D]; mask: bool[B, 1, Q, S]
    -> [B, Q, H, D].
    """
    keys, values = split_kv(kv)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def causal_extend(q: Tensor, kv: Tensor, scale: float) -> Tensor:
    """Attention of B whole prompts of one length.

    q: [B, N, H, D]; kv: [B, N, 2 * kv_heads, D] -> [B, N, H, D].
    """
    keys, values = split_kv(kv)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


Masked = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""The type of `paged_decode` and its counterpart for latents."""
Causal = Callable[[Tensor, Tensor, float], Tensor]
"""The type of `causal_extend` and its counterpart for latents."""


def torch_decode(
    pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int, scale: float,
    masked: Masked = paged_decode, soft_cap: float = 0.0, slopes: Tensor | None = None,
) -> Attend:
    """Attends with the last q_len tokens of B sequences, each to those up to itself.

    pages: i32[B, P]; lens: i32[B], including the q_len new tokens; span >= max(lens); soft_cap,
    slopes: see `attend_blocks`, which torch's attention has nothing for.
    """
    if q_len > 1:
        # Separate rows, which read nothing behind themselves: a draft may lie where the table
        # names no page of the sequence's, and 0 times another sequence's NaN is NaN.
        pages = pages.repeat_interleave(q_len, 0)
        places = torch.arange(1 - q_len, 1, device=lens.device, dtype=lens.dtype)
        lens = (lens[:, None] + places).flatten().clamp(min=1)  # padding rows may be shorter
    if window:
        pages, lens = seen_pages(pages, lens, page_size, window)
        span = min(span, pages.shape[1] * page_size)
    seen = _Seen(pages, lens, page_size, span, window, scale, soft_cap, slopes)
    if seen.by_blocks or not keeps_scores(pages.device):
        return seen.attend(None)
    mask = cache(partial(decode_mask, lens, 1, span, window))
    return seen.attend(lambda q, kv, at: masked(q.unsqueeze(1), kv, mask()[at], scale))


def torch_extend(
    rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
    masked: Masked = paged_decode, causal: Causal = causal_extend, soft_cap: float = 0.0,
    slopes: Tensor | None = None,
) -> Attend:
    """Attends with chunks of several sequences: whole prompts of one length in one call, others
    singly. soft_cap, slopes: see `torch_decode`."""
    parts: list[tuple[int, Attend]] = []
    at = 0
    while at < len(rows):
        same, row = 1, rows[at]
        if _whole(row, window):
            while (at + same < len(rows) and rows[at + same].count == row.count
                   and _whole(rows[at + same], window)):
                same += 1
            parts.append((same * row.count, _prompts(rows[at:at + same], page_size, scale, causal,
                                                        soft_cap, slopes)))
        else:
            parts.append((row.count, _prefixed(row, page_size, window, scale, masked,
                                                soft_cap, slopes)))
        at += same
    if len(parts) == 1:
        return parts[0][1]

    def run(q: Tensor, layer: Tensor, out: Tensor | None = None, scales: Tensor | None = None,
            sinks: Tensor | None = None) -> Tensor:
        pieces = q.split([size for size, _ in parts])
        done = [part(piece, layer, None, scales, sinks)
                for (_, part), piece in zip(parts, pieces, strict=True)]
        return torch.cat(done, out=out)

    return run


def _whole(row: ExtendChunk, window: int) -> bool:
    """True for a prompt from its start that no window cuts."""
    return row.start == 0 and not 0 < window < row.count


def _prompts(rows: Sequence[ExtendChunk], page_size: int, scale: float, causal: Causal,
             soft_cap: float, slopes: Tensor | None) -> Attend:
    count = rows[0].count
    pages = torch.stack([row.pages[:-(-count // page_size)] for row in rows])
    lens = torch.full((len(rows),), count, device=pages.device, dtype=torch.int32)
    seen = _Seen(pages, lens, page_size, count, 0, scale, soft_cap, slopes)
    return seen.attend(
        None if seen.by_blocks else
        lambda q, kv, _: causal(q.view(-1, count, *q.shape[1:]), kv, scale))


def _prefixed(
    row: ExtendChunk, page_size: int, window: int, scale: float, masked: Masked,
    soft_cap: float, slopes: Tensor | None,
) -> Attend:
    behind = max(0, row.start - window + 1) // page_size if window else 0
    start, pages = row.start - behind * page_size, row.pages[behind:]
    length, device = start + row.count, row.pages.device
    lens = torch.full((1,), length, device=device, dtype=torch.int32)
    seen = _Seen(pages[None], lens, page_size, length, window, scale, soft_cap, slopes)
    if seen.by_blocks or not keeps_scores(device):
        return seen.attend(None)
    mask = cache(partial(extend_mask, start, row.count, window, device))
    return seen.attend(lambda q, kv, _: masked(q[None], kv, mask()[None, None], scale))


def keeps_scores(device: torch.device) -> bool:
    """Whether torch's attention keeps scores to itself there, whatever is asked of it."""
    return device.type == "cpu"


def _has_flash(q: Tensor, layer: Tensor) -> bool:
    """Whether it does so for queries [N, H, D] under a causal mask. Not of latents."""
    own = q[None].transpose(1, 2)
    params = torch.backends.cuda.SDPAParams(own, own, own, None, 0.0, True, False)
    return layer.shape[1] > 1 and layer.dtype is not torch.int8 \
        and torch.backends.cuda.can_use_flash_attention(params)


class _Seen(NamedTuple):
    """What the last tokens of B sequences see, as many of each."""

    pages: Tensor
    lens: Tensor
    page_size: int
    span: int
    window: int
    scale: float
    soft_cap: float
    slopes: Tensor | None

    @property
    def by_blocks(self) -> bool:
        """Whether it takes what torch's attention has nothing for."""
        return self.soft_cap > 0 or self.slopes is not None

    def attend(self, compute: Callable[[Tensor, Tensor, slice], Tensor] | None) -> Attend:
        """Returns an `Attend`. compute: (q [N, H, D] of some sequences, what was read of them, [b,
        span, 2 * kv_heads, D], and which they are) -> as many numbers as q, where torch keeps
        scores to itself; None = by blocks. Of FP8 the scales of keys are multiplied into the
        queries, those of values into the result."""
        whole = cache(partial(token_index, *self[:4]))

        def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
                scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
            def read(begin: int, end: int, index: Tensor | None = None) -> Tensor:
                index = token_index(*self[:3], end, begin) if index is None else index
                return read_rows(layer, index.view(-1), q.dtype, scales).view(
                    *index.shape, *layer.shape[1:])

            def done(x: Tensor) -> Tensor:
                each = x.view(len(self.pages), len(x) // max(1, len(self.pages)), *x.shape[1:])
                row = layer[0].numel()
                if compute is None or sinks is not None or not (
                        keeps_scores(x.device) or _has_flash(x, layer)):
                    place = self.lens[:, None] + torch.arange(-each.shape[1], 0, device=x.device)
                    return attend_blocks(each, read, place, self.span, row, self.window,
                                         self.scale, self.soft_cap, sinks,
                                         self.slopes).view(x.shape)
                parts, some = [], max(1, BYTES // (self.span * row * READ))
                for at in range(0, max(1, len(each)), some):
                    own = slice(at, at + some)
                    rows, kv = each[own].flatten(0, 1), read(0, self.span, whole()[own])
                    parts.append(compute(rows.to(kv.dtype), kv, own).reshape(rows.shape))
                return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(x.dtype)

            if scales is None or layer.dtype is torch.int8:
                y = done(q)
            else:
                keys, values = key_and_value_scales(scales)
                y = scaled_heads(done(scaled_heads(q, keys)), values)
            return y if out is None else out.copy_(y)

        return run
