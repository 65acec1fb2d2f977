"""LoRA adapters of a cluster: a name is loaded at all replicas, or at none. Pure.

The router binds each request to what its adapter's name stands for, and a replica reads that when
a request needs it. So an order to load is a question first: can each replica that is ready serve
it, and is it the same everywhere? Then the launcher, which outlives every router, gets to keep the
names, and requests may use them. The names that a replica has are made the same whenever it may
have others: one that was started since reads all adapters before requests need them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.routing_policy import ReplicaView
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.config.adapter_settings import MAX_ADAPTERS
from actorium.actors.errors import (
    ActoriumError,
    BadModel,
    InvalidRequest,
    UnknownAdapter,
    from_code,
)
from actorium.actors.ledger.records import AdapterEntry, AdaptersRecord
from actorium.actors.messages import AdapterCall, AdapterOrder, NamedAdapter, Reply
from actorium.actors.scheduler.adapter_names import KNOWN_ORDERS, shown_entry
from actorium.actors.scheduler.weights import ROUTER, Key

LOG = logging.getLogger("actorium.router")


class ReplicaNames(Struct):
    """The names that a replica has."""

    asked: int
    """`ReplicaView.asked` then: once it is another one, nothing is known."""
    number: int = 0
    """Of the order that it has not answered; 0 = none."""
    call: AdapterCall | None = None
    """That order."""
    entries: dict[str, AdapterEntry] | None = None
    """None = not known."""
    loaded: AdapterEntry | None = None
    """What the adapter is that the first order loads."""
    failed: set[tuple[str, bytes]] = set()
    """Names and digests that it could not load."""
    agreed: AdaptersRecord | None = None
    """It has had these names since its last answer, as far as it can."""


class AdapterOrders:
    """The names, the orders of clients, and what replicas have to do for them."""

    def __init__(self, fleet: Fleet, assignments: Assignments,
                 configured: Sequence[AdapterEntry] | None) -> None:
        """fleet: keeps the names; configured: the adapters that replicas are started with; None =
        they serve none."""
        self._fleet, self._assignments = fleet, assignments
        self._configured = None if configured is None else AdaptersRecord([*configured])
        self._waiting: deque[AdapterOrder] = deque()
        """The first one is being carried out."""
        self._kept_by = 0
        """Number of the set of replicas that the launcher must have before the first order is
        answered; 0 = it is not carried out yet."""
        self._replicas: dict[int, ReplicaNames] = {}
        self.replies: list[Reply] = []

    @property
    def _record(self) -> AdaptersRecord:
        return self._fleet.adapters or self._configured or AdaptersRecord([])

    @property
    def entries(self) -> dict[str, AdapterEntry]:
        """What requests may name."""
        return {entry.adapter.name: entry for entry in self._record.entries}

    # --- clients ---------------------------------------------------------------------------------

    def on_order(self, order: AdapterOrder) -> None:
        """Takes an order, or a question."""
        key = _key_of(order)
        if order.call.order == "list" or key in self._record.orders:
            self._reply(key)
        elif all(_key_of(other) != key for other in self._waiting):
            self._waiting.append(order)

    def _refusal(self, call: AdapterCall) -> ActoriumError | None:
        """Why the first order cannot be carried out, whatever replicas say."""
        entries = self.entries
        known = entries.get(call.name)
        if call.order == "unload":
            return None if known else UnknownAdapter(
                f"lora_name: there is no adapter {call.name!r}")
        if known is not None and not call.replace:
            return InvalidRequest(f"lora_name: {call.name!r} is loaded already, from "
                                  f"{known.adapter.path}; load_inplace replaces it")
        if known is None and len(entries) >= MAX_ADAPTERS:
            return InvalidRequest(f"lora_name: {MAX_ADAPTERS} adapters are loaded already")
        return None

    # --- replicas --------------------------------------------------------------------------------

    def on_reply(self, index: int, reply: Reply) -> None:
        """A replica has done what it was told, or refused it."""
        names = self._replicas.get(index)
        if names is None or str(names.number) != reply.rid or names.call is None:
            return
        content, call = msgspec.json.decode(reply.json), names.call
        names.number, names.call = 0, None
        if (error := content.get("error")) is not None:
            self._on_error(names, call, from_code(
                error["code"], f"replica {index}: {error['message']}"))
            return
        names.entries = {own["name"]: _entry(own) for own in content["adapters"]}
        if call.order == "load":
            if self._loads(call):
                names.loaded = names.entries.get(call.name)
            elif names.entries.get(call.name) != self.entries.get(call.name):
                self._note_failure(names, call, f"replica {index}: its files have changed")

    def _on_error(self, names: ReplicaNames, call: AdapterCall, error: ActoriumError) -> None:
        if self._loads(call):
            self._end(error)
        else:
            self._note_failure(names, call, error.message)

    def _note_failure(self, names: ReplicaNames, call: AdapterCall, why: str) -> None:
        """A replica lacks one of the names, and is not told again."""
        entry = self.entries.get(call.name)
        if entry is not None and entry.adapter.path == call.path:
            names.failed.add((call.name, entry.adapter.digest))
            LOG.warning("adapter %r: %s", call.name, why)

    def _loads(self, call: AdapterCall) -> bool:
        """Whether it is what the first order loads."""
        first = self._candidate
        return first is not None and (first.name, first.path) == (call.name, call.path)

    @property
    def _candidate(self) -> AdapterCall | None:
        """What the first order loads, until all replicas have read it."""
        if not self._waiting or self._kept_by:
            return None
        call = self._waiting[0].call
        return call if call.order == "load" and self._refusal(call) is None else None

    # --- a wake ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Goes as far as it can."""
        if self._configured is None:
            return
        views = [view for view in self._assignments.views if view.ready and view.synced]
        if self._waiting:
            self._advance(views)
        for view in views:
            names = self._names_of(view)
            if not names.number and (self._waiting or names.agreed is not self._record):
                self._tell(view, names)

    def _tell(self, view: ReplicaView, names: ReplicaNames) -> None:
        """Tells a replica what it has to do next, if there is anything."""
        if (call := self._next_call(names)) is None:
            names.agreed = None if self._candidate else self._record
            return
        names.number, names.call, names.agreed = self._assignments.next_number(), call, None
        self._assignments.send(view, AdapterOrder(ROUTER, msgspec.structs.replace(
            call, rid=str(names.number))))

    def _names_of(self, view: ReplicaView) -> ReplicaNames:
        names = self._replicas.get(view.index)
        if names is None or names.asked != view.asked:
            names = self._replicas[view.index] = ReplicaNames(view.asked)
        return names

    def _advance(self, views: list[ReplicaView]) -> None:
        """Goes on with the first order. views: replicas that are ready."""
        call = self._waiting[0].call
        if self._kept_by:
            if self._fleet.kept >= self._kept_by:
                self._end()
        elif (error := self._refusal(call)) is not None:
            self._end(error)
        elif call.order == "unload":
            self._keep({name: own for name, own in self.entries.items() if name != call.name})
        elif views and all(loaded := [self._names_of(view).loaded for view in views]):
            if len({own.adapter.digest for own in loaded if own is not None}) > 1:
                self._end(BadModel(f"lora_path: replicas find different files at {call.path}"))
            elif (entry := loaded[0]) is not None:
                self._keep(self.entries | {call.name: entry})

    def _keep(self, entries: dict[str, AdapterEntry]) -> None:
        """These are the names from now on."""
        orders = [*self._record.orders, _key_of(self._waiting[0])][-KNOWN_ORDERS:]
        self._fleet.adapters = AdaptersRecord([*entries.values()], orders)
        self._fleet.changed = True
        self._kept_by = self._fleet.number + 1

    def _next_call(self, names: ReplicaNames) -> AdapterCall | None:
        """What a replica has to do next."""
        if names.entries is None:
            return AdapterCall("-", "list")
        first = self._candidate
        if first is not None and names.loaded is None:
            return msgspec.structs.replace(first, replace=True)
        wanted = self.entries
        if first is not None:  # it has that one beside, or in the place of another
            wanted.pop(first.name, None)
        for name, entry in wanted.items():
            if names.entries.get(name) != entry and (
                    name, entry.adapter.digest) not in names.failed:
                return AdapterCall("-", "load", name, entry.adapter.path, replace=True)
        for name in names.entries.keys() - wanted.keys():
            if first is None or name != first.name:
                return AdapterCall("-", "unload", name)
        return None

    def _end(self, error: ActoriumError | None = None) -> None:
        """Answers the first order."""
        self._kept_by = 0
        for names in self._replicas.values():
            names.loaded = None
        self._reply(_key_of(self._waiting.popleft()), error)

    def _reply(self, key: Key, error: ActoriumError | None = None) -> None:
        content: dict[str, Any] = {"adapters": [*map(shown_entry, self._record.entries)]}
        if error is not None:
            content = {"error": {"code": error.code, "message": error.message}}
        self.replies.append(Reply(key[1], key[0], msgspec.json.encode(content)))


def _key_of(order: AdapterOrder) -> Key:
    return order.client, order.call.rid


def _entry(shown: dict[str, Any]) -> AdapterEntry:
    """Inverse of `shown_entry`."""
    return AdapterEntry(NamedAdapter(shown["name"], shown["path"], bytes.fromhex(shown["digest"])),
                        shown["rank"], shown["base"])
