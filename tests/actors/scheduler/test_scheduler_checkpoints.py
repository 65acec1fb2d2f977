"""Prefix reuse of models with recurrent layers: checkpoints of states, through the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, cached, config, finish

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.messages import PageGroup
from actorium.actors.scheduler.cache.checkpoints import POLICIES, CheckpointPool
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.cache.radix_cache import PrefixKey
from actorium.actors.scheduler.cache.tree_nodes import TreeNode

SYSTEM = list(range(50, 150))


def saves(ring: Ring) -> list[tuple[int, int]]:
    """(tokens of the chunk, checkpoint) of every save, in order."""
    rows = np.concatenate([np.frombuffer(p.checkpoints, np.int32).reshape(-1, 3)
                           for p in ring.sent])
    return [(int(tokens), int(number)) for _, number, tokens in rows]


def ring(count: int = 8, save: str = "auto", page_size: int = 16, **more: int) -> Ring:
    return Ring(config(page_size=page_size, save=save, **more), checkpoints=count)


def test_the_next_turn_starts_from_the_end_of_the_last_prompt() -> None:
    r = ring()
    (first,) = finish(r, SYSTEM, max_tokens=40)
    (turn,) = finish(r, [*SYSTEM, *first.tokens, 7, 8, 9])
    assert (cached(first), cached(turn)) == (0, 96)
    assert saves(r)[0] == (96, 1)


def test_without_checkpoints_nothing_is_reused() -> None:
    for r in (ring(count=0), ring(save="none")):
        assert [cached(h) for h in (*finish(r, SYSTEM), *finish(r, SYSTEM))] == [0, 0]
        assert saves(r) == []


def test_a_branch_is_saved_by_the_second_and_used_by_the_third() -> None:
    r = ring()
    got = [cached(finish(r, [*SYSTEM, *range(i, i + 30)])[0]) for i in (200, 300, 400, 500)]
    assert got == [0, 0, 96, 96]
    assert [tokens for tokens, _ in saves(r)] == [128, 96, 128, 32, 32]


def test_the_policies_differ_in_where_they_save() -> None:
    where = {name: save(0, 70, 200, 48, 16) for name, save in POLICIES.items()}
    assert where == {"none": [], "end": [], "chunks": [64], "auto": [48]}
    where = {name: save(70, 200, 200, 48, 16) for name, save in POLICIES.items()}
    assert where == {"none": [], "end": [192], "chunks": [192], "auto": [192]}
    assert POLICIES["end"](0, 32, 32, 0, 16) == [16], "the last token is computed anyway"


def test_two_requests_with_the_same_new_prefix_share_it_one_step_later() -> None:
    """The state is there only when the step that saves it has run: the second waits for it."""
    r = ring(save="end")
    one, two = finish(r, SYSTEM, SYSTEM)
    assert (cached(one), cached(two)) == (0, 96)
    first, second = [plan for plan in r.sent if plan.admit]
    assert second.step == first.step + 1 and second.admit[0].checkpoint == saves(r)[0][1]


def test_the_least_recently_used_checkpoint_is_evicted_first() -> None:
    r = ring(count=2, save="end")
    prompts = [[kind, *SYSTEM] for kind in (1, 2, 3)]
    finish(r, prompts[0])
    finish(r, prompts[1])
    finish(r, prompts[0])
    finish(r, prompts[2])
    assert [cached(finish(r, prompts[kind])[0]) for kind in (0, 2)] == [96, 96]
    assert cached(finish(r, prompts[1])[0]) == 0
    assert r.scheduler.health().gauges["checkpoints_evicted"] == 2


def test_evicted_pages_drop_their_checkpoint() -> None:
    r = ring(count=8, save="end", pool_tokens=256)
    finish(r, SYSTEM)
    finish(r, list(range(1000, 1240)))
    assert r.scheduler.health().gauges["checkpoints"] == 1
    assert cached(finish(r, SYSTEM)[0]) == 0


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_preempted_sequences_start_again_from_a_checkpoint(chunk: int) -> None:
    r = ring(chunk=chunk, force_preempt=25)
    finish(r, SYSTEM, SYSTEM[:60], max_tokens=90)
    again = [a for plan in r.sent for a in plan.admit if a.prompt_len < len(a.tokens) // 4]
    assert again and all(a.checkpoint and a.cached_len >= 48 for a in again)


def test_checkpoints_pass_the_audit() -> None:
    state, node, other = CheckpointPool(1), TreeNode(None, b"", []), TreeNode(None, b"", [])
    assert state.save(node, step=1) == 1
    assert state.save(other, step=1) == 0, "the same plan does not take its own save away"
    assert state.save(other, step=2) == 1 and not node.checkpoint
    state.audit([node, other])
    with pytest.raises(AccountingError, match=r"checkpoints \[\] are in the tree, \[1\] in the "
                       r"books"):
        state.audit([node])
    state.drop(other)
    state.audit([node, other])


def test_an_earlier_turns_checkpoint_is_evicted_first() -> None:
    """Two checkpoints, two conversations: the second turn of one does not cost the other's."""
    r = ring(count=2, save="end")
    one, two = [1, *SYSTEM], [2, *SYSTEM]
    finish(r, one)
    finish(r, two)
    finish(r, one + list(range(300, 340)))
    assert cached(finish(r, two)[0]) == 96
    assert cached(finish(r, [*one, *range(300, 340), 5])[0]) == 128


