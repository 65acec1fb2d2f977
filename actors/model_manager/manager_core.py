"""The model manager's core: which uses of models are granted, and which engines run for them.

Uses of a model whose engine is ready are granted at once. The others wait in the order in which
they came: the first whose engine does not run has it started as soon as there is memory for it, and
no other engine is started before. Where memory is missing, the least recently used engines end. If
those that nobody uses are not enough, some that are in use get no further uses (such uses wait
behind the first), so that they end, too, and nobody waits for ever.

What only processes can do are orders (`pop_orders`); the actor reports how they went.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from actorium.actors.core import CLIENT, Core, Health, Send
from actorium.actors.messages import Message
from actorium.actors.model_manager.manager_messages import (
    KEEP_USES_SECONDS,
    LEASE_SECONDS,
    KeepUses,
    ListModels,
    ModelList,
    ModelUnloaded,
    ModelUse,
    PullModel,
    PullProgress,
    RefusalCode,
    ReleaseModel,
    ToManagerFront,
    UnloadModel,
    UseModel,
    UseProgress,
    UseReady,
    UseRefused,
)
from actorium.actors.model_manager.manager_orders import (
    NotLoaded,
    Order,
    PlanEngine,
    PullOrder,
    ScanModels,
    StartEngine,
    StopEngine,
)
from actorium.actors.model_manager.model_record import (
    STEADY_SECONDS,
    CatalogEntry,
    EngineLimits,
    ModelRecord,
    room_for,
)
from actorium.actors.model_manager.model_uses import (
    ON_START,
    ModelUses,
    UseKey,
    UseRecord,
    progress_of,
)
from actorium.actors.model_manager.served_models import ServedModels

SCAN_SECONDS = 1.0
"""The least time between two looks at the models' folder."""
BUDGET = 60.0
ENDED = "its launcher has ended"


class ManagerWakeUp(Message, frozen=True):
    """The whole inbox: it wakes the actor and does nothing else."""


