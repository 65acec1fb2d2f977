"""How far a simulation is from what happens: the same conversations through a real engine, whose
worker takes exactly the time of a step model, and through `tools/simulate`.

The engine is whole: client, tokenizer, router, schedulers, workers, detokenizer, ledgers, each a
process. What messages take is measured of other requests (`LinkDelays`) and given to the
simulation: after the load, since its router must have seen nothing before, as the simulated one.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

import msgspec
import numpy as np
from harness import Row, Rows, scenario

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.cluster.cluster_control import AskCluster, ReplicaRow
from actorium.actors.config.cluster_settings import ClusterConfig, built_with
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import roles_of
from actorium.tools.cli.cluster_command import ClusterAsker
from actorium.tools.simulate.calibration import engine_delays
from actorium.tools.simulate.outcome import simulation_figures
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.stepped_worker import SLOW_SECONDS, STEP_SECONDS
from actorium.tools.simulate.virtual_cluster import RequestColumns, VirtualCluster, cluster_config
from actorium.tools.simulate.workload import SimulatedLoad, drawn_workload

WORKER = "actorium.tools.simulate.stepped_worker:build"
SLOW = "actorium.tools.simulate.stepped_worker:build_slow"
COUNTED = ("steps", "busy_us", "computed_prompt_tokens")
SHOWN = ("steps", "step_ms", "busy", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_mean_ms",
         "tpot_p50_ms", "tpot_p99_ms")
ROUTED = ("requests", "by_prefix", "by_load", "blind")
IDS = 512
"""Token ids of prompts are below this, for the demo model's tokenizer."""
CONTEXT = 4000
"""Tokens of a conversation at its end; longer ones are made shorter, turn by turn alike."""


