"""The names of LoRA adapters: what each stands for, and how orders change that. Pure."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from actorium.actors.config.adapter_settings import (
    MAX_ADAPTERS,
    AdapterConfig,
    parse_lora_modules,
)
from actorium.actors.errors import ActoriumError, InvalidRequest, UnknownAdapter
from actorium.actors.ledger.records import AdapterEntry, AdaptersRecord
from actorium.actors.messages import AdapterOrder, NamedAdapter

LOG = logging.getLogger("actorium.scheduler")
KNOWN_ORDERS = 64
"""Orders whose repetition is answered as they were."""


class AdapterNames:
    """The adapters that requests may name."""

    def __init__(self, settings: AdapterConfig, prior: AdaptersRecord | None) -> None:
        """prior: what the ledger has, None = nothing."""
        self.entries = {entry.adapter.name: entry
                        for entry in (() if prior is None else prior.entries)}
        modules = parse_lora_modules(settings.lora_modules) if prior is None else ()
        self.starting = {module.name for module in modules}
        """Names of the configuration that are not loaded yet."""
        self._done: OrderedDict[tuple[bytes, str], None] = OrderedDict.fromkeys(
            () if prior is None else prior.orders)

    def bound(self, adapter: NamedAdapter) -> NamedAdapter:
        """Returns what a name stands for now, without a digest if it is unknown. What is bound
        stays so."""
        entry = self.entries.get(adapter.name)
        return adapter if adapter.digest or entry is None else entry.adapter

    @property
    def digests(self) -> set[bytes]:
        """Returns what the names stand for."""
        return {entry.adapter.digest for entry in self.entries.values()}

    def carried_out(self, order: AdapterOrder) -> bool:
        """Returns whether an order is a repetition of one that was carried out."""
        return (order.client, order.call.rid) in self._done

    def unload(self, order: AdapterOrder) -> ActoriumError | None:
        """Takes a name away. Returns why it cannot."""
        name = order.call.name
        if self.entries.pop(name, None) is None:
            return UnknownAdapter(f"lora_name: there is no adapter {name!r}")
        LOG.info("adapter %r is unloaded", name)
        self._note(order)
        return None

    def load(self, order: AdapterOrder) -> ActoriumError | None:
        """Gives a name to an adapter that the worker can serve. Returns why it cannot."""
        call, known = order.call, self.entries.get(order.call.name)
        if known is not None and order.client and not call.replace:
            return InvalidRequest(f"lora_name: {call.name!r} is loaded already, from "
                                  f"{known.adapter.path}; load_inplace replaces it")
        if known is None and len(self.entries) >= MAX_ADAPTERS:
            return InvalidRequest(f"lora_name: {MAX_ADAPTERS} adapters are loaded already")
        self.entries[call.name] = AdapterEntry(
            NamedAdapter(call.name, call.path, order.digest), order.rank, order.base)
        LOG.info("adapter %r is loaded from %s: rank %d, SHA-256 %s", call.name, call.path,
                 order.rank, order.digest.hex())
        self._note(order)
        return None

    def _note(self, order: AdapterOrder) -> None:
        self.starting.discard(order.call.name)
        if order.client:
            self._done[order.client, order.call.rid] = None
            if len(self._done) > KNOWN_ORDERS:
                self._done.popitem(last=False)

    def record(self) -> AdaptersRecord:
        """Returns what must not be forgotten."""
        return AdaptersRecord(list(self.entries.values()), list(self._done))


def shown_entry(entry: AdapterEntry) -> dict[str, Any]:
    """Returns what is shown of an adapter that has a name."""
    return {"name": entry.adapter.name, "path": entry.adapter.path, "rank": entry.rank,
            "base": entry.base, "digest": entry.adapter.digest.hex()}
