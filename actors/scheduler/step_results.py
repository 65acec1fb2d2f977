"""Applies a step's result: credits tokens to sequences, ends those that it ends, makes the batch
for the detokenizer, and shares the pages of images that the step has computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from actorium.actors.config.parsed_values import GRAMMAR
from actorium.actors.messages import (
    RowExperts,
    RowLogprobs,
    SequenceEvent,
    StepResult,
    TokenBatch,
)
from actorium.actors.scheduler.cache.page_allocator import Ints
from actorium.actors.scheduler.cache.radix_cache import shareable
from actorium.actors.scheduler.request_state import (
    PlanRecord,
    Rejection,
    RequestState,
    SequenceState,
    VerifiedDrafts,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState

FINISH_REASONS = {1: "stop", 2: "length"}


class BadResult(RuntimeError):
    """The worker's result does not fit the plan it answers."""


class ResultRows(NamedTuple):
    """A result's columns, unpacked: n rows."""

    counts: NDArray[np.int32]
    finish: NDArray[np.uint8]
    tokens: Ints
    """i4[sum(counts)]"""
    drafts: NDArray[np.int32] | None = None
    """i4[decodes]: drafts that each verified; None = as planned."""

    def ends(self) -> NDArray[np.int64]:
        """Returns i8[n]: where each row's tokens end in `tokens`."""
        return np.cumsum(self.counts, dtype=np.int64)


@dataclass(slots=True)
class StepOutcome:
    """A result that was applied: how many tokens it brought, and the batch for the detokenizer."""

    tokens: int
    batch: TokenBatch | None
    verified: Mapping[str, VerifiedDrafts] = field(default_factory=dict)
    """By what made the drafts; empty where none was verified."""


def apply_result(state: SchedulerState, record: PlanRecord, result: StepResult) -> StepOutcome:
    """Credits the tokens of a result to their sequences and ends those that it ends.

    Rows are matched by the plan's own record. Most belong to the sequence that still sits in the
    slot. The others left it meanwhile: preempted ones get their tokens all the same, the tokens of
    ended ones are dropped. Raises `BadResult` if the result does not fit the plan.
    """
    table, slots = state.table, record.slots
    starts = table.emitted[slots]
    steady = None if state.older_weights else _steady_counts(record, result)
    if steady is not None and table.sid[slots].tobytes() == record.sids_column:
        if len(steady) > 2:
            return _apply_draft_windows(state, record, result, starts, steady)
        table.append_one(slots, starts, np.frombuffer(result.tokens, np.int32), record.window)
        state.charge_tenants(record.sids, None)
        return StepOutcome(len(slots), TokenBatch(
            step=result.step, sids=record.sids_column, starts=starts.tobytes(),
            counts=result.counts, tokens=result.tokens, epoch=result.epoch))
    rows = _unpack(record, result)
    known = _apply_rows(state, record, rows, starts)
    state.charge_tenants(record.sids[known], rows.counts[known])
    events = _events(state, record, rows, result, known, starts)
    credited = _batch(record, result.epoch, rows, known, starts, events)
    credited.verified = _verified(record, rows)
    return credited


def _steady_counts(record: PlanRecord, result: StepResult) -> list[int] | None:
    """Returns how many rows have 0, 1, 2, ... tokens, as far as drafts were verified, of a step of
    decodes alone, each with a token at least (without drafts: with one), none ended, no logprobs;
    None of any other."""
    rows = len(record.slots)
    if (record.firsts or not rows or record.forced or result.finish != bytes(rows)
            or result.logprobs or result.prompt_logprobs or record.pooled or result.pooled
            or result.experts or len(result.counts) != rows):
        return None
    window = record.window
    if result.draft_counts:
        if any(result.draft_counts) or len(result.draft_counts) != rows:
            return None
        window = 1
    counts = [0, *map(result.counts.count, range(1, window + 1))]
    tokens = sum(count * having for count, having in enumerate(counts))
    return counts if sum(counts) == rows and 4 * tokens == len(result.tokens) else None


def _apply_draft_windows(state: SchedulerState, record: PlanRecord, result: StepResult,
                         starts: Ints, going: list[int]) -> StepOutcome:
    """Applies the result of a steady step with drafts. going: of `_steady_counts`."""
    tokens = np.frombuffer(result.tokens, np.int32)
    counts = np.frombuffer(result.counts, np.uint8).astype(np.int32)
    state.table.append_tokens(record.slots, starts, tokens, counts, record.window)
    state.charge_tenants(record.sids, counts)
    batch = TokenBatch(step=result.step, sids=record.sids_column, starts=starts.tobytes(),
                       counts=result.counts, tokens=result.tokens, epoch=result.epoch,
                       drafts=record.window - 1)
    return StepOutcome(len(tokens), batch,
                       {record.verifies: VerifiedDrafts(going, [0] * len(going))})


