"""What the layers need of a step, made once and used by all of them: how its rows attend, its
prompts' chunks by one backend and its decodes by another, and where its states lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import AttentionBackend
from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.step.batch import ExtendRow, ForwardBatch, StateRows
from actorium.gpu.step.states import LayerStates
from actorium.kernels.cpu.delta_native import Runs, plan_runs
from actorium.kernels.ragged import Ragged, plan_ragged
from actorium.kernels.reference.paged_attention import Attend
from actorium.kernels.reference.token_choice import (
    Rows,
    ScoreTokens,
    TokenChoice,
    choose,
)


class GroupContext(NamedTuple):
    """What attention layers of one group need."""

    kv_index: Tensor
    """i64[T]: where the step's keys and values go."""
    pages: list[Tensor]
    """Of each layer of the group."""
    plan: AttentionPlan
    scales: Sequence[Tensor] = ()
    """Of each layer's pages, where they have some: see `KVPagePool.scales`."""
    index_keys: Sequence[Tensor] = ()
    """See `KVPagePool.index_keys`."""
    chosen: ChosenTokens | None = None
    """Where queries attend to chosen tokens, in place of the plan."""

    def layer(self, index: int, stored: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The pages of the group's layer of this index, and their scales, see `kv.write_kv`: those
        beside the pages, or those that the checkpoint has of the layer."""
        return self.pages[index], self.scales[index] if self.scales else stored


@dataclass(slots=True)
class ForwardContext:
    """A step as the layers see it."""

    ropes: list[Tensor]
    """[T, 2, 1, head_dim] each; behind them tables of queries' scales, and what tokens give every
    layer by themselves, where there are any."""
    groups: list[GroupContext]
    states: StatePlan | None
    """None where no layer is recurrent."""
    recurrent: list[LayerStates]
    """Of each recurrent layer."""
    prompts: Any = None
    """Where the prompts of a bidirectional model lie: see `TorchOps.prompt_rows`."""
    distances: Tensor | None = None
    """What heads add to scores by distance; see `prompt_attention.attend_prompts`."""


class StatePlan:
    """What recurrent layers need of a step, made once and used by every layer."""

    def __init__(self, rows: StateRows, width: int, device: torch.device) -> None:
        """width: the convolution's."""
        self.extends, self.decodes = rows.extends, rows.decodes
        self.q_len, self.accepted = rows.q_len, rows.accepted
        self.extend_tokens = sum(run.length for run in rows.extends)
        self._width, self._device = width, device

    @cached_property
    def ragged(self) -> Ragged:
        """The extends in chunks."""
        return plan_ragged(self.extends, self._width, self._device)

    @cached_property
    def runs(self) -> Runs:
        """The extends for the C kernel."""
        return plan_runs(self.extends)


# --- How rows attend -----------------------------------------------------------------------------

@dataclass(slots=True)
class AttentionPlan:
    """How the rows of one step attend, for one window."""

    extend_tokens: int
    extend: Attend | None
    decode: Attend | None
    few: Attend | None
    """For the last layer of a step that wants few rows: attends those alone."""

    def attend_rows(self, q: Tensor, pages: Tensor, rows: Tensor,
                    scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """`attend(...)[rows]`: [R, H, D]."""
        if not len(rows):
            return q[:0]
        if self.few is not None:
            return self.few(q.index_select(0, rows), pages, None, scales, sinks)
        return self.attend(q, pages, None, scales, sinks).index_select(0, rows)

    def attend(self, q: Tensor, pages: Tensor, out: Tensor | None = None,
               scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """q: [T, H, D]; pages: the layer's, with this step's keys and values; scales, sinks: see
        `Attend` -> [T, H, D], in `out` if given."""
        if self.extend is None or self.decode is None:
            only = self.extend or self.decode
            assert only is not None
            return only(q, pages, out, scales, sinks)
        n = self.extend_tokens
        out = q.new_empty(q.shape) if out is None else out
        self.extend(q[:n], pages, out[:n], scales, sinks)
        self.decode(q[n:], pages, out[n:], scales, sinks)
        return out


NO_ATTENTION = AttentionPlan(0, None, None, None)
"""Where no layer attends."""


def plan_attention(
    batch: ForwardBatch, page_size: int, window: int, scale: float, attention: StepAttention,
    soft_cap: float = 0.0, chunked: bool = False, slopes: Tensor | None = None,
) -> AttentionPlan:
    """The plan of a step for layers with this window (0 = none), or, where they are chunked, with
    chunks of its size. soft_cap: of scores, 0 = none; slopes: see `AttentionBackend`."""
    if chunked and window:
        batch, window = within_chunks(batch, page_size, window, attention.decode), 0
    plan, decode = AttentionPlan(batch.extend_tokens, None, None, None), attention.decode.decode
    if batch.extends:
        plan.extend = attention.extend.extend(batch.extends, page_size, window, scale, soft_cap,
                                                 slopes)
    if batch.decode_rows:
        pages, lens = batch.decode_pages, batch.decode_kv_lens
        assert pages is not None and lens is not None
        plan.decode = decode(pages, lens, batch.max_kv_len, batch.decode_q_len, page_size, window,
                             scale, soft_cap, slopes)
    wanted, sequences = batch.logit_rows.shape[0], len(batch.extends) + batch.decode_rows
    if batch.tokens.device.type == "cpu" and batch.extends and wanted <= sequences \
            and not batch.all_rows:
        # Whatever else is in the step: rounding must not depend on neighbours.
        plan.few = _few(batch, page_size, window, scale, attention.decode, soft_cap,
                        slopes)
    return plan


def within_chunks(batch: ForwardBatch, page_size: int, chunk: int,
                  backend: AttentionBackend) -> ForwardBatch:
    """The same rows of a step, each with the pages of its own chunk alone: an extend is cut where a
    chunk ends, and each row of a decode is a sequence of its own. chunk: tokens, whole pages."""
    extends, pages, lens = [], batch.decode_pages, batch.decode_kv_lens
    for row in batch.extends:
        start, end = row.start, row.start + row.count
        while start < end:
            base = start // chunk * chunk
            stop = min(end, base + chunk)
            table = row.pages[base // page_size:-(-stop // page_size)]
            extends.append(ExtendRow(row.slot, start - base, stop - start, table))
            start = stop
    if pages is not None and lens is not None:
        pages, lens = backend.chunk_tables(pages, lens, batch.decode_q_len, page_size, chunk)
    return replace(batch, extends=extends, decode_rows=batch.decode_rows * batch.decode_q_len,
                   decode_pages=pages, decode_kv_lens=lens, decode_q_len=1,
                   max_kv_len=min(batch.max_kv_len, chunk))


def _few(
    batch: ForwardBatch, page_size: int, window: int, scale: float, backend: AttentionBackend,
    soft_cap: float, slopes: Tensor | None,
) -> Attend | None:
    """The wanted rows as decode rows."""
    if not len(batch.logit_rows):
        return None
    pages, lens, span = rows_alone(batch, page_size, batch.logit_rows)
    return backend.decode(pages, lens, span, 1, page_size, window, scale, soft_cap, slopes)


def rows_alone(batch: ForwardBatch, page_size: int, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Some rows of a step as decode rows, each of which sees its own sequence up to its own
    position: (i32[R, P], page tables; i32[R], lengths; the largest). rows: i64[R], R >= 1."""
    ends: list[int] = []
    tables: list[Tensor] = []
    for row in batch.extends:
        ends.append((ends[-1] if ends else 0) + row.count)
        tables.append(row.pages)
    wanted: list[Tensor] = []
    lens: list[int] = []
    held = [] if batch.decode_kv_lens is None else batch.decode_kv_lens.tolist()
    for at in rows.tolist():
        if at < batch.extend_tokens:
            i = bisect_right(ends, at)
            wanted.append(tables[i])
            lens.append(batch.extends[i].start + batch.extends[i].count - ends[i] + at + 1)
        else:
            assert batch.decode_pages is not None
            i, place = divmod(at - batch.extend_tokens, batch.decode_q_len)
            wanted.append(batch.decode_pages[i])
            lens.append(max(1, held[i] - batch.decode_q_len + place + 1))
    span = max(lens)
    pages = torch.nn.utils.rnn.pad_sequence(
        [table[:-(-span // page_size)] for table in wanted], batch_first=True)
    return pages, torch.tensor(lens, dtype=torch.int32), span


# --- Chosen tokens -------------------------------------------------------------------------------

@dataclass(slots=True)
class ChosenTokens:
    """What the rows of a step attend to, layer by layer."""

    batch: ForwardBatch
    page_size: int
    count: int
    """Tokens that a row attends to, at most."""
    scale: float
    decode: AttentionBackend
    score: ScoreTokens
    last: TokenChoice | None = field(default=None, init=False)
    """Of the layer before, of all rows."""

    def choose(self, q: Tensor, weights: Tensor, keys: Tensor) -> TokenChoice:
        """Of all rows. q: [T, heads, dim]; weights: f32[T, heads]; keys: of the layer's pages."""
        parts, first = [], 0
        for rows in self._rows():
            end = first + len(rows.lens) * rows.q_len
            parts.append(choose(q[first:end], weights[first:end], keys, rows, self.page_size,
                                self.count, self.score))
            first = end
        width = max(part.tokens.shape[1] for part in parts)
        # Beyond its length, a row's first token again.
        tokens = [torch.cat((own, own[:, :1].expand(-1, width - own.shape[1])), 1)
                  for own, _ in parts]
        self.last = TokenChoice(torch.cat(tokens), torch.cat([part.lens for part in parts]))
        return self.last

    def choose_few(self, q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor) -> TokenChoice:
        """Of those rows of the step alone, which `q` and `weights` are of."""
        pages, lens, span = rows_alone(self.batch, self.page_size, rows)
        return choose(q, weights, keys, Rows(pages, lens, span, 1), self.page_size, self.count,
                      self.score)

    def attend(self, choice: TokenChoice, q: Tensor, pages: Tensor, out: Tensor | None,
               scales: Tensor | None) -> Tensor:
        """[R, H, D]. q: [R, H, D], of the rows that the choice is of; the others: see
        `Attend`."""
        tokens, lens = choice
        run = self.decode.decode(tokens, lens, tokens.shape[1], 1, 1, 0, self.scale)
        return run(q, pages, out, scales)

    def _rows(self) -> list[Rows]:
        batch = self.batch
        rows = [Rows(own.pages[None], torch.full((1,), own.start + own.count, dtype=torch.int32,
                                                 device=own.pages.device),
                     own.start + own.count, own.count) for own in batch.extends]
        if batch.decode_rows:
            assert batch.decode_pages is not None and batch.decode_kv_lens is not None
            rows.append(Rows(batch.decode_pages, batch.decode_kv_lens, batch.max_kv_len,
                             batch.decode_q_len))
        return rows
