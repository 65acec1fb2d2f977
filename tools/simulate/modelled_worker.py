"""A worker without a model whose steps take the time that a `StepSeconds` says. Pure."""

from __future__ import annotations

import numpy as np

from actorium.actors.core import Context
from actorium.actors.messages import Admit, StepPlan, StepResult
from actorium.tools.null.null_memory import ints_of
from actorium.tools.null.null_worker import VOCAB, NullWorker
from actorium.tools.simulate.step_model import StepSeconds


class ModelledWorker(NullWorker):
    """The null worker, less what its tests are for: no drafts, masks or ends of sequence; tokens
    that are a plain sum of seed and position. It tells with each result how long the step took."""

    def __init__(self, context: Context, model: StepSeconds) -> None:
        super().__init__(context)
        self._model = model
        self._first = np.zeros(self.ready.slots, np.int64)
        """By slot: its token at position 0."""

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        self._first[admit.slot] = admit.seed & 0xFFFF

    def run(self, plan: StepPlan) -> StepResult:
        """Applies one plan. Raises `BadPlan` where it breaks the protocol."""
        self._release(ints_of(plan.release))
        for admit in plan.admit:
            self._admit(admit)
        decode = rows = ints_of(plan.decode)
        prompt, pairs = 0, 0.0
        if plan.extend:
            firsts = []
            for slot, count in ints_of(plan.extend).reshape(-1, 2).tolist():
                if self._extend(slot, count):
                    firsts.append(slot)
                prompt += count
                pairs += count * (int(self._kv[slot]) - count / 2)
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
                          busy_us=round(seconds * 1e6))