def _verified(record: PlanRecord, rows: ResultRows) -> dict[str, VerifiedDrafts]:
    """Returns how far the step's decodes got with their drafts, by what made them."""
    forced = np.isin(record.sids[record.firsts:], list(record.forced))
    found = {GRAMMAR: _progress(record, rows, forced)}
    if rows.drafts is not None or not record.forced:  # else nobody knows which drafts were none
        found[record.verifies] = _progress(record, rows, ~forced)
    return {method: seen for method, seen in found.items() if seen is not None}


def _progress(record: PlanRecord, rows: ResultRows, which: NDArray[np.bool_]
              ) -> VerifiedDrafts | None:
    """Returns how far some of the step's decodes got with their drafts; None if they had none."""
    ended, counts = rows.finish[record.firsts:][which] > 0, rows.counts[record.firsts:][which]
    if rows.drafts is None:
        most, drafts = record.window - 1, None
    else:
        drafts = rows.drafts[which]
        most = int(drafts.max(initial=0))
    if not most or not len(counts):
        return None
    seen = VerifiedDrafts(*(np.bincount(counts[such], minlength=most + 2).tolist()
                            for such in (~ended, ended)))
    if drafts is None:
        return seen
    drafts = drafts[counts > 0]
    return seen._replace(drafts=int(drafts.sum()), windows=int(np.count_nonzero(drafts)))


def _unpack(record: PlanRecord, result: StepResult) -> ResultRows:
    rows = ResultRows(np.frombuffer(result.counts, np.uint8).astype(np.int32),
                      np.frombuffer(result.finish, np.uint8),
                      np.frombuffer(result.tokens, np.int32), _drafts(record, result))
    want, got = len(record.slots), (len(rows.counts), len(rows.finish))
    if got != (want, want) or int(rows.counts.sum()) != len(rows.tokens):
        raise BadResult(f"step {result.step}: {want} rows planned; the result has {got[0]} counts, "
                        f"{got[1]} finishes and {len(rows.tokens)} tokens")
    if sorted(record.pooled) != (slots := sorted(slot for slot, _ in result.pooled)):
        raise BadResult(f"step {result.step}: the slots {sorted(record.pooled)} are pooled, the "
                        f"result has {slots}")
    if want and int(rows.counts.max()) > record.window:
        raise BadResult(f"step {result.step}: a row has {rows.counts.max()} tokens, planned were "
                        f"{record.window} at the most")
    if rows.drafts is not None and (rows.counts[record.firsts:] > rows.drafts + 1).any():
        raise BadResult(f"step {result.step}: a row has more tokens than its drafts and one")
    return rows


def _drafts(record: PlanRecord, result: StepResult) -> NDArray[np.int32] | None:
    """Returns how many drafts each decode had; None if all had those that were planned."""
    if not result.draft_counts:
        return None
    drafts = np.frombuffer(result.draft_counts, np.uint8).astype(np.int32)
    if len(drafts) != record.decodes or int(drafts.max(initial=0)) >= record.window:
        raise BadResult(f"step {result.step}: {len(drafts)} rows have up to "
                        f"{drafts.max(initial=0)} drafts, planned were {record.window - 1} for "
                        f"{record.decodes} at the most")
    return drafts


def _apply_rows(state: SchedulerState, record: PlanRecord, rows: ResultRows,
                starts: Ints) -> NDArray[np.bool_]:
    """Credits rows still in their slots, and preempted ones (whose `starts` are corrected).

    Returns bool[n]: whose sequence still lives.
    """
    table, ends = state.table, rows.ends()
    settled = table.sid[record.slots] == record.sids
    known, drafts = settled.copy(), _by_row(record, rows)
    for row in np.flatnonzero(~settled):
        sequence = state.sequences.get(int(record.sids[row]))
        if sequence is not None:
            known[row] = True
            starts[row] = len(sequence.emitted)
            mine = rows.tokens[ends[row] - rows.counts[row]:ends[row]]
            sequence.emitted = np.concatenate((sequence.emitted, mine))
            sequence.key, sequence.match_version = None, -1
            if len(mine):
                sequence.drafted += int(drafts[row])
                sequence.accepted += len(mine) - 1
    first = np.arange(len(settled)) < record.firsts
    for which, window in ((first, 1), (~first, record.window)):
        among = settled & which & (rows.counts > 0)
        table.append_tokens(record.slots[among], starts[among],
                            rows.tokens[np.repeat(among, rows.counts)], rows.counts[among], window,
                            drafts[among])
        table.retract(record.slots[settled & which & (rows.counts == 0)], window)
    return known


