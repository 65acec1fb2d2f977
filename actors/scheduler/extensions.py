"""What the scheduler's core calls, and does not need: each class here does nothing.

The core runs with these alone: first come first served, nothing remembered beyond the actor's life,
no metrics, no structured output, no drafts. `scheduler_actor.build` puts the real ones in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actorium.actors.core import Send
from actorium.actors.messages import (
    Masks,
    MediaItem,
    Ready,
    Recall,
    SequenceEvent,
    StepPlan,
    StepResult,
    Submit,
    TokenBatch,
)
from actorium.actors.scheduler.admission_checks import Rejection
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_tier import PageTier
from actorium.actors.scheduler.media_use import MediaUse
from actorium.actors.scheduler.plan_record import PlanRecord, VerifiedDrafts
from actorium.actors.scheduler.request_guard import RequestGuard
from actorium.actors.scheduler.request_state import RequestState, SequenceState
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.waiting_queue import WaitingQueue


class RequestHistory:
    """Requests beyond their end and the actor's (`recovery.recovery_log`)."""

    keep_history = False
    """Whether requests keep the logprobs that were reported of them."""
    resending = False
    """Whether `next_retained` has more requests to report again."""

    def admitted(self, request: RequestState) -> None:
        """A request was accepted."""

    def restored(self, request: RequestState) -> None:
        """An unfinished request of the actor's earlier life goes on."""

    def reported(self, batch: TokenBatch) -> None:
        """A batch is about to be sent to the detokenizer."""

    def finished(self, requests: list[RequestState], now: float) -> None:
        """These requests have ended; empties the list."""
        requests.clear()

    def queue_retained(self, sids: Sequence[int]) -> None:
        """A new detokenizer must hear of every request that is remembered, one that has missed
        something of those of these sequences: see `next_retained`."""

    def next_retained(self) -> list[RequestState]:
        """A few of the ended requests that have to be reported again."""
        return []

    def recall(self, state: SchedulerState, recall: Recall,
               now: float) -> tuple[RequestState | None, bool]:
        """The request that a client asks for; and, where there is none, whether its name belongs
        to a request that asked for something else."""
        return state.requests.get((recall.client, recall.rid)), False

    def recall_submitted(self, state: SchedulerState, submit: Submit,
                         now: float) -> RequestState | None:
        """The request that `submit` repeats, if that one has ended or is another client's."""
        return None

    def pop_records(self) -> list[Send]:
        """Records for the ledger since the last call; they go out before what they are about."""
        return []

    def all_records(self, state: SchedulerState) -> Iterator[list[Any]]:
        """The ledger's records of everything that must not be forgotten, a request at a time."""
        return iter(())

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {}


class SchedulerMetrics:
    """Observes requests and steps (`request_metrics`). Times: CLOCK_MONOTONIC seconds."""

    def admitted(self, sequences: Iterable[SequenceState | None], now: float) -> None:
        """These sequences got a slot."""

    def resumed(self, sequences: Iterable[SequenceState]) -> None:
        """These sequences go on after the death of a worker or a scheduler."""

    def result(self, record: PlanRecord, result: StepResult, now: float) -> None:
        """A step's result, before it is applied."""

    def ended(self, events: Iterable[SequenceEvent], now: float) -> None:
        """Events of sequences, some of them ends; after these left the scheduler's state."""

    def request_ended(self, request: RequestState) -> None:
        """All sequences of a request have ended."""

    def rejected(self, code: str) -> None:
        """A request was refused when it came, with this error code."""

    def gauges(self, state: SchedulerState, resting: bool, ledger: Any) -> dict[str, float]:
        """For the heartbeat; `resting`: no step is under way."""
        return {}


class TokenMasks:
    """Restricts what sequences may sample (`structured.structured_output`)."""

    last_stuck: list[int] = []
    """The sequences of the last `pop_stuck`."""

    def __bool__(self) -> bool:
        """Whether any plan or sequence needs masks."""
        return False

    def add_request(self, request: RequestState) -> Rejection | None:
        """A request comes; why it is refused, if its grammar does not compile."""
        return None

    def remove(self, sid: int) -> None:
        """A sequence has ended."""

    def add_masks(self, state: SchedulerState, plan: StepPlan, record: PlanRecord,
                  unresolved: Iterable[PlanRecord]) -> StepPlan:
        """The plan with its masks, or with the promise that they follow."""
        return plan

    def late_masks(self, state: SchedulerState, record: PlanRecord, epoch: int) -> list[Masks]:
        """The masks of the plan whose result comes next, if it was sent without them."""
        return []

    def on_result(self, state: SchedulerState, record: PlanRecord, result: StepResult) -> None:
        """A step's result, after it was applied."""

    def reset(self) -> None:
        """A fresh worker: no plan is in flight."""

    def mark_stuck(self, state: SchedulerState, sids: Iterable[int], why: str) -> None:
        """These sequences have no token left to sample, as a recording says."""

    def pop_stuck(self) -> list[tuple[RequestState, Rejection]]:
        """Requests that have no token left to sample, and why."""
        return []

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {}


