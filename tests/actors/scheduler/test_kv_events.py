"""Events of the prefix cache: a subscriber who follows them knows what is cached."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from helpers_keys import free_ports
from helpers_scheduler import Ring, config, finish

from actorium.actors.config.kv_event_settings import KVEventConfig, of_replica
from actorium.actors.errors import BadConfig
from actorium.actors.ledger.records import AdapterEntry
from actorium.actors.messages import NamedAdapter
from actorium.actors.scheduler.cache.page_numbers import root_hash
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache
from actorium.actors.scheduler.kv_event_publisher import END, KVEventPublisher
from actorium.actors.scheduler.kv_events import KVEvents

PAGE = 4


# As vLLM publishes the layout, written from its documentation.

class Stored(msgspec.Struct, tag="BlockStored", frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", frozen=True):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    pass


class StoredArray(Stored, tag="BlockStored", array_like=True, frozen=True):
    pass


class RemovedArray(Removed, tag="BlockRemoved", array_like=True, frozen=True):
    pass


class ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


class Follower:
    """A router's view: each block's tokens, and the block before it."""

    def __init__(self, layout: type[Batch | ArrayBatch] = Batch) -> None:
        self._layout = layout
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None, str | None]] = {}
        self.below: set[int] = set()
        """In the host's memory."""

    def apply(self, batch: bytes) -> None:
        found = msgspec.msgpack.decode(batch, type=self._layout)
        assert found.data_parallel_rank == 3
        for event in found.events:
            if isinstance(event, Removed) and event.medium == "CPU":
                self.below -= {*event.block_hashes}
            elif isinstance(event, Stored) and event.medium == "CPU":
                assert not self.below & {*event.block_hashes}
                self.below |= {*event.block_hashes}
            elif isinstance(event, Stored):
                assert event.medium == "GPU" and event.lora_id is None
                before, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, block in enumerate(event.block_hashes):
                    salt = event.extra_keys and event.extra_keys[i]
                    self.blocks[block] = (before, tuple(event.token_ids[i * size:(i + 1) * size]),
                                          event.lora_name, salt[0] if salt else None)
                    before = block
            elif isinstance(event, Removed):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self.blocks.clear()
                self.below.clear()

    def prefixes(self) -> set[tuple[str | None, str | None, tuple[int, ...]]]:
        """Of every block: adapter, salt, and all tokens up to its end."""
        found = set()
        for block in self.blocks:
            tokens: tuple[int, ...] = ()
            at: int | None = block
            while at is not None:
                before, own, adapter, salt = self.blocks[at]
                tokens, at = own + tokens, before
            found.add((adapter, salt, tokens))
        return found


def held(tree: RadixCache, salts: dict[str, tuple[str | None, str | None]]) -> set[Any]:
    found = set()
    for node in tree.nodes():
        data, above = b"", node
        while above.parent is not None:
            data, above = above.key + data, above.parent
        tokens = np.frombuffer(data, np.int32).tolist()
        for end in range(node.end - node.size + 1, node.end + 1):
            found.add((*salts[above.salt], tuple(tokens[:end * PAGE])))
    return found


@pytest.mark.parametrize(("layout", "named"), [(Batch, True), (ArrayBatch, False)])
def test_who_follows_the_events_knows_the_tree(layout: Any, named: bool) -> None:
    chance, digest = random.Random(3), bytes(range(32))
    salts: dict[str, tuple[str | None, str | None]] = {
        "": (None, None), "t": (None, f"{root_hash('t'):016x}"),
        f"\1{digest.hex()}": ("poet", None), f"\1{'ab' * 32}t\0x": (
            "ab" * 32, f"{root_hash(chr(116) + chr(0) + 'x'):016x}")}
    tree, follower = RadixCache(PAGE, (0,), "lru"), Follower(layout)
    events = KVEvents(3, named, {"poet": AdapterEntry(NamedAdapter("poet", "/x", digest), 4, "")})
    next_page = 1
    for _ in range(300):
        key = PrefixKey(chance.choice([*salts]), np.array(
            [chance.randrange(2) for _ in range(chance.randrange(40))], np.int32).tobytes())
        what = chance.random()
        if what < 0.7:
            count = len(key.data) // (4 * PAGE)
            tree.insert(key, [np.arange(next_page, next_page + count, dtype=np.int32)])
            next_page += count
        elif what < 0.8:
            tree.match(key)
        elif what < 0.98:
            tree.pages.evict(0, chance.randrange(6))
        else:
            tree.pages.flush()
        events.watch(tree)
        if chance.random() < 0.5 and (batch := events.take(1.5)) is not None:
            follower.apply(batch)
            assert follower.prefixes() == held(tree, salts)
    assert len(held(tree, salts)) > 20
    another = RadixCache(PAGE, (0,), "lru")
    another.insert(PrefixKey("", bytes(4 * 9)), [np.arange(1, 3, dtype=np.int32)])
    events.watch(another)
    batch = events.take(2.0)
    assert batch is not None and events.take(2.0) is None
    follower.apply(batch)
    assert follower.prefixes() == held(another, salts)


