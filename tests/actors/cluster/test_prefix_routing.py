"""What replicas tell of their caches, what the router makes of it, and what that saves."""

from __future__ import annotations

import random

import numpy as np
from helpers_cluster import ClusterBox, settings

from actorium.actors.cluster.cluster_messages import CacheDelta
from actorium.actors.cluster.replica_link import PrefixReport
from actorium.actors.cluster.routing.prefix_index import SOON, PrefixIndex
from actorium.actors.cluster.routing.routing_policy import (
    FIRST_RATE,
    HALF_LIFE,
    ReplicaView,
    believed_rates,
)
from actorium.actors.messages import StepResult
from actorium.actors.scheduler.cache.page_numbers import prefix_hashes, root_hash
from actorium.actors.scheduler.cache.radix_cache import PrefixKey, RadixCache
from actorium.actors.scheduler.request_metrics import PromptWork
from actorium.actors.scheduler.request_state import PlanRecord

PAGE = 4


def tokens_of(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def test_numbers_of_a_longer_prefix_continue_those_of_a_shorter_one() -> None:
    data = tokens_of(*range(43))
    whole = prefix_hashes(data, PAGE, root_hash("t"))
    assert len(whole) == 10 == len(set(whole.tolist()))
    part = prefix_hashes(data[:4 * 16], PAGE, root_hash("t"))
    rest = prefix_hashes(data[4 * 16:], PAGE, int(part[-1]), 4)
    assert [*part, *rest] == [*whole]
    others = (prefix_hashes(data, PAGE, root_hash("u")), prefix_hashes(data[4:], PAGE,
                                                                       root_hash("t")),
              prefix_hashes(data[16:32] + data[:16] + data[32:], PAGE, root_hash("t")))
    for other in others:
        assert not set(whole[:4].tolist()) & set(other[:4].tolist())


def held(tree: RadixCache) -> set[int]:
    """The numbers of all that a tree has, from its leaves' own keys."""
    numbers: set[int] = set()
    for node in tree.nodes():
        data, above = b"", node
        while above.parent is not None:
            data, above = above.key + data, above.parent
        numbers |= set(prefix_hashes(data, PAGE, root_hash(above.salt)).tolist())
    return numbers


def test_deltas_add_up_to_the_tree() -> None:
    chance = random.Random(3)
    tree, report, index = RadixCache(PAGE, (0,), "lru"), PrefixReport(), PrefixIndex()
    next_page = 1
    for step in range(300):
        salt = chance.choice(("", "t"))
        data = tokens_of(*(chance.randrange(2) for _ in range(chance.randrange(40))))
        what = chance.random()
        if what < 0.7:
            count = len(data) // (4 * PAGE)
            pages = np.arange(next_page, next_page + count, dtype=np.int32)
            next_page += count
            tree.insert(PrefixKey(salt, data), [pages])
        elif what < 0.8:
            tree.match(PrefixKey(salt, data))
        elif what < 0.98:
            tree.pages.evict(0, chance.randrange(6))
        else:
            tree.pages.flush()
        report.watch(tree)
        if step % 50 == 7:
            report.start_over()
        if chance.random() < 0.5 and (delta := report.take()) is not None:
            assert index.apply(2, delta)
            assert set(index._holders) == held(tree)
    another = RadixCache(PAGE, (0,), "lru")
    another.insert(PrefixKey("", tokens_of(*range(9))), [np.arange(1, 3, dtype=np.int32)])
    report.watch(another)
    fresh = report.take()
    assert fresh is not None and fresh.sequence == 0
    assert index.apply(2, fresh) and set(index._holders) == held(another)


def delta(number: int, added: list[int], removed: list[int] = []) -> CacheDelta:  # noqa: B006
    return CacheDelta(number, np.array(added, np.uint64).tobytes(),
                      np.array(removed, np.uint64).tobytes())


def test_after_a_gap_nothing_is_known() -> None:
    index = PrefixIndex()
    pages = np.array([11, 12, 13], np.uint64)
    assert not index.apply(0, delta(5, [11])) and not index.knows(0)
    assert index.apply(0, delta(0, [11, 12])) and index.apply(1, delta(0, [11]))
    assert index.match(pages, [0, 1, 2], 0.0) == {0: 2, 1: 1, 2: 0}
    assert index.apply(0, delta(1, [13], [12]))
    assert index.match(pages, [0, 1, 2], 0.0) == {0: 1, 1: 1, 2: 0}
    assert not index.apply(0, delta(3, [14])) and not index.knows(0) and index.resyncs == 1
    assert index.match(pages, [0, 1], 0.0) == {0: 0, 1: 1}


def test_what_was_sent_to_a_replica_is_expected_there_for_a_while() -> None:
    index = PrefixIndex()
    pages = np.array([21, 22], np.uint64)
    index.expect(pages, 1, 100.0)
    assert index.match(pages, [0, 1], 100.0 + SOON / 2) == {0: 0, 1: 2}
    assert index.match(pages, [0, 1], 101.0 + SOON) == {0: 0, 1: 0}


def test_a_missed_delta_is_made_good() -> None:
    box = ClusterBox(settings())
    for i in range(4):
        box.submit([1 + i] * 30)
    box.run()
    box.router.assignments._index.apply(0, delta(99, []))
    assert not box.router.assignments._index.knows(0)
    for i in range(4):
        box.submit([50 + i] * 30)
    box.run()
    for _ in range(5):
        box.turn()
    assert box.router.assignments._index.knows(0)
    for view, replica in zip(box.router.views, box.replicas, strict=True):
        known = {page for page, holders in box.router.assignments._index._holders.items()
                 if holders >> view.index & 1}
        tree = replica.bare.state.kv_cache.tree
        assert tree is not None and known == held(tree) and known


def converse(replicas: int, routing: str, pool_tokens: int) -> tuple[float, float]:
    """Twelve conversations of six turns, two tenants' system prompts: the share of prompt tokens
    that came from a cache, and the prompt tokens that were computed."""
    box = ClusterBox(settings(replicas, pool_tokens), routing)
    system = [[7] * 64, [8] * 64]
    talks = [[*system[i % 2], *([100 + i] * 20)] for i in range(12)]
    prompts = 0
    chance = random.Random(1)
    for turn in range(6):
        order = [*range(12)]
        chance.shuffle(order)
        for i in order:
            prompts += len(talks[i])
            rid = box.submit(talks[i], max_tokens=12, rid=f"{turn}-{i}")
            for _ in range(chance.randrange(4)):
                box.turn()
        box.run()
        for i in order:
            (heard,) = box.of(f"{turn}-{i}")
            talks[i] += [*heard.tokens, *([200 + turn] * 9)]
    gauges = box.router.health().gauges
    computed = sum(replica.scheduler.health().gauges["computed_prompt_tokens"]
                   for replica in box.replicas)
    assert rid and gauges["router_live"] == 0
    return 1 - computed / prompts, computed


def test_conversations_stay_where_their_prefix_is() -> None:
    """Nearly as one cache of the same size in all, and much less work than in turns."""
    one, _ = converse(1, "prefix", 4 * 1024)
    ratio, computed = converse(4, "prefix", 1024)
    _, in_turns = converse(4, "round_robin", 1024)
    assert ratio > one - 0.08 and in_turns > 1.5 * computed, (one, ratio, computed, in_turns)


# --- how fast replicas are believed to be --------------------------------------------------------

def test_a_rate_of_long_ago_counts_less_than_those_of_others() -> None:
    """A replica that was slow for a moment gets no prompts, so it is never seen to be fast again:
    in time it is believed to be as fast as others."""
    fast, slow, fresh = (ReplicaView(i, "") for i in range(3))
    assert believed_rates([fast, slow, fresh], 100.0) == [FIRST_RATE] * 3
    fast.rate, slow.rate, slow.measured = 20_000.0, 100.0, 100.0
    believed = []
    for now in (100.0, 100.0 + HALF_LIFE, 100.0 + 4 * HALF_LIFE):
        fast.measured = now
        believed.append(believed_rates([fast, slow, fresh], now))
    assert [each[0] for each in believed] == [20_000.0] * 3
    assert believed[0][1] == 100.0 and 5_000 < believed[1][1] < 10_000 < 17_000 < believed[2][1]
    assert believed[0][2] == 10_050.0, "one that has not been measured is like the others"


def test_what_a_prompt_adds_to_a_step_is_what_it_took() -> None:
    work = PromptWork()

    def step(prompt: int, decodes: int, busy_us: int, encode_us: int = 0) -> None:
        slots = np.arange(1, decodes + 1, dtype=np.int32)
        record = PlanRecord(1, slots, slots, slots.tobytes(), 0, {}, prompt + decodes)
        work.add(record, StepResult(1, 1, b"", b"", b"", busy_us=busy_us, encode_us=encode_us))

    step(100, 0, 22_000)  # there was no step to hold it against
    step(0, 4, 12_000)
    step(200, 4, 22_000)
    step(50, 3, 14_500 + 7_000, 7_000)  # an image was made besides
    assert work.gauges() == {"computed_prompt_tokens": 350.0, "prompt_us": 34_500.0}
    step(10, 4, 11_000)  # no longer than without, by chance
    assert work.us == 34_500 + 1_100


def test_what_was_expected_of_a_replica_that_died_is_forgotten_even_if_it_never_reported() -> None:
    index = PrefixIndex()
    pages = prefix_hashes(tokens_of(*range(40)), PAGE, root_hash(""))
    index.expect(pages, 1, 0.0)
    index.forget(1)
    assert index.match(pages, [0, 1], 1.0) == {0: 0, 1: 0}


def test_who_finds_less_than_its_replica_had_said_is_counted() -> None:
    """A replica that says of pages that it has lost that they are there."""
    box = ClusterBox(settings(2))
    for _ in range(20):
        box.turn()
    prompt = [*range(100, 141)]
    box.submit(prompt)
    box.run()
    box.submit(prompt)
    box.run()
    gauges = box.router.assignments.gauges()
    assert gauges["routed_missed"] == 0 and gauges["routed_by_prefix"] >= 1
    held = {view.index: view.routed for view in box.router.views}
    (home,) = [index for index, routed in held.items() if routed == 2]
    tree = box.replicas[home].bare.state.kv_cache.tree
    assert tree is not None
    tree.pages.observers = []  # nobody is told any more
    box.replicas[home].bare.state.kv_cache.flush()
    box.submit(prompt)
    box.run()
    assert box.router.assignments.gauges()["routed_missed"] == 1
    box.assert_whole()
