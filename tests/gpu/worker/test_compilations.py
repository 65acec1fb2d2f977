"""Kernels that are compiled while requests are served are counted, and named in the log."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_compile import compiled

from actorium.gpu.worker.compilations import Compilations

CODE = """
import logging
import torch
from actorium.gpu.worker.compilations import Compilations
from actorium.kernels.triton.norm import rms_norm

logging.basicConfig(level=logging.WARNING, format="%(message)s")
x, weight = torch.zeros(4, 32), torch.zeros(32)
rms_norm(x, weight, 1e-5)
own = Compilations()
own.watch()
rms_norm(x[:2], weight, 1e-5)
assert own.count == 0, "this form was there before"
rms_norm(x.half(), weight, 1e-5)
rms_norm(x.half(), weight, 1e-5)
assert own.count == 1
rms_norm(torch.zeros(4, 64), torch.zeros(64), 1e-5)
assert own.count == 2
print("counted")
"""


@pytest.mark.slow
def test_triton_compilations_after_ready_are_counted(tmp_path: Path) -> None:
    """By Triton's own compiler, for a device that is not there; what is in its cache on disk counts
    as well, since it holds up a step too."""
    pytest.importorskip("triton")
    for _ in range(2):
        assert "counted" in compiled(CODE, tmp_path)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's hooks."""
    knobs = pytest.importorskip("triton").knobs.runtime
    monkeypatch.setattr(knobs, "jit_cache_hook", None)
    monkeypatch.setattr(knobs, "jit_post_compile_hook", None)
    return knobs


def compile_once(runtime: Any, skip: bool = False) -> Any:
    """As `JITFunction._do_compile` calls the hooks."""
    kernel = SimpleNamespace(arg_names=["x", "rows", "BLOCK"])
    given = {"key": "k", "repr": "", "fn": SimpleNamespace(module="m", name="_kernel",
                                                           jit_function=kernel),
             "compile": {"constants": {(2,): 64, (1,): 1}}, "is_manual_warmup": False,
             "already_compiled": False}
    if runtime.jit_cache_hook(**given):
        return "skipped"
    return runtime.jit_post_compile_hook(**given)


def test_the_log_names_the_kernel_and_its_form(runtime: Any,
                                               caplog: pytest.LogCaptureFixture) -> None:
    own = Compilations()
    own.watch()
    with caplog.at_level(logging.WARNING):
        assert compile_once(runtime) is None
    assert own.count == 1
    assert "m._kernel(BLOCK=64, rows=1), " in caplog.text and "gap in the warm-up" in caplog.text


def test_hooks_of_others_stay(runtime: Any) -> None:
    calls: list[str] = []
    runtime.jit_cache_hook = lambda **given: calls.append(given["key"]) or given["key"] == "no"
    runtime.jit_post_compile_hook = lambda **given: calls.append("done")
    own = Compilations()
    own.watch()
    assert compile_once(runtime) is None and calls == ["k", "done"]
    runtime.jit_cache_hook(key="no")
    assert runtime.jit_cache_hook(key="no") is True and own.count == 1


def test_a_cpus_worker_does_not_import_triton_for_it() -> None:
    code = ("import sys\nfrom actorium.gpu.worker.compilations import Compilations\n"
            "Compilations().watch()\nassert 'triton' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
