"""What the ledger costs: tokens a second with it, and with --no-ledger.

    python benchmarks/ledger.py [--pairs N] [--streams N] [--json FILE]

Two engines run side by side, one with a ledger and one without; while one works, the other sleeps.
They take turns with the same load, the first of a pair by turns, and what counts is the median of
the ratios of pairs: runs next to each other, since machines wander. Once with the demo model on the
CPU, drafts off, and once with the null worker, whose steps cost next to nothing: so the ledger is
as large a part of a step as it can be. There tokens a second mostly tell how the system's scheduler
dealt four processes to the cores; so the CPU time of the scheduler process is told as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from actorium.actors.client.client import SamplingParams
from actorium.actors.launcher.engine import Engine

WORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "demo model": (160, {"device": "cpu", "speculative": "off"}),
    "null worker": (1500, {"null_worker": True, "skip_tokenizer": True})}
"""name -> (tokens of a stream, settings)"""
PROMPT = list(range(1, 33))
SHM = Path("/dev/shm")


def rate(engine: Engine, streams: int, tokens: int) -> float:
    """Tokens a second of so many streams at once."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=n) for n in range(streams)]
    start = time.perf_counter()
    done = engine.client.generate([PROMPT] * streams, params)
    spent = time.perf_counter() - start
    assert all(len(choice.token_ids) == tokens for choice in done)
    return streams * tokens / spent


def cpu_us(engine: Engine) -> float:
    """Microseconds of CPU time that the scheduler process has used."""
    (pid,) = [a.pid for a in engine.client.status().actors if a.role == "scheduler"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") * 1e6


def compare(name: str, pairs: int, streams: int) -> dict[str, Any]:
    """One work, with and without."""
    tokens, settings = WORKS[name]
    rates: dict[bool, list[float]] = {True: [], False: []}
    where = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as base, ExitStack() as stack:
        engines = {ledger: stack.enter_context(
            Engine("", run_dir=base, restart=True, ledger=ledger, max_num_seqs=streams,
                   **settings)) for ledger in (True, False)}
        for engine in engines.values():
            rate(engine, streams, tokens)
        before = {ledger: cpu_us(engine) for ledger, engine in engines.items()}
        for pair in range(pairs):
            for ledger in (True, False) if pair % 2 else (False, True):
                rates[ledger].append(rate(engines[ledger], streams, tokens))
        cpu = {ledger: (cpu_us(engine) - before[ledger]) / (pairs * tokens)
               for ledger, engine in engines.items()}
    ratios = [w / o for w, o in zip(rates[True], rates[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    row = {"work": name, "streams": streams, "pairs": pairs,
           "tokens_per_s": round(statistics.median(rates[True])),
           "tokens_per_s_without": round(statistics.median(rates[False])),
           "ratio": round(statistics.median(ratios), 4),
           "ratio_quartiles": [round(low, 4), round(high, 4)],
           "scheduler_cpu_us_per_step": round(cpu[True], 1),
           "scheduler_cpu_us_per_step_without": round(cpu[False], 1)}
    print(f"{name}: {row['tokens_per_s']} tokens/s with the ledger, "
          f"{row['tokens_per_s_without']} without; ratio {row['ratio']} "
          f"(quartiles {low:.4f} to {high:.4f}, {pairs} pairs); scheduler's CPU "
          f"{cpu[True]:.1f} us a step, {cpu[False]:.1f} without", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--works", nargs="+", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    rows = [compare(name, options.pairs, options.streams) for name in options.works]
    if options.json:
        options.json.write_text(json.dumps({"ledger": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
