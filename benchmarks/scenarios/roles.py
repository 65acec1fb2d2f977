"""Prompts and answers computed by replicas of their own, beside replicas that do both: simulated.

The same requests go to N replicas that compute prompts and answers, paced by `--target-itl`, and to
N replicas of which P compute prompts alone and the others answers alone. Both are the routers and
schedulers that serve, on a virtual clock (docs/simulate.md). Apart, a request is two: one of a
single token at the first group; then, once its pages have been sent, one whose prompt costs nothing
at the second. That flatters two roles: pages never wait for a link and are never sent in vain.

After Zhong et al., "DistServe" (OSDI 2024): what counts is the rate of requests at which 90 % have
both their first token and each further one in time (goodput).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import NamedTuple

import msgspec
import numpy as np
from harness import Rows, scenario

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.tools.simulate.step_model import StepSeconds, parse_step_model
from actorium.tools.simulate.virtual_cluster import RequestColumns, VirtualCluster, cluster_config
from actorium.tools.simulate.workload import Floats, Ints, SimulatedLoad

GOOD = 0.9
"""The share of requests that must be in time."""
RATES, CLOSE = (0.5, 250.0), 1.05
"""The requests a second among which the most is sought, and to what factor."""
TARGETS = (0.6, 0.8, 1.0)
"""--target-itl of replicas that do both, as shares of the time that a token may take."""
SIGMA = 0.8
"""Of the lognormal lengths of prompts and answers."""


class Lengths(NamedTuple):
    """Mean tokens of a prompt and of an answer."""

    prompt: int
    answer: int


LOADS = {"chat": Lengths(161, 338), "documents": Lengths(3000, 200), "long": Lengths(8000, 60)}


class Times(NamedTuple):
    """What each request waited, in seconds: for its first token, and for each further one."""

    first: Floats
    each: Floats

    def good(self, ttft: float, tpot: float) -> float:
        """The share that was in time."""
        return float(((self.first <= ttft) & (self.each <= tpot)).mean())


def load_of(lengths: Lengths, rate: float, seconds: float, seed: int) -> SimulatedLoad:
    """Requests without anything in common, which come by a Poisson process."""
    draw, requests = np.random.default_rng(seed), max(20, round(rate * seconds))

    def drawn(mean: int) -> Ints:
        return np.clip(np.rint(draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, requests)), 2,
                       8 * mean).astype(np.int64)

    zero = np.zeros(requests, np.int64)
    return SimulatedLoad(np.cumsum(draw.exponential(1 / rate, requests)), np.arange(requests + 1),
                         zero, zero, drawn(lengths.prompt), drawn(lengths.answer),
                         np.zeros(requests), seed)


def run(replicas: int, model: StepSeconds, load: SimulatedLoad, target: float,
        batched: int = SchedulerConfig().max_num_batched_tokens) -> RequestColumns:
    """target: --target-itl in ms; batched: --max-num-batched-tokens."""
    config = Config(scheduler=SchedulerConfig(target_itl=target, max_num_batched_tokens=batched),
                    memory=MemoryConfig(max_total_tokens=1 << 19))
    own = cluster_config(config, replicas, config.cluster.routing)
    return VirtualCluster(own, model, load, 0).run([])


def together(replicas: int, model: StepSeconds, target: float, load: SimulatedLoad) -> Times:
    found = run(replicas, model, load, target)
    return Times(found.first - found.arrival, (found.end - found.first) / (load.output - 1))


def apart(prompts: int, answers: int, model: StepSeconds, token_seconds: float,
          load: SimulatedLoad) -> Times:
    """token_seconds: to send the pages of a token of a prompt."""
    one = load._replace(output=np.ones_like(load.output))
    begun = run(prompts, model, one, 0.0)
    ready = begun.end + token_seconds * load.prompt
    order = np.argsort(ready, kind="stable")
    rest = load._replace(starts=ready[order], prompt=load.prompt[order],
                         output=load.output[order] - 1)
    free = msgspec.structs.replace(model, prompt=0.0, pair=0.0)
    ended = run(answers, free, rest, 0.0, 1 << 17)
    end = np.empty_like(ended.end)
    end[order] = ended.end
    return Times(begun.first - begun.arrival, (end - begun.first) / (load.output - 1))


def most(good: Callable[[float], float]) -> float:
    """Returns the highest rate whose share in time is `GOOD`. good: that share, of a rate."""
    low, high = RATES
    while high / low > CLOSE:
        middle = sqrt(low * high)
        low, high = (middle, high) if good(middle) >= GOOD else (low, middle)
    return low


def ways_of(replicas: int, model: StepSeconds, tpot: float, token_seconds: float
            ) -> dict[str, Callable[[SimulatedLoad], Times]]:
    """What is compared: replicas that do both, then each division into two roles."""
    ways: dict[str, Callable[[SimulatedLoad], Times]] = {
        f"together, {share} of tpot": partial(together, replicas, model, 1e3 * share * tpot)
        for share in TARGETS}
    return ways | {f"{count} for prompts": partial(apart, count, replicas - count, model,
                                                   token_seconds) for count in range(1, replicas)}


@scenario
def goodput(step_model: str = "0.006,4e-5,1e-4,1e-8", replicas: int = 4, seconds: float = 60.0,
            ttft: float = 1.0, tpot: float = 0.03, gigabytes: float = 25.0,
            token_kib: float = 128.0, load: list[str] = [*LOADS], seed: int = 1) -> Rows:  # noqa: B006
    """The requests a second of which nine in ten are in time, together and apart.

    seconds: for which requests come; ttft, tpot: seconds; gigabytes: a second of the link;
    token_kib: of pages for a token.
    """
    token_seconds = token_kib * 1024 / (gigabytes * 1e9)
    ways = ways_of(replicas, parse_step_model(step_model), tpot, token_seconds)
    for name in load:
        rates: list[float] = []
        for way, times in ways.items():
            def in_time(rate: float, times: Callable[[SimulatedLoad], Times] = times,
                        lengths: Lengths = LOADS[name]) -> float:
                return times(load_of(lengths, rate, seconds, seed)).good(ttft, tpot)

            rates.append(most(in_time))
            yield {"load": name, "way": way, "requests_per_s": rates[-1],
                   "of_together": rates[-1] / max(rates[:len(TARGETS)])}
