"""Proposes drafts after a step was sampled; the MTP layer does it over its rows, then chained.

Row p of the layer takes the target's hidden state of position p and token p + 1, and keeps its keys
and values at position p: in pages of its own, which the page table of full attention names.
Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import MtpDrafter
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.staging import Array, HostArrays
from actorium.gpu.step.tables import I32, SlotTables
from actorium.kernels.sampling_tables import LIMIT


class Proposer(Protocol):
    """Makes drafts after each step."""

    pool: KVPagePool | None
    """What it keeps of sequences, by the pages of full attention; None: nothing in pages."""
    captured: bool
    """Whether graphs of decodes make its drafts: it must read nothing of the host then."""

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """Whether it needs the step's hidden states to make so many drafts, or to make any later
        on (0)."""

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor | None) -> None:
        """Write so many drafts per sampled sequence to the tables; 0: only take the step in.

        sampled: i64[rows], what was sampled for each row (None: there are none); counts:
        i64[sequences], how many of its rows each emitted; hidden: [T, hidden], of every row after
        the model's final norm; None where nobody needs them.
        """

    def release(self, slots: I32) -> None:
        """The sequences in these slots leave them with the next step. Host: i32[n]."""


class LayerDrafter(Protocol):
    """A layer that drafts, and goes on from what it gave: see `MtpDrafter`."""

    def forward(self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
                rows: Tensor | None = None) -> Tensor:
        """[R, hidden], of `rows` or of all T rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [R, hidden] -> [R, tokens]."""


class MTPProposer:
    """Makes drafts with a model's MTP layer."""

    captured = True

    def __init__(self, drafter: LayerDrafter, pool: KVPagePool, tables: SlotTables,
                 group: int) -> None:
        """pool: of the layer; group: of the model's layers with full attention."""
        self.pool: KVPagePool | None = pool
        self._pages, self._drafter, self._tables, self._group = pool, drafter, tables, group

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """Whether the step's hidden states are needed: for drafts, or to keep a prompt's keys and
        values whole."""
        return drafts > 0 or step.extends is not None

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor | None) -> None:
        """Run the layer over the step; see `Proposer`."""
        hidden = self._taken(step, hidden)
        if hidden is None:
            return
        batch, tensor = step.batches[self._group], self._tables.arrays.tensor
        tokens = tensor(self._following(step, sampled))
        if not drafts or sampled is None:
            batch, n = extends_alone(batch), batch.extend_tokens
            self._drafter.forward(tokens[:n], hidden[:n], batch, self._pages, batch.logit_rows)
            return
        wanted = tensor(self._last_rows(step, batch.extend_tokens, counts))
        out = self._drafter.forward(tokens, hidden, batch, self._pages, wanted)
        self._chain(step, drafts, out)

    def _taken(self, step: InputBatch, hidden: Tensor | None) -> Tensor | None:
        """[T, hidden]: what the layer takes beside tokens; None: nothing is to be done."""
        return hidden

    def release(self, slots: I32) -> None:
        """Nothing is kept by slots."""

    def _following(self, step: InputBatch, sampled: Array) -> Array:
        """i64[T]: the token after each row's."""
        arrays, single, following = self._tables.arrays, step.ending, step.following
        if following is None:
            assert sampled is not None
            return sampled
        if sampled is None:
            return following
        following[self._ends(step)] = sampled[:single]
        joined: Array = arrays.xp.concatenate((following, sampled[single:]))
        return joined

    def _ends(self, step: InputBatch) -> Array:
        """i64[ending]: the rows of T that are the last of the extends that end."""
        return self._tables.arrays.array(step.batches[0].logit_rows)[:step.ending]

    def _last_rows(self, step: InputBatch, extend_tokens: int, counts: Array) -> Array:
        """i64[sequences]: the row whose next token is the last that was emitted."""
        arrays, single = self._tables.arrays, step.ending
        windows = arrays.arange(0, len(step.slots) - single)
        taken = counts[single:] - 1
        rows = extend_tokens + windows * step.q_len + arrays.xp.where(taken > 0, taken, 0)
        joined: Array = arrays.xp.concatenate((self._ends(step), arrays.long(rows)))
        return joined

    def _chain(self, step: InputBatch, drafts: int, out: Tensor) -> None:
        """The first draft from the layer's output `out`, the others each from the one before."""
        t, arrays = self._tables, self._tables.arrays
        slots, long = step.slots_d, arrays.long
        token = self._likeliest(out)
        t.drafts.tokens[slots, 0] = token
        if drafts == 1:
            return
        table, rows = t.pages[self._group], arrays.tensor(t.row_numbers[:len(step.slots)])
        length, ended = t.seq_len[slots], t.ended[slots]
        limit = t.record[slots, LIMIT]
        bound = min(int(t.host_len[step.slots].max()), t.max_len) if step.bounded else t.max_len
        pages = arrays.tensor(table[slots, :-(-(bound + drafts) // t.page_size)])
        for i in range(1, drafts):
            at = length - 2 + i
            index = table[slots, at // t.page_size] * t.page_size + at % t.page_size
            where, place = arrays.xp.where, t.rope_positions(slots, at)
            batch = ForwardBatch(
                arrays.tensor(token),
                arrays.tensor(long(where(place < t.max_len, place, t.max_len - 1))),
                arrays.tensor(long(where(ended | (at >= limit), 0, index))), [], 0, len(rows),
                pages, arrays.tensor(where(ended, 1, at + 1)), bound - 1 + i, rows)
            out = self._drafter.forward(arrays.tensor(token), out, batch, self._pages, None)
            token = self._likeliest(out)
            t.drafts.tokens[slots, i] = token

    def _likeliest(self, out: Tensor) -> Array:
        """i64[R]: the token drafted from each row of the layer's output."""
        logits = self._drafter.logits(out)
        if isinstance(self._tables.arrays, HostArrays):
            return logits.float().numpy().argmax(axis=1)
        return logits.argmax(1)


def make_proposers(drafter: MtpDrafter | None, shape: ModelShape, pool: KVPagePool | None,
                   tables: SlotTables) -> dict[str, Proposer]:
    """A model's proposers, by method. pool: of keys and values of the MTP layer; None: it has
    none."""
    proposers: dict[str, Proposer] = {}
    if pool is not None:
        assert drafter is not None
        full = [group.window for group in shape.groups].index(0)
        proposers["mtp"] = MTPProposer(drafter, pool, tables, full)
    return proposers


def extends_alone(batch: ForwardBatch) -> ForwardBatch:
    """The step without its decodes; no row is wanted."""
    n = batch.extend_tokens
    axes = batch.rope_positions
    return replace(batch, tokens=batch.tokens[:n], positions=batch.positions[:n],
                   rope_positions=None if axes is None else axes[..., :n],
                   kv_index=batch.kv_index[:n], decode_rows=0, decode_pages=None,
                   decode_kv_lens=None, max_kv_len=0, all_rows=False,
                   logit_rows=torch.zeros(0, dtype=torch.int64, device=batch.tokens.device))
