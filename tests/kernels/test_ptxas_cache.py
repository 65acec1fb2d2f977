"""Triton's cache that is filled here for a device that is not: benchmarks/ptxas_cache.py."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark
from helpers_compile import alone

pytest.importorskip("triton")


def filled(folder: Path, scratch: Path, *arguments: str, only: str = "^gdn: step, 1 x 16/16"
           ) -> list[str]:
    """What the script says of some rows of the tables. Fails where one cannot be walked."""
    return alone([str(BENCHMARKS / "ptxas_cache.py"), str(folder), "--only", only, *arguments],
                 scratch, 300).splitlines()


def test_keys_are_those_of_the_devices_wheel(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the library's bytes are others."""
    from triton.runtime import cache

    library, own = tmp_path / "triton" / "_C" / "libtriton.so", cache.triton_key()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"of another Python")
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)
    benchmark("ptxas_cache").keyed_for(tmp_path)
    pairs = zip(own.split("-"), cache.triton_key().split("-"), strict=True)
    assert [b for a, b in pairs if a != b] == [hashlib.sha256(b"of another Python").hexdigest()]


@pytest.mark.slow
def test_a_carried_cache_serves_wherever_it_lies(tmp_path: Path) -> None:
    archive, there = tmp_path / "kernels.tar.gz", tmp_path / "there"
    said = filled(tmp_path / "here", tmp_path, "--archive", str(archive), "--threads", "1")
    assert said[-2:] == ["2 kernels were missing", f"2 kernels packed, 0.0 MiB: {archive.name}"]
    (tmp_path / "here").rename(tmp_path / "gone")
    subprocess.run([sys.executable, BENCHMARKS / "gpucheck" / "cache.py", "unpack", archive, there],
                   check=True)
    assert filled(there, tmp_path)[-1] == "0 kernels were missing"
    assert filled(there, tmp_path, "--count")[0].endswith("2 kernels so far")


@pytest.mark.slow
def test_weights_that_carry_their_format_are_walked(tmp_path: Path) -> None:
    """Their kernels follow from bytes of the weight, while all that torch computes is zeros."""
    said = filled(tmp_path, tmp_path, "--count",
                  only="codes: (int4, groups of 32 with mins|int8, a scale a row), 1 rows")
    assert [line.rpartition(": ")[2] for line in said[:2]] == [
        "1 kernels so far", "3 kernels so far"]


def test_the_script_of_the_device_takes_what_was_carried() -> None:
    """Where nothing else is named."""
    tools: Any = BENCHMARKS.parent / "tools"
    archive = ".whl/triton-cache.tar.gz"
    assert archive.split("/")[1] in (tools / "gpu_wheels.sh").read_text()
    assert f"[ -f {archive} ] && cache={archive}" in (tools / "gpu_check.sh").read_text()
