"""Serving under load with one flag at several values, one after the other: by default with
speculative decoding off, adaptive and fixed.

    python benchmarks/serve.py [--modes "off;auto;mtp:1,fixed"] [--json FILE] [flags of the command]
    python benchmarks/serve.py --vary target-itl --modes "0;default;100" [...]

Runs `actorium bench serve` once a mode and round (the modes take turns, so that a machine whose
speed wanders treats them alike) and prints the tables of the median round by output throughput,
then one line a mode. The mode "default" leaves the flag out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = (("output_throughput", "out tok/s", "{:.1f}"), ("median_ttft_ms", "TTFT ms", "{:.2f}"),
           ("p99_ttft_ms", "p99 TTFT", "{:.1f}"), ("median_tpot_ms", "TPOT ms", "{:.3f}"),
           ("median_itl_per_token_ms", "ITL ms", "{:.2f}"),
           ("p99_itl_per_token_ms", "p99 ITL", "{:.2f}"),
           ("median_e2el_ms", "E2EL ms", "{:.1f}"))


def measure(flag: str, mode: str, flags: list[str]) -> tuple[dict[str, Any], str]:
    """(figures, table) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        done = subprocess.run([sys.executable, "-m", "actorium.tools.cli", "bench", "serve",
                               *(() if mode == "default" else (f"--{flag}", mode)),
                               "--json", str(path), *flags],
                              check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(path.read_text()), done.stdout


def line(mode: str, result: dict[str, Any]) -> str:
    """A mode's figures, and its acceptance."""
    cells = [f"{mode:<14}"] + [form.format(result[key]).rjust(11) for key, _, form in COLUMNS]
    if "spec_decode_acceptance_length" in result:
        places = " ".join(f"{share:.2f}"
                          for share in result["spec_decode_per_position_acceptance_rates"])
        cells.append(f"  length {result['spec_decode_acceptance_length']:.2f}, "
                     f"by position {places}")
    return " ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vary", default="speculative")
    parser.add_argument("--modes", default="off;auto;mtp:1,fixed;mtp:2,fixed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args, flags = parser.parse_known_args()
    modes = re.split(r"[; ]+", args.modes)
    found: dict[str, list[tuple[dict[str, Any], str]]] = {mode: [] for mode in modes}
    for _ in range(args.rounds):
        for mode in modes:
            found[mode].append(measure(args.vary, mode, flags))
    middle = {mode: sorted(runs, key=lambda run: run[0]["output_throughput"])[len(runs) // 2]
              for mode, runs in found.items()}
    for mode in modes:
        print(f"--{args.vary} {mode}\n{middle[mode][1]}")
    print(" ".join([args.vary.ljust(14)] + [name.rjust(11) for _, name, _ in COLUMNS]))
    for mode in modes:
        print(line(mode, middle[mode][0]))
    if args.json:
        rounds = {mode: [run[0]["output_throughput"] for run in runs]
                  for mode, runs in found.items()}
        Path(args.json).write_text(json.dumps(
            {"flag": args.vary, "flags": flags, "modes": {mode: middle[mode][0] for mode in modes},
             "output_throughput_of_rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
