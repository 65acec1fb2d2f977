"""Start-up times: commands, the way to the first token, and loading a large GGUF file."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import Row, Rows, ratios, scenario, take_turns, timed

PARSE = ("from actorium.tools.cli.command_line import parse; "
         "from actorium.tools.cli.generate_command import GenerateOptions; "
         "parse('actorium generate', ['--prompt', 'x', '--max-tokens', '8'], GenerateOptions)")
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": (["-c", "pass"], None),
    "import actorium": (["-c", "import actorium"], 100.0),
    "import Client": (["-c", "from actorium import Client"], None),
    "actorium version": (["-m", "actorium.tools.cli", "version"], 250.0),
    "actorium generate: its flags read": (["-c", PARSE], None)}
"""What is run -> (arguments of the interpreter, milliseconds aimed at)."""


@scenario
def commands(runs: int = 5) -> Rows:
    """Imports, commands, and the demo's way to its first token, phase by phase; aim: 3 s."""
    for name, (argv, aim) in COMMANDS.items():
        call = partial(subprocess.run, [sys.executable, *argv], check=True, capture_output=True)
        seconds = [timed(call) for _ in range(runs + 1)][1:]
        yield {"command": name, "ms": round(1e3 * statistics.median(seconds)),
               **({} if aim is None else {"aim_ms": aim})}
    found = [demo() for _ in range(max(3, runs // 2) + 1)][1:]
    for phase, until in medians([run["until_s"] for run in found]).items():
        yield {"demo": phase, "until_s": until}
    for role in found[0]["actors"]:
        own = [run["actors"][role] for run in found if role in run["actors"]]
        yield {"actor": role, "ready_s": statistics.median(one["ready_s"] for one in own),
               "phases_s": medians([one["phases_s"] for one in own])}


def demo() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        subprocess.run([sys.executable, "-m", "actorium.tools.demo", "--packaged", "--json",
                        str(path), "--started", repr(time.time())], capture_output=True)
        result: Row = json.loads(path.read_text())
        return result


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each key that all rows have."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]
            if all(key in row for row in rows)}


# --- a large file ---------------------------------------------------------------------------------

TIMED = """
import mmap, sys, time
from pathlib import Path
{before}
began = time.perf_counter()
{what}
print(time.perf_counter() - began)
"""
READ = """
with open(sys.argv[1], 'rb', buffering=0) as file:
    for _ in range(2):
        file.seek(0)
        {fresh}
        while got := file.readinto({where}):
            at = at + got
"""
WAYS = {
    "read twice, one buffer": ("at, whole = 0, memoryview(bytearray(1 << 20))",
                               READ.format(fresh="", where="whole")),
    "read twice, fresh memory": (
        "size = Path(sys.argv[1]).stat().st_size",
        READ.format(fresh="at, whole = 0, memoryview(mmap.mmap(-1, size + (1 << 20)))",
                    where="whole[at:at + (1 << 20)]")),
    "load": ("""
import torch
from actorium.actors.config.tree import Config
from actorium.actors.models.gguf_folder import gguf_folder
from actorium.gpu.models.registry import load_model
from actorium.kernels.cpu.native_library import library
library()
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
folder = gguf_folder(Path(sys.argv[1]))""",
             "load_model(folder, Config(), torch.device('cpu'), lambda *_: None)")}


def seconds_of(way: str, file: Path, cold: bool) -> float:
    """Seconds in one process, without imports and making the file's directory. cold: the file's
    pages are dropped from the system's cache before."""
    before, what = WAYS[way]
    if cold:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run([sys.executable, "-c", TIMED.format(before=before, what=what), str(file)],
                          check=True, capture_output=True, text=True)
    return float(done.stdout)


@scenario
def loading(file: Path, rounds: int = 5) -> Rows:
    """Seconds to load a GGUF file beside reading it twice, from the system's cache and cold.

    By turns, each in a process of its own: reading it twice into one buffer, twice into fresh
    memory of its size (what every loader must at least touch once), and `load_model`. Medians, and
    the ratios of loading to both.
    """
    seconds_of("load", file, False)
    for cold in (False, True):
        times = take_turns({way: partial(seconds_of, way, file, cold) for way in WAYS}, rounds)
        yield {"cache": "cold" if cold else "warm", "bytes": file.stat().st_size,
               **{way: round(statistics.median(each), 2) for way, each in times.items()},
               **{f"load / {way}": round(statistics.median(ratios(times[way], times["load"])), 2)
                  for way in WAYS if way != "load"}}
