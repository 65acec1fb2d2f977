"""Proposes drafts by an EAGLE-3 head: as the MTP layer does (`speculation.py`), but from what goes
into some of the model's layers, and in a vocabulary of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.models.eagle_head import EagleHead
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.speculation import MTPProposer, Proposer
from actorium.gpu.step.staging import Array
from actorium.gpu.step.tables import SlotTables


class EagleProposer(MTPProposer):
    """Makes drafts with a head of a checkpoint of its own."""

    def __init__(self, head: EagleHead, pool: KVPagePool, tables: SlotTables, group: int) -> None:
        super().__init__(head, pool, tables, group)
        self._head = head

    def _taken(self, step: InputBatch, hidden: Tensor | None) -> Tensor | None:
        return None if hidden is None else self._head.joined(step.batches[0].tapped)

    def _likeliest(self, out: Tensor) -> Array:
        drafts, targets = super()._likeliest(out), self._head.targets
        if targets is None:
            return drafts
        arrays = self._tables.arrays
        return arrays.array(targets.index_select(0, arrays.tensor(drafts)))


def eagle_pool(model: LoadedModel, pages: int, page_size: int, dtype: torch.dtype
               ) -> KVPagePool | None:
    """So many pages for the keys and values of a model's head, as full attention has; None where
    the model has no head."""
    if model.eagle is None:
        return None
    return KVPagePool(model.eagle.shape.layer, pages, page_size, dtype, model.device)


def eagle_proposers(model: LoadedModel, pool: KVPagePool | None, tables: SlotTables
                    ) -> dict[str, Proposer]:
    """The proposer of a model's head by the name of its method. pool: of the head; None: there is
    none."""
    if pool is None:
        return {}
    assert model.eagle is not None
    full = [group.window for group in model.shape.groups].index(0)
    return {"eagle3": EagleProposer(model.eagle, pool, tables, full)}
