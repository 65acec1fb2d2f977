"""Sleep and pause: whether the engine generates, and the way from one state to the other.

Asleep, it holds no pages and no weights; paused, it holds all and computes nothing. Both only
decide what may be admitted: what has begun ends first (`BEGUN`), or nothing is (`NONE`). Requests
that come meanwhile wait in the queue.

A sleep is reached in steps: what runs ends, or is preempted; cached prefixes go to the host's
memory, where there is a tier; then the worker frees its memory (level 1), or is ended by the
watchdog, which reads of it in the heartbeats (level 2). To wake, the worker loads again; what was
preempted is computed again, as after its death. The state is in the ledger, so that a scheduler
that is started again goes on from it, and asks the worker what it has.
"""

from __future__ import annotations

import msgspec

from actorium.actors.health import PAUSED, SLEEPING, WAKING
from actorium.actors.ledger.records import ActivityRecord
from actorium.actors.messages import (
    Control,
    ControlRequest,
    PageGroup,
    Ready,
    Reload,
    Reply,
    Reset,
    Unload,
    Unloaded,
)
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.request_lifecycle import RequestLifecycle
from actorium.actors.scheduler.scheduler_state import ALL, BEGUN, NONE
from actorium.actors.scheduler.slot_table import SlotTable
from actorium.actors.scheduler.worker_capacity import WorkerGroup

AWAKE, UNLOADING, ASLEEP, LOADING = "awake", "unloading", "asleep", "loading"
"""Stages: the worker is there, or comes by itself; frees its memory; has done so, or is ended;
loads again."""
KEEPS = ("keep", "retract")


