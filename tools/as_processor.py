"""Runs a command with C kernels built for another processor that this machine can run.

    python tools/as_processor.py NAME COMMAND [ARGUMENT ...]
    python tools/as_processor.py amx make test

NAME is one of `PROCESSORS`, or a number, which selects one of those this processor can run. `amx`
emulates the tiles of Intel's AMX in memory, and is slow (`kernels/cpu/tiles_emulated.h`). Only the
C kernels change: oneDNN, torch and what `auto` measures use the real processor. The command's PATH
begins with a compiler that replaces `-march=native`; it and a cache of its own lie below
`build/processors`.

The exit code is the command's; 2 if NAME is not available here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from actorium.kernels.cpu.native_library import SLOW_PAIRS, THIS_PROCESSOR


class Processor(NamedTuple):
    flags: tuple[str, ...]
    """The compiler's."""
    needs: str = ""
    """What a processor must have to run it, as Linux names it in /proc/cpuinfo."""


PROCESSORS = {
    "this": Processor(THIS_PROCESSOR),
    "avx2": Processor(("-march=haswell",), "avx2"),
    "avx_vnni": Processor(("-march=alderlake",), "avx_vnni"),
    "avx512": Processor(("-march=skylake-avx512",), "avx512vl"),
    "slow_pairs": Processor((*THIS_PROCESSOR, SLOW_PAIRS), "avx512_bf16"),
    "pairs": Processor(("-march=icelake-server", "-mavx512bf16"), "avx512_bf16"),
    "amx": Processor(("-march=icelake-server", "-mavx512bf16", "-mamx-tile", "-mamx-bf16",
                      "-DEMULATED_TILES"), "avx512_bf16"),
}
"""`slow_pairs`: Intel's AVX512-BF16 where a virtual machine hides AMX; `pairs`: Zen 4 and Cooper
Lake without what else this one may have."""
BUILDS = Path(__file__).resolve().parents[1] / "build" / "processors"


def missing(name: str) -> str:
    """What this processor lacks to run `name`'s build; or nothing. Raises KeyError, OSError."""
    needed = PROCESSORS[name].needs
    return needed if needed not in ("", *Path("/proc/cpuinfo").read_text().split()) else ""


def by_turns(number: int) -> str:
    """The NAME that a number means. Raises OSError where this processor can be no other."""
    names = [name for name in PROCESSORS if name != "this" and not missing(name)]
    if not names:
        raise FileNotFoundError("this processor can be no other")
    return names[number % len(names)]


def environment(name: str, to: Path = BUILDS) -> dict[str, str]:
    """Variables for a command whose C kernels are `name`'s; writes the compiler that it finds.

    Raises KeyError; OSError where there is no compiler.
    """
    real = shutil.which("cc") or shutil.which("gcc")
    if real is None:
        raise FileNotFoundError("no C compiler")
    folder = to / name
    folder.mkdir(parents=True, exist_ok=True)
    compiler, written = folder / "cc", folder / f"cc.{os.getpid()}"
    native, flags = THIS_PROCESSOR[0], " ".join(PROCESSORS[name].flags)
    written.write_text(
        "#!/bin/sh\nfor word; do\n    shift\n"
        f'    if [ "$word" = {native} ]; then set -- "$@" {flags}; else set -- "$@" "$word"; fi\n'
        f'done\nexec {shlex.quote(os.path.realpath(real))} "$@"\n')
    written.chmod(0o755)
    os.replace(written, compiler)
    return {"PATH": f"{folder.resolve()}{os.pathsep}{os.environ.get('PATH', '')}",
            "XDG_CACHE_HOME": str(folder.resolve())}


def main() -> int:
    if len(sys.argv) < 3 or not (sys.argv[1] in PROCESSORS or sys.argv[1].isdecimal()):
        print(f"{__doc__}\nNAME: {', '.join(PROCESSORS)}", file=sys.stderr)
        return 2
    name, *command = sys.argv[1:]
    try:
        if name.isdecimal():
            name = by_turns(int(name))
            print(f"C kernels of: {name}", file=sys.stderr)
        lacks = missing(name)
        variables = environment(name)
    except OSError as e:
        lacks = str(e)
    if lacks:
        print(f"error: {name} cannot be had here: {lacks}", file=sys.stderr)
        return 2
    os.execvpe(command[0], command, os.environ | variables)


if __name__ == "__main__":
    sys.exit(main())
