"""Drafts by a smaller model of the same tokens (`--speculative draft`).

The smaller model has keys and values of its own, in pages that the target's page table of full
attention names. What the target extends it extends too. After a step was sampled it reads the
tokens that it has not seen, all of a sequence in one window, and chains drafts behind the last one.

Steps whose drafts others make, or that make none, leave it behind: it reads what it has not seen
(`SlotTables.history`) once that is more than `CATCH_UP` tokens, when it is to draft again, or when
the sequence leaves.
Nothing here waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from actorium.gpu.families.draft_shape import kept_layers
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.speculation import extends_alone
from actorium.gpu.step.staging import Array, HostArrays
from actorium.gpu.step.tables import I32, SlotTables
from actorium.kernels.sampling_tables import LIMIT

CATCH_UP = 16
"""Tokens of a sequence that the model may lag behind where it drafts nothing, and the most that it
reads of one at once."""
FEW = 2
"""Tokens that are not read when a sequence leaves its slot."""


class DraftModelProposer:
    """Makes drafts with a model of its own."""

    captured = False

    def __init__(self, model: LoadedModel, pool: KVPagePool, tables: SlotTables,
                 group: int) -> None:
        """pool: of all layers of the model that keep keys and values (`kept_layers`); group: of the
        target's layers with full attention."""
        self.pool: KVPagePool | None = pool
        self._model, self._tables, self._group = model, tables, group
        self._pools = _pools_by_group(model, pool)
        self._last = model.shape.max_model_len - 1
        self._first = tables.arrays.full((tables.slots,), 0, "int32")
        """Position of the first token that was sampled since the slot's last extend."""
        self._unread = np.zeros(tables.slots, np.int32)
        """Host: at most so many of the last tokens were not read; below 0 where drafts were read
        that may be accepted."""

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """The target's hidden states are never needed."""
        return False

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor | None) -> None:
        """Read the step, and chain drafts; see `Proposer`."""
        if step.extends is not None:
            self._unread[[slot for slot, _, _ in step.extends.rows]] = 0
            self._extend(step.batches[self._group])
        if sampled is None:
            return
        self._note(step, sampled)
        if drafts:
            self._chain(step, drafts, self._read(step.slots, step.slots_d))
            self._unread[step.slots] = 1 - drafts
        elif int(self._unread[step.slots].max()) > CATCH_UP:
            self._read(step.slots, step.slots_d)

    def release(self, slots: I32) -> None:
        """Read what these slots have left: others may share their pages. One token that was a draft
        is not worth it."""
        behind = slots[self._unread[slots] > FEW]
        if len(behind):
            (on_device,) = self._tables.arrays.stage(behind)
            self._read(behind, on_device)
        self._unread[slots] = 0

    def _extend(self, batch: ForwardBatch) -> None:
        """Keys and values of what the step extends."""
        batch = extends_alone(batch)
        self._forward(replace(batch, rope_positions=None, images=None, given=None,
                              types=None, hidden=None))

    def _note(self, step: InputBatch, sampled: Array) -> None:
        """Note the tokens that the step emitted."""
        t, begun = self._tables, step.slots_d[:step.ending]
        t.note_sampled(step.row_slots_d, step.positions, sampled)
        self._first[begun] = t.seq_len[begun] - 1
        self._unread[step.slots[:step.ending]] = 1
        self._unread[step.slots[step.ending:]] += step.q_len

    def _read(self, host: I32, slots: Array) -> Tensor:
        """[sequences, hidden], of their last tokens, before the final norm: the model reads all
        that it has not read. host: `slots`, on the host."""
        unread = int(self._unread[host].max())
        while unread > CATCH_UP:
            self._read_rows(host, slots, unread, CATCH_UP)
            unread -= CATCH_UP
        self._unread[host] = 0
        rows = 1 << (unread - 1).bit_length()  # kernels are compiled for few numbers of rows
        return self._read_rows(host, slots, rows, rows)

    def _read_rows(self, host: I32, slots: Array, back: int, rows: int) -> Tensor:
        """`rows` tokens of each sequence, from the one that lies `back` from its end. What was read
        before is read again, which changes nothing; prompts are there from extends."""
        t, arrays = self._tables, self._tables.arrays
        where, long, length, table = (arrays.xp.where, arrays.long, t.seq_len[slots],
                                      t.pages[self._group])
        start = where(length > back, length - back, 0)
        at = start[:, None] + arrays.arange(0, rows)
        sink = (at < self._first[slots][:, None]) | (at >= length[:, None])
        of, bound = slots[:, None], max(self._bound(host), rows)
        index = where(sink, 0, table[of, at // t.page_size] * t.page_size + at % t.page_size)
        tokens = long(t.history[of, at])
        last = where(length - start < rows, length - start, rows) - 1
        return self._forward(ForwardBatch(
            arrays.tensor(tokens.reshape(-1)), arrays.tensor(long(at.reshape(-1))),
            arrays.tensor(long(index.reshape(-1))), [], 0, len(host),
            arrays.tensor(table[slots, :-(-bound // t.page_size)]),
            arrays.tensor(arrays.narrow(start + rows)), bound,
            arrays.tensor(t.row_numbers[:len(host)] * rows + long(last)), rows))

    def _chain(self, step: InputBatch, drafts: int, rows: Tensor) -> None:
        """The first draft from the rows of the last tokens, the others each from the one before."""
        t, arrays, slots = self._tables, self._tables.arrays, step.slots_d
        where, long = arrays.xp.where, arrays.long
        length, ended, table = t.seq_len[slots], t.ended[slots], t.pages[self._group]
        limit, bound = t.record[slots, LIMIT], self._bound(step.slots)
        pages = arrays.tensor(table[slots, :-(-(bound + drafts) // t.page_size)])
        numbers = arrays.tensor(t.row_numbers[:len(step.slots)])
        t.drafts.tokens[slots, 0] = token = self._likeliest(rows)
        for i in range(1, drafts):
            at = length - 1 + i
            index = table[slots, at // t.page_size] * t.page_size + at % t.page_size
            rows = self._forward(ForwardBatch(
                arrays.tensor(token), arrays.tensor(long(at)),
                arrays.tensor(long(where(ended | (at >= limit), 0, index))), [], 0,
                len(step.slots), pages, arrays.tensor(arrays.narrow(where(ended, 1, at + 1))),
                bound + i, numbers))
            t.drafts.tokens[slots, i] = token = self._likeliest(rows)

    def _bound(self, slots: I32) -> int:
        """The host's, on the lengths of these slots' sequences."""
        t = self._tables
        return min(int(t.host_len[slots].max()), t.max_len)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden], the rows wanted. The target may have more tokens, which stand for nothing,
        and longer sequences than the model: what it makes of these is worth little."""
        batch = replace(batch, tokens=batch.tokens.clamp(max=self._model.shape.vocabulary - 1),
                        positions=batch.positions.clamp(max=self._last))
        return self._model.forward([batch] * len(self._pools), self._pools)

    def _likeliest(self, rows: Tensor) -> Array:
        """i64[R]: the token drafted from each row, one that the target has."""
        logits = self._model.logits(rows)[:, :self._tables.vocab]
        if isinstance(self._tables.arrays, HostArrays):
            return logits.float().numpy().argmax(axis=1)
        return logits.argmax(1)


def make_draft_model_pool(shape: ModelShape, pages: int, page_size: int, dtype: torch.dtype,
                          device: torch.device) -> KVPagePool:
    """The pool of all layers of a model that drafts. shape: its own; pages: as many as the full
    attention of the model that it drafts for has."""
    layers = kept_layers(shape)
    return KVPagePool(shape.of_layer(layers[0]), pages, page_size, dtype, device, len(layers))


def _pools_by_group(model: LoadedModel, pool: KVPagePool) -> Sequence[KVPagePool]:
    """The pool of each group of the model's layers: its part of the one pool."""
    pools, layers = [], kept_layers(model.shape)
    for group in model.shape.groups:
        part, at = copy.copy(pool), [layers.index(i) for i in group.layers]
        part.layers = [pool.layers[i] for i in at]
        part.scales = [pool.scales[i] for i in at if pool.scales]
        pools.append(part)
    return pools