class SleepControl:
    """The engine's activity, and the orders that change it."""

    def __init__(self, requests: RequestLifecycle, group: WorkerGroup, epoch: int,
                 after: float, level: int, prior: ActivityRecord) -> None:
        """after, level: as `SchedulerConfig.sleep_after` and `sleep_level`; prior: what an earlier
        life of the scheduler has left."""
        self._requests, self._state, self._outgoing = requests, requests.state, requests.outgoing
        self._group, self._epoch, self._after, self._level = group, epoch, after, level
        self._wanted = prior
        """As the ledger has it."""
        self.stage = ASLEEP if prior.asleep else AWAKE
        self._settled = False
        """The pause is reached: what was to end has ended."""
        self._pause: Control | None = None
        """The order of the pause that is not reached yet; None = one of an earlier life."""
        self._pending: list[ControlRequest] = []
        self._last: tuple[bytes, str] | None = None
        """The last order: a client that has lost the answer repeats it."""
        self._unloaded: set[int] = set()
        """Ranks."""
        self._idle_since: float | None = None
        self.needed = False
        """Something else than a request needs the worker: an engine that sleeps by itself wakes."""
        self.tier: HostTier | None = None
        """Of the worker that sleeps: the host's memory stays."""

    # --- what comes in ---------------------------------------------------------------------------

    def on_control(self, request: ControlRequest) -> None:
        """Takes an order, which `step` carries out and answers."""
        control = request.control
        key = request.client, control.rid
        if key != self._last:
            self._last = key
            self._obey(control)
        elif any((other.client, other.control.rid) == key for other in self._pending):
            return
        self._pending.append(request)

    def _obey(self, control: Control) -> None:
        want = self._wanted
        if control.order in ("sleep", "pause") and control.mode == "abort":
            for key in list(self._state.requests):
                self._requests.abort(key)
        keeps = control.mode in KEEPS
        if control.order == "sleep":
            level = max(control.level, want.level if self.stage == ASLEEP else 0)
            self._want(level=level, keeps=keeps or want.paused == "keep", by_itself=False)
        elif control.order == "wake":
            self._want(level=0, by_itself=False)
        elif control.order == "pause":
            self._settled, self._pause = False, control
            self._want(paused="keep" if keeps else "wait")
        elif control.order == "resume":
            self._want(paused="")

    def _want(self, **changed: object) -> None:
        """Changes what is wanted, and has the ledger know."""
        before = self._wanted
        self._wanted = msgspec.structs.replace(before, **changed)
        self._wanted = msgspec.structs.replace(
            self._wanted, asleep=self.stage == ASLEEP and self._wanted.level > 0)
        if self._wanted != before:
            self._requests.history.activity(self._wanted)

    def declines(self, ready: Ready) -> bool:
        """Returns whether a rank that is ready is not wanted: it came up while the engine sleeps,
        and is to sleep as well (at level 2 the watchdog ends it)."""
        if self.stage not in (UNLOADING, ASLEEP) or not self._wanted.level:
            return False
        if self._wanted.level == 1:
            self._send_unload()
        return True

    def on_unloaded(self, unloaded: Unloaded) -> None:
        """Takes note of a rank without weights."""
        if self.stage == AWAKE and self._requests.worker is None:
            if not self._wanted.level:  # of an earlier life: it went to sleep, and is wanted again
                self._load()
                return
            self._send_unload()  # other ranks may not have got it
        if self.stage == UNLOADING:
            self._unloaded.add(unloaded.rank)
            if len(self._unloaded) == self._group.ranks:
                self._asleep()

    def on_worker(self) -> None:
        """The worker is ready, and is taken."""
        self.stage, self.tier = AWAKE, None
        self._idle_since = None

    def on_drain(self) -> bool:
        """The engine stops: what a pause holds back goes on. Returns whether there is no worker for
        it, and there will be none."""
        self._want(paused="")
        if self.stage in (UNLOADING, ASLEEP):
            return True
        self._want(level=0)
        return False

    # --- a wake ----------------------------------------------------------------------------------

    def step(self, in_flight: bool, now: float) -> None:
        """Goes as far as it can towards what is wanted, and answers the orders that are reached.
        in_flight: a plan is."""
        if self._wanted.by_itself and (self._state.requests or self.needed):
            self._want(level=0, by_itself=False)
        if self.stage == ASLEEP and not self._wanted.level:
            self._load()
        elif self.stage == AWAKE and self._requests.worker is not None:
            self._sleep_if_idle(in_flight, now)
            if self._wanted.level:
                if self._at_rest(in_flight, self._wanted.keeps) and self._saved():
                    self._free()
            elif self._wanted.paused and not self._settled:
                self._settle(in_flight)
        self._state.admits = self._admits()
        pending, self._pending = self._pending, []
        for request in pending:
            if self._reached(request.control.order):
                self._answer(request)
            else:
                self._pending.append(request)

    def _sleep_if_idle(self, in_flight: bool, now: float) -> None:
        want = self._wanted
        busy = in_flight or self._state.requests or self.needed or want.paused or want.level
        if not self._after or busy or self._requests.draining:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now >= self._idle_since + self._after:
            self._idle_since = None
            self._want(level=self._level, keeps=False, by_itself=True)

    def _at_rest(self, in_flight: bool, preempts: bool) -> bool:
        """Returns whether nothing runs that is to end first. preempts: what runs is preempted."""
        if in_flight:
            return False
        if preempts:
            while (sequence := self._state.table.latest()) is not None:
                self._state.preempt(sequence, "sleep")
        return not any(request.begun for request in self._state.requests.values()) or preempts

    def _saved(self) -> bool:
        """Returns whether the cached prefixes are in the host's memory, as far as it has room."""
        state = self._state
        if state.tier is None:
            return True
        if not state.tier.fetching:
            state.kv_cache.at_step(state.step + 1)
            state.kv_cache.flush()
        return not state.tier.busy

    def _settle(self, in_flight: bool) -> None:
        """Reaches the pause, if nothing is left to do for it."""
        control = self._pause
        clears = control is not None and control.clear_cache
        retracts = control is not None and (control.mode == "retract" or (
            clears and control.mode == "keep"))
        if self._wanted.paused == "keep" and not retracts:
            self._settled = not in_flight
        else:
            self._settled = self._at_rest(in_flight, retracts)
        if self._settled and clears:
            self._state.flush_cache()

    def _admits(self) -> str:
        want = self._wanted
        if want.level:
            return NONE if want.keeps else BEGUN
        if want.paused:
            return NONE if want.paused == "keep" else BEGUN
        return ALL

    def _reached(self, order: str) -> bool:
        level, stage = self._wanted.level, self.stage
        if order == "sleep":
            return stage == ASLEEP or not level
        if order == "wake":
            return bool(level) or (stage == AWAKE and self._requests.worker is not None)
        if order == "pause":
            return self._settled or not self._wanted.paused or stage != AWAKE
        return True

    def _answer(self, request: ControlRequest) -> None:
        state = {"sleeping": self.level, "paused": bool(self._wanted.paused),
                 "cache_kept": self.level == 1 and self.tier is not None}
        self._outgoing.to_detokenizer([Reply(request.control.rid, request.client,
                                             msgspec.json.encode(state))])

    # --- the worker ------------------------------------------------------------------------------

    def _free(self) -> None:
        """Nothing runs: gives up slots and pages, and the worker's memory."""
        state = self._state
        self.tier = state.tier
        self._requests.worker = None
        self._requests.masks.reset()
        if state.adapters is not None:
            state.adapters.on_no_worker()
        self._group.clear()
        state.reset_pools(SlotTable(1, 1), [PageGroup(1)], 1)
        if self._wanted.level == 1:
            self._send_unload()
        else:
            self._asleep()

    def _send_unload(self) -> None:
        self.stage = UNLOADING
        self._unloaded.clear()
        self._outgoing.to_worker(Unload(self._epoch))

    def _asleep(self) -> None:
        self.stage = ASLEEP
        self._want()

    def _load(self) -> None:
        """A worker that is unloaded loads again; one that was never ended in time says that it is
        ready; a new one says so by itself."""
        self.stage = LOADING
        self._want()
        self._outgoing.to_worker(Reset(self._epoch))
        self._outgoing.to_worker(Reload(self._epoch))

    # --- reports ---------------------------------------------------------------------------------

    @property
    def level(self) -> int:
        """Of the sleep that is reached; 0 = awake, or on its way."""
        return self._wanted.level if self.stage == ASLEEP else 0

    @property
    def ordered(self) -> bool:
        """Whether it sleeps, or is about to, until somebody has it wake."""
        return (self.stage in (UNLOADING, ASLEEP) and self._wanted.level > 0
                and not self._wanted.by_itself)

    @property
    def stopped(self) -> bool:
        """Whether no plan may be made: what runs stays where it is."""
        return self._state.admits == NONE and self._state.table.num_running > 0

    @property
    def unloads(self) -> bool:
        """Whether the worker has no weights, is about to have none, or loads them."""
        return self.stage != AWAKE or self._wanted.level > 0

    @property
    def phase(self) -> str:
        """The scheduler's, if it is not a usual one."""
        if self.stage in (UNLOADING, ASLEEP):
            return SLEEPING
        if self.stage == LOADING:
            return WAKING
        return PAUSED if self._settled and self._wanted.paused else ""

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat; by the first one the watchdog ends the worker at
        level 2, and starts it again."""
        return {"sleep_level": self.level, "paused": bool(self._wanted.paused)}

    def next_timer(self) -> float | None:
        """Returns when the engine sleeps by itself, if nothing comes."""
        return None if self._idle_since is None else self._idle_since + self._after

    def records(self) -> list[ActivityRecord]:
        """Returns what must not be forgotten."""
        return [self._wanted] if self._wanted != ActivityRecord() else []
