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
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.cache.page_numbers import Hashes, NumberedTree, root_hash
from actorium.actors.scheduler.cache.radix_cache import RadixCache
from actorium.actors.scheduler.cache.tree_nodes import TreeNode

MEDIUM, HOST = "GPU", "CPU"
"""What the field calls the device's memory, whatever the device is, and the host's below it."""
Event = tuple[str, dict[str, Any]]
"""Its name and its fields, in the order of the layout."""


class KVEvents(NumberedTree):
    """What has happened to the prefix cache since it was last told."""

    def __init__(self, replica: int, named: bool, adapters: Mapping[str, AdapterEntry]) -> None:
        """replica: its number; named: fields have names; adapters: those that have one, at any
        time."""
        super().__init__()
        self._replica, self._named, self._adapters = replica, named, adapters
        self._events: list[Event | msgspec.Raw] = []
        self._tier: HostTier | None = None
        self._below: dict[bytes, tuple[int, msgspec.Raw]] = {}
        """Pages that were told to be in the host's memory, by the tier's names: their numbers, and
        what was told."""
        self._encoder = msgspec.msgpack.Encoder()

    def watch(self, tree: RadixCache | None, tier: HostTier | None = None) -> bool:
        """Watches this tree from now on; of another one than before nothing is left. tier: the one
        below it."""
        if tree is not self.tree:
            self._events = [("AllBlocksCleared", {})]
            self._below.clear()
            self._tier = tier
            if tier is not None:
                tier.slots.on_gone = self._left_host
        return super().watch(tree)

    def start_over(self) -> None:
        """The next message begins with the whole cache."""
        self._events = [("AllBlocksCleared", {})]
        if self.tree is not None:
            for node in self.tree.nodes():
                self.added(node, self.numbers[node])
        # A page left the device later than those behind it: this order tells it before them.
        self._events += [told for _, told in reversed(self._below.values())]

    def take(self, now: float) -> bytes | None:
        """Returns a message of all events since the last call; None where there are none. now:
        seconds since 1970."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return self._encoder.encode((now, [
            own if isinstance(own, msgspec.Raw) else self._laid_out(own) for own in events],
            self._replica))

    def _laid_out(self, event: Event) -> Any:
        name, fields = event
        return {"type": name} | fields if self._named else [name, *fields.values()]

    def added(self, node: TreeNode, numbers: Hashes) -> None:
        self._events.append(self._stored(node, numbers, MEDIUM))

    def cut(self, node: TreeNode, keep: int) -> None:
        # The tier, which watches for longer, has been told before.
        for index, name in () if self._tier is None else self._tier.held_of(node, keep):
            if name not in self._below:
                event = self._stored(node, self.numbers[node], HOST, index)
                told = msgspec.Raw(self._encoder.encode(self._laid_out(event)))
                self._below[name] = int(self.numbers[node][index]), told
                self._events.append(told)
        super().cut(node, keep)

    def _left_host(self, name: bytes) -> None:
        """A page's name, or that of its further parts, left the host's memory."""
        number, _ = self._below.pop(name, (None, b""))
        if number is not None:
            self._events.append(("BlockRemoved", {"block_hashes": [number], "medium": HOST}))

    def _stored(self, node: TreeNode, numbers: Hashes, medium: str, index: int | None = None
                ) -> Event:
        """Says that a node's pages lie in a medium, or the one of this index alone."""
        assert self.tree is not None
        root = node
        while root.parent is not None:
            root = root.parent
        salt, adapter = root.salt, None
        if salt.startswith("\1"):  # see `salt_of`
            digest, salt = salt[1:65], salt[65:]
            adapter = next((name for name, entry in self._adapters.items()
                            if entry.adapter.digest.hex() == digest), digest)
        before, key = self.before(node), np.frombuffer(node.key, "<u4")
        if index is not None:
            before = int(numbers[index - 1]) if index else before
            numbers, key = numbers[index:index + 1], key.reshape(node.size, -1)[index]
        extra = [[f"{root_hash(salt):016x}"]] * len(numbers) if salt else None
        return "BlockStored", {
            "block_hashes": numbers.tolist(), "parent_block_hash": before,
            "token_ids": key.tolist(), "block_size": self.tree.page_size, "lora_id": None,
            "medium": medium, "lora_name": adapter, "extra_keys": extra}

    def removed(self, numbers: Hashes) -> None:
        self._events.append(("BlockRemoved", {"block_hashes": numbers.tolist(), "medium": MEDIUM}))
