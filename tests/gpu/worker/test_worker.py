"""The worker's role adapter: phases, results in order, resets, and last words that are clear."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from helpers_models import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.config.validation import validate
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.messages import Admit, PageGroup, Ready, Reset, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.plan.sizes import (
    GroupPages,
    PageDemand,
    device_budget,
    page_table_width,
    pool_pages,
)
from actorium.gpu.worker.compute import ComputeThread
from actorium.gpu.worker.core import WorkerCore, build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5, max_position_embeddings=256, max_shard_size="100KB")
    return path


class Shell:
    """What the real shell does for the worker, less the sockets."""

    def __init__(self, model: Path | str, **parts: Any) -> None:
        parts.setdefault("device", DeviceConfig(device="cpu", threads=1))
        parts.setdefault("scheduler", SchedulerConfig(max_num_seqs=4))
        config = validate(Config(model=ModelConfig(model=str(model)), **parts))
        self.core: WorkerCore = build(Context(config, Path("/nowhere"), "worker-0", 3, 1))
        self.news = threading.Event()
        self.phases: list[tuple[str, str]] = []
        self.got: list[Any] = []

    def start(self) -> Shell:
        self.core.on_start(self._post)
        return self

    def _post(self) -> None:
        health = self.core.health()
        self.phases.append((health.phase, health.detail))
        self.news.set()

    def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        end = monotonic() + seconds
        while True:
            self.news.clear()
            for send in self.core.on_wake(monotonic()):
                assert send.to == "scheduler"
                self.got.append(send.message)
            if done():
                return
            assert self.news.wait(end - monotonic()), self.phases

    def ready(self) -> Ready:
        self.until(lambda: bool(self.got))
        ready = self.got.pop(0)
        assert isinstance(ready, Ready)
        return ready


def _i4(*values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()


def _plans(epoch: int, steps: int) -> list[StepPlan]:
    params = ResolvedParams(max_tokens=50, temperature=0.0)
    admit = [Admit(1, _i4(5, 6, 7), 3, 0, _i4(1, 2, 3, 4), params, 1)]
    return [StepPlan(epoch, 1, admit=admit, extend=_i4((1, 3))),
            *(StepPlan(epoch, n, decode=_i4(1)) for n in range(2, steps + 1))]


def test_loading_computing_and_resetting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: dict[str, set[str]] = {}

    def written(compute: ComputeThread, name: str, value: Any) -> None:
        writers.setdefault(name, set()).add(threading.current_thread().name)
        object.__setattr__(compute, name, value)

    shell = Shell(model, memory=MemoryConfig(max_total_tokens=700))
    monkeypatch.setattr(ComputeThread, "__setattr__", written)
    shell.start()
    ready = shell.ready()
    assert (ready.epoch, ready.page_size, ready.slots) == (3, 16, 5)
    assert ready.groups == [PageGroup(1 + 700 // 16, 0)]
    assert (ready.max_model_len, ready.vocab_size, ready.device) == (256, 199, "cpu")
    assert set(ready.load_seconds) == {"import", "load", "allocate", "warm up"}
    names = [phase for phase, _ in shell.phases]
    assert names == sorted(names, key=["loading", "warming", "ready"].index)
    assert sum("/" in detail for _, detail in shell.phases) >= 2  # "shard 1/3"
    shell.core.on_message(_plans(7, 1)[0], 0.0)  # of a scheduler that does not know us yet
    shell.core.on_message(Reset(7), 0.0)
    shell.until(lambda: shell.got == [ready])
    shell.got.clear()
    shell.core.on_message(Reset(7, worker=2), 0.0)  # meant for the worker before this one
    shell.core.on_message(_plans(7, 1)[0], 0.0)
    shell.core.on_message(Reset(7, worker=3), 0.0)
    for plan in _plans(7, 5):
        shell.core.on_message(plan, 0.0)
    shell.until(lambda: len(shell.got) == 5)
    results: list[StepResult] = shell.got
    assert [r.step for r in results] == [1, 2, 3, 4, 5]
    assert {r.epoch for r in results} == {7}
    assert all(r.busy_us > 0 for r in results)
    assert shell.core.health().phase == "idle"
    assert shell.core.health().step == 5
    shell.core.on_message(Reset(8, worker=3), 0.0)
    shell.core.on_message(Reset(7), 0.0)
    for plan in _plans(7, 2) + _plans(8, 5):  # what an older scheduler says is not heard
        shell.core.on_message(plan, 0.0)
    shell.until(lambda: len(shell.got) == 10)
    assert {r.epoch for r in results[5:]} == {8}
    assert [r.tokens for r in results[5:]] == [r.tokens for r in results[:5]]
    assert results[5].idle_us == 0
    shell.core.drain(0.0)
    assert shell.core.done
    assert {"steps", "plans_received", "phase"} <= writers.keys()
    assert all(len(threads) == 1 for threads in writers.values()), writers


@pytest.mark.parametrize(("change", "error", "message"), [
    ({}, BadModel, "no such directory"),
    ({"device": DeviceConfig(device="cuda")}, BadConfig, "cuda was asked for"),
])
def test_why_it_cannot_start(change: dict[str, Any], error: type[Exception],
                             message: str) -> None:
    import torch

    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    shell = Shell("/no/such/model", **change).start()
    with pytest.raises(error, match=message) as caught:
        shell.until(lambda: False)
    assert "\n" not in str(caught.value)


def test_memory_that_holds_no_page(model: Path) -> None:
    shell = Shell(model, memory=MemoryConfig(max_total_tokens=3)).start()
    with pytest.raises(BadConfig, match="max_total_tokens: 3 tokens are less than one page of 16"):
        shell.until(lambda: False)


def test_truncated_weights_are_named(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    shell = Shell(tmp_path).start()
    with pytest.raises(BadModel, match=shard.name):
        shell.until(lambda: False)


def test_a_step_that_fails_is_fatal(model: Path) -> None:
    shell = Shell(model).start()
    shell.ready()
    shell.core.on_message(Reset(1, worker=3), 0.0)
    shell.core.on_message(StepPlan(1, 1, extend=_i4((2, 1))), 0.0)
    with pytest.raises(ValueError, match="slot 2 cannot take 1 tokens: it is empty") as caught:
        shell.until(lambda: False)
    assert [frame.name for frame in caught.traceback][-1] == "_extends"


def test_importing_the_role_does_not_import_torch() -> None:
    code = ("import sys, actorium.gpu.worker.core\n"
            "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_page_arithmetic() -> None:
    assert page_table_width(100, 16) == 8
    full, sizes = [GroupPages(0, 1000)], PageDemand(16, 4, 100, 2048)
    assert pool_pages(full, sizes, 1 << 30) == [1 + 4 * 8]
    assert pool_pages(full, sizes, 21_999) == [21]
    assert pool_pages(full, sizes, 1 << 30, max_total_tokens=100) == [1 + 6]
    with pytest.raises(BadConfig, match="hold no page of 1,000 bytes"):
        pool_pages(full, sizes, 1999)
    assert device_budget(0.9, 1000, 300, 100) == 500


@pytest.mark.parametrize("first", [0, 1])
def test_pages_of_groups(first: int) -> None:
    """Four windowed layers for each one with full attention, in either order."""
    sizes = PageDemand(page_size=16, sequences=8, max_model_len=4000, chunk=100)
    need = 8 * (-(-50 // 16) + 2) + 7
    assert (sizes.table_width, sizes.for_one(0), sizes.for_all(0)) == (251, 251, 2008)
    assert (sizes.for_one(50), sizes.for_all(50)) == (11, need)

    def pages(budget: int, total: int | None = None) -> tuple[int, int]:
        groups = [GroupPages(50, 4000), GroupPages(0, 1000)]
        got = pool_pages(groups if first else groups[::-1], sizes, budget, total)
        return (got[1], got[0]) if first else (got[0], got[1])

    assert pages(1 << 30) == (1 + 2008, 1 + need)
    assert pages(1000 * (1 + 700) + 4000 * (1 + need)) == (1 + 700, 1 + need)
    assert pages(1000 * (1 + 700) + 4000 * (1 + need) - 1) == (1 + 699, 1 + need)
    assert pages(5000 * 11 + 4999) == (11, 11)  # neither can run out before the other
    assert pages(1 << 30, total=20 * 16) == (21, 21)
    with pytest.raises(BadConfig, match="hold no page of 5,000 bytes"):
        pages(9999)


def test_pages_where_every_layer_is_windowed() -> None:
    sizes = PageDemand(page_size=16, sequences=8, max_model_len=4000, chunk=100)
    windowed = [GroupPages(50, 1000)]
    assert pool_pages(windowed, sizes, 1 << 30) == [1 + sizes.for_all(50)]
    assert pool_pages(windowed, sizes, 20_000) == [20]
    assert pool_pages(windowed, sizes, 1 << 30, max_total_tokens=320) == [1 + 20]
    assert pool_pages(windowed, sizes, 1 << 30, max_total_tokens=16) == [1 + sizes.for_one(50)]
    assert pool_pages(windowed, sizes, 12_000) == [12]
    with pytest.raises(BadConfig, match="less than a window of 50 tokens and max_num_batched"):
        pool_pages(windowed, sizes, 11_999)
    assert sizes.for_one(3990) == sizes.table_width


@given(st.integers(1, 99), st.integers(1, 40), st.integers(1, 200), st.integers(0, 99),
       st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_windowed_pages_suffice(window: int, page_size: int, length: int, start: int,
                                chunks: list[int]) -> None:
    """What sequences in any place need is never more than what sizing reckons with."""
    sizes = PageDemand(page_size, len(chunks), 1000, sum(chunks))
    spans = [range(max(0, start + length * i - window + 1), start + length * i + chunk)
             for i, chunk in enumerate(chunks)]
    needed = [len({token // page_size for token in span}) for span in spans]
    assert sum(needed) <= sizes.for_all(window)
    assert max(needed) <= sizes.for_one(window)
