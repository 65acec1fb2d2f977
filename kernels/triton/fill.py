"""The rows of a step's decodes, read from the resident tables in one launch: see
`kernels.sampling_tables.WindowRows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from actorium.kernels.sampling_tables import LIMIT, ROPE_DELTA, DecodeState, WindowRows, WindowSizes
from actorium.kernels.triton.sampling_keys import field

_LIMIT, _ROPE_DELTA = tl.constexpr(LIMIT), tl.constexpr(ROPE_DELTA)
BLOCK = 512
"""Numbers of a page table that a program copies: 16 bytes for each of its threads."""


@triton.jit(do_not_specialize=["slots", "most", "row_stride", "group_stride", "groups", "q_len",
                               "width", "max_len", "count"],
            do_not_specialize_on_alignment=["slots"])
def _fill(slots: tensor, last_token: tensor, seq_len: tensor, ended: tensor, drafts: tensor,
          most: tensor, record: tensor, tables: tensor, row_stride: tensor, group_stride: tensor,
          groups: tensor, tokens: tensor, positions: tensor, kv: tensor, pages: tensor,
          lens: tensor, sampled: tensor, row_slots: tensor, q_len: tensor, width: tensor,
          max_len: tensor, count: tensor, PAGE: tl.constexpr, WINDOW: tl.constexpr,
          BLOCK: tl.constexpr) -> None:
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + sequence).to(tl.int64)
    own, group_stride = tables + slot * row_stride, group_stride.to(tl.int64)
    place = tl.arange(0, WINDOW)
    at = part * BLOCK + tl.arange(0, BLOCK)
    for group in range(groups):
        page = tl.load(own + group * group_stride + at, mask=at < width, other=0)
        tl.store(pages + (group * count.to(tl.int64) + sequence) * width + at, page,
                 mask=at < width)
    if part == 0:
        live = place < q_len
        row = sequence * q_len + place
        length, gone = tl.load(seq_len + slot), tl.load(ended + slot) != 0
        position = length - 1 + place
        token = tl.load(drafts + slot * most + place - 1, mask=live & (place > 0), other=0)
        token = tl.where(place == 0, tl.load(last_token + slot), token)
        # Drafts beyond the sequence's end, and any beyond the model's, are never accepted.
        sink = gone | ((q_len > 1) & (position >= field(record, slot, _LIMIT)))
        for group in range(groups):
            table = own + group * group_stride
            page = tl.load(table + position // PAGE, mask=live & (sink == 0), other=0)
            index = tl.where(sink, 0, page.to(tl.int64) * PAGE + position % PAGE)
            tl.store(kv + group * (count * q_len) + row, index, mask=live)
        tl.store(tokens + row, token, mask=live)
        turned = tl.minimum(position + field(record, slot, _ROPE_DELTA), max_len - 1)
        tl.store(positions + row, turned.to(tl.int64), mask=live)
        tl.store(sampled + row, position + 1, mask=live)
        tl.store(row_slots + row, slot.to(tl.int32) + place * 0, mask=live)
        tl.store(lens + sequence, tl.where(gone, q_len, length + q_len - 1))


def fill(slots: Tensor, progress: DecodeState, drafts: Tensor, record: Tensor, tables: Tensor,
         lengths: WindowSizes, out: WindowRows) -> None:
    """The rows of these slots, to `out`: see `kernels.sampling_tables.WindowRows`.

    slots: i32[B]; drafts: i64[slots, most]; record: i32[slots, WIDTH]; tables: i32[groups, slots,
    P], rows contiguous.
    """
    count = len(slots)
    if count:
        _fill[(count, triton.cdiv(lengths.width, BLOCK))](
            slots, progress.last_token, progress.seq_len, progress.ended, drafts, drafts.shape[1],
            record, tables, tables.stride(1), tables.stride(0), len(tables), *out, lengths.q_len,
            lengths.width, lengths.max_len, count, PAGE=lengths.page_size,
            WINDOW=triton.next_power_of_2(lengths.q_len), BLOCK=BLOCK, num_warps=4)
