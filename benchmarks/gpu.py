"""Everything worth knowing of the engine on one CUDA device, in three calls that stand alone.

    python benchmarks/gpu.py contact|kernels|tests [--out DIR] [--seconds 500] [--group NAME]
        [--toy]
    python benchmarks/gpu.py page [--out DIR]

Every group of rows runs in a process of its own, with limits for the group and for each row: what
fails, hangs or runs out of memory costs only itself. What no longer fits into the time is left out,
and that is said. Written to DIR, anew after every row: gpu-CALL.json and gpu-CALL.md; of contact
gpu-timeline.json (for ui.perfetto.dev). page makes docs/gpu.md of what lies in DIR. --toy runs the
same code at tiny sizes on a CPU, Triton's kernels in its interpreter: a test of the battery; its
figures say nothing. `tools/gpu_check.sh` (make gpu-check) sets the machine up first.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    from gpucheck.plan import PARTS

    own = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("part", choices=[*PARTS, "page"])
    own.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    own.add_argument("--seconds", type=float, default=500.0, help="for everything")
    own.add_argument("--group", action="append", help="only these groups of rows")
    own.add_argument("--toy", action="store_true", help="tiny sizes on a CPU")
    own.add_argument("--memory", type=float, default=0.0,
                     help="with --toy: GiB that the device pretends to have")
    own.add_argument("--row-limit", type=float, default=0.0, help="seconds of every row")
    own.add_argument("--fault", action="append", default=[],
                     metavar="GROUP/ROW=raise|hang|capture|exit|wrong",
                     help="with --toy: what this row does instead; more than once")
    own.add_argument("--carried", action="store_true", help="the kernels' cache was carried here")
    own.add_argument("--scratch", type=Path, help="folder for what is not to be kept")
    own.add_argument("--only", help=argparse.SUPPRESS)
    own.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return own


def main() -> int:
    options = parser().parse_args()
    if (options.fault or options.memory) and not options.toy:
        parser().error("--fault and --memory go with --toy")
    if options.part == "page":
        from gpucheck import report

        report.write(options.out)
        return 0
    if options.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.only:
        return one_group(options)
    looks = not options.toy and options.scratch is None  # else gpu_check.sh has looked
    if looks and (why := no_device()):
        print(f"gpu.py: {why}; --toy runs at tiny sizes on a CPU", file=sys.stderr)
        return 2
    from gpucheck import battery

    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with an end to what was started
    with tempfile.TemporaryDirectory() as scratch:
        options.scratch = options.scratch or Path(scratch)
        code = battery.run(options)
    print(f"\n{(options.out / f'gpu-{options.part}.md').read_text()}\nexit code {code}")
    return code


def one_group(options: argparse.Namespace) -> int:
    """A group, in this process; see `gpucheck.battery`."""
    from gpucheck import child
    from gpucheck.plan import PARTS
    from gpucheck.record import Record

    group = next(own for own in PARTS[options.part]() if own.name == options.only)
    return child.run(Record(options.record, group.name), group, options.seconds, options.toy,
                     options)


def no_device() -> str:
    """Why there is none; empty if there is. Asked in a process of its own: this one is not to
    touch the device."""
    asked = ("try:\n import torch\nexcept ImportError:\n raise SystemExit(3)\n"
             "raise SystemExit(0 if torch.cuda.is_available() else 4)")
    code = subprocess.run([sys.executable, "-c", asked], stderr=subprocess.DEVNULL).returncode
    return {0: "", 3: "torch is not installed"}.get(code, "torch finds no CUDA device")


if __name__ == "__main__":
    sys.exit(main())
