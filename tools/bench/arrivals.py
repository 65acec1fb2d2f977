"""When each request of a load is sent. Pure."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from actorium.actors.errors import BadConfig


class RampUp(NamedTuple):
    """A rate that grows over the load, as vLLM's --ramp-up-strategy."""

    strategy: str
    """linear | exponential."""
    start: float
    """Requests a second at first."""
    end: float

    def rate(self, share: float) -> float:
        """Requests a second after this share (0..1) of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return float(self.start * (self.end / self.start) ** share)

    def check(self) -> None:
        """Raise `BadConfig`, naming the flag."""
        if self.strategy not in ("linear", "exponential"):
            raise BadConfig("--ramp-up-strategy: must be linear or exponential, got "
                            f"{self.strategy!r}", "ramp_up_strategy")
        if not 0 < self.start <= self.end < math.inf:
            raise BadConfig("--ramp-up-start-rps: must be above 0 and at most --ramp-up-end-rps, "
                            f"got {self.start} and {self.end}", "ramp_up_start_rps")


def arrivals(number: int, rate: float, burstiness: float, seed: int,
             ramp_up: RampUp | None = None) -> list[float]:
    """Seconds from the start at which each request is sent.

    rate: requests a second, inf = all at once. The gaps are gamma distributed with shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier, inf is a clock.
    As in vLLM they are stretched so that the last of `number` requests comes at number / rate
    whatever the seed is; not with a `ramp_up`, whose rates are used instead of `rate`.
    """
    if math.isinf(rate) and ramp_up is None:
        return [0.0] * number
    rng = random.Random(seed)
    times, now = [], 0.0
    for index in range(number):
        here = rate if ramp_up is None else ramp_up.rate(index / max(number - 1, 1))
        now += (1 / here if math.isinf(burstiness)
                else rng.gammavariate(burstiness, 1 / (here * burstiness)))
        times.append(now)
    if ramp_up is not None or not now:
        return times
    return [time * number / rate / now for time in times]
