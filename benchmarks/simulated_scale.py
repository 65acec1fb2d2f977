"""How a simulated cluster grows: `actorium simulate` with more and more replicas, as many requests
and conversations a second for each.

    python benchmarks/simulated_scale.py [--replicas 16 64 256 1000] [--requests-each 100]
        [--rate-each 4] [--json FILE] [--plot FILE]

Steps are as long as the model of steps says that is given (`--step-model`). Prints throughput and
times to the first token, and what the simulation itself took: seconds, and megabytes of the
largest process (one for each 64 replicas).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEP_MODEL = "0.006,4e-5,1e-4,1e-8"
SHOWN = {"requests_per_s": "requests/s", "output_per_s": "tokens/s", "ttft_p50_ms": "TTFT p50, ms",
         "ttft_p99_ms": "TTFT p99, ms", "tpot_p50_ms": "TPOT p50, ms", "hit_ratio": "cached",
         "wall_s": "took, s", "processor_s": "of processors, s",
         "most_megabytes_of_a_process": "MB of a process"}


def simulated(replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", "actorium.tools.cli", "simulate", "--step-model",
             options.step_model, "--replicas", str(replicas), "--rate",
             str(options.rate_each * replicas), "--requests",
             str(options.requests_each * replicas), "--json", str(path)],
            check=True, stdout=subprocess.DEVNULL)
        (figures,) = json.loads(path.read_text())["clusters"]
    return {**figures, **figures["simulation"]}


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput, first tokens, and what the simulation took, over replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    sizes = [row["replicas"] for row in rows]
    for panel, keys, title in zip(
            panels, (["output_per_s"], ["ttft_p50_ms", "ttft_p99_ms"], ["wall_s", "processor_s"]),
            ("output tokens/s", "time to first token, ms", "the simulation, s"), strict=True):
        for key in keys:
            panel.plot(sizes, [row[key] for row in rows], "o-", label=SHOWN[key])
        panel.set(title=title, xlabel="replicas", xscale="log", ylim=(0, None))
        panel.legend(frameon=False)
    panels[0].set(yscale="log", ylim=(100, None))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--requests-each", type=int, default=100)
    parser.add_argument("--rate-each", type=float, default=4.0)
    parser.add_argument("--step-model", default=STEP_MODEL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    for replicas in options.replicas:
        rows.append(simulated(replicas, options))
        print(f"{replicas} replicas: " + ", ".join(
            f"{title} {rows[-1][key]:,.4g}" for key, title in SHOWN.items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        picture(rows, options.plot)


if __name__ == "__main__":
    main()
