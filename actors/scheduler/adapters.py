"""The scheduler's LoRA adapters: which names there are, what the worker has read of them, and which
sequences may be admitted.

A name stands for a path and for a digest of all that was found there. A request is bound to both
when it is accepted, and its pages are cached under the digest: so it ends with the adapter that it
began with, although the name may be loaded anew or unloaded meanwhile, and no other adapter's pages
are ever shared with it.

The worker reads an adapter by a number (`LoadAdapter`), and sequences are admitted once all ranks
have answered. It keeps at most `max_cpu_loras`, and runs `Ready.adapters` different ones at once.
Names are in the ledger; numbers are given anew for each worker. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from actorium.actors.config.adapter_settings import MAX_ADAPTERS, AdapterConfig
from actorium.actors.errors import ActoriumError, BadModel, EngineUnavailable
from actorium.actors.ledger.records import AdaptersRecord
from actorium.actors.messages import (
    AdapterAnswer,
    AdapterOrder,
    AdapterRef,
    DropAdapter,
    LoadAdapter,
    Reply,
)
from actorium.actors.runtime.beat_gauges import MARK, RUNNING_WITH, WAITING_FOR
from actorium.actors.scheduler.adapter_names import AdapterNames, shown_entry
from actorium.actors.scheduler.request_state import SequenceState

LOG = logging.getLogger("actorium.scheduler")
PATIENCE = 64
"""Admissions with other adapters after which one that waits for a place goes first."""
SHOWN_IN_USE = 64
"""Adapters whose sequences heartbeats tell of."""

SERVES_NONE = "the worker serves no adapters with this model"


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """An adapter that the worker has in the host's memory, or reads."""

    number: int
    digest: bytes
    answered: set[int] = field(default_factory=set)
    """Ranks that can serve it."""
    ready: bool = False
    failed: bool = False
    last: int = 0
    """When a sequence was last admitted with it, as a count of such admissions; 0 = never."""


@dataclass(slots=True, eq=False)
class AdapterUse:
    """The sequences with one adapter that have not ended."""

    path: str
    waiting: int = 0
    foreground: int = 0
    """Those of the waiting ones that give way to no others."""
    running: int = 0
    passed: int = 0
    """Admissions with other adapters while it waited for a place."""


