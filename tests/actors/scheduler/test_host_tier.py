"""Pages that are evicted to the host's memory, seen through the scheduler core."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from helpers_scheduler import Ring, assert_whole, cached, config, finish, gauges

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.messages import PageGroup, Ready
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.radix_cache import PrefixKey
from actorium.actors.scheduler.cache.tree_nodes import TreeNode, TreeObserver

PROMPTS = [[1000 * number + i for i in range(65)] for number in range(30)]
"""Four whole pages and a token each: more than ten times a pool of ten pages."""


def ring_of(host_pages: int, seqs: int = 2) -> Ring:
    return Ring(config(page_size=16, pool_tokens=160, seqs=seqs, host_pages=host_pages))


def test_a_working_set_of_ten_pools_comes_back() -> None:
    ring = ring_of(200)
    first = [finish(ring, prompt)[0] for prompt in PROMPTS]
    again = [finish(ring, prompt)[0] for prompt in PROMPTS]
    assert {cached(heard) for heard in first} == {0}
    assert {cached(heard) for heard in again} == {64}
    found = gauges(ring)
    assert found["host_pages_hit"] >= 4 * 27 and not found["host_pages_corrupt"]


def test_without_slots_nothing_is_copied() -> None:
    ring = ring_of(0)
    for prompt in PROMPTS * 2:
        finish(ring, prompt)
    assert not any(plan.store or plan.load for plan in ring.sent)
    assert "host_pages" not in gauges(ring)


def test_the_least_recently_used_goes_when_the_slots_run_out() -> None:
    ring = ring_of(8)
    for prompt in PROMPTS:
        finish(ring, prompt)
    found = gauges(ring)
    assert found["host_pages"] == 8 and found["host_pages_evicted"] > 90
    assert cached(finish(ring, PROMPTS[0])[0]) == 0


def test_every_planted_flip_is_found_and_none_is_served() -> None:
    """A flip in each stored page: what the pages hold is checked by the null worker at each query.
    """
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    dice = random.Random(7)
    assert ring.worker.memory is not None
    stored = int(gauges(ring)["host_pages"])
    bits = ring.worker.memory.host.view(np.uint8).reshape(200, -1)
    for slot in range(200):
        bits[slot, dice.randrange(bits.shape[1])] ^= 1 << dice.randrange(8)
    again = [finish(ring, prompt)[0] for prompt in PROMPTS[:20]]
    assert {cached(heard) for heard in again} == {0}
    found = gauges(ring)
    assert not found["host_pages_hit"] and 80 <= found["host_pages_corrupt"] <= stored


def test_tenants_share_nothing() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt, tenant="a")
    assert cached(finish(ring, PROMPTS[0], tenant="b")[0]) == 0
    assert cached(finish(ring, PROMPTS[0], tenant="a")[0]) == 64


def test_who_leaves_while_its_pages_come_leaves_nothing_behind() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    rid = ring.submit(PROMPTS[0])
    ring.wake()
    assert ring.sent[-1].load
    ring.cancel(rid)
    ring.run()
    ring.assert_at_rest()
    rid = ring.submit(PROMPTS[0])
    ring.run()
    assert cached(ring.of(rid)[0]) == 64
    assert gauges(ring)["host_pages_hit"] == 4


def test_a_flush_forgets_them() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    ring.flush()
    assert cached(finish(ring, PROMPTS[0])[0]) == 0


def test_a_lost_worker_takes_them_along() -> None:
    ring = ring_of(200)
    for prompt in PROMPTS:
        finish(ring, prompt)
    ring.submit(PROMPTS[0])
    ring.wake()
    ring.lose_worker()
    ring.run()
    assert_whole(ring)
    assert not gauges(ring)["host_pages_hit"]


def flip_all(ring: Ring) -> None:
    assert ring.worker.memory is not None
    ring.worker.memory.host.view(np.uint8).reshape(200, -1)[:, 3] ^= 4


def test_two_who_wait_for_the_same_corrupt_pages_both_compute_them() -> None:
    ring = ring_of(200, seqs=4)
    for prompt in PROMPTS:
        finish(ring, prompt)
    flip_all(ring)
    rids = [ring.submit(PROMPTS[0][:33] + [7, 8]), ring.submit(PROMPTS[0][:33] + [9])]
    ring.run()
    assert cached(ring.of(rids[0])[0]) == 0
    assert gauges(ring)["host_pages_corrupt"] == 2 and not gauges(ring)["host_pages_hit"]
    assert_whole(ring)


def test_what_the_disk_does_not_give_in_time_is_computed() -> None:
    """Of four pages the last two are late: those before them are used."""
    ring = Ring(config(page_size=16, pool_tokens=160, seqs=2, chunk=32, disk=True))
    for prompt in PROMPTS[:10]:
        finish(ring, prompt)
    in_time = ring.move_pages

    def late() -> bool:
        reads, moved = bool(ring.orders) and ring.orders[0].verb == "read", in_time()
        if reads:
            answer = ring.answers.pop()
            ring.answers.append(msgspec.structs.replace(
                answer, outcomes=answer.outcomes[:2] + b"\3\3"))
        return moved

    ring.move_pages = late  # type: ignore[method-assign]
    assert cached(finish(ring, PROMPTS[0])[0]) == 32
    found = gauges(ring)
    assert (found["disk_pages_hit"], found["disk_pages_late"]) == (2, 2)
    assert not found["disk_pages_corrupt"]
    ring.move_pages = in_time  # type: ignore[method-assign]
    assert cached(finish(ring, PROMPTS[1])[0]) == 64


def small_tier(slots: int = 8) -> tuple[KVCacheManager, HostTier]:
    kv_cache = KVCacheManager([PageGroup(11, 0)], 4, MemoryConfig(debug_memory=True))
    worker = Ready(1, [PageGroup(11, 0)], 4, 2, 99, 99, "null", host_pages=slots)
    return kv_cache, HostTier(kv_cache, worker)


def key_of(start: int, pages: int) -> PrefixKey:
    return PrefixKey("", np.arange(start, start + 4 * pages, dtype=np.int32).tobytes())


def keep(kv_cache: KVCacheManager, key: PrefixKey, owner: int = 1) -> None:
    pages = kv_cache.allocate(len(key.data) // 16, owner)
    assert pages is not None and kv_cache.tree is not None
    kv_cache.move_lock(kv_cache.cache_pages(key, pages, None, 0), None)
    kv_cache.release(pages, owner)


def begin(kv_cache: KVCacheManager, tier: HostTier, sid: int, key: PrefixKey) -> None:
    assert kv_cache.tree is not None
    assert tier.fetch(sid, key, kv_cache.tree.match(key))


def slots_of(rows: bytes) -> list[int]:
    """The host slots of `StepPlan.store` or `load`."""
    return np.frombuffer(rows, np.int32).reshape(-1, 3)[:, 2].tolist()


def test_a_corrupt_slot_is_nobodys_until_its_last_reader_is_through() -> None:
    """Else a later plan would fill it with another page before the second reader's copy."""
    kv_cache, tier = small_tier(slots=2)
    keep(kv_cache, key_of(0, 2))
    kv_cache.flush()
    tier.planned(1)
    longer = key_of(0, 3)
    begin(kv_cache, tier, 7, longer)
    slots = slots_of(tier.planned(2)[1])
    begin(kv_cache, tier, 8, longer)
    tier.copied(2, 0, np.array(slots, np.int32).tobytes())
    keep(kv_cache, key_of(500, 2), 9)
    kv_cache.flush()
    stored, loaded = tier.planned(3)
    assert not stored and slots_of(loaded) == slots
    kv_cache.audit(tier.holders())
    tier.copied(3, 0, np.array(slots, np.int32).tobytes())
    kv_cache.audit(tier.holders())
    assert tier.gauges()["host_pages_corrupt"] == 2 and not tier.gauges()["host_pages"]
    assert tier.gauges()["host_pages_unstored"] == 2


