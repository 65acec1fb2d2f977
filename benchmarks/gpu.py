"""Everything worth knowing of the engine on one CUDA device, in one call.

    python benchmarks/gpu.py [--out DIR] [--seconds 420] [--part NAME ...] [--toy]

Parts, each in a process of its own, so that one that fails, hangs or breaks the device leaves the
others alone; the most telling first. What no longer fits into the time is left out, and that is
said. Written to DIR: gpu.json, gpu.md, gpu-kernels.png, gpu-decode.png, gpu-timeline.png and
gpu-timeline.json (for ui.perfetto.dev). --toy runs the same code at tiny sizes on a CPU, Triton's
kernels in its interpreter: a test of the battery; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

TIMELINE = "gpu-timeline"
GRACE = 10.0
"""Seconds that a part may need to end by itself, when its time is over."""


class Share(NamedTuple):
    """What a part may take."""

    least: float
    """Seconds below which it is not begun."""
    most: float


PARTS = {"ceilings": Share(10, 60), "kernels": Share(20, 150), "decode": Share(40, 110),
         "ring": Share(60, 120), "speculation": Share(60, 110), "transformers": Share(40, 70),
         "ring-no-overlap": Share(50, 100)}


def run_part(name: str, path: Path, seconds: float, toy: bool, ceilings: dict[str, float],
             out: Path) -> None:
    """One part, in this process; its figures go to `path`."""
    import gpu_bench

    part = gpu_bench.Part(path, seconds, toy)
    if name != "ceilings" and not ceilings:  # those of this very device, and no others
        gpu_bench.ceilings(part)
        ceilings = ceilings_of(part.facts)
    if name == "ceilings":
        gpu_bench.ceilings(part)
    elif name == "kernels":
        import gpu_kernels
        gpu_kernels.run(part, ceilings)
    elif name.startswith("ring"):
        import gpu_ring
        overlap = name == "ring"
        gpu_ring.run(part, overlap, out / TIMELINE if overlap else None)
    else:
        import gpu_model
        if name == "decode":
            gpu_model.decode(part, ceilings["copy_gbs"])
        elif name == "speculation":
            gpu_model.speculation(part, ceilings["copy_gbs"])
        else:
            gpu_model.transformers(part)


def in_a_process(name: str, path: Path, seconds: float, ceilings: dict[str, float], out: Path
                 ) -> str:
    """The same, in a process of its own; why it failed, if it did."""
    command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds), "--out",
               str(out), "--into", str(path), "--ceilings", json.dumps(ceilings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        try:
            _, said = process.communicate(timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return f"took more than {seconds:.0f} s"
    if process.returncode:
        print(said[-3000:], file=sys.stderr)
        last = said.strip().splitlines()[-1:] or [""]
        return f"exit code {process.returncode}: {last[0][:300]}"
    return ""


def battery(names: list[str], seconds: float, toy: bool, out: Path) -> dict[str, Any]:
    """All parts, one behind the other."""
    found: dict[str, Any] = {}
    ceilings: dict[str, float] = {}
    end = monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            path, left = Path(scratch) / f"{name}.json", end - monotonic() - GRACE
            empty: dict[str, Any] = {"facts": {}, "rows": [], "skipped": []}
            if left < PARTS[name].least and not toy:
                found[name] = empty | {"skipped": [
                    f"all of it: {max(0, left):.0f} s are left, it takes {PARTS[name].least:.0f}"]}
                continue
            print(f"{name}: {left:.0f} s left", flush=True)
            given, why = min(left, PARTS[name].most), ""
            if toy:
                run_part(name, path, given, toy, ceilings, out)
            else:
                why = in_a_process(name, path, given, ceilings, out)
            found[name] = json.loads(path.read_text()) if path.exists() else empty
            if why:
                found[name]["skipped"].append(f"the rest: {why}")
            if name == "ceilings":
                ceilings = ceilings_of(found[name]["facts"])
    return found


def ceilings_of(facts: dict[str, Any]) -> dict[str, float]:
    """What was measured of the device, of all that is known of it."""
    return {name: fact for name, fact in facts.items() if isinstance(fact, float)}


def write(found: dict[str, Any], toy: bool, out: Path) -> None:
    """The files, but for the timeline's."""
    import gpu_report

    (out / "gpu.json").write_text(json.dumps({"toy": toy} | found, indent=1) + "\n")
    (out / "gpu.md").write_text(gpu_report.page(found, toy))
    try:
        gpu_report.plots(found, out)
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)


def main() -> int:
    """Parse flags, run, write."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=420.0, help="for everything")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif (why := no_device()):
        print(f"gpu.py: {why}; --toy runs at tiny sizes on a CPU", file=sys.stderr)
        return 2
    if options.into is not None:
        run_part(options.part[0], options.into, options.seconds, options.toy, options.ceilings,
                 options.out)
        return 0
    names = [name for name in PARTS if name in (options.part or PARTS)]
    found = battery(names, options.seconds, options.toy, options.out)
    write(found, options.toy, options.out)
    print(f"{options.out / 'gpu.md'}")
    return 0 if all(found[name]["rows"] or found[name]["facts"] for name in names) else 1


def no_device() -> str:
    """Why there is none; empty if there is."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


if __name__ == "__main__":
    sys.exit(main())
