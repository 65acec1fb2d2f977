"""What the scheduler observes of requests, against what the detokenizer hears and when."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from helpers_scheduler import Ring, config, gauges

from actorium.actors.health import plain_gauges
from actorium.actors.runtime import beat_gauges
from actorium.actors.runtime.beat_gauges import BOUNDS, Histogram, read


class Clocked(Ring):
    """A ring whose time moves, and which keeps when each sequence was heard of."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.told: dict[int, list[float]] = defaultdict(list)
        super().__init__(*args, **more)

    def _hear(self, message: Any) -> None:
        super()._hear(message)
        for sid in memoryview(getattr(message, "sids", b"")).cast("q").tolist():
            self.told[sid].append(self.now)

    def run_at(self, pace: random.Random) -> None:
        """Until nothing moves, time passing at random."""
        self.wake()
        for _ in range(20_000):
            self.now += pace.choice((0.0003, 0.004, 0.03, 0.7))
            if not (pace.random() < 0.5 and self.work()) and not self.deliver() \
                    and not self.work():
                return
        raise AssertionError("still busy")


def counted(values: list[float], name: str) -> list[float]:
    """By bucket, the plain way."""
    bounds = BOUNDS[name]
    found = [0.0] * (len(bounds) + 1)
    for value in values:
        found[next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))] += 1
    return found


def gaps(ring: Clocked) -> list[float]:
    return [b - a for times in ring.told.values() for a, b in zip(times, times[1:], strict=False)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [
    {}, {"overlap": False}, {"force_preempt": 5}, {"pool_tokens": 320},
    {"seqs": 3}])
def test_gaps_and_first_tokens_are_those_the_detokenizer_sees(settings: dict[str, Any],
                                                              seed: int) -> None:
    pace = random.Random(seed)
    ring = Clocked(config(**settings))
    for _ in range(12):
        ring.submit(pace.randrange(1, 60), max_tokens=pace.randrange(1, 40),
                    n=pace.choice((1, 1, 3)))
        for _ in range(pace.randrange(4)):
            ring.wake()
            ring.work()
            ring.deliver()
    ring.run_at(pace)
    told = gauges(ring)
    heard = gaps(ring)
    assert read(told, "between_tokens")[0] == counted(heard, "between_tokens")
    assert read(told, "between_tokens")[1] == pytest.approx(sum(heard))
    sequences = len(ring.heard)
    for name in ("first_token", "queued", "prefill", "request", "generation_tokens"):
        assert sum(read(told, name)[0]) == sequences
    tokens = [len(h.tokens) for h in ring.heard.values()]
    assert read(told, "generation_tokens") == (counted(tokens, "generation_tokens"), sum(tokens))
    assert sum(read(told, "per_token")[0]) == sum(n > 1 for n in tokens)
    assert told["finished_length"] + told.get("finished_stop", 0) == sequences


def test_drafts_count_one_gap_a_step() -> None:
    ring = Clocked(config(speculative="mtp:3,fixed"), acceptance=(0.8, 0.6, 0.5))
    pace = random.Random(1)
    for i in range(6):
        ring.submit(5 + i, max_tokens=30)
    ring.run_at(pace)
    assert read(gauges(ring), "between_tokens")[0] == counted(gaps(ring), "between_tokens")


def test_a_refused_or_cancelled_request_counts_as_ended_and_no_more() -> None:
    ring = Clocked(config())
    ring.submit([], rid="none")
    ring.submit(5, rid="gone")
    ring.cancel("gone")
    ring.run()
    told = gauges(ring)
    assert (told["finished_error"], told["finished_abort"]) == (1, 1)
    assert sum(read(told, "request")[0]) == sum(read(told, "first_token")[0]) == 0


def test_ended_requests_are_counted_once_each() -> None:
    ring = Clocked(config(seqs=4, force_preempt=3))
    ring.submit(5, max_tokens=4, n=3)
    ring.submit(30, max_tokens=9)
    ring.submit(7, rid="gone", max_tokens=30, n=2)
    ring.wake()
    ring.cancel("gone")
    ring.submit([], rid="none")
    ring.run()
    told = gauges(ring)
    assert read(told, "choices") == (counted([3, 1, 2], "choices"), 6)
    assert read(told, "max_tokens") == (counted([4, 9, 30], "max_tokens"), 43)
    longest: dict[str, int] = defaultdict(int)
    for heard in ring.heard.values():
        longest[heard.opened.rid] = max(longest[heard.opened.rid], len(heard.tokens))
    assert read(told, "most_generation_tokens")[1] == sum(longest.values())
    preempted = read(told, "preemptions")
    assert sum(preempted[0]) == sum(read(told, "request")[0])
    assert 0 < preempted[1] <= told["preemptions"]
    assert told["rejected_invalid_request"] == 1


def test_prompt_tokens_are_counted_as_they_are_computed() -> None:
    ring = Clocked(config())
    prompt = list(range(1, 65))
    ring.submit(prompt, max_tokens=3)
    ring.run()
    assert gauges(ring)["computed_prompt_tokens"] == 64
    ring.submit(prompt, max_tokens=3)
    ring.run()
    told = gauges(ring)
    found = told["cache_hit_tokens"]
    assert 0 < found < 64 and told["computed_prompt_tokens"] == 128 - found
    assert read(told, "prefill_tokens")[1] == 128 - found
    assert told["cache_lookup_tokens"] == 128


def test_times_are_counted_from_arrival() -> None:
    ring = Clocked(config())
    ring.submit(5, max_tokens=2)
    request = next(iter(ring.scheduler.state.requests.values()))
    request.submit = type(request.submit)(**{
        name: getattr(request.submit, name) for name in request.submit.__struct_fields__}
        | {"arrival": ring.now - 3.0})
    ring.wake()
    ring.now += 4.0
    ring.work()
    ring.deliver()
    ring.run()
    told = gauges(ring)
    assert read(told, "queued")[1] == pytest.approx(3.0)
    assert read(told, "prefill")[1] == pytest.approx(4.0)
    assert read(told, "first_token")[1] == pytest.approx(7.0)


def test_a_histogram_travels_as_gauges() -> None:
    seen = Histogram("queued")
    assert seen.gauges() == {}
    for value in (-1.0, 0.01, 0.0100001, 9000.0):
        seen.add(value)
    told = seen.gauges()
    assert plain_gauges(told | {"running": 3.0}) == {"running": 3.0}
    counts, total = read(told, "queued")
    assert counts == counted([0.0, 0.01, 0.0100001, 9000.0], "queued") and counts[0] == 2
    assert total == pytest.approx(9000.02, abs=1e-3)
    assert read({}, "queued") == ([0.0] * len(counts), 0.0)


def test_bounds_rise() -> None:
    for bounds in beat_gauges.BOUNDS.values():
        assert list(bounds) == sorted(set(bounds)) and bounds[0] > 0


def test_sequences_resumed_on_a_new_worker_count_their_tokens() -> None:
    ring = Clocked(config())
    ring.submit(5, max_tokens=20)
    ring.submit(6, max_tokens=20)
    ring.wake()
    for _ in range(4):
        ring.work()
        ring.deliver()
    assert gauges(ring)["resumed_sequences"] == 0
    emitted = sum(len(h.tokens) for h in ring.heard.values())
    ring.lose_worker()
    ring.wake()
    ring.run()
    told = gauges(ring)
    assert (told["resumed_sequences"], told["resumed_tokens"]) == (2, emitted) and emitted > 0
    assert told["ledger_full"] == 0
