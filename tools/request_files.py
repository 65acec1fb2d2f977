"""Lists the files, classes and functions of this package that one streamed chat runs through.

`python tools/request_files.py [--engine "FLAGS OF serve"] [--functions]` starts an engine, asks it
once so that everything is imported and warm, and then once more while every process notes each
function that it enters. What runs without any request (heartbeats) is counted apart.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8,
        "stream": True}
IDLE = 3.0
"""Seconds without a request, for what runs anyway."""
SETTLE = 25.0
"""Seconds after the first answer: spare processes still import what they may need."""
READY = re.compile(r"http://[\d.]+:\d+")
HOOK = '''
import mmap, os, sys, threading
folder = os.environ["REQUEST_FILES_FOLDER"]
package = os.environ["REQUEST_FILES_PACKAGE"]
with open(os.path.join(folder, "phase"), "r+b") as file:
    phase = mmap.mmap(file.fileno(), 1)
seen = set()
def note(frame, event, _):
    if event == "call" and phase[0]:
        code = frame.f_code
        if (code, phase[0]) not in seen:
            seen.add((code, phase[0]))
            if "/site-packages/" not in code.co_filename and package in code.co_filename:
                line = f"{phase[0]}\\t{code.co_filename}\\t{code.co_qualname}\\n".encode()
                out = os.open(os.path.join(folder, f"{os.getpid()}.seen"),
                              os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(out, line)
                os.close(out)
threading.setprofile(note)
sys.setprofile(note)
'''
"""Put before each process of the engine, as `sitecustomize`."""


def ask(url: str) -> int:
    """Streams one chat; returns the number of its events."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return sum(line.startswith(b"data: ") for line in answer)


def traced(flags: list[str]) -> list[tuple[int, str, str]]:
    """Returns (phase, file, qualified name) of each function entered: phase 1 without a request, 2
    with it. flags: of `actorium serve`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        (folder / "phase").write_bytes(b"\0")
        command = [str(Path(sys.executable).with_name("actorium")), "serve", "--name",
                   f"trace-{os.getpid()}", "--port", "0", *flags]
        env = os.environ | {"PYTHONPATH": name, "REQUEST_FILES_FOLDER": name,
                            "REQUEST_FILES_PACKAGE": f"{PACKAGE}/"}
        with (folder / "phase").open("r+b") as file, mmap.mmap(file.fileno(), 1) as phase, \
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True) as engine:
            assert engine.stdout is not None
            try:
                url = next(found[0] for line in engine.stdout if (found := READY.search(line)))
                ask(url)
                time.sleep(SETTLE)
                for number, run in ((1, lambda: time.sleep(IDLE)), (2, lambda: ask(url))):
                    phase[0] = number
                    run()
                    phase[0] = 0
            finally:
                engine.terminate()
        lines = [line for path in folder.glob("*.seen") for line in path.read_text().splitlines()]
    split = [line.split("\t") for line in lines]
    return [(int(number), str(Path(path).resolve().relative_to(PACKAGE)), qualified)
            for number, path, qualified in split]


def classes(names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns (file, class) of those functions that are methods."""
    return {(path, name.split(".")[0]) for path, name in names
            if "." in name.split(".<locals>")[0]}


def main() -> None:
    """Print the list, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="", help="flags of `actorium serve`")
    parser.add_argument("--functions", action="store_true", help="list functions, too")
    arguments = parser.parse_args()
    rows = traced(shlex.split(arguments.engine))
    idle = {(path, name) for number, path, name in rows if number == 1}
    request = {(path, name) for number, path, name in rows if number == 2}
    files = {path for path, _ in request}
    without = {path for path, _ in request - idle}
    for path in sorted(files):
        names = sorted(name for where, name in request if where == path)
        print(f"{path}{'' if path in without else '  (without a request, too)'}")
        if arguments.functions:
            print(*(f"    {name}" for name in names), sep="\n")
    print(f"{len(files)} files, {len(classes(request))} classes, {len(request)} functions; "
          f"not without a request: {len(without)} files, {len(classes(request - idle))} classes, "
          f"{len(request - idle)} functions")


if __name__ == "__main__":
    main()
