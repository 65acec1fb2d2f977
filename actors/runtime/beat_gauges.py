"""Forms of gauges in heartbeats: histograms in fixed buckets, and steps by mode and size. Pure.

An actor counts into a `Histogram`; its heartbeats carry the counts that are not zero, under names
with a `MARK` ("ttft|3", "ttft|sum"); the watchdog makes histograms of them again for `/metrics`.
As in Prometheus a bucket holds values up to and including its bound; values above the last bound
are counted as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from actorium.actors.health import HISTOGRAM_MARK as MARK

SUM = "sum"
RUNNING_WITH, WAITING_FOR = "adapter_running", "adapter_waiting"
"""Sequences by the name of their adapter, which stands behind a `MARK`."""
HTTP_REQUESTS = "http_seconds"
"""The gateways' histogram; the others are the scheduler's."""
HTTP_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0,
                4.5, 5.0, 7.5, 10.0, 30.0, 60.0)

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5,
               5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
                  0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE_REQUEST = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
                 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5)) + (1e6,)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
               16384.0)

BOUNDS: Mapping[str, tuple[float, ...]] = {
    "first_token": FIRST_TOKEN, "between_tokens": BETWEEN_TOKENS, "per_token": BETWEEN_TOKENS,
    "request": WHOLE_REQUEST, "queued": WHOLE_REQUEST, "prefill": WHOLE_REQUEST,
    "decode": WHOLE_REQUEST, "inference": WHOLE_REQUEST, "prompt_tokens": TOKENS,
    "generation_tokens": TOKENS, "most_generation_tokens": TOKENS, "max_tokens": TOKENS,
    "choices": CHOICES, "preemptions": PREEMPTIONS, "prefill_tokens": TOKENS,
    "step_tokens": STEP_TOKENS, "step": BETWEEN_TOKENS, HTTP_REQUESTS: HTTP_SECONDS}
"""Upper bounds by name, in seconds or tokens; vLLM's, with finer ones below where a small model is
that fast."""
PREEMPTION_CAUSES = ("memory", "priority", "forced", "worker", "sleep")
POOLED, POOLED_TOKENS = "pooled_", "pooled_tokens_"
"""What a task's name follows: sequences pooled, and tokens of their prompts."""
STEP_MODES = ("full_graph", "piecewise_graph", "program", "eager")
"""How a worker runs steps: decodes from one graph; graphs with attention between them; decodes from
a program in C; operation by operation."""
EAGER_REASONS = ("off", "images", "prompt_embeds", "experts", "hidden_states", "adapters", "tokens",
                 "prompts", "sequences")
"""Why a step ran operation by operation: nothing is captured that could serve it; images are in it,
a prompt given as embeddings, or a request that is told its experts or hidden states;
more tokens than any size that is captured; prompts in it, or more or other numbers of sequences
than programs in C are for."""
_PREFIX, _OF = "steps_", "_of_"


class Histogram:
    """Counts by bucket; the last one is for what is above all bounds."""

    def __init__(self, name: str) -> None:
        """`name`: one of `BOUNDS`."""
        self.name, self.bounds = name, BOUNDS[name]
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self._keys = [f"{name}{MARK}{i}" for i in range(len(self.counts))]

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value, so many times; less than nothing (clocks of two boots) counts as 0."""
        value = value if value > 0.0 else 0.0
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def gauges(self) -> dict[str, float]:
        """For a heartbeat; nothing while nothing was observed."""
        if not any(self.counts):
            return {}
        gauges = {key: float(n) for key, n in zip(self._keys, self.counts, strict=True) if n}
        gauges[f"{self.name}{MARK}{SUM}"] = self.sum
        return gauges


def read(gauges: Mapping[str, float], name: str) -> tuple[list[float], float]:
    """The counts by bucket, and the sum, of the histogram `name` in a beat's gauges."""
    counts = [gauges.get(f"{name}{MARK}{i}", 0.0) for i in range(len(BOUNDS[name]) + 1)]
    return counts, gauges.get(f"{name}{MARK}{SUM}", 0.0)


def step_key(mode: str, size: int) -> str:
    """The name by which a worker counts steps that were run so: sequences of graphs and programs
    of decodes, tokens of segments, of eager steps the power of two that their tokens are within. In
    a heartbeat "steps_" stands before it."""
    return f"{mode}{_OF}{size}"


def eager_key(reason: str) -> str:
    """The name by which a worker counts the eager steps of a reason."""
    return f"eager_for_{reason}"


def steps_by_size(gauges: Mapping[str, float]) -> dict[tuple[str, int], float]:
    """(mode, size) -> steps so far, of a worker's gauges; in the order of `STEP_MODES` and size."""
    steps = {}
    for name, count in gauges.items():
        mode, of, size = name.removeprefix(_PREFIX).rpartition(_OF)
        if name.startswith(_PREFIX) and of and mode in STEP_MODES and size.isdecimal():
            steps[mode, int(size)] = count
    return dict(sorted(steps.items(), key=lambda row: (STEP_MODES.index(row[0][0]), row[0][1])))
