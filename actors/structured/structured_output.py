"""Masks of the tokens that each row of a plan may sample, where requests ask for structured output,
allow some tokens only, or forbid words.

A row's mask depends on all tokens before it, of which the last is known only when the previous plan
has been answered. So a plan is sent without waiting, and its masks follow in a message of their own
(`Masks`): the worker runs the forward pass meanwhile, and needs them when it samples. This module
makes masks only; plans are made as if there were none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.errors import ActoriumError, EngineUnavailable, InvalidRequest
from actorium.actors.messages import Masks, RowMask, StepPlan, StepResult, Submit, ThoughtRule
from actorium.actors.runtime.inflight_journal import PROCESS_FAULTS, InflightJournal
from actorium.actors.scheduler.request_state import (
    PlanRecord,
    Rejection,
    RequestState,
    SequenceState,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.step_results import BadResult
from actorium.actors.structured.forced_tokens import behind_emitted
from actorium.actors.structured.guides import SequenceGuide, ThoughtGuide, TokenRuleFilter
from actorium.actors.structured.text_state import limits_of

NO_DRAFTS: tuple[int, ...] = ()
MAX_REASON_CHARS = 500
"""The most characters of a guide's error that its client gets."""


Load = Callable[[], Any]
"""Returns a `grammar.GrammarVocabulary`, or what a replay has in its place."""


def thought_rule_of(submit: Submit) -> ThoughtRule | None:
    """Returns the limit on a request's thoughts: of its rules, or of its grammar."""
    if submit.rules is not None and submit.rules.thought is not None:
        return submit.rules.thought
    limits = limits_of(submit.grammar)
    if limits is None or limits.budget is None:
        return None
    return ThoughtRule(limits.thought, limits.budget, limits.opened)


def is_free(grammar: str) -> bool:
    """Returns whether a grammar limits nothing but a thought."""
    limits = limits_of(grammar)
    return limits is not None and limits.free


def needs_vocabulary(submit: Submit) -> bool:
    """Returns whether a request's masks depend on the texts of tokens."""
    return bool(submit.grammar or submit.rules is not None and submit.rules.thought is not None)


class VocabularyLoader:
    """Loads a vocabulary once, on its own thread if it is started; calling it waits for that."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._result: Any = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts loading."""
        threading.Thread(target=self._once, name="vocabulary", daemon=True).start()

    def _once(self) -> Any:
        """Returns the vocabulary, or the error of loading it."""
        with self._lock:
            if self._result is None:
                try:
                    self._result = self._load()
                except ActoriumError as error:
                    self._result = error
                except Exception as error:  # a structured request reports it; others do not need it
                    self._result = EngineUnavailable(f"structured: no vocabulary: {error}")
        return self._result

    def __call__(self) -> Any:
        """Returns the vocabulary, or raises the error of loading it."""
        result = self._once()
        if isinstance(result, ActoriumError):
            raise result
        return result


