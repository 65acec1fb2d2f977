"""The whole engine, all its processes: steady decode of the Llama shape, and from its actors'
events how long the device idled between steps, and why."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic_ns, perf_counter
from typing import Any

import numpy as np

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.step_events import DEVICE
from actorium.tools.bench import timeline as trace

from . import models, shapes
from .ceilings import of_this_run
from .child import Bench

NEW = 64
KEPT_EVENTS = 1 << 15
"""Steps of the timeline kept as a file: some megabytes."""
TIMELINE = "gpu-timeline.json"


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """The first `count` prompts of a length, which have nothing in common."""
    return [np.random.default_rng((length, i)).integers(0, vocab - 1, length).tolist()
            for i in range(count)]


def run(bench: Bench, overlap: bool) -> None:
    """One engine; with overlap its timeline is kept."""
    wanted = [own for own in shapes.RING if bench.wants(own.name)]
    if not wanted:
        return
    most = wanted[-1].small() if bench.toy else wanted[-1]
    shape = models.shape_of(shapes.LLAMA, bench.toy)
    # A path that is short enough for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(shape))
        start = perf_counter()
        with _engine(bench, folder, overlap, most.batch) as engine:
            batch = prompts(most.batch, most.context, shape["vocab_size"])
            opened = perf_counter()
            _generate(engine.client, batch, 1)  # found in the prefix cache from now on
            spent = perf_counter() - opened
            bench.record.facts(start_s=opened - start,
                               prefill_tok_s=most.batch * most.context / spent)
            for own in wanted:
                with bench.row(own.name) as go:
                    if go:
                        count = own.small().batch if bench.toy else own.batch
                        begin = monotonic_ns()
                        answers = _generate(engine.client, batch[:count], bench.size(NEW, 10))
                        window = begin, monotonic_ns()
                        if _complete(bench, own.name, answers, bench.size(NEW, 10)):
                            steps = trace.join(trace.load(folder / "trace"))
                            found = _row(steps, count, window)
                            bench.record.add(own.name, overlap=overlap, context=most.context,
                                             **found, **_beside(bench, most.context, found))
        if overlap:
            with bench.trying("timeline"):
                keep(bench.record.path.with_name(TIMELINE), trace.load(folder / "trace"))


def _engine(bench: Bench, folder: Path, overlap: bool, batch: int) -> Engine:
    device: dict[str, Any] = {"device": "cuda", "memory_fraction": 0.85}
    if bench.toy:
        device = {"device": "cpu", "kv_cache_bytes": 16 << 20, "threads": 1}
    return Engine(str(folder), load_format="dummy", skip_tokenizer=True, speculative="off",
                  run_dir=str(folder / "run"), trace_dir=str(folder / "trace"), overlap=overlap,
                  max_num_seqs=batch, graph_batch_sizes=shapes.GRAPHS,
                  max_num_batched_tokens=bench.size(2048, 256), **device)


def _generate(client: Client, batch: Sequence[list[int]], tokens: int) -> list[list[int]]:
    found = client.generate(list(batch), SamplingParams(max_tokens=tokens, temperature=0.0,
                                                        ignore_eos=True))
    return [list(own.token_ids) for own in found]


def _complete(bench: Bench, name: str, answers: list[list[int]], tokens: int) -> bool:
    """Whether every answer has all its tokens, and a single one those that the engine with overlap
    gave to the same prompt. (Many come and go in other steps each time, which may round otherwise.)
    """
    lost = [len(own) != tokens for own in answers]
    if bench.spoils(name):
        answers[0][-1] += 1
    one = answers[0] if len(answers) == 1 else []
    want = bench.record.row(name, "ring").get("answer", one)
    return bench.compared(name, max(sum(lost) / len(lost), float(one != want)), 0.0,
                          compared=len(answers) * tokens, **({"answer": one} if one else {}))


def _beside(bench: Bench, context: int, found: Mapping[str, Any]) -> dict[str, float]:
    """A step's floor, where this call has opened the same model by itself."""
    facts = bench.record.group("decode")["facts"]
    if "floor" not in facts:
        return {}
    us = models.Floor(*facts["floor"]).us(found["batch"], context + NEW / 2,
                                          of_this_run(bench).copy_gbs)
    return {"floor_us": us, "share": us / found["step_us"]}


def _row(steps: Sequence[trace.TimelineStep], batch: int, window: tuple[int, int]) -> dict[str,
                                                                                           Any]:
    """Measures steps in which the whole batch decodes and nothing else happens. Raises `ValueError`
    if there are too few."""
    mine = [s for s in steps if s.decodes == batch and DEVICE in s.spans
            and window[0] <= s.spans[DEVICE][0] <= window[1]]
    if len(mine) < 3:
        raise ValueError(f"{len(mine)} steps of the whole batch")
    found = trace.summary(mine)
    period = statistics.median(b.spans[DEVICE][0] - a.spans[DEVICE][0]
                               for a, b in zip(mine, mine[1:], strict=False)) / 1e3
    return {"batch": batch, "step_us": period, "device_us": found.phases["device"],
            "tokens_s": batch / period * 1e6, "idle_ratio": found.idle_ratio,
            "phases": found.phases,
            "causes": {cause: us / found.steps for cause, us in found.causes.items()}}


def keep(path: Path, tracks: Sequence[trace.Track]) -> None:
    each = KEPT_EVENTS // len(tracks)
    last = [track._replace(events=track.events[-each:]) for track in tracks]
    trace.write_chrome(path, last, trace.join(last))
