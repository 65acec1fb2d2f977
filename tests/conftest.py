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

import faulthandler
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import helpers_timeouts
import helpers_zygote
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from helpers_interpreter import spare_repetitions
from helpers_skips import SkipReport
from hypothesis import settings

from actorium.actors.launcher import engine

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
    config.pluginmanager.register(helpers_timeouts, "timeouts")
    if not hasattr(config, "workerinput"):
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
    """Spread the files whose tests wait among those that compute, the longest of both first: xdist
    hands files out in this order, and a processor that one worker leaves alone is another's."""
    files, places = list(dict.fromkeys(item.path for item in items)), {}
    waiting = [file for file in files if not {*WAITING}.isdisjoint(file.parts)]
    for part in (waiting, [file for file in files if file not in set(waiting)]):
        part.sort(key=lambda file: file.name not in LONG)
        places.update({file: (at + 0.5) / len(part) for at, file in enumerate(part)})
    items.sort(key=lambda item: places[item.path])


BEYOND_TIMEOUT_S = 60.0
"""How long after its timeout a test's process is ended."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[object]:
    """pytest-timeout raises in the main thread, which does nothing to a test that waits in C or
    catches all exceptions: its process then writes all threads' stacks and ends, and pytest-xdist
    reports the test."""
    faulthandler.dump_traceback_later(settings.timeout + BEYOND_TIMEOUT_S, exit=True,
                                      file=item.config.stash[fault_handler_stderr_fd_key])
    return (yield)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Iterator[object]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(optionalhook=True)  # a GPU machine may have no xdist, and its tests want none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from helpers_scheduling import FilesOrRooms

    return FilesOrRooms(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection(session: pytest.Session) -> None:
    """Of several workers each begins with files of its own: rewriting a file's assertions takes
    half of the time of collecting it, and is kept on the disk for those who come to it later."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # what is collected stays: looking through it takes a fifth of the time
    tests, count = Path(__file__).parent, worker["workercount"]
    files = sorted(file for file in tests.rglob("test_*.py") if "conformance" not in file.parts)
    for file in files[int(worker["workerid"].removeprefix("gw"))::count]:
        sys.path.insert(0, str(file.parent))
        with suppress(Exception, pytest.skip.Exception):  # collecting it says so
            importlib.import_module(file.stem)
        sys.path.remove(str(file.parent))


def pytest_collection_finish() -> None:
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest adds a handler to each that does not, six times a test
    gc.enable()
    gc.collect()
    gc.freeze()  # ten thousand tests, and torch: nobody throws them away
    gc.set_threshold(20_000, 10, 10)  # a look after each 700 objects took 3 % of the time
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