class AdapterTable:
    """All adapters of one engine; see the module."""

    def __init__(self, settings: AdapterConfig, ranks: int, epoch: int, patient: bool,
                 prior: AdaptersRecord | None) -> None:
        """ranks: of the worker; epoch: the scheduler's; patient: whoever waits long for a place
        gets one before others; prior: what the ledger has, None = nothing."""
        self._ranks, self._epoch, self._patient = ranks, epoch, patient
        self._most = settings.max_cpu_loras or MAX_ADAPTERS
        self.names = AdapterNames(settings, prior)
        self._limit: int | None = None
        """Different adapters that may run at once; None = there is no worker."""
        self._held: dict[bytes, HeldAdapter] = {}
        self._uses: dict[bytes, AdapterUse] = {}
        self._due: set[bytes] = set()
        """Those that have waited for a place for so long that they go first."""
        self._failed: set[bytes] = set()
        """What this worker cannot serve, until a request or an order asks for it again."""
        self._loads: list[AdapterOrder] = []
        """Orders that wait for the worker's answer."""
        self._number = self._admissions = self._places = 0
        """The last number; admissions with an adapter; different adapters that run."""
        self._changed = True
        """Something may be loaded, dropped or answered since the last `step`."""
        self._requests_next = False
        """Requests get the next room before orders do."""
        self._admissible: frozenset[bytes] | None = None
        """Adapters of the only sequences that may be admitted; None = all may."""
        self._counts = dict.fromkeys(("adapter_loads", "adapter_evictions", "adapter_failures"), 0)
        self._to_load: list[LoadAdapter] = []
        self._leaving: list[HeldAdapter] = []
        """To be dropped, once no slot has them any more."""
        self._replies: list[Reply] = []
        self._record: AdaptersRecord | None = None

    # --- requests --------------------------------------------------------------------------------

    def arrived(self, sequence: SequenceState) -> None:
        """Counts a sequence that waits."""
        if (adapter := sequence.request.submit.adapter) is None:
            return
        use = self._uses.setdefault(adapter.digest, AdapterUse(adapter.path))
        use.waiting += 1
        use.foreground += not sequence.background
        self._failed.discard(adapter.digest)
        self._changed |= adapter.digest not in self._held

    def admitted(self, sequence: SequenceState) -> int:
        """Counts a waiting sequence that runs from now on. Returns its adapter's number for the
        worker, 0 = none."""
        if not (digest := sequence.adapter):
            return 0
        use, held = self._uses[digest], self._held[digest]
        use.waiting -= 1
        use.foreground -= not sequence.background
        self._places += not use.running
        use.running += 1
        use.passed = 0
        self._due.discard(digest)
        self._admissions += 1
        held.last = self._admissions
        if self._patient:
            for other, waits in self._uses.items():
                if waits.foreground and not waits.running and self._ready(other):
                    waits.passed += 1
                    if waits.passed > PATIENCE:
                        self._due.add(other)
        return held.number

    def vacated(self, sequence: SequenceState) -> None:
        """Counts a running sequence that waits again, or ends next."""
        if digest := sequence.adapter:
            use = self._uses[digest]
            use.running -= 1
            use.waiting += 1
            use.foreground += not sequence.background
            self._places -= not use.running
            self._changed = True

    def ended(self, sequence: SequenceState) -> None:
        """Removes a waiting sequence."""
        if digest := sequence.adapter:
            use = self._uses[digest]
            use.waiting -= 1
            use.foreground -= not sequence.background
            if not (use.waiting or use.running):
                del self._uses[digest]
                self._due.discard(digest)
            self._changed = True

    def blocked(self, digest: bytes, in_turn: bool = True) -> bool:
        """Returns whether no sequence with this adapter may be admitted now: it is not read yet, or
        has no place beside those that run. in_turn: one that has waited for long goes first."""
        if not digest:
            return False
        if not self._ready(digest):
            return True
        use = self._uses[digest]
        if not use.running and self._places >= (self._limit or 0):
            return True
        return in_turn and digest not in self._due and any(
            self._uses[due].foreground and self._ready(due) for due in self._due)

    def _ready(self, digest: bytes) -> bool:
        held = self._held.get(digest)
        return held is not None and held.ready

    @property
    def reading(self) -> bool:
        """Whether the worker reads one that sequences wait for."""
        return any(use.waiting and not self._ready(digest) for digest, use in self._uses.items())

    @property
    def loading(self) -> bool:
        """Whether orders wait for the worker."""
        return bool(self._loads)

    # --- orders ----------------------------------------------------------------------------------

    def on_order(self, order: AdapterOrder, asleep: bool) -> None:
        """Takes an order; what is loaded is answered by `step`. asleep: there is no worker, and
        will be none."""
        call, key = order.call, (order.client, order.call.rid)
        if call.order == "list" or self.names.carried_out(order):
            self._answer(order)
        elif any((load.client, load.call.rid) == key for load in self._loads):
            return
        elif call.order == "unload":
            self._end(order, self.names.unload(order))
        elif order.error:
            self._refuse(order, BadModel(order.error))
        elif asleep:
            self._refuse(order, EngineUnavailable("the engine sleeps: wake it up first"))
        elif self._limit == 0:
            self._refuse(order, BadModel(SERVES_NONE))
        else:
            self._loads.append(order)
            self._failed.discard(order.digest)
            self._changed = True

    def _end(self, order: AdapterOrder, error: ActoriumError | None) -> None:
        """Answers an order that was carried out, or could not be."""
        if error is not None:
            self._refuse(order, error)
            return
        self._changed, self._record = True, self.names.record()
        self._answer(order)

    def _refuse(self, order: AdapterOrder, error: ActoriumError) -> None:
        """Raises `BadModel` where an engine that starts cannot have what it is configured with."""
        if order.client:
            self._answer(order, {"error": {"code": error.code, "message": error.message}})
            return
        text = f"lora_modules: {order.call.name}: {error.message}"
        if self._epoch == 1:
            raise BadModel(text, "adapters.lora_modules")
        LOG.error("%s", text)  # it was served before: what else there is goes on
        self.names.starting.discard(order.call.name)

    def _answer(self, order: AdapterOrder, content: dict[str, Any] | None = None) -> None:
        if order.client:
            self._replies.append(Reply(order.call.rid, order.client, msgspec.json.encode(
                content or {"adapters": self.listed()})))

    def listed(self) -> list[dict[str, Any]]:
        """Returns what is shown of each adapter that has a name."""
        shown = []
        for entry in self.names.entries.values():
            use = self._uses.get(entry.adapter.digest, AdapterUse(""))
            shown.append(shown_entry(entry) | {"loaded": self._ready(entry.adapter.digest),
                                               "running": use.running, "waiting": use.waiting})
        return shown

    # --- the worker ------------------------------------------------------------------------------

    def on_worker(self, most: int) -> None:
        """A worker is ready, which has read nothing yet. most: `Ready.adapters`."""
        self.on_no_worker()
        self._limit = most
        if not most:
            self._fail_loads(None, SERVES_NONE)

    def on_no_worker(self) -> None:
        """The worker is gone; nothing runs."""
        for known in (self._held, self._failed, self._to_load, self._leaving):
            known.clear()
        self._limit, self._changed = None, True

    def on_answer(self, answer: AdapterAnswer) -> tuple[bytes, str] | None:
        """Takes note that a rank can serve an adapter, or cannot. Returns then the digest and why:
        the requests that have it must end."""
        held = next((held for held in (*self._held.values(), *self._leaving)
                     if held.number == answer.number), None)
        if held is None or answer.epoch != self._epoch:
            return None
        self._changed = True
        if not answer.error:
            held.answered.add(answer.rank)
            held.ready = len(held.answered) == self._ranks
            return None
        held.failed = True
        if self._held.get(held.digest) is held:
            self._drop(held)
        self._failed.add(held.digest)
        self._counts["adapter_failures"] += 1
        self._fail_loads(held.digest, answer.error)
        return held.digest, answer.error

    def _fail_loads(self, digest: bytes | None, why: str) -> None:
        """Refuses the orders that wait for an adapter; None = for any."""
        for load in [load for load in self._loads if digest in (None, load.digest)]:
            self._loads.remove(load)
            self._refuse(load, BadModel(why))

    def step(self, admissible: frozenset[bytes] | None = None) -> None:
        """Has the worker read what is wanted, as far as there is room, and forget what nobody can
        ask for any more; answers the orders that are carried out. admissible: adapters of the only
        sequences that may be admitted, None = all may."""
        self._changed |= admissible != self._admissible
        self._admissible = admissible
        if not (self._limit and self._changed):
            return
        self._changed = False
        for load in [load for load in self._loads if self._ready(load.digest)]:
            self._loads.remove(load)
            self._end(load, self.names.load(load))
        needed = self.names.digests | self._uses.keys() | {load.digest for load in self._loads}
        for digest in [digest for digest in self._held if digest not in needed]:
            self._drop(self._held[digest])
        for digest, path in self._wanted():
            if self._make_room():
                self._hold(digest, path)
                self._requests_next = any(load.digest == digest for load in self._loads)
        for entry in self.names.entries.values():  # ahead of requests, while there is room
            if len(self._held) < self._most and self._lacks(entry.adapter.digest):
                self._hold(entry.adapter.digest, entry.adapter.path)

    def _wanted(self) -> Iterator[tuple[bytes, str]]:
        """Yields (digest, path) of what is waited for, and not held. Where there is little room,
        orders and requests take turns."""
        loads = [(load.digest, load.call.path) for load in self._loads]
        requests = [(digest, use.path) for digest, use in self._uses.items()
                    if use.waiting and self._may_be_admitted(digest)]
        both = requests + loads if self._requests_next else loads + requests
        return (wanted for wanted in both if self._lacks(wanted[0]))

    def _may_be_admitted(self, digest: bytes) -> bool:
        return self._admissible is None or digest in self._admissible

    def _lacks(self, digest: bytes) -> bool:
        return digest not in self._held and digest not in self._failed

    def _make_room(self) -> bool:
        """Returns whether the worker may hold one more, once the one that was used longest ago, and
        does not run, is dropped. What is read for sequences that wait is used once first: else two
        that wait could take each other's room for ever."""
        if len(self._held) < self._most:
            return True
        loading = {load.digest for load in self._loads}
        foreground = any(use.foreground for use in self._uses.values())
        idle = []
        for digest, held in self._held.items():
            use = self._uses.get(digest)
            first = use is not None and not held.last and self._may_be_admitted(digest) \
                and (use.foreground if foreground else use.waiting)
            if held.ready and digest not in loading and not first \
                    and (use is None or not use.running):
                idle.append((use is not None, held.last, digest))
        if not idle:
            return False
        self._drop(self._held[min(idle)[-1]])
        self._counts["adapter_evictions"] += 1
        return True

    def _hold(self, digest: bytes, path: str) -> None:
        for held in self._leaving:
            if held.digest == digest and not held.failed:
                self._leaving.remove(held)
                held.last = 0
                self._held[digest] = held
                return
        self._number += 1
        self._held[digest] = HeldAdapter(self._number, digest)
        self._to_load.append(LoadAdapter(self._epoch, AdapterRef(self._number, path, digest)))
        self._counts["adapter_loads"] += 1

    def _drop(self, held: HeldAdapter) -> None:
        del self._held[held.digest]
        self._leaving.append(held)

    # --- what goes out ---------------------------------------------------------------------------

    def pop_orders(self, released: bool) -> Sequence[LoadAdapter | DropAdapter]:
        """Takes out the messages to the worker. released: it has been sent the release of every
        slot that is free; until then nothing is dropped that a slot may still have there."""
        loads, self._to_load = self._to_load, []
        if not released:
            return loads
        leaving, self._leaving = self._leaving, []
        return [*(DropAdapter(self._epoch, held.number) for held in leaving), *loads]

    @property
    def leaving(self) -> bool:
        """Whether any is to be dropped, once no slot has it any more."""
        return bool(self._leaving)

    def pop_replies(self) -> tuple[AdaptersRecord | None, list[Reply]]:
        """Takes out a record for the ledger, if anything has changed, and the answers that it comes
        before."""
        record, replies = self._record, self._replies
        self._record, self._replies = None, []
        return record, replies

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        gauges: dict[str, float] = {
            "adapters": len(self.names.entries), "adapters_running": self._places,
            "adapters_held": sum(held.ready for held in self._held.values()), **self._counts}
        in_use = (entry.adapter for entry in self.names.entries.values()
                  if entry.adapter.digest in self._uses)
        for adapter in islice(in_use, SHOWN_IN_USE):
            use = self._uses[adapter.digest]
            gauges[f"{RUNNING_WITH}{MARK}{adapter.name}"] = use.running
            gauges[f"{WAITING_FOR}{MARK}{adapter.name}"] = use.waiting
        return gauges

    def audit(self, running: dict[bytes, int]) -> str:
        """Returns what is wrong with the books; "": nothing. running: sequences that have a slot,
        by adapter."""
        counted = {digest: use.running for digest, use in self._uses.items() if use.running}
        if counted != running:
            return f"adapters: {counted} are counted as running, {running} run"
        if self._places != len(counted) or self._places > (self._limit or 0):
            return f"adapters: {self._places} places of {self._limit} for {len(counted)}"
        return ""
