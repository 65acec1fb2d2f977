"""Runs logits processors: changes the logits of rows whose requests name some, before all other
parameters count, and keeps those requests' tokens on the device for it, so that no step waits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actorium.actors.plugins.logits_processors import LogitsProcessor, ProcessedRows
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.sampler import SamplerOutput
from actorium.gpu.step.staging import Upload
from actorium.gpu.step.tables import PROCESSES, SlotTables


class LogitsProcessing:
    """Runs the processors of one engine over the rows of its steps."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], tables: SlotTables) -> None:
        """processors: by name."""
        self._processors, self._tables = processors, tables

    def stage(self, step: InputBatch, up: Upload) -> None:
        """Adds what a step with processed rows needs on the device to its upload."""
        if not step.needs & PROCESSES:
            return
        history, single, q_len = self._tables.processed, step.ending, step.q_len
        rows = np.flatnonzero(step.flags & PROCESSES).astype(np.int32)
        places = np.where(rows < single, 0, (rows - single) % q_len).astype(np.int32)
        first = np.arange(len(step.slots), dtype=np.int32)
        first[single:] = single + np.arange(len(first) - single) * q_len
        step.staged |= {
            "processed": up.add(rows),
            "places": up.add(places),  # in their windows: as many drafts precede each
            "histories": up.add(history.rows_of(step.row_slots[rows])),
            "kept": up.add(history.rows_of(step.slots)), "first": up.add(first)}

    def apply(self, step: InputBatch, up: Upload, logits: Tensor) -> Tensor:
        """Returns the step's logits with those of the processed rows changed: [rows, V], float32.

        Each row is processed as if the drafts before it were the sequence's tokens. Raises
        `ValueError` naming a processor that gives something else than logits.
        """
        arrays, chosen = self._tables.arrays, np.flatnonzero(step.flags & PROCESSES)
        of_rows = arrays.tensor(arrays.long(up[step.staged["processed"]]))
        logits = logits.float()
        block, facts = logits[of_rows], self._facts(step, up, chosen)
        calls = [self._tables.sequences[slot].params.processors
                 for slot in step.row_slots[chosen].tolist()]
        for turn in range(max(map(len, calls))):
            rows_by_name: dict[str, list[int]] = {}
            for row, own in enumerate(calls):
                if turn < len(own):
                    rows_by_name.setdefault(own[turn].name, []).append(row)
            for name, rows in rows_by_name.items():
                args = [calls[row][turn].args for row in rows]
                if len(rows) == len(calls):
                    block = self._processed(name, block, facts._replace(args=args))
                    continue
                pick = block.new_tensor(rows, dtype=of_rows.dtype)
                picked = ProcessedRows(args, *(each[pick] for each in facts[1:]))
                block[pick] = self._processed(name, block[pick], picked)
        logits[of_rows] = block
        return logits

    def _processed(self, name: str, logits: Tensor, rows: ProcessedRows) -> Tensor:
        shape, processor = logits.shape, self._processors.get(name)
        if processor is None:  # of a request from before an upgrade
            raise ValueError(f"logits processor {name}: is not installed any longer")
        out = processor(logits, rows)
        if not isinstance(out, Tensor) or out.shape != shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"logits processor {name}: must return logits of {tuple(shape)}, "
                             f"got {got}")
        return out.to(logits.dtype)

    def _facts(self, step: InputBatch, up: Upload, chosen: NDArray[np.int64]) -> ProcessedRows:
        """Of the processed rows, without their arguments."""
        t, arrays = self._tables, self._tables.arrays
        xp, long = arrays.xp, arrays.long
        rows, places, histories = (long(up[step.staged[name]]) for name in (
            "processed", "places", "histories"))
        lengths, slots = long(step.positions[rows]), step.row_slots[chosen]
        # The host's bounds are those behind this step, so that drafts are within them.
        width = min(int(t.host_len[slots].max()) + t.drafts.max_drafts, t.processed.width)
        tokens = long(t.processed.tokens[histories, :width])
        columns = arrays.arange(0, width)[None]
        if step.q_len > 1:
            drafts = t.drafts.tokens[step.row_slots_d[rows]]
            for i in range(step.q_len - 1):
                at = (lengths - places + i)[:, None]
                tokens = xp.where((columns == at) & (places > i)[:, None], drafts[:, i:i + 1],
                                  tokens)
        tokens = xp.where(columns < lengths[:, None], tokens, -1)
        prompts = [t.sequences[slot].prompt_len for slot in slots.tolist()]
        tensor = arrays.tensor
        return ProcessedRows((), tensor(tokens), tensor(lengths),
                             tensor(lengths).new_tensor(prompts))

    def keep(self, step: InputBatch, up: Upload, out: SamplerOutput) -> None:
        """Adds what a step emitted to the tokens of its processed sequences."""
        t, arrays = self._tables, self._tables.arrays
        kept, first = (arrays.long(up[step.staged[name]]) for name in ("kept", "first"))
        begin, where = arrays.long(step.positions[first]), arrays.xp.where
        tokens = t.processed.tokens
        for i, column in enumerate(out.columns):
            at = begin + i
            taken = (out.counts > i) & (at < t.processed.width)
            tokens[where(taken, kept, 0), where(taken, at, 0)] = arrays.narrow(column)
