"""Plan -> batch -> forward -> sample -> result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.actors.messages import RowLogprobs, StepPlan, StepResult
from actorium.gpu.batch import ForwardBatch
from actorium.gpu.pools import PagePool
from actorium.gpu.sampler import commit, sample
from actorium.gpu.staging import Fetched
from actorium.gpu.states import Recurrent, StatePool
from actorium.gpu.steps import PromptRows, Step, build
from actorium.gpu.tables import I32, LOGPROBS, Tables
from actorium.kernels.logprobs import Logprobs, join, logprobs

LOGITS_BYTES = 256 << 20
"""Most that the logits of prompt positions may take at once."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[PagePool],
                recurrent: Recurrent | None = None) -> Tensor: ...

    def logits(self, rows: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Launched:
    """A step under way on the device."""

    plan: StepPlan
    slots: I32
    """Of the sampled rows."""
    rows: Fetched | None
    """token, finish, count: [rows] each; None when nothing was sampled."""
    ranked: list[tuple[int, int]]
    """(sampled row, alternatives) of the rows that want log-probabilities."""
    ranked_values: Fetched | None
    prompts: list[PromptRows]
    prompt_values: Fetched | None

    def result(self, busy_us: int = 0, idle_us: int = 0) -> StepResult:
        """Wait for the step and tell what it produced."""
        counts, tokens, finish = b"", b"", b""
        if self.rows is not None:
            token, end, emitted = self.rows.wait()
            counts = emitted.astype(np.uint8).tobytes()
            finish = end.astype(np.uint8).tobytes()
            tokens = token[emitted > 0].astype(np.int32).tobytes()
        return StepResult(
            self.plan.epoch, self.plan.step, counts, tokens, finish,
            _row_logprobs(self.ranked, self.ranked_values),
            _prompt_logprobs(self.prompts, self.prompt_values), busy_us, idle_us)


class Runner:
    """Runs plans, in order, on one device."""

    def __init__(self, model: Model, pools: list[PagePool], tables: Tables,
                 states: StatePool | None = None) -> None:
        """pools: of each group of the model's layers; states: of its recurrent layers."""
        self.model, self.pools, self.tables, self.states = model, pools, tables, states
        self.moves = tables.moves

    def run(self, plan: StepPlan) -> StepResult:
        """One step, to its end."""
        return self.launch(plan).result()

    def reset(self) -> None:
        """Forget every slot."""
        self.tables.reset()

    @property
    def running(self) -> int:
        """Slots in use, as the host knows it."""
        return len(self.tables.sequences)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue one step on the device without waiting for it (on a CPU: run it).

        Raises `ValueError` on a plan that does not fit the tables.
        """
        step = build(self.tables, plan)
        recurrent = self._recurrent(plan, step)
        out = Launched(plan, step.slots, None, [], None, step.prompts, None)
        if not len(step.batches[0].tokens):
            return out
        hidden = self.model.forward(step.batches, self.pools, recurrent)
        rows = len(step.slots)
        if rows:
            self._sample(step, hidden[:rows], out)
        if step.prompts:
            out.prompt_values = self._prompts(step.prompts, hidden[rows:])
        return out

    def _recurrent(self, plan: StepPlan, step: Step) -> Recurrent | None:
        """Admit the plan's sequences to the states, and find the step's rows of them."""
        if self.states is None:
            return None
        if plan.admit:
            self.states.admit(plan.admit)
        decodes = step.slots_d[len(step.slots) - len(plan.decode) // 4:]
        return Recurrent(self.states, self.states.rows(
            plan, step.batches[0].extends, self.moves.tensor(self.moves.long(decodes))))

    def _sample(self, step: Step, hidden: Tensor, out: Launched) -> None:
        logits = self.model.logits(hidden)
        raw = None
        if step.needs & LOGPROBS:
            wanted = np.flatnonzero(step.flags & LOGPROBS)
            (index,) = self.moves.stage(wanted.astype(np.int32))
            index = self.moves.long(index)
            raw = logits[self.moves.tensor(index)]
        tokens = sample(self.tables, step, logits)
        if raw is not None:
            seqs = self.tables.sequences
            out.ranked = [(row, min(seqs[int(step.slots[row])].params.logprobs, raw.shape[1]))
                          for row in wanted.tolist()]
            most = max(k for _, k in out.ranked)
            chosen = self.moves.tensor(tokens[index])
            out.ranked_values = self.moves.fetch(*logprobs(raw, chosen, most))
        out.rows = self.moves.fetch_rows(*commit(self.tables, step, tokens))

    def _prompts(self, prompts: list[PromptRows], hidden: Tensor) -> Fetched:
        (tokens,) = self.moves.stage(np.concatenate([p.tokens for p in prompts]))
        targets = self.moves.tensor(self.moves.long(tokens))
        vocab = self.tables.vocab
        k = min(max(p.k for p in prompts), vocab)
        step = max(1, LOGITS_BYTES // (4 * vocab))
        parts: list[Logprobs] = []
        for at in range(0, len(hidden), step):
            logits = self.model.logits(hidden[at:at + step])
            parts.append(logprobs(logits, targets[at:at + step], k))
        return self.moves.fetch(*join(parts))


def _row_logprobs(ranked: list[tuple[int, int]], values: Fetched | None) -> list[RowLogprobs]:
    if values is None:
        return []
    arrays = values.wait()
    chosen, ranks, ids, top = (a.tobytes() for a in arrays)
    most = arrays[2].shape[1]
    return [RowLogprobs(row, 0, chosen[4 * i:4 * i + 4], ranks[4 * i:4 * i + 4],
                        ids[4 * most * i:4 * (most * i + k)], top[4 * most * i:4 * (most * i + k)])
            for i, (row, k) in enumerate(ranked)]


def _prompt_logprobs(prompts: list[PromptRows], values: Fetched | None) -> list[RowLogprobs]:
    if values is None:
        return []
    arrays, out, at = values.wait(), [], 0
    for p in prompts:
        out.append(_pack(p.slot, p.start, arrays, at, at + len(p.tokens), p.k))
        at += len(p.tokens)
    return out


def _pack(row: int, start: int, arrays: list[NDArray[Any]], first: int, last: int,
          k: int) -> RowLogprobs:
    chosen, ranks, top_ids, top = (a[first:last] for a in arrays)
    return RowLogprobs(row, start, chosen.tobytes(), ranks.tobytes(), top_ids[:, :k].tobytes(),
                       top[:, :k].tobytes())
