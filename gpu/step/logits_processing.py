"""Runs logits processors: changes the logits of rows whose requests name some, before all other
parameters count. What a processor does wrong fails the requests whose rows it got, one by one.
No step waits for it: whether logits are finite is read with the step's tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, where

from actorium.actors.errors import ActoriumError
from actorium.actors.plugins.logits_processors import LogitsProcessor, ProcessedRows
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.staging import Download, Upload, on_device
from actorium.gpu.step.tables import PROCESSES, SlotTables

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessorFaults:
    """What processors did wrong with the processed rows of a step."""

    slots: Sequence[int]
    """Of each of these rows."""
    sequences: Sequence[int]
    """Which of the step's sampled sequences each is of."""
    places: Sequence[int]
    """Drafts before it in its window."""
    raised: dict[int, str] = field(default_factory=dict)
    """Row -> why, as far as the host knows at once."""
    checked: list[tuple[str, list[int]]] = field(default_factory=list)
    """Processor, and the rows that it has given logits for."""
    finite: Download | None = None
    """Of each of these calls, whether the rows' largest logits are numbers: bool[rows]."""

    def failed(self, counts: Sequence[int]) -> list[tuple[int, str, str]]:
        """`StepResult.failed` of a step whose sampled sequences emitted so many tokens. A row
        behind a draft that was not accepted stands for nothing, whatever became of it."""
        why = dict(self.raised)
        for (name, rows), finite in zip(self.checked, self.finite.wait() if self.finite else [],
                                        strict=True):
            why |= {row: f"{name}: its largest logit is not a finite number"
                    for row, good in zip(rows, finite.tolist(), strict=True) if not good}
        ended = {self.slots[row]: text for row, text in why.items()
                 if self.places[row] < counts[self.sequences[row]]}
        return [(slot, ActoriumError.code, f"logits_processors: {text}")
                for slot, text in ended.items()]