class ManagerCore(Core):
    """Pure core of the model manager; see `core.Core`."""

    inbox: Any = ManagerWakeUp
    client_inbox: Any = ToManagerFront

    def __init__(self, limits: EngineLimits, wait: float, queue: int, allow_pull: bool = False,
                 wall_offset: float = 0.0) -> None:
        """wait: seconds that a use may wait; queue: uses that may; wall_offset: Unix time less the
        monotonic clock."""
        self.models, self.uses, self.limits = ServedModels(), ModelUses(), limits
        self._wait, self._queue, self._allow_pull = wait, queue, allow_pull
        self._wall_offset = wall_offset
        self._lists: list[tuple[bytes, str]] = []
        """(client, rid) of lists that wait for a fresh catalog."""
        self._scanned_at: float | None = None
        self._scanning = False
        self._first: UseRecord | None = None
        """The waiting use that has the next engine started."""
        self.adopting = False
        """Not all engines of the manager before are known yet: none is started meanwhile."""
        self.uses_known_at = -math.inf
        """Until then clients may not have said yet which uses the manager before has granted."""
        self._sends: list[Send] = []
        self._orders: list[Order] = []
        self._draining = False
        self._steps = self._starts = self._evictions = self._failures = 0

    # --- what clients want ---

    def on_message(self, message: Any, now: float) -> None:
        """Does nothing: the message only wakes the actor."""

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self._steps += 1
        self.uses.on_sign_of_life(client, now)
        match message:
            case UseModel():
                self._add_use((client, message.use.id), message.use, message.wait, now)
            case ReleaseModel():
                self._drop_use((client, message.id), now)
            case KeepUses():
                self._renew(client, message.uses, now)
            case ListModels():
                self._lists.append((client, message.rid))
            case UnloadModel():
                self._unload(client, message)
            case PullModel():
                self._pull(client, message)

    def _add_use(self, key: UseKey, use: ModelUse, wait: float | None, now: float) -> None:
        if (known := self.uses.get(key)) is not None:
            if known.granted and known.model is not None:
                self._report_ready(known, known.model)
            return
        record = UseRecord(key, use, now + (self._wait if wait is None else min(wait, self._wait)))
        self.uses.add(record, now)
        if self._draining:
            self._refuse(record, "unavailable", "the server is stopping")
        elif self.uses.waiting_count > self._queue and not self.uses.has_share(use, self._queue):
            self._refuse(record, "queue_full",
                         f"{self._queue} requests already wait for models (--models-queue)")
        elif (model := self.models.find(use.name)) is not None:
            record.model = model
        elif not use.name and len(self.models):
            self._refuse(record, "model_required", "model: several models are served; name one of "
                         f"them: {self.models.some_names()}")

    def _renew(self, client: bytes, uses: Iterable[ModelUse], now: float) -> None:
        """The client has these uses, and no others."""
        listed = {use.id: use for use in uses}
        for name in self.uses.ids_of(client):
            if name not in listed:
                self._drop_use((client, name), now)
        for name, use in listed.items():
            if self.uses.get((client, name)) is None:
                self._add_use((client, name), use, None, now)
                added = self.uses.get((client, name))
                if added is not None:
                    added.continued = True
                    added.renewed = (added.model is not None
                                     and now < added.model.in_doubt_until)

    def _drop_use(self, key: UseKey, now: float) -> None:
        use = self.uses.remove(key)
        if use is not None and use.granted and use.model is not None:
            use.model.in_use -= 1
            use.model.last_used = now
            if not use.model.in_use:
                use.model.set_expiry(now)

    def _unload(self, client: bytes, message: UnloadModel) -> None:
        model = self.models.find(message.name)
        if model is None:
            self._sends.append(Send(CLIENT, UseRefused(
                message.rid, "model_not_found", self.models.unknown_name(message.name)), client))
            return
        if model.state == "ready" or (model.state == "loading"
                                      and not self.uses.waiting_for(model)):
            model.unloading = True
            if not model.in_use:
                self._stop(model)
        self._sends.append(Send(CLIENT, ModelUnloaded(message.rid, model.name, model.state),
                                client))

    def _pull(self, client: bytes, message: PullModel) -> None:
        if self._allow_pull and not self._draining:
            self._orders.append(PullOrder(client, message.rid, message.name))
        else:
            why = "the server is stopping" if self._draining else \
                "models are not fetched for callers (--models-allow-pull)"
            self.report_pull(client, PullProgress(message.rid, "refused", done=True, error=why))

    def on_client_lost(self, client: bytes, now: float) -> None:
        """Its uses that wait end. Those that are granted stay as long as their lease: the requests
        are in the engines, and the gateway's successor takes them over."""
        for name in self.uses.ids_of(client):
            use = self.uses.get((client, name))
            if use is not None and not use.granted:
                self._drop_use((client, name), now)

    # --- what the actor reports ---

    def set_catalog(self, entries: Iterable[CatalogEntry], now: float) -> None:
        """The models that are there now."""
        self.models.update(entries, self.uses.models_waited_for())
        for use in self.uses.unresolved():
            use.model = self.models.find(use.use.name)
            if use.model is None:
                self._refuse(use, "model_not_found", self.models.unknown_name(use.use.name))
        self._scanning, self._scanned_at = False, now

    def load_on_start(self, now: float) -> None:
        """Starts the engines of the models that want it. Called once, after the first catalog."""
        for model in self.models:
            if model.entry.load_on_start:
                self._add_use((ON_START, model.name), ModelUse(model.name, model.name), None, now)

    def adopt(self, entry: CatalogEntry, run_dir: str, ready: bool, now: float) -> None:
        """An engine runs that an earlier manager has started."""
        model = self.models.get(entry.name) or self.models.add_unlisted(entry)
        model.state, model.run_dir = "ready" if ready else "loading", run_dir
        model.in_doubt_until = now + LEASE_SECONDS
        model.ready_at = now
        model.set_expiry(now)
        self._plan(model)

    def set_plan(self, entry: CatalogEntry, memory: int, reason: str, now: float) -> None:
        """What the engine of a model takes; reason: why that is not known."""
        model = self.models.get(entry.name)
        if model is None:
            return
        model.planning = False
        if entry.digest != model.entry.digest and not model.running:
            return  # its files have changed meanwhile
        if not reason:
            model.memory = memory
        elif model.running:
            model.memory = self.limits.memory  # nothing is started beside what is not known
        else:
            self._on_failure(model, reason, now)

    def set_progress(self, name: str, detail: str) -> None:
        """How far the start of an engine is, for people."""
        if (model := self.models.get(name)) is not None and model.state == "loading":
            model.detail = detail

    def engine_ready(self, name: str, run_dir: str, now: float) -> None:
        """An engine that was started answers requests."""
        model = self.models.get(name)
        if model is None or model.state != "loading":
            return
        model.state, model.detail, model.run_dir = "ready", "", run_dir
        model.ready_at = now
        if not model.in_use:
            model.set_expiry(now)

    def engine_ended(self, name: str, reason: str, now: float, killed: bool = False) -> None:
        """The processes of an engine have ended; reason: why, as far as it is known; killed: not by
        its own doing."""
        model = self.models.get(name)
        if model is None or not model.running:
            return
        if self._goes_on(model, killed, now):
            model.state, model.detail, model.run_dir = "loading", "", ""
            self._failures += 1
            self._start_engine(model, True)
            return
        before, adopted = model.state, now < model.in_doubt_until
        for use in self.uses.granted_for(model):
            self._refuse(use, "engine_failed", f"the engine of {name} has ended: {reason or ENDED}")
        model.end()
        early = before == "ready" and now - model.ready_at < STEADY_SECONDS
        if adopted:
            model.detail = reason  # the manager before may have ended it: it may start again
        elif before == "loading" or early:
            self._on_failure(model, reason or ENDED, now)
        elif before == "ready":
            self._failures += 1
            model.detail = reason or ENDED
        if not model.listed and not self.uses.waiting_for(model):
            self.models.remove(model)

    def _goes_on(self, model: ModelRecord, killed: bool, now: float) -> bool:
        """Whether an engine that has ended by itself is started again at once, in the memory that
        it had: requests are under way there, or wait for it and it was killed while it started.
        Not with other files: what it had begun would go on differently."""
        wanted = model.in_use > 0 or (killed and bool(self.uses.waiting_for(model)))
        return (wanted and model.state in ("loading", "ready") and not model.changed
                and not self._draining and model.count_death(now))

    def report_pull(self, client: bytes, progress: PullProgress) -> None:
        """How the fetching of a model gets on."""
        self._sends.append(Send(CLIENT, progress, client))

    def _on_failure(self, model: ModelRecord, reason: str, now: float) -> None:
        self._failures += 1
        model.fail(reason, now)
        for use in self.uses.waiting_for(model):
            self._refuse(use, "model_failed", f"{model.name} does not start: {reason}")

    # --- what goes out ---

    def on_wake(self, now: float) -> Sequence[Send]:
        self._expire_uses(now)
        if self._lists or self.uses.unresolved():
            if not self._scanning and now >= self._scan_due:
                self._scanning = True
                self._orders.append(ScanModels())
            elif not self._scanning:
                self._answer_lists()
        self._schedule(now)
        for model in self.models:
            due = model.expires_at is not None and now >= model.expires_at
            if model.state == "ready" and due and not model.busy(now):
                self._stop(model)
        self._report_progress(now)
        sends, self._sends = self._sends, []
        return sends

    def pop_orders(self) -> list[Order]:
        """What the actor has to do, in order. Call it after each `on_wake`."""
        orders, self._orders = self._orders, []
        return orders

    def _expire_uses(self, now: float) -> None:
        for client in self.uses.silent_clients(now):
            for name in self.uses.ids_of(client):
                self._drop_use((client, name), now)
        for use in self.uses.waiting:
            if now >= use.deadline:
                name = use.use.name if use.model is None else use.model.name
                state, detail = progress_of(use, self._first, self.models)
                self._refuse(use, "deadline", f"{name}: not ready in time: {state} {detail}")

    def _schedule(self, now: float) -> None:
        """Grant what can be granted, and start the engine of the first use that waits for one."""
        self._first = None
        for use in self.uses.waiting:
            model = use.model
            if model is None or not self.uses.is_waiting(use) or self._draining:
                continue
            if model.state == "ready" and (
                    use.renewed or self._first is None or not model.leaving):
                self._grant(use, model, now)
            elif (self._first is None and model.state != "loading"
                  and not self._start(use, model, now)):
                self._first = use
        if self._first is None:
            self._mark(())

    def _start(self, use: UseRecord, model: ModelRecord, now: float) -> bool:
        """Starts the model's engine, or makes room for it, or refuses the use. Returns whether the
        next use may have an engine started, too."""
        # One that runs here is about to end, and is started again after that.
        if model.running or self.adopting:
            self._mark(())
            return False
        if now < model.retry_at:
            self._refuse(use, "model_failed", f"{model.name} does not start: {model.detail} (tried "
                         f"again in {model.retry_at - now:.0f} s)")
            return True
        if self.limits.memory and self._plan_missing(model):
            self._mark(())
            return False
        room = room_for(model, self.models, self.limits, now)
        if room.never:
            self._refuse(use, "does_not_fit", f"{model.name} does not fit: {room.never}")
            return True
        if not room.fits:
            self._mark(room.victims)
            for victim in room.victims:
                if not victim.busy(now):
                    self._evictions += 1
                    self._stop(victim)
            return False
        model.state, model.detail = "loading", ""
        # Its engine may have died with the manager before, and a new request may be heard sooner
        # than whoever has others under way there: these are lost without the engine's ledger.
        self._start_engine(model, now < self.uses_known_at or any(
            waiting.continued for waiting in self.uses.waiting_for(model)))
        if model.memory is None:
            self._plan(model)
        return True

    def _start_engine(self, model: ModelRecord, continues: bool) -> None:
        self._starts += 1
        self._orders.append(StartEngine(model.entry, continues))

    def _plan_missing(self, wanted: ModelRecord) -> bool:
        """Orders the plans of this model and of those that run, as far as they are not known."""
        missing = [model for model in self.models
                   if model.memory is None and (model is wanted or model.running)]
        for model in missing:
            self._plan(model)
        return bool(missing)

    def _plan(self, model: ModelRecord) -> None:
        if not model.planning:
            model.planning = True
            self._orders.append(PlanEngine(model.entry))

    def _mark(self, victims: Sequence[ModelRecord]) -> None:
        """These engines, and no others, leave."""
        for model in self.models:
            model.leaving = model in victims

    def _grant(self, use: UseRecord, model: ModelRecord, now: float) -> None:
        self.uses.grant(use)
        model.in_use += 1
        model.last_used, model.expires_at, model.unloading = now, None, False
        model.failures = 0
        if use.use.keep_alive is not None:
            model.keep_alive = use.use.keep_alive
        if use.key[0] == ON_START:
            self._drop_use(use.key, now)
        else:
            self._report_ready(use, model)

    def _report_ready(self, use: UseRecord, model: ModelRecord) -> None:
        self._sends.append(Send(CLIENT, UseReady(use.use.id, model.name, model.run_dir),
                                use.key[0]))

    def _refuse(self, use: UseRecord, code: RefusalCode, why: str) -> None:
        """It ends, whether it waits or was granted."""
        self.uses.remove(use.key)
        if use.key[0] == ON_START:
            self._orders.append(NotLoaded(why))
        else:
            self._sends.append(Send(CLIENT, UseRefused(use.use.id, code, why[:4096]), use.key[0]))

    def _stop(self, model: ModelRecord) -> None:
        model.state, model.expires_at = "stopping", None
        self._orders.append(StopEngine(model.name))

    def _report_progress(self, now: float) -> None:
        for use in self.uses.waiting:
            shown = progress_of(use, self._first, self.models)
            if shown == use.shown and now < use.shown_at + KEEP_USES_SECONDS:
                continue
            use.shown, use.shown_at = shown, now
            if use.key[0] != ON_START and use.model is not None:
                self._sends.append(Send(CLIENT, UseProgress(use.use.id, use.model.name, *shown),
                                        use.key[0]))

    def _answer_lists(self) -> None:
        default = self.models.find("")
        infos = [model.info(len(self.uses.waiting_for(model)), model is default, self._wall_offset)
                 for model in self.models]
        taken = sum(model.memory or 0 for model in self.models if model.running)
        for client, rid in self._lists:
            self._sends.append(Send(CLIENT, ModelList(
                rid, infos, taken, self.limits.memory, self.limits.engines), client))
        self._lists.clear()

    # --- life ---

    @property
    def _scan_due(self) -> float:
        return 0.0 if self._scanned_at is None else self._scanned_at + SCAN_SECONDS

    def next_timer(self) -> float | None:
        due = [self.uses.next_timer()]
        for model in self.models:
            if model.state == "ready" and model.expires_at is not None:
                due.append(model.expires_at)
            if model.state == "ready" and model.leaving and not model.in_use:
                due.append(model.in_doubt_until)
        if self.uses.unresolved() and not self._scanning:
            due.append(self._scan_due)
        return min((at for at in due if at is not None), default=None)

    def drain(self, now: float) -> None:
        if self._draining:
            return
        self._draining = True
        for use in self.uses.waiting:
            self._refuse(use, "unavailable", "the server is stopping")
        for model in self.models:
            if model.state in ("loading", "ready"):
                self._stop(model)

    @property
    def done(self) -> bool:
        return (self._draining and not self._orders and not self._sends
                and not any(model.running for model in self.models))

    def health(self) -> Health:
        running = [model for model in self.models if model.running]
        gauges = {
            "models": len(self.models), "engines": len(running),
            "planned_bytes": sum(model.memory or 0 for model in running),
            "uses": len(self.uses) - self.uses.waiting_count,
            "waiting_uses": self.uses.waiting_count, "starts": self._starts,
            "evictions": self._evictions, "failed_engines": self._failures}
        phase = "draining" if self._draining else "ready"
        return Health(phase, self._steps, BUDGET, {name: float(n) for name, n in gauges.items()},
                      f"models: {len(self.models)}, with an engine: {len(running)}")