def test_a_flush_keeps_the_copies_that_a_fetch_of_the_same_plan_reads() -> None:
    kv_cache, tier = small_tier()
    keep(kv_cache, key_of(0, 2))
    kv_cache.flush()
    begin(kv_cache, tier, 7, key_of(0, 3))
    tier.flush()
    stored, loaded = tier.planned(1)
    assert set(slots_of(stored)) >= set(slots_of(loaded)) != set()


def test_who_watches_a_tree_is_not_put_out_by_another_nor_by_a_repair() -> None:
    class Cuts(TreeObserver):
        count = 0

        def cut(self, node: TreeNode, keep: int) -> None:
            self.count += node.size - keep

    kv_cache, tier = small_tier()
    cuts = Cuts()
    assert kv_cache.tree is not None
    kv_cache.tree.pages.observers.append(cuts)
    keep(kv_cache, key_of(0, 2))
    kv_cache.flush()
    assert cuts.count == 2 and tier.stored == 2
    kv_cache.pools[0].allocate(1, 5)  # is leaked
    assert kv_cache.repair() and not tier.gauges()["host_pages"], "what they held is in doubt"
    keep(kv_cache, key_of(0, 2))
    kv_cache.flush()
    assert cuts.count == 4 and tier.stored == 4


def test_a_burst_gives_up_what_was_used_longest_ago_and_not_what_comes() -> None:
    """Before the disk has got any of it: six pages for four slots."""
    kv_cache = KVCacheManager([PageGroup(11, 0)], 4, MemoryConfig(debug_memory=True))
    tier = HostTier(kv_cache, Ready(1, [PageGroup(11, 0)], 4, 2, 99, 99, "null", host_pages=4,
                                    disk="ahead"))
    for number, pages in enumerate((2, 2, 2)):
        keep(kv_cache, key_of(100 * number, pages), number + 1)
        kv_cache.flush()
        tier.planned(number + 1)
        tier.copied(number + 1, 0, b"")
    found = tier.gauges()
    assert (found["host_pages"], found["host_pages_unstored"]) == (4, 0)
    assert (found["host_pages_evicted"], found["disk_pages_unwritten"]) == (2, 2)
    begin(kv_cache, tier, 7, key_of(200, 3))
    assert len(slots_of(tier.planned(4)[1])) == 2
    kv_cache.audit(tier.holders())