class LogitsProcessing:
    """Runs the processors of one engine over the rows of its steps."""

    def __init__(self, processors: Mapping[str, LogitsProcessor], tables: SlotTables) -> None:
        """processors: by name; with any, the tables must keep histories."""
        self._processors, self._tables = processors, tables

    def stage(self, step: InputBatch, up: Upload) -> None:
        """Adds what a step with processed rows needs on the device to its upload."""
        if not step.needs & PROCESSES:
            return
        rows = np.flatnonzero(step.flags & PROCESSES).astype(np.int32)
        step.staged |= {"processed": up.add(rows), "places": up.add(_places(step, rows))}

    def apply(self, step: InputBatch, up: Upload, logits: Tensor
              ) -> tuple[Tensor, ProcessorFaults]:
        """Returns the step's logits with those of the processed rows changed, [rows, V], float32,
        and what went wrong: rows that failed have logits of no meaning, but finite ones.

        Each row is processed as if the drafts before it were the sequence's tokens.
        """
        arrays, chosen = self._tables.arrays, np.flatnonzero(step.flags & PROCESSES)
        slots, places = step.row_slots[chosen].tolist(), _places(step, chosen)
        sequences = np.where(chosen < step.ending, chosen,
                             step.ending + (chosen - step.ending) // step.q_len)
        faults = ProcessorFaults(slots, sequences.tolist(), places.tolist())
        calls = [self._tables.sequences[slot].params.processors for slot in slots]
        run = _Run(logits.float(), arrays.tensor(arrays.long(up[step.staged["processed"]])),
                   self._facts(step, up, chosen) if self._processors else None, faults)
        for turn in range(max(map(len, calls))):
            rows_by_name: dict[str, list[int]] = {}
            for row, own in enumerate(calls):
                if turn < len(own):
                    rows_by_name.setdefault(own[turn].name, []).append(row)
            for name, rows in rows_by_name.items():
                run.process(name, self._processors.get(name), rows,
                            [calls[row][turn].args for row in rows])
        if run.finite:
            faults.finite = arrays.fetch(*(arrays.array(each) for each in run.finite))
        return run.logits, faults

    def _facts(self, step: InputBatch, up: Upload, chosen: NDArray[np.int64]) -> ProcessedRows:
        """Of the processed rows, without their arguments."""
        t, arrays = self._tables, self._tables.arrays
        xp, long = arrays.xp, arrays.long
        rows, places = (long(up[step.staged[name]]) for name in ("processed", "places"))
        lengths, slots = long(step.positions[rows]), step.row_slots[chosen]
        slots_d = step.row_slots_d[rows]
        # The host's bounds are those behind this step, so that drafts are within them.
        width = min(int(t.host_len[slots].max()) + t.drafts.max_drafts, t.history.shape[1])
        tokens = long(t.history[slots_d, :width])
        columns = arrays.arange(0, width)[None]
        if step.q_len > 1:
            drafts = t.drafts.tokens[slots_d]
            for i in range(step.q_len - 1):
                at = (lengths - places + i)[:, None]
                tokens = xp.where((columns == at) & (places > i)[:, None], drafts[:, i:i + 1],
                                  tokens)
        tokens = xp.where(columns < lengths[:, None], tokens, -1)
        prompts = [t.sequences[slot].prompt_len for slot in slots.tolist()]
        tensor = arrays.tensor
        return ProcessedRows((), tensor(tokens), tensor(lengths),
                             tensor(lengths).new_tensor(prompts))


@dataclass(slots=True)
class _Run:
    """The processed rows of a step, in the making."""

    logits: Tensor
    """[rows of the step, V], float32."""
    at: Tensor
    """i64[processed rows]: which of them these are."""
    facts: ProcessedRows | None
    """Of the processed rows, without their arguments; None where nothing is installed."""
    faults: ProcessorFaults
    finite: list[Tensor] = field(default_factory=list)
    """`ProcessorFaults.finite`, on the device."""

    def process(self, name: str, processor: LogitsProcessor | None, rows: list[int],
                args: list[Mapping[str, Any]]) -> None:
        """Lets a processor change some of the rows. Where it raises, each gets a call of its own:
        the arguments or tokens of one alone may be what it cannot work with."""
        picked = on_device(rows, self.at.device)
        at = self.at[picked]
        try:
            if processor is None or self.facts is None:  # of a request from before an upgrade
                raise _Unfit("is not installed any longer")
            # Copies: whatever it changes in place is of these rows and this call alone.
            out = _checked(self.logits[at], processor, ProcessedRows(
                args, *(each[picked] for each in self.facts[1:])))
        except (Exception, SystemExit) as error:
            if len(rows) > 1:
                for row, own in zip(rows, args, strict=True):
                    self.process(name, processor, [row], [own])
                return
            self.faults.raised.setdefault(rows[0], f"{name}: {_text(error)}")
            LOG.warning("logits processor %s failed a request", name, exc_info=error)
            return
        finite = out.amax(1).isfinite()
        if at.device.type != "cpu" or not finite.all():  # elsewhere nobody waits to know
            out = where(finite[:, None], out, 0.0)
        self.logits[at] = out
        self.faults.checked.append((name, rows))
        self.finite.append(finite)


class _Unfit(Exception):
    """What a processor gave is no logits."""


def _text(error: BaseException) -> str:
    """What a client may know: exceptions of plug-ins may quote other things."""
    return str(error) if isinstance(error, _Unfit) else f"raised {type(error).__name__}"


def _checked(logits: Tensor, processor: LogitsProcessor, rows: ProcessedRows) -> Tensor:
    """Returns what a processor makes of some rows: [R, V], float32. Raises `_Unfit` if that is
    something else than logits, and whatever the processor raises."""
    shape, device, out = logits.shape, logits.device, processor(logits, rows)
    if not isinstance(out, Tensor) or (out.shape, out.device) != (shape, device) \
            or not out.is_floating_point():
        got = (f"{out.dtype} of {tuple(out.shape)} on {out.device}" if isinstance(out, Tensor)
               else type(out).__name__)
        raise _Unfit(f"must return floating-point logits of {tuple(shape)} on {device}, got {got}")
    return out.to(logits.dtype)


def _places(step: InputBatch, rows: NDArray[np.integer]) -> NDArray[np.int32]:
    """How many drafts precede each of the step's rows in its window."""
    return np.where(rows < step.ending, 0, (rows - step.ending) % step.q_len).astype(np.int32)
