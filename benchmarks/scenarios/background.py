"""What a batch beside them costs interactive requests, on the machines of known speed of `pacing`.

Interactive requests (128 tokens in, 64 out) come at random; 64 requests of a batch (256 in, 64 out)
are under way all the time. The batch has the background priority, or that of all others.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from harness import Row, Rows, scenario
from scenarios.loop import Loop, ReceivedTokens
from scenarios.pacing import ALL, MACHINES, Machine, spread

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.messages import BACKGROUND
from actorium.actors.params import ResolvedParams

LIVE_IN, LIVE_OUT, BATCH_IN, BATCH_OUT, AT_ONCE = 128, 64, 256, 64, 64
PRIORITIES = {"none": None, "background": BACKGROUND, "as others": 0}


def run(machine: Machine, priority: int | None, beside: int, rate: float, requests: int) -> Row:
    """Serves interactive requests, `rate` a second (0 = none, for as long as 300 of the batch
    take), beside a batch; milliseconds, and tokens a second."""
    loop, dice = Loop(Config(
        memory=MemoryConfig(max_total_tokens=1 << 18),
        scheduler=SchedulerConfig(max_num_seqs=64, background_seqs=beside)), cost=machine.cost
        ), random.Random(3)
    live: list[ReceivedTokens] = []
    sent: list[float] = []
    batch = started = 0
    due = 0.0
    while len(live) < requests if rate else batch < 300:
        while rate and loop.now >= due and len(sent) < requests:
            loop.submit(f"live-{len(sent)}", _prompt(len(sent), LIVE_IN),
                        ResolvedParams(max_tokens=LIVE_OUT), len(sent))
            sent.append(loop.now)
            due += dice.expovariate(rate)
        while priority is not None and started < batch + AT_ONCE:
            loop.submit(f"batch-{started}", _prompt(1 << 20 | started, BATCH_IN),
                        ResolvedParams(max_tokens=BATCH_OUT), started, priority=priority)
            started += 1
        if loop.idle:
            loop.now = max(loop.now, due)
        for ended in loop.step() if not loop.idle else ():
            if ended.rid.startswith("live"):
                live.append(ended)
            else:
                batch += 1
    gaps = [b - a for one in live for a, b in pairwise(one.came)]
    first = [one.came[0] - sent[int(one.rid.removeprefix("live-"))] for one in live]
    return {"batch_tokens_per_s": round(batch * BATCH_OUT / loop.now, 1),
            **({**spread("itl", gaps), **spread("ttft", first)} if live else {})}


def _prompt(number: int, tokens: int) -> bytes:
    return np.full(tokens, number + 1, np.int32).tobytes()


@scenario
def background(machines: list[str] = ALL, beside: list[int] = [2], rate: float = 0.3,  # noqa: B006
               requests: int = 200) -> Rows:
    """Gaps and first tokens of interactive requests: no batch, a background one, an ordinary one.
    beside: --background-seqs; rate: interactive requests a second."""
    for name in machines:
        machine = MACHINES[name]
        yield {"machine": name, "batch": "alone", **run(machine, BACKGROUND, 2, 0.0, 0)}
        for batch, priority in PRIORITIES.items():
            for most in beside if batch == "background" else [2]:
                yield {"machine": name, "batch": batch, "background_seqs": most,
                       **run(machine, priority, most, rate, requests)}
