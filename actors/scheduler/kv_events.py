"""Events of the prefix cache for routers outside, in the layout that vLLM publishes. Pure.

A batch is a msgpack array (time, events, replica), an event a map or an array with its name:
`BlockStored`, `BlockRemoved` or `AllBlocksCleared`. A block is a page; its hash is its number, of
which the router of replicas makes its index, too.
The layout is that of KVEventBatch in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from actorium.actors.ledger.records import AdapterEntry
from actorium.actors.scheduler.cache.page_numbers import Hashes, NumberedTree, root_hash
from actorium.actors.scheduler.cache.radix_cache import RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode

MEDIUM = "GPU"
"""What the field calls the device's memory, whatever the device is."""
Event = tuple[str, dict[str, Any]]
"""Its name and its fields, in the order of the layout."""


class KVEvents(NumberedTree):
    """What has happened to the prefix cache since it was last told."""

    def __init__(self, replica: int, named: bool, adapters: Mapping[str, AdapterEntry]) -> None:
        """replica: its number; named: fields have names; adapters: those that have one, at any
        time."""
        super().__init__()
        self._replica, self._named, self._adapters = replica, named, adapters
        self._events: list[Event] = []
        self._encoder = msgspec.msgpack.Encoder()

    def watch(self, tree: RadixCache | None) -> bool:
        """Watches this tree from now on; of another one than before nothing is left."""
        if tree is not self.tree:
            self._events = [("AllBlocksCleared", {})]
        return super().watch(tree)

    def start_over(self) -> None:
        """The next message begins with the whole cache."""
        self._events = [("AllBlocksCleared", {})]
        if self.tree is not None:
            for node in self.tree.nodes():
                self.added(node, self.numbers[node])

    def take(self, now: float) -> bytes | None:
        """Returns a message of all events since the last call; None where there are none. now:
        seconds since 1970."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return self._encoder.encode((now, [self._laid_out(own) for own in events], self._replica))

    def _laid_out(self, event: Event) -> Any:
        name, fields = event
        return {"type": name} | fields if self._named else [name, *fields.values()]

    def added(self, node: TreeNode, numbers: Hashes) -> None:
        assert self.tree is not None
        root = node
        while root.parent is not None:
            root = root.parent
        salt, adapter = root.salt, None
        if salt.startswith("\1"):  # see `salt_of`
            digest, salt = salt[1:65], salt[65:]
            adapter = next((name for name, entry in self._adapters.items()
                            if entry.adapter.digest.hex() == digest), digest)
        extra = [[f"{root_hash(salt):016x}"]] * len(numbers) if salt else None
        self._events.append(("BlockStored", {
            "block_hashes": numbers.tolist(), "parent_block_hash": self.before(node),
            "token_ids": np.frombuffer(node.key, "<u4").tolist(),
            "block_size": self.tree.page_size, "lora_id": None, "medium": MEDIUM,
            "lora_name": adapter, "extra_keys": extra}))

    def removed(self, numbers: Hashes) -> None:
        self._events.append(("BlockRemoved", {"block_hashes": numbers.tolist(), "medium": MEDIUM}))
