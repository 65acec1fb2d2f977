"""The model runner: plan -> input batch -> forward pass -> sampling -> result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import RowMask, StepPlan, StepResult
from actorium.gpu.adapters.adapter_slots import AdapterSlots, HostRows
from actorium.gpu.graphs.capture import Capturer
from actorium.gpu.graphs.decode_graphs import DecodeGraphRunner, GraphReplay
from actorium.gpu.plan.graph_memory import GraphShape
from actorium.gpu.step.forward import CapturedLayers, StepCounts, StepModel
from actorium.gpu.step.given_rows import take_rows
from actorium.gpu.step.hidden_rows import hidden_results, hidden_tap
from actorium.gpu.step.host_pages import HostPages, PageStaging
from actorium.gpu.step.input_batch import (
    InputBatch,
    PromptLogprobRows,
    fill_batch,
    prepare_batch,
    stage_rows,
)
from actorium.gpu.step.launched_step import LaunchedStep
from actorium.gpu.step.logits_processing import LogitsProcessing
from actorium.gpu.step.pooled_rows import PooledRows, PooledStep, pool_rows
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.result_logprobs import (
    logprobs_count,
    named_tokens,
)
from actorium.gpu.step.routed_experts import (
    RoutedRows,
    RoutedStep,
    chosen_of,
    routed_rows,
    routing_of,
)
from actorium.gpu.step.sampler import SamplerOutput, sample_and_commit
from actorium.gpu.step.speculation import Proposer
from actorium.gpu.step.staging import Array, Download, Upload
from actorium.gpu.step.states import RecurrentBatch, StatePool
from actorium.gpu.step.tables import I32, LOGPROBS, MASKED, SlotTables
from actorium.kernels.reference.logprobs import Logprobs, join

LOGITS_BYTES = 256 << 20
"""The most that the logits of prompt positions take at once."""


ProposeHook = Callable[[I32, I32, int], I32]
"""(slots, positions, k) -> i32[n, k]: drafts of the tokens at each slot's position and after it."""
ToLogits = Callable[[Tensor], Tensor]
OnQueue = Callable[[], None]
WaitForMasks = Callable[[StepPlan], Sequence[RowMask]]
"""Waits for the masks that follow a plan. It may abandon the step with an exception, after which
`ModelRunner.reset` must be called."""


def _no_masks(plan: StepPlan) -> Sequence[RowMask]:
    raise ValueError(f"masks: those of step {plan.step} should follow, nobody waits for them")


def _rows_of(pooled: Sequence[PooledRows]) -> int:
    return sum(own.rows for own in pooled)


