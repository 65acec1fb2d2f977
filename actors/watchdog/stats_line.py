"""The periodic log line on throughput, every so many seconds in which there was work. Pure.

Its wording is vLLM's, in the same order, so that people and scripts that know vLLM's log can read
it; fields that vLLM lacks follow. It is made of the heartbeats' gauges: rates are differences of
counters over the time between the two heartbeats that carried them. Tokens are counted when their
step ends: where none has, the line says so, and the next one's rates are over that time as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actorium.actors.health import CounterReading, Growth, growth
from actorium.actors.runtime.beat_gauges import STEP_MODES, steps_by_size
from actorium.actors.runtime.roles import SCHEDULER, WORKER
from actorium.actors.watchdog.supervised import Supervised

TOKENS = ("computed_prompt_tokens", "tokens")
COUNTERS = ("steps", "cache_lookup_tokens", "cache_hit_tokens", "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "preemptions")
SIZES_SHOWN = 3
"""Of each way in which steps were run, those that served most."""


class StatsLine(NamedTuple):
    """The text, and the same as fields of a JSON line."""

    text: str
    fields: dict[str, float]


class StatsLogger:
    """Makes a line when one is due."""

    def __init__(self, seconds: float) -> None:
        """seconds: between two lines; 0 = there are none."""
        self._seconds = seconds
        self._due: float | None = None
        self._before: dict[tuple[str, ...], CounterReading] = {}
        """By the names of what was read."""

    def next_timer(self) -> float | None:
        """When to tick; None = never."""
        return self._due

    def tick(self, actors: Mapping[str, Supervised], now: float) -> StatsLine | None:
        """The line that is due at `now`; None if none is, or there was no work."""
        if not self._seconds or (self._due is not None and now < self._due):
            return None
        first, self._due = self._due is None, now + self._seconds
        scheduler, worker = actors.get(SCHEDULER), actors.get(WORKER)
        done = self._since(scheduler, COUNTERS).counts
        tokens = self._since(scheduler, TOKENS, wait=True)
        modes = self._since(worker, _step_counters(worker), (WORKER,)).counts
        if first or scheduler is None:
            return None
        gauges = scheduler.gauges
        if not (done["steps"] or gauges.get("running") or gauges.get("waiting")):
            return None
        return _line(gauges, done, modes, tokens)

    def _since(self, actor: Supervised | None, names: tuple[str, ...], key: tuple[str, ...] = (),
               wait: bool = False) -> Growth:
        """The growth of counters since the last tick. key: of those whose names change; wait: of
        work that has counted nothing the beginning stays."""
        if actor is None:
            return Growth(0.0, dict.fromkeys(names, 0.0))
        key = key or names
        counts = {name: actor.gauges.get(name, 0.0) for name in names}
        before = self._before.get(key)
        if before is not None:  # sizes turn up when the first step of them is run
            before = before._replace(counts={**dict.fromkeys(names, 0.0), **before.counts})
        new = CounterReading(actor.epoch, actor.seen, counts)
        grown = growth(before, new)
        if grown is None:  # what the ledger has goes on, the rest is counted from 0 on
            old = {} if before is None else before.counts
            grown = Growth(self._seconds, {
                name: count - old.get(name, 0.0) if count >= old.get(name, 0.0) else count
                for name, count in counts.items()})
        if before is None or before.epoch != new.epoch or any(grown.counts.values()) or not (
                wait and actor.gauges.get("running")):
            self._before[key] = new
        return grown


def _line(gauges: Mapping[str, float], done: Mapping[str, float], modes: Mapping[str, float],
          tokens: Growth) -> StatsLine:
    used, total = gauges.get("kv_tokens_used", 0.0), gauges.get("kv_tokens", 0.0)
    fields = {
        "prompt_tokens_per_second": tokens.rate("computed_prompt_tokens"),
        "generation_tokens_per_second": tokens.rate("tokens"),
        "running": gauges.get("running", 0.0), "waiting": gauges.get("waiting", 0.0),
        "kv_tokens_used": used, "kv_tokens": total, "kv_usage": used / total if total else 0.0}
    parts = [f"Avg prompt throughput: {fields['prompt_tokens_per_second']:.1f} tokens/s",
             f"Avg generation throughput: {fields['generation_tokens_per_second']:.1f} tokens/s",
             f"Running: {fields['running']:.0f} reqs", f"Waiting: {fields['waiting']:.0f} reqs"]
    if done["preemptions"]:
        fields["preemptions"] = done["preemptions"]
        parts.append(f"Preemptions: {done['preemptions']:.0f}")
    parts.append(f"KV cache usage: {100 * fields['kv_usage']:.1f}% "
                 f"({used:.0f}/{total:.0f} tokens)")
    if done["cache_lookup_tokens"]:
        fields["prefix_cache_hit_rate"] = done["cache_hit_tokens"] / done["cache_lookup_tokens"]
        parts.append(f"Prefix cache hit rate: {100 * fields['prefix_cache_hit_rate']:.1f}%")
    if gauges.get("running") and not any(tokens.counts.values()):
        fields["step_seconds"] = tokens.seconds
        parts.append(f"No step has ended for {tokens.seconds:.1f} s")
    _add_speculation(done, fields, parts)
    _add_graphs(modes, fields, parts)
    return StatsLine(", ".join(parts), {name: round(value, 4) for name, value in fields.items()})


def _add_speculation(done: Mapping[str, float], fields: dict[str, float],
                     parts: list[str]) -> None:
    windows, drafted, accepted = (done[f"spec_decode_num_{name}"] for name in
                                  ("drafts", "draft_tokens", "accepted_tokens"))
    if not (windows and drafted):
        return
    fields["mean_acceptance_length"] = 1 + accepted / windows
    fields["draft_acceptance_rate"] = accepted / drafted
    parts += [f"Mean acceptance length: {fields['mean_acceptance_length']:.2f}",
              f"Avg draft acceptance rate: {100 * fields['draft_acceptance_rate']:.1f}%"]


def _step_counters(worker: Supervised | None) -> tuple[str, ...]:
    """The worker's counters of steps: by how it ran them, and by size."""
    gauges = worker.gauges if worker is not None else {}
    return (*(f"steps_{mode}" for mode in STEP_MODES),
            *(name for name in gauges if name.startswith("steps_") and name[-1].isdecimal()))


def _add_graphs(modes: Mapping[str, float], fields: dict[str, float], parts: list[str]) -> None:
    """The share of steps that were captured, and which sizes served how many."""
    eager = modes.get("steps_eager", 0.0)
    steps = sum(modes.get(f"steps_{mode}", 0.0) for mode in STEP_MODES)
    if steps <= eager:
        return
    fields["graph_share"] = 1 - eager / steps
    sizes = {key: count for key, count in steps_by_size(modes).items() if count}
    fields.update({f"steps_{mode}_of_{size}": count for (mode, size), count in sizes.items()})
    shown = []
    for mode in STEP_MODES:
        counts = sorted(((count, size) for (other, size), count in sizes.items() if other == mode),
                     reverse=True)
        if counts:
            listed = [f"{size}: {count:.0f}" for count, size in counts[:SIZES_SHOWN]]
            shown.append(f"{mode} {', '.join(listed + ['...'] * (len(counts) > SIZES_SHOWN))}")
    parts.append(f"Graphs: {100 * fields['graph_share']:.1f}% of steps"
                 + f" ({'; '.join(shown)})" * bool(shown))
