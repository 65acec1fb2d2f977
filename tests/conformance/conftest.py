"""Tests with packages and minutes of their own: only with `-m conformance`.

Each case runs against an engine that `actorium serve` started with hardly a flag, once for each
model: `--model smollm2` or `--model demo` picks one. A file's `models` mark narrows that.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import thinking
from wire import Server

from actorium.tools.pictures import PICTURE_MODEL

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"
MODELS = {"demo": "", "smollm2": str(BUILD / "models" / "smollm2"), "pictures": str(PICTURE_MODEL),
          "thinking": str(BUILD / "models" / "thinking"),
          "infill": str(BUILD / "models" / "infill")}
TEXTS = ("demo", "smollm2")
"""Those that files without the `models` mark are tried with."""
CLIENT_OF = {"embeddings": "cohere", "langchain": "langchain_openai", "openai_agents": "agents",
             "quantisers": "torchao", "llama_server": "llamacpp_client", **{name: name for name in (
    "anthropic", "guidellm", "instructor", "litellm", "lm_eval", "mteb", "ollama", "openai", "peft",
    "pydantic_ai", "schemathesis")}}
"""A file's name and the module that it needs."""
DEMO = HERE.parents[1] / "tools" / "demo" / "demo_model"
KEY = "conformance-key"
START_SECONDS, STOP_SECONDS = 120.0, 60.0


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One engine of a model, for all files."""
    with serving(request.param) as served:
        yield served


@pytest.fixture(scope="session")
def thinking_server() -> Iterator[Server]:
    """The packaged model with a template that begins a thought; `thinking.CLOSE` ends it. Long
    prompts are cut by the template."""
    with serving_thoughts() as served:
        yield served


@contextmanager
def serving_thoughts(*flags: str) -> Iterator[Server]:
    """An engine of it."""
    thinking.make(Path(MODELS["thinking"]))
    with serving("thinking", "--chat-template", str(thinking.TEMPLATE), *flags) as served:
        yield served


@pytest.fixture(scope="module")
def strict_server() -> Iterator[Server]:
    """The packaged model as a careful operator starts it, with vLLM's names of the flags."""
    with serving("demo", "--served-model-name", "first", "second", "--strict-model-name",
                 "--api-key", KEY, "--max-num-seqs", "1", "--max-num-queued-reqs", "1",
                 "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                 "--reasoning-parser", "qwen3", "--max-model-len", "1k", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def scraped_servers(tmp_path_factory: pytest.TempPathFactory
                    ) -> Iterator[tuple[Server, Server, Server]]:
    """The packaged model with a key, with replicas, and as one of several."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "demo").symlink_to(DEMO)
    with serving("demo", "--api-key", KEY, "--max-model-len", "256", key=KEY) as one, \
            serving("demo", "--replicas", "2", "--max-model-len", "256") as two, \
            serving("demo", "--models-dir", str(folder), "--max-model-len", "256") as three:
        yield one, two, three


@contextmanager
def serving(name: str, *flags: str, key: str | None = None) -> Iterator[Server]:
    """An engine that `actorium serve` started; it must stop by itself, too."""
    path = MODELS[name]
    if path and not Path(path, "config.json").exists():
        pytest.fail(f"{path}: no model there; tests/conformance/setup.sh makes it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = f"conformance-{name}-{port}"
    log = BUILD / f"{engine}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "actorium.tools.cli", "serve", *([path] if path else []),
             "--port", str(port), "--name", engine, *flags], stdout=told, stderr=told)
    served = Server(name, "", path, f"http://127.0.0.1:{port}", engine, key)
    try:
        _wait(served, process, log)
        yield replace(served, model=served.get("/v1/models").ok()["data"][0]["id"])
        assert process.poll() is None, f"the engine ended in the middle: see {log}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"the engine did not stop within {STOP_SECONDS:g} s: see {log}")


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if server.get("/health", timeout=5.0).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"the engine did not start: {log.read_text()[-2000:]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--model`."""
    parser.addoption("--model", choices=sorted(set(MODELS) - {"thinking", "infill"}), default=None,
                     help="conformance: with this model alone")


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers."""
    config.addinivalue_line("markers", "conformance: real clients and generated requests, minutes "
                                       "long; run by its own make target")
    config.addinivalue_line("markers", "models(*names): the models that a file is tried with")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Once for each model."""
    if "server" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("models")
    wanted = mark.args if mark is not None else TEXTS
    only = metafunc.config.getoption("--model", None)
    metafunc.parametrize("server", [name for name in wanted if only in (None, name)],
                         indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them unless they are asked for; then none may be skipped for want of its client."""
    mine = [item for item in items if HERE in item.path.parents]
    if "conformance" not in (config.option.markexpr or ""):
        skip = pytest.mark.skip(reason="run by `make conformance`")
        for item in mine:
            item.add_marker(skip)
        return
    files = {item.path.stem.removeprefix("test_") for item in mine}
    missing = sorted(CLIENT_OF[file] for file in files & set(CLIENT_OF)
                     if importlib.util.find_spec(CLIENT_OF[file]) is None)
    if missing:
        raise pytest.UsageError(f"{', '.join(missing)}: not installed here; see setup.sh")