class ModelRunner:
    """Runs plans, in order, on one device: a model, the caches it writes, and what steps know of
    sequences."""

    def __init__(self, model: StepModel, pools: list[KVPagePool], tables: SlotTables,
                 states: StatePool | None = None, proposers: Mapping[str, Proposer] | None = None,
                 propose: ProposeHook | None = None, force: tuple[float, ...] = ()) -> None:
        """pools: of each group of the model's layers; states: of its recurrent layers; proposers:
        what makes drafts, by method; propose: makes them where there is no proposer; force: accept
        drafts with these probabilities, by place in the window, whatever was sampled."""
        self.model, self.pools, self.tables, self.states = model, pools, tables, states
        self.proposers, self.arrays = dict(proposers or {}), tables.arrays
        self._one = tables.arrays.full((1,), 1, "int64")
        self._hook, self.force = propose, force
        self.segments: CapturedLayers | None = None
        """Runs the layers of steps that it serves."""
        self.graphs: DecodeGraphRunner | None = None
        self.served = StepCounts()
        """Steps so far, by how they were run."""
        self.host: HostPages | None = None
        self.staging: PageStaging | None = None
        """Of `host`, where pages are not on the host themselves."""
        self.adapters: AdapterSlots | None = None
        """None where no adapters are served."""
        self.processing = LogitsProcessing({}, tables)
        """Of plug-ins' logits processors."""
        self.wait: WaitForMasks = _no_masks
        self.window = 1
        """Rows of each decode of the last step."""

    @property
    def draft_pools(self) -> list[KVPagePool]:
        """Pages of what drafts."""
        return [own.pool for own in self.proposers.values() if own.pool is not None]

    @property
    def all_pools(self) -> list[KVPagePool]:
        """The pools of the model's groups and of what drafts."""
        return [*self.pools, *self.draft_pools]

    def decode_graphs(self, capturer: Capturer, shapes: Sequence[GraphShape]) -> DecodeGraphRunner:
        """Graphs of its decodes, to be captured in the order of these shapes."""
        return DecodeGraphRunner(self.tables, self._captured, self._decode_logits, capturer, shapes,
                                 self.force, self.adapters)

    @property
    def _captured(self) -> Proposer | None:
        """What makes drafts within graphs."""
        return next((own for own in self.proposers.values() if own.captured), None)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step to its end."""
        return self.launch(plan).result()

    def reset(self) -> None:
        """Free every slot, and forget the copies that are under way."""
        self.tables.reset()
        if self.adapters is not None:
            self.adapters.reset()
        if self.staging is not None:
            self.staging.drop()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_queue: OnQueue = lambda: None) -> LaunchedStep:
        """Queue one step on the device without waiting for it (on a CPU: run it). on_queue:
        called when the host has prepared it, before the device's part is queued. Masks that
        follow the plan are waited for (`wait`) when the forward pass is queued.

        Raises `ValueError` on a plan that does not fit the tables.
        """
        if plan.release:
            for own in self.proposers.values():
                own.release(np.frombuffer(plan.release, np.int32))
        up = self.arrays.upload()
        step = prepare_batch(self.tables, plan, up)
        self.window = step.q_len
        out = LaunchedStep(plan, step.slots, prompts=step.prompts, drafted=step.draft_counts)
        if self.host is not None and (plan.store or plan.load):
            out.lost = (self.staging or self.host).begin(plan.store, plan.load)
        adapted, staged = self._adapted(plan, step), None
        routed = routed_rows(step, self.tables.routed) if self.tables.routed else []
        captured = None if self.graphs is None or routed else self.graphs.serve(
            step, sum(made for own, made in self._drafting(plan) if own.captured), up, adapted)
        if captured is None:
            stage_rows(step, up)
            if adapted is not None and self.adapters is not None:
                staged = self.adapters.stage(adapted, up)
        else:
            self.served.add("full_graph", captured.rows)
        self._pick(plan, step, up)
        self.processing.stage(step, up)
        on_queue()
        up.send()
        if staged is not None and self.adapters is not None:
            step.adapted = self.adapters.staged(staged, up)
        if self.states is not None and plan.admit:
            self.states.admit(plan.admit)
        if (images := self.tables.images) is not None:
            out.media = images.prepare(plan, step.extends.rows if step.extends else (),
                                       self.tables.sequences)
        if not step.tokens:
            return out
        if captured is None:
            fill_batch(self.tables, step, up)
            if images is not None:
                images.apply(step.batches)
            if self.tables.given:
                step.batches[0].given = take_rows(step.batches[0], self.tables.given)
            self._run(plan, step, up, out, routed)
        else:
            rows, counts = self._replay(captured, step, up, out)
            for own, made in self._drafting(plan):
                if not own.captured:
                    own.propose(step, made, rows, counts, None)
        if plan.drafts and self._hook is not None and not self.proposers and len(step.slots):
            self._propose_with(self._hook, step, plan.drafts)
        if "masked" in step.staged:
            out.drafts = self.arrays.fetch(self.tables.drafts.reported(
                step.masked, self.arrays.long(up[step.staged["masked"]]), plan.drafts))
        return out

    def _adapted(self, plan: StepPlan, step: InputBatch) -> HostRows | None:
        """Which rows of the step have an adapter."""
        if self.adapters is None:
            return None
        self.adapters.apply(plan)
        return self.adapters.rows_of(step)

    def _pick(self, plan: StepPlan, step: InputBatch, up: Upload) -> None:
        """Add what log-probabilities, masks and drafts need on the device to the upload."""
        if step.needs & LOGPROBS:
            rows = np.flatnonzero(step.flags & LOGPROBS).astype(np.int32)
            step.staged["ranked"] = up.add(rows)
            named = named_tokens(self.tables, step.row_slots[rows])
            if named is not None:
                step.staged["named"] = up.add(named.reshape(-1))
        if plan.drafts and step.needs & MASKED:
            step.masked = step.slots[self.tables.flags[step.slots] & MASKED > 0]
            step.staged["masked"] = up.add(step.masked)
        if step.prompts:
            step.staged["prompts"] = up.add(np.concatenate([p.tokens for p in step.prompts]))

    def _run(self, plan: StepPlan, step: InputBatch, up: Upload, out: LaunchedStep,
             routed: list[RoutedRows]) -> None:
        """Run the step operation by operation, or its layers from piecewise graphs."""
        recurrent, normed, rows = self._recurrent(plan, step), None, None
        if step.pooled:
            step.batches[0].hidden = hidden_tap(step, self.tables.pooled, self.model.shape.layers)
        if routed:
            rows = self._routed_rows(step, recurrent, routed, out)
        if any(own.needs_hidden(step, made) for own, made in self._drafting(plan)):
            normed = self.model.norm_rows(self._all_rows(step, recurrent) if rows is None else rows)
            wanted = normed.index_select(0, step.batches[0].logit_rows)
            emitted = self._sample_rows(step, wanted, self.model.head_logits, up, out)
            if step.pooled:
                self._pool(step, wanted[-_rows_of(step.pooled):], out)
        else:
            wanted = (self.wanted_rows(step, recurrent) if rows is None
                      else rows.index_select(0, step.batches[0].logit_rows))
            emitted = self._sample_rows(step, wanted, self.model.logits, up, out)
            if step.pooled:
                self._pool(step, self.model.norm_rows(wanted[-_rows_of(step.pooled):]), out)
        tokens, counts = (emitted.rows, emitted.counts) if emitted else (None, None)
        for own, made in self._drafting(plan):
            own.propose(step, made, tokens, counts, normed)

    def _routed_rows(self, step: InputBatch, recurrent: RecurrentBatch | None,
                     routed: list[RoutedRows], out: LaunchedStep) -> Tensor:
        """`_all_rows`, operation by operation, with the experts of the rows `routed` noted."""
        tape = self.model.tape
        tape.chosen = []
        try:
            rows = self._all_rows(step, recurrent)
            out.experts = RoutedStep(routed, routing_of(self.model.shape)[2],
                                     self.arrays.fetch(chosen_of(tape.chosen, routed)))
        finally:
            tape.chosen = None
        return rows

    def _drafting(self, plan: StepPlan) -> Iterator[tuple[Proposer, int]]:
        """What makes drafts, and how many each makes now."""
        for method, own in self.proposers.items():
            yield own, plan.drafts if plan.draft_method in (method, "") else 0

    def _decode_logits(self, step: InputBatch) -> tuple[Tensor | None, Tensor]:
        """What graphs of decodes capture: every row after the final norm, where drafts are made of
        them, and logits."""
        rows = self._all_rows(step, self._recurrent(StepPlan(0, 0), step))
        if self._captured is None:
            return None, self.model.logits(rows)
        normed = self.model.norm_rows(rows)
        return normed, self.model.head_logits(normed)

    def _recurrent(self, plan: StepPlan, step: InputBatch) -> RecurrentBatch | None:
        """The step's rows of the recurrent states; None where the model has none."""
        if self.states is None:
            return None
        arrays, drafts = self.arrays, self.tables.drafts
        slots, extends = step.slots_d[step.ending:], step.batches[0].extends
        decodes = arrays.tensor(slots - self._one)  # i64: slot 0, of padding, has no row
        if not drafts.max_drafts:
            return RecurrentBatch(self.states, self.states.rows(plan, extends, decodes))
        accepted = arrays.tensor(drafts.accepted[slots])
        return RecurrentBatch(self.states, self.states.rows(plan, extends, decodes, step.q_len,
                                                            accepted))

    def _all_rows(self, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        """[T, hidden]: every row before the final norm."""
        for batch in step.batches:
            batch.all_rows = True
        return self.wanted_rows(step, recurrent)

    def wanted_rows(self, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        """[R, hidden]: the rows `logit_rows` before the final norm; all T where `all_rows`."""
        as_text = all(batch.images is None and batch.turned_to.dim() == 1 for batch in step.batches)
        if self.model.tape.chosen is not None:
            why = "experts"
        elif step.batches[0].hidden is not None:
            why = "hidden_states"
        elif self.segments is None:
            why = "off"
        elif not as_text:
            why = "images"
        elif step.batches[0].given is not None:
            why = "prompt_embeds"
        elif size := self.segments.serves(step):
            self.served.add(self.segments.serves_as, size)
            return self.segments.forward(step, self.pools, recurrent)
        else:
            why = self.segments.misses(step)
        if step.adapted is not None and self.adapters is not None:
            self.served.add_eager(step.tokens, "adapters")
            return self.adapters.layers.forward(step.adapted, step.batches, self.pools, recurrent)
        self.served.add_eager(step.tokens, why)
        return self.model.forward(step.batches, self.pools, recurrent)

    def _propose_with(self, hook: ProposeHook, step: InputBatch, drafts: int) -> None:
        """Write the hook's drafts to the tables. Waits for the device."""
        t = self.tables
        (length,) = self.arrays.fetch_rows(t.seq_len[step.slots_d]).wait()
        (given,) = self.arrays.stage(hook(step.slots, length, drafts))
        t.drafts.tokens[step.slots_d, :drafts] = self.arrays.long(given)

    def _replay(self, captured: GraphReplay, step: InputBatch, up: Upload,
                out: LaunchedStep) -> tuple[Array, Array]:
        """Replay the step from graphs; rare parameters are sampled outside them. Returns rows and
        counts of the `SamplerOutput`."""
        captured.lend(step)
        captured.forward()
        packed = captured.packed
        if packed is None:
            # The result of the step before may still be on its way to the host.
            self.arrays.wait_for_fetches()
            emitted = self._sample(step, captured.logits[:len(step.row_slots)], up, out)
            captured.follow(emitted)
            return emitted.rows, emitted.counts
        self.arrays.wait_for_fetches()
        captured.finish()
        out.rows = self.arrays.fetch(packed).unstack(len(step.slots))
        if step.q_len > 1:
            out.learn = self._learn(step)
        return captured.emitted(step)

    def _sample_rows(self, step: InputBatch, wanted: Tensor, to_logits: ToLogits, up: Upload,
                     out: LaunchedStep) -> SamplerOutput | None:
        """Sample, and compute prompt log-probabilities. wanted: [R, hidden], the `logit_rows`."""
        rows, emitted = len(step.row_slots), None
        if rows:
            emitted = self._sample(step, to_logits(wanted[:rows]), up, out)
        if step.prompts:
            tokens = self.arrays.long(up[step.staged["prompts"]])
            out.prompt_values = self._prompts(step.prompts, self.arrays.tensor(tokens),
                                              wanted[rows:rows + len(tokens)], to_logits)
        return emitted

    def _pool(self, step: InputBatch, normed: Tensor, out: LaunchedStep) -> None:
        """Take in rows of prompts that are pooled. normed: [R, hidden], after the final norm."""
        if (tap := step.batches[0].hidden) is not None:
            out.hidden = hidden_results(tap, step.pooled, normed, self.tables.pooled,
                                        self.model.shape.layers)
        assert self.model.pooler is not None, "the scheduler knows which tasks are served"
        found = pool_rows(self.model.pooler, step.pooled, normed, self.tables.pooled)
        if found is not None:
            out.pooled = PooledStep(found[0], self.arrays.fetch(found[1]))

    def _sample(self, step: InputBatch, logits: Tensor, up: Upload,
                out: LaunchedStep) -> SamplerOutput:
        raw, index = None, None
        if "ranked" in step.staged:
            index = self.arrays.long(up[step.staged["ranked"]])
            raw = logits[self.arrays.tensor(index)]
        if processed := "processed" in step.staged:
            logits, out.processed = self.processing.apply(step, up, logits)
        masks = self.wait(out.plan) if out.plan.masks_follow else out.plan.masks
        emitted = sample_and_commit(self.tables, step, logits, masks, self.force)
        tokens = emitted.rows
        if processed and self.tables.history is not None:
            self.tables.note_sampled(step.row_slots_d, step.positions, tokens)
        if raw is not None:
            out.ranked = self._ranked(step, raw.shape[1])
            most = max(k for _, _, k in out.ranked)
            chosen, named = self.arrays.tensor(tokens[index]), None
            if "named" in step.staged:
                flat = self.arrays.long(up[step.staged["named"]])
                named = self.arrays.tensor(flat.reshape(-1, most))
            out.ranked_values = self.arrays.fetch(
                *self.tables.sampling.logprobs(raw, chosen, most, named))
        if emitted.packed is None:
            out.rows = self.arrays.fetch_rows(emitted.counts, emitted.finish, *emitted.columns)
        else:
            out.rows = self.arrays.fetch(emitted.packed).unstack()
        if step.q_len > 1:
            out.learn = self._learn(step)
        return emitted

    def _ranked(self, step: InputBatch, vocab: int) -> list[tuple[int, int, int]]:
        t = self.tables
        return [(i, 1 if i < step.ending else step.q_len,
                 logprobs_count(t.sequences[int(step.slots[i])].params, vocab))
                for i in np.flatnonzero(t.flags[step.slots] & LOGPROBS).tolist()]

    def _learn(self, step: InputBatch) -> Callable[[I32], None]:
        drafts, raised = self.tables.drafts, np.full(len(step.slots), step.q_len, np.int32)
        raised[:step.ending] = 1
        return partial(drafts.learn, step.slots, drafts.serials(step.slots), raised)

    def _prompts(self, prompts: Sequence[PromptLogprobRows], targets: Tensor, hidden: Tensor,
                 to_logits: ToLogits) -> Download:
        vocab = self.tables.vocab
        k = min(max(p.k for p in prompts), vocab)
        step = max(1, LOGITS_BYTES // (4 * vocab))
        parts: list[Logprobs] = []
        for at in range(0, len(hidden), step):
            logits = to_logits(hidden[at:at + step])
            parts.append(self.tables.sampling.logprobs(logits, targets[at:at + step], k))
        return self.arrays.fetch(*join(parts))