class StructuredOutputManager:
    """The guides of all live sequences that have a grammar or token rules."""

    def __init__(self, load: Load) -> None:
        """load: returns the vocabulary; called when the first grammar comes."""
        self.made = 0
        """Masks, since the start."""
        self.last_stuck: list[int] = []
        """The sequences that the last call of `pop_stuck` returned."""
        self.last_forced: dict[int, Mapping[int, Sequence[int]]] = {}
        """What `forced` has returned since the wake began, by step."""
        self.forced_before: Mapping[int, dict[int, Sequence[int]]] = {}
        """The same of a recording, which a replay has in the place of grammars."""
        self._load = load
        self._words: Any = None
        self._guides: dict[int, SequenceGuide] = {}
        self._drafts: dict[int, list[int]] = {}
        """The drafts made for each sequence in the last plan that sampled it."""
        self._planned: dict[int, list[int]] = {}
        """Step -> the sequences with guides among its rows, in order."""
        self._due: set[int] = set()
        """Steps whose masks follow the plan."""
        self._stuck: dict[int, tuple[RequestState, Rejection]] = {}
        """By sid."""

    def __bool__(self) -> bool:
        """Returns whether any sequence has a guide, or a plan waits for its masks."""
        return bool(self._guides or self._due)

    def add_request(self, request: RequestState) -> Rejection | None:
        """Adds guides for the request's live sequences; returns an error if its grammar does not
        compile."""
        submit = request.submit
        if not submit.grammar and submit.rules is None:
            return None
        rules, limit = submit.rules, thought_rule_of(submit)
        narrows = rules is not None and (rules.allowed or rules.bad_words or rules.thought is None)
        tokens = TokenRuleFilter(rules, submit.params, bool(submit.grammar)) \
            if rules is not None and narrows else None
        try:
            if needs_vocabulary(submit) and self._words is None:
                self._words = self._load()
            thought = None if limit is None else ThoughtGuide(limit, self._words)
            for sid in request.live:
                matcher = None
                if submit.grammar and self._words is not None and not is_free(submit.grammar):
                    matcher = self._words.matcher(submit.grammar)
                self._guides[sid] = SequenceGuide(matcher, tokens, thought)
        except ActoriumError as error:
            return Rejection(error.code, error.message)
        return None

    # --- grammars that are compiled before they are needed ---

    def knows(self, grammar: str) -> bool:
        """Returns whether a request with this grammar ("" = none) delays no other."""
        return self._words is not None and (not grammar or self._words.knows(grammar))

    def prepare(self, grammar: str) -> tuple[Any, Any]:
        """Returns the vocabulary, which is loaded if that is still to be done, and the compiled
        grammar. Runs on any thread. Raises `ActoriumError` if there is no vocabulary."""
        words = self._words or self._load()
        return words, words.compile(grammar) if grammar else None

    def add_compiled(self, grammar: str, words: Any, compiled: Any) -> None:
        """Adds the result of `prepare`."""
        self._words = self._words or words
        if grammar:
            self._words.keep(grammar, compiled)

    def remove(self, sid: int) -> None:
        """Forgets a sequence that is over."""
        self._guides.pop(sid, None)
        self._drafts.pop(sid, None)

    # --- plans -----------------------------------------------------------------------------------

    def add_masks(self, state: SchedulerState, plan: StepPlan, record: PlanRecord,
                  unresolved: Iterable[PlanRecord]) -> StepPlan:
        """Adds masks to a plan that was made without, or announces that they follow. unresolved:
        the plans before it that have no result yet."""
        masked = [sid for sid in record.sids.tolist() if sid in self._guides]
        if not masked:
            return plan
        self._planned[record.step] = masked
        masked = [sid for sid in masked if self._decides(state, sid)]
        if not masked:
            return plan
        if any(not set(masked).isdisjoint(before.sids.tolist()) for before in unresolved):
            self._due.add(record.step)
            return msgspec.structs.replace(plan, masks_follow=True)
        return msgspec.structs.replace(plan, masks=self._masks(state, record))

    def forced(self, state: SchedulerState, step: int, unresolved: Sequence[PlanRecord],
               most: int) -> Mapping[int, Sequence[int]]:
        """Returns by sid what grammars leave no choice about: at most so many tokens that follow on
        those that the plan in flight is sure to emit. Of sequences that may emit others there, and
        of those that have a choice next, there is nothing."""
        forced: dict[int, Sequence[int]] = {}
        rows = {sid: (record, row) for record in unresolved
                for row, sid in enumerate(record.sids.tolist())}
        for sid, guide in self._guides.items():
            sequence = state.sequences.get(sid)
            if (guide.matcher is None or sequence is None
                    or not state.table.decoding[sequence.slot]
                    or not self._advance(state, sequence, guide)):
                continue
            tokens: Sequence[int] = guide.matcher.forced()
            if tokens and sid in rows:
                tokens = behind_emitted(tokens, self._verified_drafts(*rows[sid], sid))
            if tokens:
                forced[sid] = tokens[:most]
        state.guard.journal.clear()
        forced = forced or self.forced_before.get(step, {})
        if forced:
            self.last_forced[step] = forced
        return forced

    def late_masks(self, state: SchedulerState, record: PlanRecord, epoch: int) -> list[Masks]:
        """Returns the masks of the next plan to be answered, if it was sent without."""
        if record.step not in self._due:
            return []
        self._due.remove(record.step)
        return [Masks(epoch, record.step, self._masks(state, record))]

    def pop_stuck(self) -> list[tuple[RequestState, Rejection]]:
        """Returns the requests found unable to continue since the last call, and why."""
        self.last_stuck = list(self._stuck)
        if not self._stuck:
            return []
        found, self._stuck = list(self._stuck.values()), {}
        return found

    def mark_stuck(self, state: SchedulerState, sids: Iterable[int], why: str) -> None:
        """Marks sequences as unable to continue: what they sample from here on is discarded."""
        for sid in sids:
            if (sequence := state.sequences.get(sid)) is not None:
                self._stuck[sid] = sequence.request, Rejection(InvalidRequest.code, why)

    def on_result(self, state: SchedulerState, record: PlanRecord, result: StepResult) -> None:
        """Stores the drafts that a step has made for sequences with guides; forgets those that it
        ended."""
        masked = self._planned.pop(record.step, None)
        if masked is None:
            return
        for sid in masked:
            if sid not in state.sequences:
                self.remove(sid)
        if not record.drafts:
            for sid in masked:
                self._drafts.pop(sid, None)
            return
        if len(result.drafts) != 4 * record.drafts * len(masked):
            raise BadResult(f"step {record.step}: {len(result.drafts)} bytes of drafts, planned "
                            f"were {record.drafts} for {len(masked)} rows with masks")
        rows = np.frombuffer(result.drafts, np.int32).reshape(-1, record.drafts).tolist()
        for sid, drafts in zip(masked, rows, strict=True):
            if sid in self._guides:
                self._drafts[sid] = drafts[:drafts.index(-1)] if -1 in drafts else drafts

    def reset(self) -> None:
        """Forgets drafts and plans in flight: the worker is a fresh one."""
        self._drafts.clear()
        self._planned.clear()
        self._due.clear()

    def gauges(self) -> dict[str, float]:
        """Counts masks made since the start."""
        return {"masks": self.made}

    def _decides(self, state: SchedulerState, sid: int) -> bool:
        """Returns whether a sequence's guide may decide a token of the plans made so far."""
        sequence = state.sequences.get(sid)
        if sequence is None:
            return False
        length = int(state.table.len_hi[sequence.slot]) - len(sequence.request.prompt)
        return self._guides[sid].decides(length - 1)

    def _masks(self, state: SchedulerState, record: PlanRecord) -> list[RowMask]:
        """Returns the masks of the plan's rows, all plans before it being answered."""
        journal = state.guard.journal
        wanted: list[tuple[SequenceGuide, Sequence[int]]] = []
        whose: list[tuple[SequenceState, int]] = []
        sids, slots = record.sids.tolist(), record.slots.tolist()
        for row, (sid, slot) in enumerate(zip(sids, slots, strict=True)):
            guide, sequence = self._guides.get(sid), state.sequences.get(sid)
            if (guide is None or sequence is None or not self._decides(state, sid)
                    or not self._advance(state, sequence, guide)):
                continue
            wanted.append((guide, self._verified_drafts(record, row, sid)))
            whose.append((sequence, slot))
        masks: list[RowMask] = []
        found = self._rows_isolated(wanted, [sequence for sequence, _ in whose], journal)
        journal.clear()
        for (guide, _), (sequence, slot), rows in zip(wanted, whose, found, strict=True):
            if rows is None:
                continue
            if guide.error:
                self.mark_stuck(state, [sequence.sid], _why(guide))
            else:
                masks += [RowMask(slot, place, bits.tobytes()) for place, bits in enumerate(rows)
                          if bits is not None]
        self.made += len(masks)
        return masks

    def _advance(self, state: SchedulerState, sequence: SequenceState, guide: SequenceGuide
                 ) -> bool:
        """Advances a guide by what its sequence has emitted since; returns False where the sequence
        cannot go on."""
        journal = state.guard.journal
        journal.put(sequence.request.name)
        try:
            allowed = guide.accept(state.table.emitted_of(sequence, guide.consumed).tolist())
        except BaseException as error:
            self._fail(sequence, journal, error)
            return False
        if not allowed:
            self.mark_stuck(state, [sequence.sid], _why(guide))
        return allowed

    def _verified_drafts(self, record: PlanRecord, row: int, sid: int) -> Sequence[int]:
        """Returns the drafts that a plan verifies for a sequence with a guide."""
        if record.window == 1 or row < record.firsts:
            return NO_DRAFTS
        drafts: Sequence[int] = record.forced.get(sid) or self._drafts.get(sid, [])
        if record.forced:  # where there were fewer, the worker has 0
            drafts = [*drafts, *[0] * (record.window - 1 - len(drafts))]
        return drafts[:record.window - 1]

    def _rows_isolated(self, wanted: Sequence[tuple[SequenceGuide, Sequence[int]]],
                    whose: Sequence[SequenceState],
                    journal: InflightJournal) -> Sequence[list[Any] | None]:
        """Returns the masks of each guide's rows; None for one that fails. Computes them together,
        or one by one if that fails or one of them is suspected of a death."""
        if not wanted:
            return ()
        names = [sequence.request.name for sequence in whose]
        if journal.quiet or not any(map(journal.suspected, names)):
            journal.put_all(names)
            try:
                return self._rows(wanted)
            except PROCESS_FAULTS:
                raise
            except BaseException:  # one of them failed: the loop below finds out which
                pass
        masks: list[list[Any] | None] = []
        for one, sequence in zip(wanted, whose, strict=True):
            journal.put(sequence.request.name)
            try:
                masks += self._rows([one])
            except BaseException as error:
                self._fail(sequence, journal, error)
                masks.append(None)
        return masks

    def _fail(self, sequence: SequenceState, journal: InflightJournal,
              error: BaseException) -> None:
        """Marks the sequence's request as one to be ended."""
        failure = journal.failed(error, sequence.request.submit.rid)
        self._stuck[sequence.sid] = sequence.request, Rejection(failure.code, failure.message)

    def _rows(self, wanted: Sequence[tuple[SequenceGuide, Sequence[int]]]) -> list[list[Any]]:
        """Returns the masks of each guide's rows: of all grammars in parallel, then narrowed."""
        asked = [(guide.matcher, drafts) for guide, drafts in wanted if guide.matcher is not None]
        made = iter(self._words.masks(asked) if self._words is not None and asked else ())
        return [guide.rows(None if guide.matcher is None else next(made), drafts)
                for guide, drafts in wanted]