class DraftPolicy:
    """How many tokens each plan drafts for its sequences (`draft_policy`): none."""

    max_drafts = 0

    def next(self, batch: int) -> int:
        """Drafts that the next plan makes for each of its `batch` sampled rows."""
        return 0

    def verified(self, seen: VerifiedDrafts) -> None:
        """A step has verified drafts."""

    def timed(self, batch: int, drafts: int, busy_us: int) -> None:
        """A step that only decoded `batch` sequences took so long."""

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {}


class PrefillAllowance:
    """What prompts may take of one step within its budget: all of it."""

    deferred = 0
    """Tokens by which chunks were cut."""
    spent = False
    """Whether not even a page of a fresh prompt fits any more."""
    encode: list[MediaItem] = []
    encode_us = 0
    """See `StepPlan`."""

    def take(self, start: int, wanted: int, media: Sequence[MediaItem] = ()) -> int:
        """Takes the chunk of a prompt that begins at position `start`: `wanted` tokens, or as many
        as fit. Returns its length."""
        return wanted


class PrefillPacer:
    """Bounds the prompt tokens of steps with decodes (`prefill_pacing`): it does not."""

    active = False
    """Whether it has to be asked, and told."""
    about = ""
    """What it keeps to, for the log."""

    def allowance(self, decoded: int, streaming: int, waiting: int,
                  unresolved: Iterable[PlanRecord]) -> PrefillAllowance:
        """What prompts may take of a step that decodes so many tokens of `streaming` sequences,
        while `waiting` others have no token yet. unresolved: the plans in flight."""
        return PrefillAllowance()

    def predict(self, decoded: int, prompt: int, attended: float) -> int:
        """Microseconds of a step; attended: as `PlanRecord.attended`."""
        return 0

    def encoded(self, keys: Iterable[bytes]) -> None:
        """The worker has made what these items need."""

    def planned(self, deferred: int) -> None:
        """A plan was made that leaves so many prompt tokens to later ones."""

    def measured(self, record: PlanRecord, busy: int, idle: int) -> None:
        """A step took so many microseconds after others without one; 0 = nobody measured it."""

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {}


class WorkerTrials:
    """Finds the request that kills the worker (`recovery.suspects`)."""

    active = False
    """Whether anybody is on trial: `restrict` and `decoded` have something to do."""

    def worker_died(self, state: SchedulerState,
                    unanswered: Iterable[PlanRecord]) -> RequestState | None:
        """The worker has died with these plans; the request to be ended for it, if any."""
        return None

    def restrict(self, state: SchedulerState) -> None:
        """Restricts the next plan to the requests on trial."""

    def decoded(self, record: PlanRecord) -> None:
        """A step came back."""

    def gauges(self, state: SchedulerState) -> dict[str, float]:
        """For the heartbeat."""
        return {}


class StateAuditor:
    """Checks the accounting while the engine runs (`recovery.audit`)."""

    def check(self, state: SchedulerState, step: int, in_flight: bool) -> str | None:
        """After each wake; a line for people where there is less memory from now on. Raises
        `AccountingError`."""
        return None


@dataclass(slots=True)
class SchedulerExtensions:
    """Everything that a `SchedulerCore` is extended by."""

    guard: RequestGuard = field(default_factory=RequestGuard)
    history: RequestHistory = field(default_factory=RequestHistory)
    metrics: SchedulerMetrics = field(default_factory=SchedulerMetrics)
    masks: TokenMasks = field(default_factory=TokenMasks)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    trials: WorkerTrials = field(default_factory=WorkerTrials)
    auditor: StateAuditor = field(default_factory=StateAuditor)
    media: MediaUse = field(default_factory=MediaUse)
    new_draft_policy: Callable[[int], DraftPolicy] = lambda drafts: DraftPolicy()
    """(drafts that the worker can make) -> the policy."""
    new_prefill_pacer: Callable[[Ready], PrefillPacer] = lambda worker: PrefillPacer()
    new_page_tier: Callable[[KVCacheManager, Ready], PageTier] = lambda pages, worker: PageTier()
