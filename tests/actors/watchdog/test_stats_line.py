"""The line on the work: when there is one, and what it says."""

from __future__ import annotations

import re
from typing import Any

from actorium.actors.watchdog.stats_line import StatsLine, StatsLogger
from actorium.actors.watchdog.supervised import Supervised, starting

IDLE = {"running": 0.0, "waiting": 0.0, "steps": 0.0, "tokens": 0.0, "kv_tokens": 1000.0}


def actors(now: float, epoch: int = 1, **gauges: float) -> dict[str, Supervised]:
    """As heard of at `now`."""
    found = {role: starting(role, 10, epoch, now) for role in ("scheduler", "worker-0")}
    found["scheduler"].gauges = IDLE | gauges
    found["worker-0"].gauges = {name: n for name, n in gauges.items() if name.startswith("steps_")}
    return found


def line_after(seconds: float = 10.0, seen: float = 10.0, before: dict[str, float] | None = None,
               **gauges: Any) -> StatsLine | None:
    """That at the end of one interval."""
    made = StatsLogger(seconds)
    assert made.tick(actors(100.0, **(before or {})), 100.0) is None
    assert made.next_timer() == 100.0 + seconds
    assert made.tick(actors(100.0 + seen / 2, **gauges), 100.0 + seconds / 2) is None
    return made.tick(actors(100.0 + seen, **gauges), 100.0 + seconds)


def test_a_line_reads_as_vllms() -> None:
    line = line_after(running=3.0, waiting=2.0, steps=50.0, tokens=900.0, kv_tokens_used=250.0,
                      computed_prompt_tokens=1200.0, cache_lookup_tokens=2000.0,
                      cache_hit_tokens=800.0)
    assert line is not None and line.text == (
        "Avg prompt throughput: 120.0 tokens/s, Avg generation throughput: 90.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0% (250/1000 tokens), "
        "Prefix cache hit rate: 40.0%")
    assert line.fields["generation_tokens_per_second"] == 90
    vllms = re.compile(r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: "
                       r"([\d.]+) tokens/s, Running: (\d+) reqs, Waiting: (\d+) reqs")
    assert vllms.search(line.text)


def test_tokens_are_counted_over_the_time_that_their_step_took() -> None:
    """A prompt's step of 40 s: four lines of nothing and a burst would each be wrong."""
    made, busy = StatsLogger(10.0), {"running": 1.0, "steps": 1.0}
    assert made.tick(actors(100.0), 100.0) is None
    found = []
    for at, more in ((110.0, {}), (120.0, {}), (140.0, {"computed_prompt_tokens": 2000.0}),
                     (150.0, {"computed_prompt_tokens": 2300.0})):
        line = made.tick(actors(at, **busy, **more), at)
        assert line is not None
        found.append((line.fields["prompt_tokens_per_second"], line.fields.get("step_seconds")))
    assert found == [(0, 10), (0, 20), (50, None), (30, None)]
    line = made.tick(actors(160.0, **busy, computed_prompt_tokens=2300.0), 160.0)
    assert line is not None and line.text.endswith("No step has ended for 10.0 s")


def test_time_without_work_does_not_count() -> None:
    made = StatsLogger(10.0)
    for at in (100.0, 110.0, 120.0):
        assert made.tick(actors(at), at) is None
    line = made.tick(actors(130.0, running=1.0, steps=9.0, tokens=50.0), 130.0)
    assert line is not None and line.fields["generation_tokens_per_second"] == 5


def test_the_stats_lines_optional_parts() -> None:
    line = line_after(steps=50.0, tokens=100.0, preemptions=2.0, spec_decode_num_drafts=40.0,
                      spec_decode_num_draft_tokens=80.0, spec_decode_num_accepted_tokens=60.0,
                      steps_full_graph=40.0, steps_piecewise_graph=8.0, steps_eager=2.0)
    assert line is not None and line.text.endswith(
        "Waiting: 0 reqs, Preemptions: 2, KV cache usage: 0.0% (0/1000 tokens), "
        "Mean acceptance length: 2.50, Avg draft acceptance rate: 75.0%, Graphs: 96.0% of steps")


def test_sizes_that_served_steps() -> None:
    """Growth alone, also of sizes that turn up in the interval; the three that served most."""
    line = line_after(before={"steps": 50.0, "steps_program": 30.0, "steps_program_of_1": 30.0},
                      steps=150.0, steps_program=100.0, steps_program_of_1=35.0,
                      steps_program_of_2=5.0, steps_program_of_4=20.0, steps_program_of_12=40.0,
                      steps_eager=30.0, steps_eager_of_2048=30.0)
    assert line is not None and line.text.endswith(
        "Graphs: 70.0% of steps (program 12: 40, 4: 20, 2: 5, ...; eager 2048: 30)")
    assert {name: count for name, count in line.fields.items() if name.startswith("steps_")} == {
        "steps_program_of_1": 5.0, "steps_program_of_2": 5.0, "steps_program_of_4": 20.0,
        "steps_program_of_12": 40.0, "steps_eager_of_2048": 30.0}


def test_no_work_no_line() -> None:
    assert line_after() is None
    assert line_after(before={"steps": 9.0, "tokens": 70.0}, steps=9.0, tokens=70.0) is None
    assert line_after(running=1.0) is not None, "what is stuck is told of"
    eager = line_after(steps=5.0, steps_eager=5.0)
    assert eager is not None and "Graphs" not in eager.text


def test_rates_are_by_the_time_between_beats() -> None:
    line = line_after(seen=8.0, before={"steps": 1.0, "tokens": 100.0}, steps=9.0, tokens=180.0)
    assert line is not None and "Avg generation throughput: 10.0 tokens/s" in line.text


def test_a_scheduler_that_was_started_again_counts_from_nothing() -> None:
    made = StatsLogger(10.0)
    made.tick(actors(100.0, steps=500.0, tokens=9000.0), 100.0)
    line = made.tick(actors(110.0, epoch=2, steps=3.0, tokens=20.0), 110.0)
    assert line is not None and "Avg generation throughput: 2.0 tokens/s" in line.text


def test_what_the_ledger_has_goes_on_with_the_next_scheduler() -> None:
    made = StatsLogger(10.0)
    made.tick(actors(100.0, steps=500.0, tokens=9000.0), 100.0)
    line = made.tick(actors(110.0, epoch=2, steps=3.0, tokens=9050.0), 110.0)
    assert line is not None and "Avg generation throughput: 5.0 tokens/s" in line.text


def test_none_at_all() -> None:
    made = StatsLogger(0.0)
    assert made.tick(actors(100.0, steps=3.0), 100.0) is None and made.next_timer() is None
