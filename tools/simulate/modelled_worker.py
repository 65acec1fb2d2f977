"""A worker without a model whose steps take the time that a `StepSeconds` says. Pure."""

from __future__ import annotations

import msgspec

from actorium.actors.core import Context
from actorium.actors.messages import StepPlan, StepResult
from actorium.tools.null.null_memory import ints_of
from actorium.tools.null.null_worker import NullWorker
from actorium.tools.simulate.step_model import StepSeconds


class ModelledWorker(NullWorker):
    """The null worker, which tells with each result how long the step has taken."""

    def __init__(self, context: Context, model: StepSeconds) -> None:
        super().__init__(context)
        self._model = model

    def run(self, plan: StepPlan) -> StepResult:
        """Applies one plan. Raises `BadPlan` where it breaks the protocol."""
        result = super().run(plan)
        decode, prompt, pairs = ints_of(plan.decode), 0, 0.0
        if plan.extend:
            for slot, count in ints_of(plan.extend).reshape(-1, 2).tolist():
                prompt += count
                pairs += count * (int(self._kv[slot]) - count / 2)
        seconds = self._model.seconds(prompt, len(decode), float(self._kv[decode].sum()), pairs)
        return msgspec.structs.replace(result, busy_us=round(seconds * 1e6))
