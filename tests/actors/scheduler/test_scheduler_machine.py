"""Hypothesis drives the scheduler through every interleaving it can think of.

After each wake the books must balance (a debug audit of every page, slot and lock), the null worker
must find that every query sees its own sequence's prefix, whoever computed it, and each sequence
must have been told a prefix of what its seed says. Prompts share and branch; page groups with
sliding windows, all policies, flushes and lost workers are among the moves.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from helpers_examples import walk, walks
from helpers_scheduler import Heard, Ring, config, expected, ints
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.messages import BACKGROUND
from actorium.actors.params import PoolingTask, ResolvedPooling

MAX_MODEL_LEN = 70


def speculative(drafts: int, fixed: bool) -> str:
    return f"mtp:{drafts}" + (",fixed" if fixed else "") if drafts else "off"


def dear(decodes: int, window: int, drafts: int, extended: int) -> int:
    """A cost that makes the number of drafts wander."""
    return 100 + decodes * decodes * window * 7


class SchedulerMachine(RuleBasedStateMachine):
    adapters = AdapterConfig()
    worked = 0
    """Steps that workers have run, in all examples."""

    @initialize(page_size=st.sampled_from([1, 2, 16, 64]), pages=st.integers(1, 40),
                chunk=st.sampled_from([1, 3, 7, 512]), seqs=st.integers(1, 6),
                overlap=st.booleans(), queued=st.sampled_from([2, 100]),
                force=st.sampled_from([0, 0, 1, 2, 5]),
                policy=st.sampled_from(["fcfs", "lpm", "priority", "fair"]),
                cache=st.sampled_from([True, True, True, False]),
                eviction=st.sampled_from(["lru", "lfu", "priority"]),
                windows=st.sampled_from([(0,), (0,), (0, 9), (16,), (0, 4, 33), (12, 0)]),
                checkpoints=st.sampled_from([None, None, 0, 1, 2, 5, 40]),
                save=st.sampled_from(["auto", "auto", "chunks", "end", "none"]),
                drafts=st.integers(0, 4), fixed=st.booleans(),
                acceptance=st.sampled_from([(0.0,), (1.0,), (0.5,), (0.8, 0.6), (0.9, 0.0, 1.0)]),
                host=st.sampled_from([0, 1, 7, 200]), disk=st.booleans())
    def begin(self, page_size: int, pages: int, chunk: int, seqs: int, overlap: bool, queued: int,
              force: int, policy: str, cache: bool, eviction: str,
              windows: tuple[int, ...], checkpoints: int | None, save: str, drafts: int,
              fixed: bool, acceptance: tuple[float, ...], host: int, disk: bool) -> None:
        force = force if chunk > 1 else 0  # else each token costs a whole prompt of steps
        tokens = max(page_size * pages, 24)
        settings = config(page_size=page_size, pool_tokens=tokens, seqs=seqs, chunk=chunk,
                          queued=queued, overlap=overlap, force_preempt=force,
                          max_model_len=MAX_MODEL_LEN, policy=policy, cache=cache,
                          eviction=eviction, weights={"a": 2.0}, save=save,
                          speculative=speculative(drafts, fixed),
                          host_pages=host if cache else 0, disk=disk and cache)
        self.ring = Ring(msgspec.structs.replace(settings, adapters=self.adapters),
                         windows=windows, checkpoints=checkpoints, acceptance=acceptance,
                         cost=None if fixed else dear)
        kv_cache = self.ring.scheduler.state.kv_cache
        self.limit = min(MAX_MODEL_LEN, kv_cache.capacity(1 + drafts) + 1)

    @rule(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=3),
          max_tokens=st.integers(1, 60), n=st.integers(1, 3), picky=st.booleans(),
          min_tokens=st.integers(0, 5), patience=st.none() | st.integers(1, 40),
          tenant=st.sampled_from(["", "a", "b"]),
          priority=st.sampled_from([BACKGROUND, -1, 0, 1, 2]),
          told=st.sampled_from([-1, -1, 2]))
    def submit(self, parts: list[tuple[int, int]], max_tokens: int, n: int, picky: bool,
               min_tokens: int, patience: int | None, tenant: str, priority: int,
               told: int) -> None:
        deadline = None if patience is None else self.ring.now + patience
        prompt = [100 * kind + i for kind, count in parts for i in range(count)]
        self.ring.submit(prompt, max_tokens=max_tokens, n=n, min_tokens=min_tokens,
                         eos_ids=tuple(range(0, 512, 37)) if picky else (), deadline=deadline,
                         tenant=tenant, priority=priority, prompt_logprobs=told)

    @rule(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 35)), min_size=1, max_size=2),
          task=st.sampled_from(["embed", "token_embed"]), every_row=st.booleans(),
          tenant=st.sampled_from(["", "a"]), priority=st.sampled_from([BACKGROUND, 0, 1]))
    def pool(self, parts: list[tuple[int, int]], task: PoolingTask, every_row: bool, tenant: str,
             priority: int) -> None:
        prompt = [100 * kind + i for kind, count in parts for i in range(count)]
        self.ring.submit(prompt, max_tokens=1, tenant=tenant, priority=priority,
                         pooling=ResolvedPooling(task, every_row or task == "token_embed"))

    @precondition(lambda self: self.ring.heard)
    @rule(pick=st.integers(0, 10**6), more=st.integers(1, 8), max_tokens=st.integers(1, 30))
    def go_on(self, pick: int, more: int, max_tokens: int) -> None:
        """The next turn of a conversation: all that was said, and some more."""
        said = list(self.ring.heard.values())[pick % len(self.ring.heard)]
        submit = said.submit
        prompt = ints(submit.prompt) + said.tokens + list(range(300, 300 + more))
        self.ring.submit(prompt, max_tokens=max_tokens, tenant=submit.tenant,
                         priority=submit.priority)

    @rule()
    def flush(self) -> None:
        self.ring.flush()

    @rule(flips=st.lists(st.integers(0, 2**31), min_size=1, max_size=9))
    def corrupt(self, flips: list[int]) -> None:
        """Bits flip in the copies that the host's memory has."""
        assert self.ring.worker.memory is not None
        bits = self.ring.worker.memory.host.view(np.uint8).reshape(-1)
        for flip in flips if len(bits) else ():
            bits[flip // 8 % len(bits)] ^= 1 << flip % 8
        disk = list(self.ring.worker.memory.disk.values())
        for flip in flips if disk else ():
            page = disk[flip % len(disk)][0].view(np.uint8)
            page[flip // 8 % len(page)] ^= 1 << flip % 8

    @rule(every=st.integers(1, 3))
    def lose_files(self, every: int) -> None:
        """Another engine makes room, or somebody clears the directory."""
        assert self.ring.worker.memory is not None
        disk = self.ring.worker.memory.disk
        for name in list(disk)[::every]:
            del disk[name]

    @rule(moves=st.lists(st.sampled_from("wdwdwdnoa"), min_size=1, max_size=32))
    def move(self, moves: list[str]) -> None:
        """The worker works, a result is delivered, or the scheduler merely wakes."""
        for move in moves:
            self.ring.now += 0.1
            if move == "w":
                self.ring.work()
            elif move == "d":
                self.ring.deliver()
            elif move == "o":
                self.ring.move_pages()
            elif move == "a":
                self.ring.answer()
            else:
                self.ring.wake()

    @precondition(lambda self: self.ring.submits)
    @rule(pick=st.integers(0, 10**6))
    def cancel(self, pick: int) -> None:
        rids = list(self.ring.submits)
        self.ring.cancel(rids[pick % len(rids)])

    @precondition(lambda self: self.ring.heard)
    @rule(pick=st.integers(0, 10**6), tokens=st.integers(0, 9))
    def stop(self, pick: int, tokens: int) -> None:
        sids = list(self.ring.heard)
        self.ring.stop(sids[pick % len(sids)], tokens)

    @rule()
    def lose_the_worker(self) -> None:
        """A fresh worker says that it is ready; what the old one was doing is lost."""
        self.ring.lose_worker()
        self.ring.wake()

    @invariant()
    def told_what_the_seeds_say(self) -> None:
        for heard in self.ring.heard.values() if hasattr(self, "ring") else ():
            check(heard, self.limit)
            assert heard.reason in (None, "stop", "length", "abort", "deadline", "error")

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.now += 100.0
        self.ring.run(limit=100_000)
        self.ring.assert_at_rest()
        for heard in self.ring.heard.values():
            check(heard, self.limit)
        SchedulerMachine.worked += self.ring.worked


def check(heard: Heard, limit: int) -> None:
    """Told a prefix; all of it if it ended by itself."""
    tokens, reason = expected(heard, limit)
    assert heard.tokens == tokens[:len(heard.tokens)]
    stopped = heard.reason == "stop" and heard.pooled is None  # by whoever reads the text
    if heard.submit.pooling is not None and not stopped:
        assert (heard.reason == "stop") == (heard.pooled is not None)
    stopped_outside = heard.reason == "stop" and heard.events[-1].stop_token is None
    if heard.reason in ("length", "stop") and not stopped_outside:
        assert (heard.tokens, heard.reason) == (tokens, reason)
    if heard.error_code and heard.error_code != "quarantined":  # lost its worker when alone, twice
        assert heard.error_code in ("queue_full", "context_overflow", "unknown_adapter") \
            and not heard.tokens


@pytest.mark.parametrize("number", walks(6))
def test_any_schedule(number: int) -> None:
    walk(SchedulerMachine, number, 40)


def test_enough_steps_were_walked() -> None:
    """Counts what the machine above has done in this process (nothing, if it was not chosen). What
    is drawn follows from the modules that are loaded, too: 2,000 to 3,000 steps."""
    assert SchedulerMachine.worked == 0 or SchedulerMachine.worked >= 1_500
