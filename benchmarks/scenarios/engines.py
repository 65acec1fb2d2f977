"""Whole engines that differ in some flags alone, side by side, by turns: what a setting costs.

While one works, the other sleeps. A ratio is how many times as long it took as the first one, the
median over runs next to each other, beside it the middle half of them. The same flags may stand
there twice: what two engines that do not differ differ by is what the figures are good for.
"""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import SHM, Processors, Row, Rows, middle, ratios, scenario, take_turns

from actorium import Engine, SamplingParams
from actorium.tools.bench import workloads

VARIANTS, LEDGER = ["exact=off", "exact=auto", "exact=on"], ["no-ledger", "ledger"]
SHAPES, WORKS = ["TINY", "S06", "HYB"], ["W1", "W2", "W3"]
STREAMED: dict[str, tuple[int, dict[str, Any]]] = {
    "demo model": (160, {"device": "cpu", "speculative": "off"}),
    "null worker": (1500, {"null_worker": True, "skip_tokenizer": True})}
"""Work -> (tokens of a stream, settings)."""
KINDS = [*STREAMED]


def settings(flags: str) -> dict[str, Any]:
    """Returns `--exact on --no-ledger`, or `exact=on no-ledger`, as settings of an `Engine`."""
    settings: dict[str, Any] = {}
    words = shlex.split(flags)
    for at, word in enumerate(words):
        if at and words[at - 1].startswith("--") and not word.startswith("--"):
            continue  # the value of the word before
        name, given, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not given and at + 1 < len(words):
            value = "" if words[at + 1].startswith("--") else words[at + 1]
        off = not value and name.startswith("no-")
        settings[name.removeprefix("no-" * off).replace("-", "_")] = (
            int(value) if value.isdigit() else value or not off)
    return settings


def compared(times: dict[str, list[float]]) -> Row:
    """Median seconds, and the ratios to the first one."""
    base, *others = times.values()
    return {"seconds": {name: statistics.median(own) for name, own in times.items()},
            "ratios": {name: middle(ratios(base, own))
                       for name, own in zip([*times][1:], others, strict=True)}}


@scenario
def works(variants: list[str] = VARIANTS, shapes: list[str] = SHAPES, works: list[str] = WORKS,
          runs: int = 7, max_total_tokens: int = 8192) -> Rows:
    """W1 to W3 of engines with random weights in bfloat16. Default: what `--exact` costs.

    variants: their flags, in quotes as "--exact on --threads 2"; a lone one without dashes. W1: one
    request, 128 tokens in, 128 out. W2: 32 requests, 128 in, 64 out. W3: one prompt of 2,048.
    """
    by_name = {work.name: work for work in workloads.WORKLOADS}
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="act") as folder, ExitStack() as running:
            path = workloads.shape_dir(shape, Path(folder))
            vocab = json.loads((path / "config.json").read_text())["vocab_size"]
            engines = {}
            for number, flags in enumerate(variants):
                engine = running.enter_context(Engine(str(path), run_dir=folder, **{
                    "name": f"e{number}", "load_format": "dummy", "dtype": "bfloat16",
                    "skip_tokenizer": True, "device": "cpu",
                    "max_total_tokens": max_total_tokens, **settings(flags)}))
                engines[f"{number}: {flags}"] = workloads.ClientEngine(engine.client, vocab)
            for name in works:
                yield {"shape": shape, "work": name,
                       **compared(work_times(engines, by_name[name], runs))}


def work_times(engines: dict[str, workloads.ClientEngine], work: workloads.Workload, runs: int
               ) -> dict[str, list[float]]:
    """Seconds of each run of each engine, after a short one to get warm."""
    for engine in engines.values():
        engine.run(work, -1, min(4, work.output))
    turns = dict.fromkeys(engines, 0)

    def once(name: str) -> float:
        time.sleep(workloads.SETTLE)
        turns[name] += 1
        return engines[name].run(work, turns[name], work.output).seconds

    return take_turns({name: partial(once, name) for name in engines}, runs)


@scenario
def streams(variants: list[str] = LEDGER, works: list[str] = KINDS, streams: int = 32,
            pairs: int = 30) -> Rows:
    """Streams at once: time, tokens a second, the scheduler's processor time. Default: the ledger.

    With the demo model on the CPU, drafts off, and with a worker without a model, whose steps cost
    next to nothing, so that what a setting costs is as large a part of a step as it can be. There
    tokens a second mostly tell how the system dealt the processes to the cores; so the CPU time of
    the scheduler's process is reported as well. A ledger is in memory.
    """
    for work in works:
        tokens, own = STREAMED[work]
        with tempfile.TemporaryDirectory(dir=SHM) as base, ExitStack() as stack:
            engines = {f"{number}: {flags}": stack.enter_context(Engine("", run_dir=base, **{
                "restart": True, "max_num_seqs": streams, **own, **settings(flags)}))
                for number, flags in enumerate(variants)}
            calls = {name: partial(seconds, engine, streams, tokens)
                     for name, engine in engines.items()}
            take_turns(calls, 1)
            spent = Processors({name: scheduler_pid(engine) for name, engine in engines.items()})
            times = take_turns(calls, pairs)
            cpu = {name: 1e6 * used / pairs / tokens for name, used in spent.spent().items()}
        yield {"work": work, "streams": streams, **compared(times),
               "tokens_per_s": {name: round(streams * tokens / statistics.median(found))
                                for name, found in times.items()},
               "scheduler_cpu_us_per_step": cpu}


def seconds(engine: Engine, streams: int, tokens: int) -> float:
    """Measures so many streams at once."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=n) for n in range(streams)]
    start = time.perf_counter()
    done = engine.client.generate([list(range(1, 33))] * streams, params)
    spent = time.perf_counter() - start
    assert all(len(choice.token_ids) == tokens for choice in done)
    return spent


def scheduler_pid(engine: Engine) -> int:
    (pid,) = [a.pid for a in engine.client.status().actors if a.role == "scheduler"]
    return pid
