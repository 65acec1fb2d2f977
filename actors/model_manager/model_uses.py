"""The uses of models: who has which, and who waits, in the order in which they came. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actorium.actors.model_manager.manager_messages import (
    KEEP_USES_SECONDS,
    LEASE_SECONDS,
    ModelState,
    ModelUse,
)
from actorium.actors.model_manager.model_record import ModelRecord

UseKey = tuple[bytes, str]
"""(client, id of the use)"""
ON_START = b""
"""Stands for a client: its uses start models with `load_on_start`, and are never silent."""


class UseRecord:
    """A use that is granted, or waits. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, key: UseKey, use: ModelUse, deadline: float) -> None:
        self.key, self.use, self.deadline = key, use, deadline
        self.model: ModelRecord | None = None
        """None = its name is looked for in a fresh catalog."""
        self.granted = False
        self.continued = False
        """Its client had it before this manager knew it."""
        self.renewed = False
        """An earlier manager may have granted it: its client has requests under way."""
        self.shown: tuple[ModelState, str] | None = None
        """The last progress that its client got, and when."""
        self.shown_at = 0.0


class ModelUses:
    """All uses."""

    def __init__(self) -> None:
        self._uses: dict[UseKey, UseRecord] = {}
        self._waiting: dict[UseKey, UseRecord] = {}
        """Those that are not granted."""
        self._clients: dict[bytes, dict[str, None]] = {}
        """The ids of each client's uses."""
        self._last_message: dict[bytes, float] = {}
        """When each of these clients last sent something."""

    def __len__(self) -> int:
        return len(self._uses)

    def get(self, key: UseKey) -> UseRecord | None:
        return self._uses.get(key)

    @property
    def waiting(self) -> list[UseRecord]:
        """Those that are not granted, in the order in which they came."""
        return list(self._waiting.values())

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def is_waiting(self, use: UseRecord) -> bool:
        return use.key in self._waiting

    def waiting_for(self, model: ModelRecord) -> list[UseRecord]:
        return [use for use in self._waiting.values() if use.model is model]

    def granted_for(self, model: ModelRecord) -> list[UseRecord]:
        return [use for use in self._uses.values() if use.granted and use.model is model]

    def models_waited_for(self) -> Iterator[ModelRecord]:
        return (use.model for use in self._waiting.values() if use.model is not None)

    def unresolved(self) -> list[UseRecord]:
        """Those whose names are looked for."""
        return [use for use in self._waiting.values() if use.model is None]

    def ids_of(self, client: bytes) -> Iterable[str]:
        return list(self._clients.get(client, ()))

    def add(self, use: UseRecord, now: float) -> None:
        """A new one, which waits."""
        client, name = use.key
        self._uses[use.key] = self._waiting[use.key] = use
        self._clients.setdefault(client, {})[name] = None
        self._last_message.setdefault(client, now)

    def grant(self, use: UseRecord) -> None:
        """It waits no more."""
        use.granted = True
        del self._waiting[use.key]

    def remove(self, key: UseKey) -> UseRecord | None:
        use = self._uses.pop(key, None)
        if use is not None:
            self._waiting.pop(key, None)
            del self._clients[key[0]][key[1]]
            if not self._clients[key[0]]:
                del self._clients[key[0]], self._last_message[key[0]]
        return use

    # --- leases ---

    def on_sign_of_life(self, client: bytes, now: float) -> None:
        """The client has sent something."""
        if client in self._clients:
            self._last_message[client] = now

    def silent_clients(self, now: float) -> list[bytes]:
        """Those whose uses are forgotten."""
        return [client for client, last in self._last_message.items()
                if client != ON_START and now > last + LEASE_SECONDS]

    def next_timer(self) -> float | None:
        """When a use or a client is to be looked at."""
        due = [last + LEASE_SECONDS + 0.001 for client, last in self._last_message.items()
               if client != ON_START]
        for use in self._waiting.values():
            due += [use.deadline, use.shown_at + KEEP_USES_SECONDS]
        return min(due, default=None)


def progress_of(use: UseRecord, first: UseRecord | None, models: Iterable[ModelRecord]
                ) -> tuple[ModelState, str]:
    """How far a waiting use is. first: the one that has the next engine started."""
    model = use.model
    if model is None:
        return "waiting", ""
    if model.state in ("loading", "stopping"):
        return model.state, model.detail
    if model.planning:
        return "waiting", "for its memory plan"
    if use is not first:
        return "waiting", "behind earlier requests for other models"
    leaving = [other.name for other in models if other.leaving or other.state == "stopping"]
    return "waiting", f"for the end of {', '.join(leaving)}" if leaving else "for memory"
