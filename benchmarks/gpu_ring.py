"""The whole engine, all its processes: steady decode of the Llama shape, and from its actors'
events how long the device idled between steps, and why. Overlap on and off."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns, perf_counter
from typing import Any

import numpy as np
from gpu_bench import Part
from gpu_model import GRAPHS, LLAMA, shape_of

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.events import DEVICE
from actorium.tools import trace

NEW = 64
KEPT_EVENTS = 1 << 15
"""Of the timeline that is kept as a file: some megabytes."""


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """The first `count` prompts of a length, which have nothing in common."""
    return [np.random.default_rng((length, i)).integers(0, vocab - 1, length).tolist()
            for i in range(count)]


def run(part: Part, overlap: bool, keep: Path | None = None) -> None:
    """One engine. keep: where the timeline (.json) and its picture (.png) go."""
    ways = [(40, (1, 2))] if part.toy else [(1024, (1, 8, 32, 128, 256)), (4096, (1, 8, 32))]
    vocab = shape_of(LLAMA, part.toy)["vocab_size"]
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(shape_of(LLAMA, part.toy)))
        windows: list[tuple[int, int, int, int]] = []
        start = perf_counter()
        with _engine(part, folder, overlap) as engine:
            part.facts["start_s"] = perf_counter() - start
            for context, batches in ways:
                with part.trying(f"context {context}", 0.0 if part.toy else 20.0) as go:
                    if go:
                        windows += _context(part, engine.client, context, batches, vocab)
        tracks = trace.load(folder / "trace")
    steps = trace.join(tracks)
    for context, batch, begin, end in windows:
        _row(part, steps, overlap, context, batch, (begin, end))
    if keep is not None:
        _keep(keep, tracks, steps)


def _engine(part: Part, folder: Path, overlap: bool) -> Engine:
    device: dict[str, Any] = {"device": "cuda", "memory_fraction": 0.8}
    if part.toy:
        device = {"device": "cpu", "kv_cache_bytes": 16 << 20, "threads": 1}
    return Engine(str(folder), load_format="dummy", skip_tokenizer=True, speculative="off",
                  run_dir=str(folder / "run"), trace_dir=str(folder / "trace"), overlap=overlap,
                  max_num_seqs=2 if part.toy else 256, graph_batch_sizes=GRAPHS,
                  max_num_batched_tokens=256 if part.toy else 8192, **device)


def _context(part: Part, client: Client, context: int, batches: Sequence[int], vocab: int
             ) -> list[tuple[int, int, int, int]]:
    """(context, batch, nanoseconds from, to) of each batch. Prompts are computed once, and then
    found in the prefix cache."""
    batch = prompts(batches[-1], context, vocab)
    start = perf_counter()
    client.generate(batch, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    spent = perf_counter() - start
    part.facts[f"prefill_tok_s_{context}"] = len(batch) * context / spent
    part.save()
    windows = []
    params = SamplingParams(max_tokens=8 if part.toy else NEW, temperature=0.0, ignore_eos=True)
    for count in batches:
        begin = monotonic_ns()
        client.generate(batch[:count], params)
        windows.append((context, count, begin, monotonic_ns()))
    return windows


def _row(part: Part, steps: Sequence[trace.Step], overlap: bool, context: int, batch: int,
         window: tuple[int, int]) -> None:
    """Of the steps in which the whole batch decodes and nothing else is done."""
    mine = [s for s in steps if s.decodes == batch and DEVICE in s.spans
            and window[0] <= s.spans[DEVICE][0] <= window[1]]
    if len(mine) < 3:
        part.skip(f"ring {batch} x {context}", f"{len(mine)} steps of the whole batch")
        return
    found = trace.summary(mine)
    period = statistics.median(b.spans[DEVICE][0] - a.spans[DEVICE][0]
                               for a, b in zip(mine, mine[1:], strict=False)) / 1e3
    part.add(batch=batch, context=context, overlap=overlap, step_us=period,
             device_us=found.phases["device"], tokens_s=batch / period * 1e6,
             idle_ratio=found.idle_ratio, phases=found.phases,
             causes={cause: us / found.steps for cause, us in found.causes.items()})


def _keep(path: Path, tracks: Sequence[trace.Track], steps: Sequence[trace.Step]) -> None:
    each = KEPT_EVENTS // len(tracks)
    last = [track._replace(events=track.events[-each:]) for track in tracks]
    trace.write_chrome(path.with_suffix(".json"), last, trace.join(last))
    trace.plot(path.with_suffix(".png"), steps)
