"""Load for a serving engine: which requests, and when each one is sent. Nothing heavy is imported.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

from actorium.actors.errors import BadConfig
from actorium.tools.demo_tasks import TASKS, held_out

DATASETS = ("random", "demo")


class Ask(NamedTuple):
    """One request of the load."""

    prompt: list[int] | None
    """Token ids; None where there are messages."""
    messages: list[Any] | None
    output: int
    """Tokens to generate; the end of sequence is ignored with a prompt, not with messages."""


class Shape(NamedTuple):
    """Sizes of random prompts and answers, in tokens."""

    input_len: int
    output_len: int
    range_ratio: float
    """Each length is drawn evenly from its mean, less and more by this share."""


def random_asks(number: int, shape: Shape, vocab: int, seed: int) -> list[Ask]:
    """Prompts of random token ids: the same for the same seed."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        spread = int(mean * shape.range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))

    return [Ask([rng.randrange(vocab) for _ in range(length(shape.input_len))], None,
                length(shape.output_len)) for _ in range(number)]


def demo_asks(number: int, output: int, seed: int) -> list[Ask]:
    """Chats on the demo model's tasks (held-out items), in an order that `seed` says. Raises
    `BadConfig` if there are not so many."""
    each = -(-number // len(TASKS))
    try:
        items = [item for task in TASKS for item in held_out(task, each)]
    except ValueError as error:
        raise BadConfig(f"--num-prompts: {error}", "num_prompts") from None
    random.Random(seed).shuffle(items)
    return [Ask(None, [{"role": "user", "content": item.prompt}], output)
            for item in items[:number]]


def arrivals(number: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is sent.

    rate: requests a second, inf = all at once. The gaps are gamma distributed with shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier.
    """
    if math.isinf(rate):
        return [0.0] * number
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(number):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
