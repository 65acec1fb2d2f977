"""Runs the battery: `python -m actorium.tools.chaos [--rows NAMES] [--seed N] [--json FILE]`.

Without --seed one is drawn; it is printed, and repeats the faults and requests of the run. Exit
code 1 if anything went wrong. With --json, rows that are not run keep their figures in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic, strftime
from typing import Any

from actorium.tools.chaos import (
    client_rows,
    cluster_rows,
    hostile_rows,
    kill_rows,
    load_rows,
    lora_rows,
    model_rows,
    models_rows,
    stop_rows,
)
from actorium.tools.chaos.drawn_rows import drawn
from actorium.tools.chaos.fault_injection import UNFENCED, no_dedup
from actorium.tools.chaos.faults import PAIRS, ROLES, Fault

Row = Callable[[int], dict[str, Any]]
"""From a seed to the measurements, with a list of everything that went wrong under "wrong"."""
PARTS = 4
"""The number of parts of the row of kills, each with an engine of its own."""
PART_SECONDS, STREAMS = 100.0, 200
MINUTES = 4.0
"""Of the row of drawn faults: most kinds once, on two idle cores."""


def _kills(part: int) -> Row:
    return lambda seed: kill_rows.kills(seed + part, PART_SECONDS, STREAMS, rounds=2, stops=1,
                                        pairs=PAIRS[part::PARTS], full=1)


def _quarantine(actor: str) -> Row:
    return lambda seed: hostile_rows.quarantine(actor, seed, requests=500, poisoned=20,
                                                latest=300.0)


def _teeth(seed: int) -> dict[str, Any]:
    """Runs engines and clients that are broken on purpose, which the battery must detect."""
    unfenced = kill_rows.chaos([Fault(1.0, "kill", ("scheduler",))], seed, 20, roles=UNFENCED)
    with no_dedup():
        twice = kill_rows.chaos([Fault(1.0, "kill", ("detokenizer",))], seed, 20)
    noticed = {"without fencing": len(unfenced["wrong"]), "without dedup": len(twice["wrong"])}
    return {"noticed": noticed,
            "wrong": [f"{what}: not noticed" for what, count in noticed.items() if not count]}


ROWS: dict[str, Row] = {
    **{f"kills-{part + 1}": _kills(part) for part in range(PARTS)},
    "ranks": lambda seed: kill_rows.ranks(seed, faults=8, streams=100),
    "disks": lambda seed: kill_rows.disks(seed, times=5, streams=100),
    "numbers": lambda seed: kill_rows.numbers(seed, streams=100),
    "adapters": lambda seed: lora_rows.adapters(seed, 200, 8, kills=ROLES),
    "cluster": lambda seed: cluster_rows.cluster(seed, count=60, streams=100),
    "nodes": lambda seed: cluster_rows.nodes(seed, count=24, streams=60),
    "poison": lambda seed: hostile_rows.poison(seed, requests=500, poisoned=20, latest=300.0),
    **{f"poison-{actor}": _quarantine(actor) for actor in hostile_rows.FAILING},
    "crowd": lambda seed: load_rows.crowd(seed, seconds=10.0, readers=50, vanishing=200),
    "flood": lambda _: load_rows.flood(seconds=10.0, clients=4),
    "fuzz": lambda seed: hostile_rows.fuzz(seed, 100_000),
    "stops": lambda seed: stop_rows.stops(seed, 10),
    "orphans": lambda _: stop_rows.orphans(5),
    "reboot": lambda seed: stop_rows.reboot(seed, 5),
    "unread": lambda _: stop_rows.unread(3),
    "soak": lambda seed: load_rows.soak(seed, 150.0, 40),
    "model": model_rows.model,
    "model-tp2": lambda seed: model_rows.ranks(seed, faults=40),
    "images": model_rows.images,
    "cluster-images": lambda seed: model_rows.images(seed, kills=6, others=8, replicas=2),
    "models": models_rows.models,
    "probes": lambda seed: stop_rows.probes(seed, stops=5, streams=200, times=100),
    "starved": lambda seed: stop_rows.starved(seed, 20.0, spinners=30, streams=100),
    "clients": client_rows.clients,
    "clients-replicas": lambda seed: client_rows.clients(seed, replicas=2),
    "drawn": lambda seed: drawn(seed, MINUTES),
    "teeth": _teeth}


def run(names: list[str], seed: int, report: Callable[[str, dict[str, Any]], None],
        rows: dict[str, Row] = ROWS) -> None:
    """Runs rows; calls `report` with each finished row."""
    for name in names:
        began, load = monotonic(), os.getloadavg()[0]
        try:
            row = rows[name](seed)
        except Exception as error:  # the other rows have their say all the same
            traceback.print_exc()
            row = {"wrong": [f"{type(error).__name__}: {error}"]}
        wrong = row.pop("wrong")
        report(name, row | {"took_s": round(monotonic() - began, 1), "load_before": round(load, 2),
                            "load_after": round(os.getloadavg()[0], 2), "wrong": wrong})


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(),
            "kernel": platform.release(), "at": strftime("%Y-%m-%d")}


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="default: all: %(default)s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6),
                        help="default: any")
    parser.add_argument("--minutes", type=float, default=MINUTES,
                        help="of the row of drawn faults; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: there is no {unknown[0]!r} among {', '.join(ROWS)}")
    path: Path | None = options.json
    found = json.loads(path.read_text()) if path is not None and path.is_file() else {"rows": {}}
    bad: list[str] = []

    def report(name: str, row: dict[str, Any]) -> None:
        print(f"{name}: {json.dumps(row, indent=1)}", flush=True)
        bad.extend(f"{name}: {text}" for text in row["wrong"])
        found["rows"][name] = row
        if path is not None:
            found["machine"] = _machine()
            path.write_text(json.dumps(found, indent=1) + "\n")

    print(f"seed {options.seed}: SEED={options.seed} CHAOS_MINUTES={options.minutes:g} repeats it",
          flush=True)
    run(names, options.seed, report,
        ROWS | {"drawn": lambda seed: drawn(seed, options.minutes, _say)})
    print(f"seed {options.seed}: {len(bad)} wrong" + "".join(f"\n  {text}" for text in bad[:40]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
