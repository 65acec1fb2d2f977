"""What `--exact` costs: W1 to W3 of engines that differ in that flag alone, by turns in one run.

    python benchmarks/exact_cost.py [--shapes TINY,S06,HYB] [--modes off,auto,on] [--runs 7]
        [--works W1,W2,W3] [--json FILE]

Random weights in bfloat16. A ratio is how many times as long a mode took as the first one, the
median over runs next to each other; beside it the middle half of them. A mode may stand there
twice: what two engines that do not differ differ by is what the figures are good for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from actorium import Engine
from actorium.tools.bench import workloads

WORKS = {work.name: work for work in workloads.WORKLOADS}


def measured(shape: str, modes: list[str], works: list[str], runs: int, flags: dict[str, Any]
             ) -> dict[str, list[list[float]]]:
    """Seconds of each run, by work, for each of the modes."""
    with tempfile.TemporaryDirectory(prefix="act") as folder, contextlib.ExitStack() as running:
        path = workloads.shape_dir(shape, Path(folder))
        vocab = json.loads((path / "config.json").read_text())["vocab_size"]
        engines: list[workloads.MeasuredEngine] = []
        for number, mode in enumerate(modes):
            engine = running.enter_context(Engine(
                str(path), run_dir=folder, name=f"e{number}", load_format="dummy", dtype="bfloat16",
                skip_tokenizer=True, device="cpu", exact=mode, **flags))
            own = workloads.ClientEngine(engine.client, vocab)
            own.name = f"{mode}, {number}"
            engines.append(own)
        found = workloads.measure(engines, [WORKS[name] for name in works], runs,
                                  lambda text: print(text, flush=True))
    return {name: [found[engine.name][at].seconds for engine in engines]
            for at, name in enumerate(works)}


def neighbours(base: list[float], other: list[float]) -> list[float]:
    """[q1, median, q3] of how many times as long the other took, in runs next to each other."""
    ratios = [b / a for a, b in zip(base, other, strict=True)]
    ratios += [b / a for a, b in zip(base[1:], other, strict=False)]
    return [round(one, 3) for one in statistics.quantiles(ratios, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="TINY,S06,HYB")
    parser.add_argument("--modes", default="off,auto,on")
    parser.add_argument("--works", default="W1,W2,W3")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--max-total-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    modes, works = options.modes.split(","), options.works.split(",")
    result: dict[str, Any] = {"cores": os.cpu_count(), "at": time.strftime("%Y-%m-%d")}
    lines = [f"| | {' | '.join(works)} |", "|---" * (len(works) + 1) + "|"]
    for shape in options.shapes.split(","):
        load = os.getloadavg()[0]
        found = measured(shape, modes, works, options.runs,
                         {"max_total_tokens": options.max_total_tokens})
        ratios = [{name: neighbours(found[name][0], seconds[number])
                   for name, seconds in found.items()} for number in range(1, len(modes))]
        result[shape] = {"load": [load, os.getloadavg()[0]], "modes": modes, "seconds": found,
                         "ratios": ratios}
        for mode, own in zip(modes[1:], ratios, strict=True):
            cells = [f"{middle:.2f} ({low:.2f}, {high:.2f})" for low, middle, high in own.values()]
            lines.append(f"| {shape}, `{mode}` | {' | '.join(cells)} |")
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