def _by_row(record: PlanRecord, rows: ResultRows) -> NDArray[np.int32]:
    """Returns i4[n]: the drafts that each row had."""
    drafts = np.zeros(len(rows.counts), np.int32)
    drafts[record.firsts:] = record.window - 1 if rows.drafts is None else rows.drafts
    return drafts


def _batch(record: PlanRecord, epoch: int, rows: ResultRows, known: NDArray[np.bool_], starts: Ints,
           events: list[SequenceEvent]) -> StepOutcome:
    keep = known & (rows.counts > 0)
    tokens = rows.tokens[np.repeat(keep, rows.counts)]
    if not len(tokens) and not events:
        return StepOutcome(0, None)
    drafts = b"" if rows.drafts is None else \
        rows.drafts[keep[record.firsts:]].astype(np.uint8).tobytes()
    batch = TokenBatch(step=record.step, sids=record.sids[keep].tobytes(),
                       starts=starts[keep].tobytes(),
                       counts=rows.counts[keep].astype(np.uint8).tobytes(),
                       tokens=tokens.tobytes(), events=events, epoch=epoch,
                       drafts=max(drafts) if drafts else record.window - 1,
                       firsts=int(np.count_nonzero(keep[:record.firsts])), draft_counts=drafts)
    return StepOutcome(len(tokens), batch)


def _events(state: SchedulerState, record: PlanRecord, rows: ResultRows, result: StepResult,
            known: NDArray[np.bool_], starts: Ints) -> list[SequenceEvent]:
    """Returns an event for each sequence that has a first token, one of other weights than before,
    an end or logprobs."""
    finished = rows.finish.any()
    if not (record.firsts or finished or result.logprobs or result.prompt_logprobs
            or result.pooled or result.experts or state.older_weights):
        return []
    news: dict[int, dict[str, Any]] = {}
    for row in range(record.firsts):
        sequence = state.sequences.get(int(record.sids[row]))
        if sequence is not None and not sequence.first_token_reported:
            sequence.first_token_reported = True
            news[sequence.sid] = {"cached_tokens": sequence.cached_len}
    for sid, run in _runs(state, record, rows, known, starts):
        news.setdefault(sid, {})["weights"] = run
    for logprobs in result.logprobs:
        if known[logprobs.row]:
            sid = int(record.sids[logprobs.row])
            news.setdefault(sid, {})["logprobs"] = logprobs
            if state.keep_history:
                state.sequences[sid].logprobs.append(logprobs)
    for logprobs in result.prompt_logprobs:
        sequence = state.sequences.get(record.extends[logprobs.row])
        if sequence is None:
            continue
        with state.guard.of(sequence.request):
            if (fresh := _unreported_logprobs(sequence, logprobs)) is not None:
                news.setdefault(sequence.sid, {})["prompt_logprobs"] = fresh
                if state.keep_history:
                    sequence.prompt_logprobs.append(fresh)
    for own in result.experts:
        if (found := _unreported_experts(state, record, own, known, starts)) is not None:
            news.setdefault(found[0], {})["experts"] = found[1]
    ended = _finish(state, record, rows, known, news) if finished else []
    ended += _finish_pooled(state, record, result, news)
    events = {sid: SequenceEvent(sid=sid, **fields) for sid, fields in news.items()}
    for sequence in ended:
        sequence.finish = msgspec.structs.replace(events[sequence.sid], logprobs=None,
                                                  prompt_logprobs=None, experts=None)
    return list(events.values())


