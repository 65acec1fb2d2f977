"""A worker without a model whose steps take the time that a `StepSeconds` says. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorium.actors.core import Context
from actorium.actors.messages import Admit, Pooled, StepPlan, StepResult
from actorium.tools.null.null_memory import Ints, ints_of
from actorium.tools.null.null_worker import VOCAB, NullWorker
from actorium.tools.simulate.step_model import StepSeconds


class ModelledWorker(NullWorker):
    """The null worker, less what its tests are for: no drafts, masks or ends of sequence; tokens
    that are a plain sum of seed and position. Each result says how long its step took."""

    def __init__(self, context: Context, model: StepSeconds) -> None:
        super().__init__(context)
        self._model = model
        self._first = np.zeros(self.ready.slots, np.int64)
        """Token at position 0, by slot."""

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        self._first[admit.slot] = admit.seed & 0xFFFF

    # --- many steps that only decode, of sequences that do not end --------------------------------

    def microseconds_ahead(self, slots: NDArray[np.integer], steps: int) -> NDArray[np.int64]:
        """How long each of the next `steps` decodes of these slots would take: i8[steps]."""
        model, rows = self._model, len(slots)
        context = int(self._length[slots].sum()) + rows * np.arange(steps, dtype=np.float64)
        # Added up in the order of `StepSeconds.seconds`, so that no bit differs.
        seconds = model.base + model.prompt * 0 + model.sequence * rows + model.context * context
        return np.rint((seconds + model.pair * 0.0) * 1e6).astype(np.int64)

    def tokens_from(self, slots: NDArray[np.integer], back: int, steps: int) -> Ints:
        """The tokens of `steps` decodes of these slots, of which the last `back` plans made the
        first ones: i4[slots, steps]."""
        first = (self._first[slots] + self._length[slots] - back)[:, None]
        return ((first + np.arange(steps)) % VOCAB).astype(np.int32)

    def skip(self, slots: NDArray[np.integer], steps: int) -> None:
        """Goes on as if these slots had been decoded so many times."""
        self._length[slots] += steps
        self._kv[slots] = self._length[slots] - 1

    def decode(self, plan: StepPlan, slots: NDArray[np.integer]) -> StepResult:
        """Applies a plan that decodes these slots and nothing else."""
        rows, length = len(slots), self._length[slots]
        live = self._alive[slots]
        if live.all():
            tokens, counts = (self._first[slots] + length) % VOCAB, b"\1" * rows
            length = length + 1
        else:
            tokens, counts = ((self._first[slots] + length) % VOCAB)[live], live.tobytes()
            length = length + live
        finish, ended = bytes(rows), length >= self._end[slots]
        if ended.any():
            ended &= live
            finish = (ended.view(np.uint8) * np.uint8(2)).tobytes()
            self._alive[slots[ended]] = False
        self._length[slots] = length
        self._kv[slots] = length - 1
        seconds = self._model.seconds(0, rows, float(int(length.sum()) - rows), 0.0)
        return StepResult(epoch=plan.epoch, step=plan.step, counts=counts, finish=finish,
                          tokens=tokens.astype(np.int32).tobytes(), busy_us=round(seconds * 1e6))

    def run(self, plan: StepPlan) -> StepResult:
        """Applies one plan. Raises `BadPlan` where it breaks the protocol."""
        if not (plan.release or plan.admit or plan.extend):
            return self.decode(plan, ints_of(plan.decode))
        self._release(ints_of(plan.release))
        for admit in plan.admit:
            self._admit(admit)
        decode = rows = ints_of(plan.decode)
        prompt, pairs, pooled = 0, 0.0, list[tuple[int, Pooled]]()
        if plan.extend:
            ended = list[int]()
            for slot, count in ints_of(plan.extend).reshape(-1, 2).tolist():
                if self._extend(slot, count):
                    ended.append(slot)
                prompt += count
                pairs += count * (int(self._kv[slot]) - count / 2)
            firsts, pooled = self._pool(ended)
            rows = np.concatenate((np.array(firsts, np.int32), decode))
        live, length = self._alive[rows], self._length[rows]
        tokens = ((self._first[rows] + length) % VOCAB)[live].astype(np.int32)
        length += live
        finish = (live & (length >= self._end[rows])).view(np.uint8) * np.uint8(2)
        self._length[rows] = length
        self._kv[decode] = read = length[len(rows) - len(decode):] - 1
        if finish.any():
            self._alive[rows[finish > 0]] = False
        seconds = self._model.seconds(prompt, len(decode), float(read.sum()), pairs)
        return StepResult(epoch=plan.epoch, step=plan.step, tokens=tokens.tobytes(),
                          counts=live.tobytes(), finish=finish.tobytes(),
                          busy_us=round(seconds * 1e6), pooled=pooled)
