"""What drafts for a model: a layer of its own checkpoint, chained for more than one draft."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool


class Drafter(Protocol):
    """The MTP layer of a model, chained for more than one draft."""

    @property
    def waits(self) -> bool:
        """See `decoder.Mlp`."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, pool: KVPagePool,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[R, hidden], after the layer's norm, of `rows` (i64[R] of the T rows; None = all); keys
        and values of all T rows are written.

        hidden: [T, hidden], of each row after the model's final norm, or what this gave for it,
        further on in a chain. tokens: i64[T], the token after each row's. batch: positions,
        kv_index, extends and decodes as for a layer of full attention whose pages are `pool`'s;
        its tokens and logit_rows are not read.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [R, hidden] -> [R, vocab], by the model's head: see
        `Decoder.head_logits`."""
