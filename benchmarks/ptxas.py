"""Registers, spills, shared memory and tensor cores of every kernel that serves, on any machine.

Launches of `ptxas_cases` are compiled for each device asked for and held against `ptxas_rules`;
nothing runs, and no device is needed. `make ptxas` writes results/ptxas.json and results/ptxas.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import markdown

QUICK = re.compile("|".join((
    "decode Llama-3.1-8B, q1$", "extend Llama-3.1-8B, split", "delta Qwen3.5-27B, q1$",
    "scaled_mm D.* 512")))
"""Cases of the test that every change runs."""


def compiled(capability: int, wanted: re.Pattern[str], share: int, shares: int
             ) -> list[dict[str, Any]]:
    """Facts of every kernel of these cases, of one share of them, and their faults."""
    from ptxas_cases import cases
    from ptxas_device import Standin, facts
    from ptxas_rules import faults

    device, found = Standin().install(), []
    device.become(capability)
    chosen = [c for c in cases() if wanted.search(c.name) and capability >= c.oldest]
    for case in chosen[share::shares]:
        with device.launches() as kernels:
            case.launch()
        for kernel in {kernel.hash: kernel for kernel in kernels}.values():
            own = facts(kernel, capability)
            found.append({"case": case.name, "sm": capability, **own._asdict(),
                          "faults": faults(case.name, capability, own)})
    return found


def shared_out(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same by several processes, none of which interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rows = []
    for capability in arguments.sm:
        shares = [subprocess.Popen(
            [sys.executable, __file__, "--sm", str(capability), "--share", f"{i}/{arguments.jobs}",
             "--cases", arguments.cases], env=env, stdout=subprocess.PIPE, text=True)
            for i in range(arguments.jobs)]
        outs = [share.communicate()[0] for share in shares]
        if any(share.returncode for share in shares):
            sys.exit(f"sm_{capability}: a share of the cases ended with an error")
        rows += [row for out in outs for row in json.loads(out)]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns Markdown with a row for each kernel of a case."""
    return markdown(
        ("sm", "case", "kernel", "warps", "registers", "spills, stored / loaded", "shared",
         "programs an SM", "products", "fp64"),
        [(row["sm"], row["case"], f"`{row['kernel']}`", row["warps"], row["registers"],
          "{} / {}".format(*row["spills"]) if any(row["spills"]) else "-", f"{row['shared']:,}",
          row["programs"], row["products"] or "-", row["doubles"] or "-") for row in rows]) + "\n"


def main() -> None:
    """Compile, print what breaks a rule, and end with 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", type=int, nargs="+", default=[90], help="compute capabilities")
    parser.add_argument("--cases", default="",
                        help="those whose name this expression finds; their figures are printed")
    parser.add_argument("--quick", action="store_true", help="the decisive ones")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share:
        share, shares = map(int, arguments.share.split("/"))
        json.dump(compiled(arguments.sm[0], re.compile(arguments.cases), share, shares),
                  sys.stdout)
        return
    if arguments.quick:
        arguments.cases = QUICK.pattern
    began = time.monotonic()
    rows = shared_out(arguments)
    bad = [row for row in rows if row["faults"]]
    for row in bad:
        print(f"sm_{row['sm']} {row['case']} {row['kernel']}: {'; '.join(row['faults'])}")
    if arguments.cases and not arguments.quick:
        print(table(rows))
    print(f"{len(rows)} kernels, {len(bad)} not as they are meant, "
          f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        import triton

        arguments.json.write_text(json.dumps({"triton": triton.__version__, "kernels": rows},
                                             indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(table(rows))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
