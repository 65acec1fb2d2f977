"""Hypothesis profiles: state machines take their number of examples from them.

The quick one walks the same ways each time; the battery looks for new ones.

No test asks the Hugging Face hub: those that fetch have one of their own (`helpers_hub`).

Without a CUDA device Triton's kernels run in its interpreter, which is chosen before its import.

Threads of OpenMP sleep while they wait: by default they keep a processor busy, which other files,
tested at the same time, would like to have. It is chosen before torch is imported, for all
processes that tests start.

Engines have no fork server, but in the tests that are about deaths: it imports torch once more for
each engine that lives a few seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import helpers_zygote
import pytest
import torch
from helpers_interpreter import spare_repetitions
from helpers_skips import SkipReport
from hypothesis import settings

from actorium.actors.launcher import engine

pytest_plugins = ["helpers_forks"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACTORIUM_FORK_SERVER"] = "off"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_start_launcher = engine.start_launcher
settings.register_profile("quick", max_examples=120, derandomize=True, database=None)
settings.register_profile("battery", max_examples=5000)
settings.load_profile("quick")


# Operations of tiny models gain nothing from threads, and wait for one another at each: all the
# longer where other files are tested at the same time.
THREADS = torch.get_num_threads()
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, since pytest reads options of a folder below too late."""
    parser.addoption("--adversary", metavar="FILE", default="",
                     help="tests/adversary in full size; counts go to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipReport(), "skips")


WAITING = ("engine", "adversary")
"""Folders whose tests mostly wait for processes of their own."""
LONG = frozenset(f"test_{name}.py" for name in (
    "gpu_benchmark", "gpu_suites", "launcher", "thinking_walk", "engine_cli", "restarts",
    "speculation", "warmup_forms", "decode_graphs", "piecewise_graphs", "media_requests", "hybrid",
    "parity", "gguf_reader", "stored_checkpoints", "attention_blocks", "triton_delta_extend",
    "triton_sampling", "triton_grouped", "verify_core", "bench_peer", "model_files",
    "engine_deaths", "references"))
"""Files that take longest: one that is begun last would keep its worker alone at the end. The rules
of the code, which one worker tests together, begin with that of references."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose tests wait among those that compute, the longest of both first: forks
    take files in this order, and a processor that one of them leaves alone is another's."""
    files, places = list(dict.fromkeys(item.path for item in items)), {}
    waiting = [file for file in files if not {*WAITING}.isdisjoint(file.parts)]
    for part in (waiting, [file for file in files if file not in set(waiting)]):
        part.sort(key=lambda file: file.name not in LONG)
        places.update({file: (at + 0.5) / len(part) for at, file in enumerate(part)})
    items.sort(key=lambda item: places[item.path])


MANY = 5000
"""Tests, of which some import the models of transformers, and with them half of torch."""


def pytest_collection() -> None:
    gc.disable()  # what is collected stays: looking through it takes a fifth of the time


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.forks and len(session.items) > MANY:
        importlib.import_module("transformers.models.llama.modeling_llama")
    gc.enable()
    gc.collect()
    gc.freeze()  # ten thousand tests, and torch: nobody throws them away
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        spare_repetitions()


@pytest.fixture(autouse=True, scope="session")
def _forked_engines() -> Iterator[None]:
    """Engines of tests are forked off a process that has imported all that they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "start_launcher", helpers_zygote.launcher)
        yield


@pytest.fixture
def real_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and command lines start from scratch, as elsewhere."""
    monkeypatch.setattr(engine, "start_launcher", _start_launcher)
    monkeypatch.setattr("helpers_cli.Cli.forked", False)
    monkeypatch.setattr("helpers_runtime.LauncherProcess.forked", False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Also after a test that opened a device, which takes all of them."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def all_threads() -> None:
    """For kernels that share out their work themselves."""
    torch.set_num_threads(THREADS)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not look at how many drafts were accepted, nor for rows of padding."""
    monkeypatch.setattr("actorium.kernels.reference.window.most_accepted",
                        lambda accepted, most: most)
    monkeypatch.setattr("actorium.kernels.reference.state_rows.all_real", lambda rows: False)