def test_a_match_does_not_outlive_its_checkpoint() -> None:
    """The number went to another prefix while the sequence that had matched it still waited."""
    settings = config(page_size=16, pool_tokens=64, seqs=2, chunk=3, queued=2, overlap=False,
                      force_preempt=1, policy="lpm")
    r = Ring(settings, checkpoints=1)
    r.submit([0, 1, 2, 3, 4], max_tokens=13)
    r.wake()
    r.submit([0, 1, 2, 3, 4, 300, 301], max_tokens=12)
    r.run(limit=100_000)
    assert_whole(r)


def test_a_lost_worker_takes_the_checkpoints_with_it() -> None:
    r = ring(chunk=40)
    run_before = finish(r, SYSTEM)
    assert cached(run_before[0]) == 0
    r.submit([*SYSTEM, *range(300, 400)], max_tokens=30)
    r.wake()
    r.lose_worker()
    r.run()
    assert_whole(r)


def test_an_admission_without_pages_for_a_chunk_still_reaches_the_worker() -> None:
    """The pages of a windowed group may turn out to be held after all: the chunk waits a step."""
    settings = config(page_size=1, pool_tokens=24, seqs=5, chunk=7, queued=2, force_preempt=2,
                      policy="fair", save="chunks", max_model_len=70, weights={"a": 2.0})
    r = Ring(settings, windows=(0, 9), checkpoints=5)
    prompt = [*range(200, 204), *range(200, 216)]
    r.submit(prompt, max_tokens=48, n=3, min_tokens=1, priority=-1, tenant="b",
             deadline=r.now + 20, prompt_logprobs=2)
    r.wake()
    r.work()
    r.submit([*range(100, 107), 0, 1, *range(200, 212)], max_tokens=40, min_tokens=3, tenant="a")
    r.submit([0, 200], max_tokens=1, tenant="a")
    r.lose_worker()
    r.wake()
    r.work()
    r.now += 100
    r.run(limit=100_000)
    r.assert_at_rest()


def test_no_checkpoint_without_a_node_to_own_it() -> None:
    """All layers windowed, and the pages of the prefix are gone: the tree has no end to hang it on.
    """
    memory = KVCacheManager([PageGroup(8, window=16)], 16, MemoryConfig(debug_memory=True),
                            recurrent=True, checkpoints=2)
    key = PrefixKey("", np.arange(32, dtype=np.int32).tobytes())
    assert memory.checkpoint(key, [np.zeros(2, np.int32)], 0, 32) == 0
    memory.audit([])
