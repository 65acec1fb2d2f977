"""Makes the next plan: first a decode of every running sequence, then chunks of prompts that have
begun, then admissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from actorium.actors.config.parsed_values import GRAMMAR, parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.messages import (
    BACKGROUND,
    MAX_MESSAGE_BYTES,
    MAX_RESULT,
    Admit,
    PromptEmbeds,
    Ready,
    RowDrafts,
    StepPlan,
    StepResult,
)
from actorium.actors.scheduler.draft_policy import DraftChoice, DraftPolicy
from actorium.actors.scheduler.prefill_pacing import PrefillAllowance, PrefillPacer, new_pacer
from actorium.actors.scheduler.request_state import PlanRecord, SequenceState, VerifiedDrafts
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import DecodeRows


class Planner:
    """Makes plans from the scheduler's state."""

    def __init__(self, state: SchedulerState, epoch: int, config: Config) -> None:
        """epoch: the scheduler's."""
        self.drafting: DraftPolicy | None = None
        """What makes each plan's drafts, and how many; None = nothing does."""
        self.pacing: PrefillPacer | None = None
        """How many prompt tokens share a step with decodes; None = all that fit its budget."""
        self._state = state
        self._epoch = epoch
        self._budget = config.scheduler.max_num_batched_tokens
        """Tokens that a step may compute."""
        self._background_seqs = config.scheduler.background_seqs
        """Background sequences that run beside others."""
        self._preempt_every = config.scheduler.force_preempt_every
        self._target_itl = config.scheduler.target_itl
        self._fixed_drafts = parse_speculative(config.speculation.speculative).fixed
        self.most_forced = 0
        """Drafts of a sequence in a step, at most, that its grammar forces; 0 = they are not made
        use of."""
        self._made = DraftChoice()
        """The drafts of the last plan."""
        self._hidden_states = (0, 0, 0)
        """See `Ready`."""

    def plan(self, step: int, unresolved: tuple[PlanRecord, ...],
             forced: Mapping[int, Sequence[int]] | None = None) -> (
                 tuple[StepPlan, PlanRecord] | None):
        """Returns the next plan and its record; None when there is nothing to compute.

        unresolved: records of the plans still in flight; forced: tokens that grammars force, by
        sid.
        """
        state = self._state
        state.kv_cache.at_step(step)
        state.room.reserve.on_step()
        if self._preempt_every and step % self._preempt_every == 0:
            victim = state.table.latest(decoding=True)  # it has emitted a token since
            if victim is not None:
                state.preempt(victim, "forced")
        self._preempt_background()
        self._preempt_for_priority(unresolved)
        state.table.window = 1 + self._made.drafts
        if forced:
            forced = self._open_window(forced)
        while True:
            rows, appends = self._reserve()
            draft = PartialPlan(self._budget - len(rows.slots) * state.table.window, [appends],
                                len(rows.slots), unresolved)
            for sequence in sorted(state.prefilling, key=lambda s: s.background):
                self._plan_chunk(draft, sequence)
            while (draft.budget > 0 and not (draft.allowance and draft.allowance.spent)
                   and self._admit(draft)):
                self._plan_chunk(draft, state.prefilling[-1])
            if (draft.extends or draft.admits or len(rows.slots) or not state.prefilling
                    or state.guard.failed):
                break
            # Prompts hold each other's pages: only the windows of a very small pool get here.
            self._make_room()
        if not (draft.extends or draft.admits or len(rows.slots)
                or (state.tier is not None and state.tier.due)
                or (state.adapters is not None and state.adapters.leaving
                    and state.slots_to_release)):
            return None
        if forced:  # some of them may have been preempted meanwhile
            draft.forced = {sid: forced[sid] for sid in rows.sids.tolist() if sid in forced}
            opened = state.table.window
            state.table.window = 1 + max([self._made.drafts, *map(len, draft.forced.values())])
            draft.budget += (opened - state.table.window) * len(rows.slots)
        state.table.plan_decode(rows)
        return self._assemble(step, rows, draft)

    def _open_window(self, forced: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Makes the next plan's windows as long as it pays for tokens that grammars force. Returns
        those tokens that it is to verify."""
        table, made = self._state.table, self._made.drafts
        assert self.drafting is not None
        wanted = self.drafting.forced(int(np.count_nonzero(table.decoding)),
                                      [len(tokens) for tokens in forced.values()])
        longest = max(made, wanted)
        table.window = 1 + longest
        return {sid: tokens[:longest] for sid, tokens in forced.items()} if longest else {}

    def reset(self, worker: Ready) -> None:
        """Starts over with a fresh worker: nothing runs, nothing is drafted yet. What was learnt of
        an earlier worker that made the same drafts is kept, and of one that kept to the same
        target."""
        methods = worker.draft_methods or ({"": worker.drafts} if worker.drafts else {})
        if methods != (self.drafting.methods if self.drafting else {}):
            self.drafting = DraftPolicy(methods, self._fixed_drafts) if methods else None
        self.most_forced = methods.get(GRAMMAR, 0)
        self._hidden_states = worker.hidden_states
        self._made = DraftChoice()
        pacing = new_pacer(self._target_itl, worker)
        if pacing is None or self.pacing is None or pacing.about != self.pacing.about:
            self.pacing = pacing
        self._state.table.window = 1

    def on_result(self, record: PlanRecord, verified: Mapping[str, VerifiedDrafts],
                  result: StepResult) -> None:
        """Learns from a step how many drafts were right, what making them cost, and how long steps
        take. record: as the step was run; verified: by method."""
        if self.drafting is not None:
            for method, seen in verified.items():
                self.drafting.verified(method, seen)
            if result.draft_counts and not verified and record.verifies:
                self.drafting.verified(record.verifies, None)
            if record.forced:
                if not record.extends:
                    self.drafting.timed(record.decodes, DraftChoice(GRAMMAR, record.window - 1),
                                        result.busy_us)
            elif ((record.window == 1 + record.drafts or result.draft_counts)
                    and record.verifies == record.method and not record.extends):
                drafts = record.window - 1
                self.drafting.timed(
                    record.decodes, DraftChoice(record.method if drafts else "", drafts),
                    result.busy_us)
        if self.pacing is not None:
            self.pacing.encoded(result.encoded)
            if record.extends or not result.step % 4:  # of steps that only decode, a sample
                self.pacing.measured(record, result.busy_us - result.encode_us, result.idle_us)

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        return {**(self.drafting.gauges() if self.drafting else {}),
                **(self.pacing.gauges() if self.pacing else {})}

    def _assemble(self, step: int, rows: DecodeRows, draft: PartialPlan) -> tuple[StepPlan,
                                                                                  PlanRecord]:
        extends = draft.extends
        column, slots, sids, sids_column = b"", rows.slots, rows.sids, rows.sids_column
        firsts, pooled = self._finish_prompts(extends)
        if extends:
            column = _column([(s.slot, n) for s, n in extends])
        if firsts:
            slots = np.concatenate((np.array([s.slot for s in firsts], np.int64), slots))
            sids = np.concatenate((np.array([s.sid for s in firsts], np.int64), sids))
            sids_column = sids.tobytes()
        computed, predicted = self._budget - draft.budget, 0
        allowance, tier = draft.allowance, self._state.tier
        if self.pacing is not None and extends:
            decoded = len(rows.slots) * self._state.table.window
            predicted = self.pacing.predict(decoded, computed - decoded, draft.attended)
            self.pacing.planned(allowance.deferred if allowance else 0)
        made = self.drafting.next(len(slots)) if self.drafting else DraftChoice()
        record = PlanRecord(step, slots, sids, sids_column, len(firsts),
                            {s.slot: s.sid for s, _ in extends},
                            computed, self._state.table.window, made.drafts,
                            draft.attended, predicted, {s.slot: s.sid for s in pooled},
                            [(s.slot, int(self._state.table.order[s.slot]), s.computed)
                             for s, _ in extends if s.request.submit.media],
                            self._made.method, made.method, draft.forced)
        # Whoever decodes in the next plan is sampled in this one, so all have as many drafts then.
        self._state.table.window = 1 + record.drafts
        self._made = made
        store, load = (b"", b"") if tier is None else tier.planned(step)
        release = _column(self._state.slots_to_release)
        self._state.slots_to_release.clear()
        return StepPlan(
            epoch=self._epoch, step=step, release=release, admit=draft.admits,
            page_appends=b"".join(draft.appends), extend=column, decode=rows.slots_column,
            checkpoints=_column(draft.checkpoints), drafts=record.drafts,
            draft_method=record.method,
            draft_cost=self.drafting.cost if self.drafting and record.drafts else 0.0,
            encode=allowance.encode if allowance else [],
            encode_us=allowance.encode_us if allowance else 0,
            store=store, load=load, forced=[
                RowDrafts(int(slot), _column([*draft.forced[sid]])) for slot, sid in zip(
                    rows.slots.tolist(), rows.sids.tolist(), strict=True)
                if sid in draft.forced] if draft.forced else []), record

    def _finish_prompts(self, extends: list[tuple[SequenceState, int]]
                        ) -> tuple[list[SequenceState], list[SequenceState]]:
        """Returns the sequences whose prompt this plan completes: those that are sampled, which
        decode from the next plan on, and those that are pooled, which end with its result."""
        firsts, pooled = list[SequenceState](), list[SequenceState]()
        for sequence, _ in extends:
            if sequence.computed == sequence.total:
                self._state.prefilling.remove(sequence)
                (pooled if sequence.pooled else firsts).append(sequence)
        for sequence in firsts:
            self._state.table.start_decoding(sequence.slot)
        return firsts, pooled

    def _reserve(self) -> tuple[DecodeRows, bytes]:
        """Returns the rows to decode, and the pages they still need, preempting until those are
        there.

        The oldest sequence (of the highest priority) is never the victim of another one, and alone
        it fits the pools (its end was capped to that at submission): so every wave of preemptions
        lets someone finish.
        """
        state, table = self._state, self._state.table
        while True:
            rows = table.decode_rows()
            if table.windowed and len(rows.slots):
                table.free_behind_windows(rows.slots, table.len_lo[rows.slots] - 1, state.kv_cache)
            slots = table.needing_pages(rows)
            if not len(slots):
                return rows, b""
            promised = state.room.reserved_pages()
            for early in (True, False):
                appends = table.grow(slots, state.kv_cache, early, promised)
                if appends is not None:
                    return rows, appends
            self._make_room()

    def _make_room(self) -> None:
        """Makes pages available: unlocks those behind every window, else preempts a sequence."""
        state = self._state
        if state.unlock_windows():
            return
        victim = state.room.pick_victim(state.queue.policy == "priority") or state.table.latest()
        assert victim is not None
        state.preempt(victim, "memory")
        state.room.reserve.on_preemption()

    def _plan_chunk(self, draft: PartialPlan, sequence: SequenceState) -> None:
        """Plans a sequence's next chunk, as far as budget and pages go. Where that raises, the plan
        is left as it was."""
        computed, planned = sequence.computed, len(draft.extends)
        error = self._state.guard.attempt(
            sequence.request, partial(self._add_chunk, draft, sequence))
        if error is not None:
            sequence.computed = computed
            for _, chunk in draft.extends[planned:]:
                draft.budget += chunk
            del draft.extends[planned:]

    def _add_chunk(self, draft: PartialPlan, sequence: SequenceState) -> None:
        state = self._state
        table, kv_cache, slot = state.table, state.kv_cache, sequence.slot
        left = sequence.total - sequence.computed
        chunk = min(left, draft.budget)
        size = left == chunk and sequence.pooled and self._result_bytes(sequence)
        if size and draft.results and draft.results + size > 2 * MAX_RESULT:
            chunk -= 1  # it ends with a later step: results travel in one message
        if state.whole_prompts:
            chunk = 0 if chunk < left else left
        elif sequence.background and state.foreground:
            chunk = min(chunk, kv_cache.page_size)
        if chunk > 0 and draft.rows and self.pacing is not None:
            if draft.allowance is None:
                # Those that are pooled wait for no first token: streams need not make way for it.
                waiting = len(state.queue) - state.queue.pooled + sum(
                    not own.pooled for own in state.prefilling)
                draft.allowance = self.pacing.allowance(
                    draft.rows * table.window, draft.rows, waiting, draft.unresolved)
            if draft.allowance is not None:
                chunk = draft.allowance.take(sequence.computed, chunk,
                                             sequence.request.submit.media)
        if chunk <= 0:
            return
        table.free_behind_windows(np.array([slot]), np.array([sequence.computed]), kv_cache)
        appends = table.grow_to(slot, self._written(sequence, chunk), kv_cache)
        if appends is None:
            room = min(kv_cache.available(g) for g in range(len(kv_cache.pools)))
            most = (int(table.held[slot]) + room) * kv_cache.page_size - sequence.computed
            # The end of the prompt may lack a page for the drafts alone: then it ends later.
            chunk = min(chunk, most, left - 1)
            if chunk > 0 and not state.whole_prompts:
                appends = table.grow_to(slot, sequence.computed + chunk, kv_cache)
        if appends is None:
            return
        draft.appends.append(appends)
        draft.attended += chunk * (sequence.computed + chunk / 2)
        sequence.computed += chunk
        draft.results += size if chunk == left else 0
        draft.extends.append((sequence, chunk))
        draft.budget -= chunk
        draft.checkpoints += state.chunk_planned(sequence, chunk)

    def _result_bytes(self, sequence: SequenceState) -> int:
        """Returns the bytes of what is told of every token of a pooled prompt."""
        pooling, (_, width, number) = sequence.request.submit.pooling, self._hidden_states
        assert pooling is not None
        row = len(pooling.layers) * number or 4 * (pooling.task == "token_embed")
        return sequence.total * row * width

    def _written(self, sequence: SequenceState, chunk: int) -> int:
        """Returns how many tokens of the sequence have K and V somewhere after its next `chunk`
        ones."""
        tokens = sequence.computed + chunk
        if tokens < sequence.total:
            return tokens
        return self._state.table.reach(tokens, sequence.end)

    def _next_to_admit(self, unresolved: tuple[PlanRecord, ...]) -> SequenceState | None:
        """Returns the sequence to admit next, unless tokens of it are still in flight.

        (A preempted sequence is recomputed from all its tokens, so the last must be known.)
        """
        state = self._state
        head = state.next_waiting
        if head is not None and head.background and state.trial is None and state.foreground \
                and state.background_running >= self._background_seqs:
            return None
        if head is None or any((record.sids == head.sid).any() for record in unresolved):
            return None
        return head

    def _admit(self, draft: PartialPlan) -> bool:
        """Adds the admission of the next sequence to the plan; False if there is none to make."""
        head = self._next_to_admit(draft.unresolved)
        if head is None:
            return False
        before = len(draft.admits)
        error = self._state.guard.attempt(head.request, partial(self._add_admission, draft, head))
        if error is not None and head.slot:
            self._state.undo_admission(head)
        return len(draft.admits) > before

    def _add_admission(self, draft: PartialPlan, head: SequenceState) -> None:
        if draft.fits(head.request.submit.embeds) and self._state.can_admit(head) \
                and not self._state.fetch_prefix(head):
            draft.admits.append(self._state.admit(head))

    # Both are called before the plan is begun, so that no sequence leaves a slot that it names.

    def _preempt_background(self) -> None:
        """Preempts background sequences, the latest first, until no more run than may beside
        others."""
        state = self._state
        if state.background_running <= self._background_seqs or not state.foreground:
            return
        running = [s for s in state.table.sequences if s is not None and s.background]
        running.sort(key=lambda s: int(state.table.order[s.slot]))
        for victim in running[self._background_seqs:][::-1]:
            state.preempt(victim, "priority")

    def _preempt_for_priority(self, unresolved: tuple[PlanRecord, ...]) -> None:
        """Preempts lower priorities until the highest that waits fits: under the priority policy
        any, under the others background sequences."""
        state = self._state
        by_priority = state.queue.policy == "priority"
        if not (by_priority or state.background_running and state.queue.foreground):
            return
        head = self._next_to_admit(unresolved)
        while head is not None and not state.can_admit(head):
            victim = state.room.pick_victim(by_priority, head.priority if by_priority
                                            else BACKGROUND + 1)
            if victim is None:
                return
            state.preempt(victim, "priority")


def _column(rows: list[Any]) -> bytes:
    return np.array(rows, np.int32).tobytes() if rows else b""


@dataclass(slots=True)
class PartialPlan:
    """A plan while it is made."""

    budget: int
    """Tokens that it may still compute."""
    appends: list[bytes]
    rows: int
    """Sequences that it decodes."""
    unresolved: tuple[PlanRecord, ...]
    """Records of the plans in flight."""
    extends: list[tuple[SequenceState, int]] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    checkpoints: list[tuple[int, int, int]] = field(default_factory=list)
    results: int = 0
    """Bytes of the results that it brings."""
    attended: float = 0.0
    """As `PlanRecord.attended`."""
    allowance: PrefillAllowance | None = None
    """What the extends may take of that; None = all of it."""
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """As `PlanRecord.forced`."""

    def fits(self, embeds: PromptEmbeds | None) -> bool:
        """Returns whether a prompt's embeddings fit into the message beside those of others."""
        return embeds is None or len(embeds.data) + sum(
            [len(own.embeds.data) for own in self.admits if own.embeds is not None]
        ) <= MAX_MESSAGE_BYTES // 2
