"""How the C library is kept: built once, in private, and never fatal. What is in it does not matter
here, so it is a stub, compiled in no time."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actorium.kernels.backends import select_ops
from actorium.kernels.cpu import native_library as native
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.tools.as_processor import BUILDS


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of all functions that there must be, none of which does anything."""
    if not isinstance(select_ops(torch.bfloat16, torch.device("cpu"), 64, native=True), NativeOps):
        pytest.skip("no C compiler, or torch with another OpenMP")
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "stub.c").write_text("".join([
        f"int actorium_version(void) {{ return {native.VERSION}; }}\n",
        *(f"void {name}(void) {{}}\n" for name in native.SIGNATURES)]))
    (folder / "pair_rate.c").write_text("double pair_rate(void) { return 2.0; }\n")
    monkeypatch.setattr(native, "SOURCES", folder)
    return folder


def fresh(cache: Path) -> ctypes.CDLL | None:
    """The library as a process has it that has never asked for it."""
    native._path.cache_clear()
    return native.library(cache)


def test_processes_without_a_compiler_keep_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh(tmp_path) is None


def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert fresh(tmp_path / "cache") is None
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("stub")
def test_library_is_built_once_and_is_private(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fresh(cache) is not None
    (built,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = built.stat().st_mtime_ns
    assert fresh(cache) is not None
    assert built.stat().st_mtime_ns == before


def test_another_source_is_another_library(stub: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fresh(cache) is not None
    with (stub / "stub.c").open("a") as source:
        source.write("void one_more(void) {}\n")
    assert fresh(cache) is not None
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(("rate", "slow"), [(0.5, 1), (2.0, 0)])
def test_it_is_built_after_what_the_processor_is_fast_at(
    rate: float, slow: int, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By a compiler that does not build for another processor (tools/as_processor.py).
    own = [folder for folder in os.environ["PATH"].split(os.pathsep)
           if not Path(folder).is_relative_to(BUILDS.resolve())]
    monkeypatch.setenv("PATH", os.pathsep.join(own))
    (stub / "pair_rate.c").write_text(f"double pair_rate(void) {{ return {rate}; }}\n")
    with (stub / "stub.c").open("a") as source:
        source.write("#ifdef SLOW_PAIRS\n#define SLOW 1\n#else\n#define SLOW 0\n#endif\n"
                     "int slow_pairs(void) { return SLOW; }\n")
    found = fresh(tmp_path / "cache")
    assert found is not None and found.slow_pairs() == slow


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or torch with another OpenMP")
def test_what_is_measured_is_a_rate(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or "gcc"
    rate = native._pair_rate([compiler, *native.FLAGS, *native.THIS_PROCESSOR], tmp_path)
    assert 0.1 < rate < 5


def test_a_library_of_another_version_is_not_used(stub: Path, tmp_path: Path) -> None:
    source = stub / "stub.c"
    source.write_text(source.read_text().replace(f"return {native.VERSION};", "return 0;"))
    assert fresh(tmp_path / "cache") is None


def test_a_damaged_library_in_the_cache_is_not_fatal(stub: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fresh(cache) is not None
    (built,) = cache.iterdir()
    code = ("import torch, pathlib, sys; from actorium.kernels.cpu import native_library as native;"
            "native.SOURCES = pathlib.Path(sys.argv[2]);"
            "print(native.library(pathlib.Path(sys.argv[1])) is None)")
    built.unlink()  # it is mapped here: cut short in place, it would take this process along
    built.write_bytes(b"not a library")
    out = subprocess.run([sys.executable, "-c", code, str(cache), str(stub)], capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": ""})
    assert out.stdout.strip() == "True", out.stderr


def test_whether_it_is_built_is_known_without_building_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "c_compiler", lambda: "/usr/bin/a-compiler")
    assert not native.is_built() and list(tmp_path.iterdir()) == []
    where = native._library_file("/usr/bin/a-compiler", native.cache_folder(),
                                 (*native.FLAGS, *native.THIS_PROCESSOR))
    where.parent.mkdir()
    where.touch()
    assert native.is_built()
    monkeypatch.setattr(native, "c_compiler", lambda: None)
    assert not native.is_built()
