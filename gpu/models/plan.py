"""What attention needs of a step, made once and used by every layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actorium.gpu.batch import ExtendRow, ForwardBatch
from actorium.kernels.attention import (
    causal_extend,
    extend_mask,
    paged_extend,
    token_index,
)
from actorium.kernels.ops import Decode, TorchOps


@dataclass(slots=True)
class Part:
    """Some rows of the step that attend in one call: run(q, fresh kv, pages) -> [n, H, D]."""

    first: int
    count: int
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class AttentionPlan:
    """How the rows of one step attend, for one window."""

    parts: list[Part] = field(default_factory=list)
    few: Decode | None = None
    """For the last layer of a step that wants few rows: attends those alone."""

    def attend_rows(self, q: Tensor, fresh: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
        """`attend(...)[rows]`: [R, H, D]."""
        if self.few is not None:
            return self.few(q.index_select(0, rows), pages)
        return self.attend(q, fresh, pages).index_select(0, rows)

    def attend(self, q: Tensor, fresh: Tensor, pages: Tensor) -> Tensor:
        """q: [T, H, D]; fresh: [T, 2 * KVH, D], this step's keys and values, already in pages;
        pages: the layer's -> [T, H, D]."""
        done = [part.run(q[part.first:part.first + part.count],
                         fresh[part.first:part.first + part.count], pages)
                for part in self.parts]
        return done[0] if len(done) == 1 else torch.cat(done)


def plan_attention(
    batch: ForwardBatch, page_size: int, window: int, scale: float, ops: TorchOps
) -> AttentionPlan:
    """The plan of a step for layers with this window (0 = none)."""
    plan = AttentionPlan()
    first, rows = 0, batch.extends
    while rows:
        run = 1
        if _whole(rows[0], window):
            same = rows[0].count
            while run < len(rows) and rows[run].count == same and _whole(rows[run], window):
                run += 1
            plan.parts.append(_causal(first, run, rows[0].count, scale))
        else:
            plan.parts.append(_extend(first, rows[0], page_size, window, scale))
        first += run * rows[0].count
        rows = rows[run:]
    if batch.decode_rows:
        plan.parts.append(_decode(batch, page_size, window, scale, ops))
    if batch.tokens.device.type == "cpu" and batch.logit_rows.shape[0] * 8 <= len(batch.tokens):
        plan.few = _few(batch, page_size, window, scale, ops)
    return plan


def _whole(row: ExtendRow, window: int) -> bool:
    """A prompt from its start that no window cuts."""
    return row.start == 0 and not 0 < window < row.count


def _causal(first: int, rows: int, count: int, scale: float) -> Part:
    def run(q: Tensor, fresh: Tensor, pages: Tensor) -> Tensor:
        out = causal_extend(q.view(rows, count, *q.shape[1:]),
                            fresh.view(rows, count, *fresh.shape[1:]), scale)
        return out.reshape(q.shape)

    return Part(first, rows * count, run)


def _extend(first: int, row: ExtendRow, page_size: int, window: int, scale: float) -> Part:
    length = row.start + row.count
    device = row.pages.device
    lens = torch.full((1,), length, device=device, dtype=torch.int32)
    index = token_index(row.pages[None], lens, page_size, length)[0]
    mask = extend_mask(row.start, row.count, window, device)

    def run(q: Tensor, fresh: Tensor, pages: Tensor) -> Tensor:
        return paged_extend(q, pages, index, mask, scale)

    return Part(first, row.count, run)


def _decode(
    batch: ForwardBatch, page_size: int, window: int, scale: float, ops: TorchOps
) -> Part:
    pages, lens, q_len = batch.decode_pages, batch.decode_kv_lens, batch.decode_q_len
    assert pages is not None and lens is not None
    attend = ops.decode(pages, lens, batch.max_kv_len, q_len, page_size, window, scale)

    def run(q: Tensor, fresh: Tensor, layer: Tensor) -> Tensor:
        return attend(q, layer)

    return Part(batch.extend_tokens, batch.decode_rows * q_len, run)


def _few(
    batch: ForwardBatch, page_size: int, window: int, scale: float, ops: TorchOps
) -> Decode | None:
    """The wanted rows as decode rows: each sees its own sequence up to its own position."""
    ends: list[int] = []
    tables: list[Tensor] = []
    for row in batch.extends:
        ends.append((ends[-1] if ends else 0) + row.count)
        tables.append(row.pages)
    wanted: list[Tensor] = []
    for at in batch.logit_rows.tolist():
        if at < batch.extend_tokens:
            wanted.append(tables[bisect_right(ends, at)])
        else:
            assert batch.decode_pages is not None
            wanted.append(batch.decode_pages[(at - batch.extend_tokens) // batch.decode_q_len])
    if not wanted:
        return None
    lens = (batch.positions.index_select(0, batch.logit_rows) + 1).to(torch.int32)
    span = int(lens.max())
    pages = torch.nn.utils.rnn.pad_sequence(
        [table[:-(-span // page_size)] for table in wanted], batch_first=True)
    return ops.decode(pages, lens, span, 1, page_size, window, scale)
