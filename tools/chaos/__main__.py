"""Run the battery: `python -m actorium.tools.chaos [--rows NAMES] [--seed N] [--json FILE]`.

Exit code 1 if anything was wrong. With --json, rows that are not run keep their figures in the
file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, strftime
from typing import Any

from actorium.tools.chaos.fault_injection import PAIRS, Fault

Row = Callable[[int], dict[str, Any]]
PARTS = 4
"""The row of kills comes in so many, each with an engine of its own."""
PART_SECONDS, STREAMS = 100.0, 200


def _kills(part: int) -> Row:
    def row(seed: int) -> dict[str, Any]:
        from actorium.tools.chaos.kills import kills

        return kills(seed + part, PART_SECONDS, STREAMS, rounds=2, stops=1,
                     pairs=PAIRS[part::PARTS], full=1)
    return row


def _poison(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.poison import poison

    return poison(seed, requests=500, poisoned=20, latest=300.0)


def _quarantine(actor: str) -> Row:
    def row(seed: int) -> dict[str, Any]:
        from actorium.tools.chaos.quarantine import quarantine

        return quarantine(actor, seed, requests=500, poisoned=20, latest=300.0)
    return row


def _crowd(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.crowd import crowd

    return crowd(seed, seconds=10.0, readers=50, vanishing=200)


def _fuzz(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.fuzz import fuzz

    return fuzz(seed, 100_000)


def _stops(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.stop_row import stops

    return stops(seed, 10)


def _orphans(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.stop_row import orphans

    return orphans(5)


def _reboot(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.reboot import reboot

    return reboot(seed, 5)


def _soak(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.soak import soak

    return soak(seed, 150.0, 40)


def _model(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.model_row import model

    return model(seed)


def _probes(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.probe_rows import probes

    return probes(seed, stops=5, streams=200, times=100)


def _starved(seed: int) -> dict[str, Any]:
    from actorium.tools.chaos.probe_rows import starved

    return starved(seed, 20.0, spinners=30, streams=100)


def _teeth(seed: int) -> dict[str, Any]:
    """Broken engines and clients, which the battery must notice."""
    from actorium.tools.chaos.kills import chaos
    from actorium.tools.chaos.teeth import UNFENCED, no_dedup

    unfenced = chaos([Fault(1.0, "kill", ("scheduler",))], seed, 20, roles=UNFENCED)
    with no_dedup():
        twice = chaos([Fault(1.0, "kill", ("detokenizer",))], seed, 20)
    noticed = {"without fencing": len(unfenced["wrong"]), "without dedup": len(twice["wrong"])}
    return {"noticed": noticed,
            "wrong": [f"{what}: not noticed" for what, count in noticed.items() if not count]}


ROWS: dict[str, Row] = {
    **{f"kills-{part + 1}": _kills(part) for part in range(PARTS)}, "poison": _poison,
    **{f"poison-{actor}": _quarantine(actor)
       for actor in ("tokenizer", "scheduler", "detokenizer", "gateway")},
    "crowd": _crowd, "fuzz": _fuzz, "stops": _stops, "orphans": _orphans, "reboot": _reboot,
    "soak": _soak, "model": _model, "probes": _probes, "starved": _starved, "teeth": _teeth}


def run(names: list[str], seed: int, told: Callable[[str, dict[str, Any]], None]) -> None:
    """Run rows; `told` gets each as it is done."""
    for name in names:
        began, load = monotonic(), os.getloadavg()[0]
        row = ROWS[name](seed)
        wrong = row.pop("wrong")
        told(name, row | {"took_s": round(monotonic() - began, 1), "load_before": round(load, 2),
                          "load_after": round(os.getloadavg()[0], 2), "wrong": wrong})


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(),
            "kernel": platform.release(), "at": strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="default: all: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: there is no {unknown[0]!r} among {', '.join(ROWS)}")
    path: Path | None = options.json
    found = json.loads(path.read_text()) if path is not None and path.is_file() else {"rows": {}}
    bad: list[str] = []

    def told(name: str, row: dict[str, Any]) -> None:
        print(f"{name}: {json.dumps(row, indent=1)}", flush=True)
        bad.extend(f"{name}: {text}" for text in row["wrong"])
        found["rows"][name] = row
        if path is not None:
            found["machine"] = _machine()
            path.write_text(json.dumps(found, indent=1) + "\n")

    run(names, options.seed, told)
    print(f"{len(bad)} wrong" + "".join(f"\n  {text}" for text in bad[:40]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
