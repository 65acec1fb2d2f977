"""Hours of everything at once: requests of all kinds over HTTP, adapters and vectors among them,
while processes are killed; then whether anything has grown, slowed down or got lost.

In the first quarter of the time one actor after the other is killed. The rest is left alone, and
judged: how the time of a chat drifts and, in the last third, memory and descriptors of every actor
(as by `soak`). Over the whole time no request may be lost, and no id of an answer may come twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Row, Rows, scenario
from safetensors.numpy import save_file
from scenarios.soak import (
    ALLOWED,
    CHAT,
    EVERY,
    KINDS,
    POOL,
    STORED,
    TENANTS,
    Crowd,
    Kinds,
    Sample,
    chat_body,
    figures,
    look,
    prompt_text,
    slope,
)

from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.models.model_dir import read_config, resolve
from actorium.actors.runtime.rundir import engine_dir

KILLED = ("worker-0", "tokenizer", "scheduler", "detokenizer", "gateway-0", "watchdog")
KILLS, SETTLED, JUDGED = 0.25, 0.3, 2 / 3
"""Shares of the time after which nobody is killed any more, latency is judged, and memory is."""
WARM = 1 << 16
"""Requests after which all that an actor keeps is at its bound: the tokenizer's table of recent
ones is the largest. Memory is judged where so many came between the last kill and then."""
DRIFT, WINDOWS = 0.25, 12
"""The most that the median of a chat may grow over the time that is judged, as a share; and the
parts of that time whose medians are compared."""
ADAPTERS, RANK = ("fox", "moon"), 4


class Soaked(NamedTuple):
    """What was seen."""

    samples: list[Sample]
    """Of the time in which memory is judged."""
    settled: float
    """When latency began to be judged, by `time.monotonic`."""
    kills: dict[str, int]
    before: int
    """Requests that were begun by the last kill."""


def write_adapter(folder: Path, seed: int) -> Path:
    """Writes a random adapter of the demo model's MLPs, as PEFT does."""
    config, draw = read_config(resolve("")), np.random.default_rng(seed)
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none",
        "target_modules": ["down_proj"], "base_model_name_or_path": "demo"}))
    tensors = {}
    for i in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{i}.mlp.down_proj"
        for part, shape in (("A", (RANK, inner)), ("B", (hidden, RANK))):
            tensors[f"{name}.lora_{part}.weight"] = (
                0.02 * draw.standard_normal(shape)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _adapted(chance: random.Random) -> dict[str, Any]:
    return chat_body(chance) | {"model": chance.choice(ADAPTERS)}


def _vectors(chance: random.Random) -> dict[str, Any]:
    return {"model": "default",
            "input": [prompt_text(chance) for _ in range(chance.randrange(1, 5))]}


MIXED: Kinds = KINDS | {"adapter": (10, CHAT, _adapted),
                        "vectors": (6, "/v1/embeddings", _vectors)}


async def drive(crowd: Crowd, engine: Engine, at_once: int, seconds: float, apart: float) -> Soaked:
    """Sends requests for so long; apart: seconds between two kills."""
    began, kills, before = time.monotonic(), dict.fromkeys(KILLED, 0), 0
    quiet, judged = began + KILLS * seconds, began + JUDGED * seconds
    end, victims = began + seconds, cycle(KILLED)
    work, samples, next_kill = asyncio.create_task(crowd.run(at_once)), [], began + apart
    while (now := time.monotonic()) < end:
        pids = await asyncio.to_thread(pids_of, engine)
        if next_kill <= now < quiet:
            victim = next(victims)
            if victim in pids:
                os.kill(pids[victim], signal.SIGKILL)
                kills[victim] += 1
                before = crowd.begun
            next_kill = now + apart
        elif now >= judged:
            samples.append(look(pids, crowd.begun))
        await asyncio.wait({work}, timeout=EVERY)
        if work.done():
            break
    crowd.stop()
    await work
    return Soaked(samples, began + SETTLED * seconds, kills, before)


def pids_of(engine: Engine) -> dict[str, int]:
    """The processes by role."""
    return {one.role: one.pid for one in engine.client.status().actors} | {
        "launcher": int(engine.pid or 0)}


def drift(chats: list[tuple[float, float]], since: float) -> Row:
    """How the median of chats changed since then. chats: as `Crowd.chats`."""
    late = [(at, took) for at, took in chats if at >= since]
    size = len(late) // WINDOWS
    if not size:
        return {"chats": len(late)}
    medians = [statistics.median(took for _, took in late[i * size:(i + 1) * size])
               for i in range(WINDOWS)]
    middle = statistics.median(medians)
    grown = slope([(i, round(1e9 * own)) for i, own in enumerate(medians)]) * WINDOWS / 1e9
    return {"chats": len(late), "median_ms": 1e3 * middle, "p99_ms": 1e3 * statistics.quantiles(
        [took for _, took in late], n=100)[98], "window_medians_ms": [1e3 * m for m in medians],
        "drift": grown / middle}


def faults(rows: dict[str, Row], crowd: Crowd, drifted: Row, between: int) -> list[str]:
    """Returns what is not as it must be. between: requests between the last kill and the time in
    which memory is judged."""
    wrong = [f"{ended} {name}" for name, ended in sorted(crowd.ended.items())
             if name.endswith("broken") or name.rpartition(" ")[2].startswith("5")]
    if crowd.repeated:
        wrong.append(f"{crowd.repeated} ids of answers came twice")
    if "drift" not in drifted:
        wrong.append(f"{drifted['chats']} chats are too few to see a drift")
    elif drifted["drift"] > DRIFT:
        wrong.append(f"a chat takes {100 * drifted['drift']:.0f} % longer at the end")
    for role, row in rows.items():
        if row["descriptors_a_minute"] > 0.01:
            wrong.append(f"{role} opens {row['descriptors_a_minute']:.2f} descriptors a minute")
        if between >= WARM and row["mb_a_minute"] > ALLOWED:
            wrong.append(f"{role} grows by {row['mb_a_minute']:.2f} MB a minute")
    return wrong


@scenario
def hours(hours: float = 1.0, at_once: int = 24, kill_every: float = 30.0, seed: int = 1) -> Rows:
    """Everything at once for so many hours; fails where something grew, slowed down or got lost."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"tenant{i} key-{i}\n" for i in range(TENANTS)))
        modules = [f"{name}={write_adapter(Path(folder) / name, i)}"
                   for i, name in enumerate(ADAPTERS)]
        with Engine("", port=0, api_keys_file=str(keys), max_num_seqs=16, access_log=False,
                    max_total_tokens=POOL, responses_max=STORED, enable_lora=True,
                    lora_modules=tuple(modules), max_restarts=1 << 20) as engine:
            path = engine_dir(engine.name)
            assert isinstance(path, Path)
            where = actor.where(path)
            assert where is not None
            crowd = Crowd(where.url, 1 << 40, seed, MIXED)
            apart = min(kill_every, 3600 * hours * KILLS / (len(KILLED) + 1))
            soaked = asyncio.run(drive(crowd, engine, at_once, 3600 * hours, apart))
    rows, between = figures(soaked.samples), soaked.samples[0].requests - soaked.before
    for role, row in rows.items():
        yield {"actor": role, "kills": soaked.kills.get(role, 0), **row}
    drifted = drift(crowd.chats, soaked.settled)
    wrong = faults(rows, crowd, drifted, between)
    yield {"requests": crowd.begun, "requests_between_kills_and_memory": between,
           "memory_judged": between >= WARM, "kills": sum(soaked.kills.values()),
           "answers_with_ids": len(crowd.ids), "ids_twice": crowd.repeated, "latency": drifted,
           "ended": dict(sorted(crowd.ended.items())), "wrong": wrong}
    if between < WARM:
        print(f"memory is not judged: {between:,} requests came between the last kill and the last "
              f"third, and what is bounded is full after {WARM:,}")
    if wrong:
        raise SystemExit("; ".join(wrong))