def short_load(requests: int, rate: float, seed: int) -> SimulatedLoad:
    """Conversations that fit the demo model's context, and do not take the afternoon."""
    work = drawn_workload("chat", requests, rate, seed)
    prompt, output = np.minimum(work.prompt, 300), np.minimum(work.output // 4 + 2, 100)
    for number in range(len(work.starts)):
        rows = slice(work.first[number], work.first[number + 1])
        room = CONTEXT - len(tokens_of(work.opening(number)))
        share = min(1.0, room / (prompt[rows] + output[rows]).sum())
        prompt[rows] = np.maximum(prompt[rows] * share, 1)
        output[rows] = np.maximum(output[rows] * share, 1)
    return work._replace(prompt=prompt, think=work.think / 10, output=output)


def tokens_of(data: bytes) -> list[int]:
    return (np.frombuffer(data, np.int32) % IDS).tolist()


async def asked(client: AsyncClient, prompt: list[int], output: int) -> tuple[float, float,
                                                                               list[int], int]:
    """(when its first token came, when its last, its tokens, how many of the prompt were cached)"""
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    first, cached = 0.0, 0
    tokens: list[int] = []
    async for delta in client.stream(prompt, params):
        if delta.token_ids and not tokens:
            first = perf_counter()
        tokens += delta.token_ids
        if delta.usage is not None:
            cached = delta.usage.cached_tokens
    return first, perf_counter(), tokens, cached


async def played(name: str, run_dir: str | None, work: SimulatedLoad) -> RequestColumns:
    columns = RequestColumns(work.requests)
    async with AsyncClient(name, run_dir) as client:
        began = perf_counter()

        async def conversation(number: int) -> None:
            said = tokens_of(work.opening(number))
            await asyncio.sleep(work.starts[number] - (perf_counter() - began))
            for row in range(work.first[number], work.first[number + 1]):
                said += tokens_of(work.asked(row))
                columns.prompt[row], columns.arrival[row] = len(said), perf_counter()
                columns.first[row], columns.end[row], answer, columns.cached[row] = await asked(
                    client, said, int(work.output[row]))
                columns.tokens[row] = len(answer)
                said += answer
                await asyncio.sleep(float(work.think[row]))

        await asyncio.gather(*map(conversation, range(len(work.starts))))
    return columns


async def warmed(name: str, run_dir: str | None) -> None:
    """What is made once is made: by requests of which the router learns nothing."""
    async with AsyncClient(name, run_dir) as client:
        await asyncio.gather(*(asked(client, [number] * 16, 8) for number in range(8)))


async def counters(name: str, run_dir: str | None) -> dict[str, int]:
    """The schedulers' sums, when their last reports are there."""
    await asyncio.sleep(1.5)
    async with AsyncClient(name, run_dir) as client:
        actors = (await client.status()).actors
    gauges = next(actor.gauges for actor in actors if actor.role == "scheduler")
    return {each: int(gauges[each]) for each in COUNTED}


def router_rows(name: str, run_dir: str | None) -> list[ReplicaRow]:
    """What the router says of its replicas; none of an engine without."""
    try:
        with ClusterAsker(name, run_dir) as asker:
            return asker.ask(AskCluster).rows
    except BadConfig:
        return []


def compare(work: SimulatedLoad, config: Config, steps: StepSeconds) -> Row:
    name, run_dir = config.runtime.name, config.runtime.run_dir
    replicas = config.cluster.replicas
    asyncio.run(warmed(name, run_dir))
    before, earlier = asyncio.run(counters(name, run_dir)), router_rows(name, run_dir)
    real = asyncio.run(played(name, run_dir, work))
    after = asyncio.run(counters(name, run_dir))
    rows = [msgspec.structs.replace(row, **{each: getattr(row, each) - getattr(old, each)
                                            for each in ROUTED})
            for row, old in zip(router_rows(name, run_dir), earlier, strict=True)]
    delays = asyncio.run(engine_delays(name, run_dir, replicas))
    own = cluster_config(config, replicas, config.cluster.routing)
    model = msgspec.structs.replace(steps, inward=delays.inward, outward=delays.outward)
    cluster = VirtualCluster(own, model, work, 0)
    simulated = cluster.run([])
    counts = {"real": {each: after[each] - before[each] for each in COUNTED},
              "simulated": {each: cluster.counts()[each] for each in COUNTED}}
    return {**{which: simulation_figures(vars(columns), counts[which], replicas, None)
               | {"step_ms": counts[which]["busy_us"] / counts[which]["steps"] / 1e3,
                  "replicas": msgspec.to_builtins(told)}
               for which, columns, told in (("real", real, rows),
                                            ("simulated", simulated, cluster.router.fleet.rows()))},
            "delays_ms": {name: 1e3 * value for name, value in delays._asdict().items()}}


@scenario
def errors(requests: int = 1200, rate: float = 20.0, rounds: int = 3, replicas: int = 4,
           routing: str = "prefix", slow: bool = False) -> Rows:
    """The simulation's errors for TTFT and TPOT, and what each router made of the load.

    As asked here it takes some six minutes, on two processors that have nothing else to do. --slow
    makes steps four times as long, for a busy machine; ask --rate 5 then.
    """
    worker, steps = (SLOW, SLOW_SECONDS) if slow else (WORKER, STEP_SECONDS)
    for number in range(rounds):
        work = short_load(requests, rate, number)
        config = Config(cluster=ClusterConfig(replicas=replicas, routing=routing))
        with Engine("", speculative="off", target_itl=0.0, replicas=replicas,
                    routing=routing, roles=built_with(roles_of(config), worker)) as engine:
            found = compare(work, engine.config, steps)
        real, simulated = found["real"], found["simulated"]
        yield {"round": number, "delays_ms": found["delays_ms"],
               "cached": [real["hit_ratio"], simulated["hit_ratio"]]}
        for key in SHOWN:
            yield {"figure": key, "real": real[key], "simulated": simulated[key],
                   "error": f"{simulated[key] / real[key] - 1:+.1%}"}
        for which, own in (("real", real), ("simulated", simulated)):
            yield {"routed": which, "requests": [row["requests"] for row in own["replicas"]],
                   "prompt_tokens_per_s": [row["prompt_rate"] for row in own["replicas"]]}