def _runs(state: SchedulerState, record: PlanRecord, rows: ResultRows, known: NDArray[np.bool_],
          starts: Ints) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields (sid, run) of the sequences whose tokens are of other weights from this step on."""
    among = (starts == 0) & bool(state.weights)
    if state.older_weights:
        among |= np.isin(record.sids, list(state.older_weights))
    for row in np.flatnonzero(among & known & (rows.counts > 0)):
        sequence = state.sequences[int(record.sids[row])]
        run = int(starts[row]), state.weights
        state.older_weights.discard(sequence.sid)
        sequence.runs.append(run)
        yield sequence.sid, run


def _finish(state: SchedulerState, record: PlanRecord, rows: ResultRows, known: NDArray[np.bool_],
            news: dict[int, dict[str, Any]]) -> list[SequenceState]:
    """Ends the sequences that the result ends, and returns them."""
    ends, ended = rows.ends(), []
    for row in np.flatnonzero((rows.finish > 0) & known):
        sid, code = int(record.sids[row]), int(rows.finish[row])
        fields = news.setdefault(sid, {})
        fields["finish_reason"] = FINISH_REASONS[code]
        if code == 1:
            fields["stop_token"] = int(rows.tokens[ends[row] - 1])
        sequence = state.sequences[sid]
        with state.guard.of(sequence.request):
            state.finish(sequence)
            fields |= draft_counts(sequence)
            ended.append(sequence)
    return ended


def _finish_pooled(state: SchedulerState, record: PlanRecord, result: StepResult,
                   news: dict[int, dict[str, Any]]) -> list[SequenceState]:
    """Ends the sequences that the step has pooled, and returns them."""
    ended = []
    for slot, pooled in result.pooled:
        sequence = state.sequences.get(record.pooled[slot])
        if sequence is None:
            continue
        with state.guard.of(sequence.request):
            state.finish(sequence)
            news[sequence.sid] = {
                "cached_tokens": sequence.cached_len, "finish_reason": "stop",
                "pooled": msgspec.structs.replace(pooled, weight_version=state.weights)} | (
                {"weights": (0, state.weights)} if state.weights else {})
            ended.append(sequence)
    return ended


def draft_counts(sequence: SequenceState) -> dict[str, int]:
    """Returns the fields of an end event that count drafts; empty where there were none."""
    if not sequence.drafted:
        return {}
    return {"draft_tokens": sequence.drafted, "accepted_tokens": sequence.accepted}


def _unreported_logprobs(sequence: SequenceState, logprobs: RowLogprobs) -> RowLogprobs | None:
    """Returns the part of prompt logprobs that was not reported before a preemption recomputed
    them."""
    count = len(logprobs.chosen) // 4
    skip = min(max(sequence.prompt_logprobs_reported - logprobs.start, 0), count)
    if skip == count:
        return None
    sequence.prompt_logprobs_reported = logprobs.start + count
    if not skip:
        return logprobs
    top = len(logprobs.top_ids) // count
    return msgspec.structs.replace(
        logprobs, start=logprobs.start + skip, chosen=logprobs.chosen[4 * skip:],
        ranks=logprobs.ranks[4 * skip:], top_ids=logprobs.top_ids[top * skip:],
        top_logprobs=logprobs.top_logprobs[top * skip:])


def _unreported_experts(state: SchedulerState, record: PlanRecord, own: RowExperts,
                        known: NDArray[np.bool_], starts: Ints) -> tuple[int, RowExperts] | None:
    """Returns the sequence, and the part of its experts that was not reported before a preemption
    computed them again."""
    if own.row >= 0 and not known[own.row]:
        return None
    sid = record.extends[-1 - own.row] if own.row < 0 else int(record.sids[own.row])
    sequence = state.sequences.get(sid)
    if sequence is None:
        return None
    start = own.start if own.row < 0 else sequence.prompt_len + int(starts[own.row]) - 1
    fresh = RowExperts(0, start, own.experts).beyond(sequence.experts_reported)
    if fresh is None:
        return None
    sequence.experts_reported = fresh.end
    if state.keep_history:
        sequence.experts.append(fresh)
    return sid, fresh


def apply_media(state: SchedulerState, record: PlanRecord,
                result: StepResult) -> list[tuple[RequestState, Rejection]]:
    """Lets what a step has computed of its own images be shared, as far as it still lies in the
    slot of its admission. Returns the requests that `StepResult.failed` ends, and why: nothing of
    theirs is shared."""
    failed = {slot: Rejection(code, why) for slot, code, why in result.failed}
    for slot, admission, computed in record.media:
        sequence = state.table.sequences[slot]
        if slot in failed or sequence is None or state.table.order[slot] != admission:
            continue
        sequence.shareable = shareable(sequence.request.submit.media, computed)
        state.cache_prefix(sequence, state.table.pages_of(slot), sequence.computed)
    if not failed:
        return []
    ended, sids = {}, dict(zip(record.slots.tolist(), record.sids.tolist(), strict=True))
    for slot, why in failed.items():
        owner = state.sequences.get((sids | record.extends).get(slot, 0))
        if owner is not None:
            ended[owner.request.key] = owner.request, why
    return list(ended.values())