def _why(guide: SequenceGuide) -> str:
    lines = guide.error.splitlines() or [""]
    return lines[0][:MAX_REASON_CHARS]


def vocabulary(context: Context) -> Load:
    """Returns the loader of the engine's model. In a first life it starts with the engine, while
    the worker loads, since loading takes more than a second where there are many tokens and blocks
    everything else in the process; after a restart, when needed."""
    if context.config.model.skip_tokenizer:
        return no_vocabulary
    loading = VocabularyLoader(partial(_load_vocabulary, context.config))
    if context.epoch <= 1:
        loading.start()
    return loading


def _load_vocabulary(config: Config) -> Any:
    """Returns the model's vocabulary, the same as the tokenizer's: a grammar that passes there
    compiles here. Raises `BadModel`."""
    from actorium.actors.structured.grammar import GrammarVocabulary
    from actorium.actors.tokenizer.text_model import TextModel

    model = TextModel(config)
    return GrammarVocabulary(model.path / "tokenizer.json", model.facts.vocab_size,
                             model.facts.eos_ids)


def no_vocabulary() -> Any:
    """Raises `InvalidRequest`: the loader of engines that have no tokenizer."""
    raise InvalidRequest("structured: the engine runs without a tokenizer (skip_tokenizer)",
                         "structured")