@pytest.mark.parametrize("slots", [8, 50])
def test_who_follows_knows_what_is_in_the_hosts_memory(slots: int) -> None:
    """Pages leave the device, come back, and leave the host, also by a flush;
    who subscribes late is told the same."""
    ring = Ring(config(page_size=PAGE, pool_tokens=40, seqs=2, host_pages=slots))
    events, follower, late = KVEvents(3, True, {}), Follower(), Follower()
    chance, most = random.Random(5), 0
    for turn in range(60):
        finish(ring, [1000 * chance.randrange(9) + i for i in range(chance.randrange(4, 22))])
        state = ring.core.state
        if turn == 40:
            state.flush_cache()
        assert state.tier is not None and state.kv_cache.tree is not None
        events.watch(state.kv_cache.tree, state.tier)
        if (batch := events.take(1.0)) is not None:
            follower.apply(batch)
        assert len(follower.below) == len(state.tier.slots.held)
        assert len(follower.blocks) == len(held(state.kv_cache.tree, {"": (None, None)}))
        most = max(most, len(follower.below))
        events.start_over()
        batch = events.take(1.0)
        assert batch is not None
        late.apply(batch)
        assert (late.blocks.keys(), late.below) == (follower.blocks.keys(), follower.below)
    assert most == 8 if slots == 8 else most > 20


def connected(context: zmq.Context[Any], kind: int, at: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.connect(at)
    return socket


def test_messages_and_what_was_missed() -> None:
    port, again = free_ports(), free_ports()
    ring, context, live = Ring(config(page_size=PAGE)), zmq.Context[Any](), Follower()
    settings = KVEventConfig(
        kv_events_endpoint=f"tcp://*:{port - 3}", kv_events_topic="kv@pod@model",
        kv_events_replay_endpoint=f"tcp://*:{again - 3}", kv_events_buffer=3)
    publisher = KVEventPublisher(settings, ring.core.state, 1, 3)
    publisher.on_start(lambda: None)
    with pytest.raises(BadConfig, match=rf"kv_events_endpoint: cannot use tcp://\*:{port}: Addr"):
        KVEventPublisher(settings, ring.core.state, 1, 3)
    reader = connected(context, zmq.SUB, f"tcp://127.0.0.1:{port}")
    for sent in range(500):  # until the subscription has arrived
        finish(ring, [sent] * 20, max_tokens=2)
        publisher.publish()
        if reader.poll(10):
            break
    topic, found, batch = reader.recv_multipart()
    assert (topic, found) == (b"kv@pod@model", sent.to_bytes(8, "big"))
    live.apply(batch)  # who comes late is told of all
    tree = ring.core.state.kv_cache.tree
    assert tree is not None and live.prefixes() == held(tree, {"": (None, None)})
    ring.core.state.kv_cache.flush()
    publisher.publish()
    finish(ring, [*range(50, 90)], max_tokens=2)
    publisher.publish()
    for number in (1, 2):
        topic, found, batch = reader.recv_multipart()
        assert int.from_bytes(found, "big") == sent + number
        live.apply(batch)
    assert live.prefixes() == held(tree, {"": (None, None)})

    dealer = connected(context, zmq.DEALER, f"tcp://127.0.0.1:{again}")
    dealer.send_multipart((b"", b"what?"))  # no such request: no answer
    dealer.send_multipart((b"", (sent + 1).to_bytes(8, "big")))
    asked = [dealer.recv_multipart() for _ in range(3)]
    assert asked[1] == [b"", b"kv@pod@model", found, batch]
    assert asked[0][2] == (sent + 1).to_bytes(8, "big") and asked[2] == [b"", b"", END, b""]
    context.destroy(0)
    settings = KVEventConfig(kv_events_endpoint="ipc:///tmp/none/such")
    with pytest.raises(BadConfig, match="kv_events_endpoint: cannot use ipc:///tmp/none/such: No"):
        KVEventPublisher(settings, ring.core.state, 1, 0)
    settings = KVEventConfig(kv_events_endpoint=f"tcp://127.0.0.1:{again}")  # connects
    assert KVEventPublisher(settings, ring.core.state, 3, 0)._number == 2 << 32


def test_addresses_of_replicas() -> None:
    assert of_replica("", 2) == "" and of_replica("ipc:///tmp/e", 3) == "ipc:///tmp/e-3"
    assert of_replica("tcp://*:5557", 3) == "tcp://*:5560"
    assert of_replica("tcp://[::]:5557", 0) == "tcp://[::]:5557"
