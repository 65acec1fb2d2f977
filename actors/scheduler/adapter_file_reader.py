"""Reads adapters' files in front of the scheduler's core, which does no IO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from actorium.actors.config.adapter_settings import AdapterConfig, parse_lora_modules
from actorium.actors.errors import ActoriumError
from actorium.actors.ledger.records import AdapterEntry
from actorium.actors.messages import AdapterCall, AdapterOrder, NamedAdapter
from actorium.actors.models.adapter_files import AdapterFiles, read_adapter
from actorium.actors.runtime.offload import Offload, OffloadJob
from actorium.actors.scheduler.adapters import AdapterTable

MAX_ERROR = 4000
"""Characters of an error."""


class AdapterFileReader:
    """Orders to load adapters wait here while a thread reads the files: to hash them takes a second
    for each gigabyte or so."""

    def __init__(self, settings: AdapterConfig, table: AdapterTable | None) -> None:
        """table: the core's; None = the engine serves no adapters."""
        self._settings, self._table = settings, table
        self._offload = Offload()  # none of a request's budget counts for files
        self._post: Callable[[], None] | None = None
        self._jobs: list[tuple[AdapterOrder, OffloadJob[AdapterFiles]]] = []

    def on_start(self, post: Callable[[], None]) -> None:
        """Begins to read the adapters of the configuration that are not loaded. post: wakes the
        core, from any thread."""
        self._post = post
        for number, module in enumerate(parse_lora_modules(self._settings.lora_modules)):
            if self._table is not None and module.name in self._table.names.starting:
                path = Path(module.path).expanduser().absolute()
                self.takes(AdapterOrder(b"", AdapterCall(
                    f"start-{number}", "load", module.name, str(path))))

    def takes(self, order: AdapterOrder) -> bool:
        """Returns whether an order waits from now on."""
        if order.call.order != "load" or self._post is None:
            return False
        key = order.client, order.call.rid
        if all((other.client, other.call.rid) != key for other, _ in self._jobs):
            work = partial(read_adapter, Path(order.call.path), self._settings.max_lora_rank)
            self._jobs.append((order, self._offload.submit(work, self._post)))
        return True

    def pop_ready(self) -> list[AdapterOrder]:
        """Returns the orders whose files are read, or cannot be, in their order."""
        if not self._jobs:
            return []
        jobs, self._jobs = self._jobs, []
        ready = []
        for order, job in jobs:
            if job.done:  # asked once: a thread may end it at any time
                ready.append(_read(order, job))
            else:
                self._jobs.append((order, job))
        return ready


def read_entries(settings: AdapterConfig) -> list[AdapterEntry]:
    """Returns the adapters of the configuration, read at once. Raises `BadModel`."""
    entries = []
    for module in parse_lora_modules(settings.lora_modules):
        adapter = read_adapter(Path(module.path), settings.max_lora_rank)
        named = NamedAdapter(module.name, str(adapter.path), adapter.digest)
        entries.append(AdapterEntry(named, adapter.rank, adapter.base))
    return entries


def _read(order: AdapterOrder, job: OffloadJob[AdapterFiles]) -> AdapterOrder:
    try:
        adapter = job.result()
    except ActoriumError as error:
        return replace(order, error=error.message[:MAX_ERROR])
    return replace(order, call=replace(order.call, path=str(adapter.path)), digest=adapter.digest,
                   rank=adapter.rank, base=adapter.base)
