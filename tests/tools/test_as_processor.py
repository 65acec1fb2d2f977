"""A command whose C kernels are another processor's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorium.tools import as_processor
from actorium.tools.as_processor import PROCESSORS, environment, missing

SCRIPT = Path(as_processor.__file__)
SHOWN = """
#ifdef EMULATED_TILES
#error the tiles are emulated
#endif
#ifdef __AVX2__
#error there is AVX2
#endif
"""


def said(words: list[str], folder: Path, name: str) -> str:
    """What the compiler that is found first says."""
    done = subprocess.run(["cc", *words, "-c", "-o", os.devnull, "-x", "c", "-"], input=SHOWN,
                          capture_output=True, text=True,
                          env=os.environ | environment(name, folder))
    return done.stderr


def test_its_compiler_builds_for_it(tmp_path: Path) -> None:
    assert "the tiles are emulated" in said(["-march=native"], tmp_path, "amx")
    assert "there is AVX2" in said(["-march=native"], tmp_path, "avx2")
    assert "emulated" not in said(["-march=native"], tmp_path, "avx2")


def test_other_words_stay_as_they_are(tmp_path: Path) -> None:
    assert said(["-march=x86-64"], tmp_path, "amx") == ""


def test_a_command_has_that_library(tmp_path: Path) -> None:
    if lacks := missing("avx2"):
        pytest.skip(f"this processor has no {lacks}")
    code = ("import shutil; from actorium.kernels.cpu.native_library import cache_folder;"
            "print(shutil.which('cc'), cache_folder())")
    done = subprocess.run([sys.executable, str(SCRIPT), "avx2", sys.executable, "-c", code],
                          capture_output=True, text=True, check=True)
    folder = as_processor.BUILDS.resolve() / "avx2"
    assert done.stdout.split() == [str(folder / "cc"), str(folder / "actorium")]


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "this", sys.executable, "-c", "exit(7)"])
    assert done.returncode == 7


def test_numbers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_processor, "missing", lambda name: "" if "avx" in name else "x")
    names = ["avx2", "avx_vnni", "avx512", "avx2"]
    assert [as_processor.by_turns(number) for number in range(4)] == names
    monkeypatch.setattr(as_processor, "missing", lambda name: "x")
    with pytest.raises(OSError, match="can be no other"):
        as_processor.by_turns(0)


@pytest.mark.parametrize("words", [[], ["amx"], ["vax", "true"]])
def test_bad_words_are_told(words: list[str]) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2 and f"NAME: {', '.join(PROCESSORS)}" in done.stderr


def test_what_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(as_processor, "missing", lambda name: "avx1024")
    monkeypatch.setattr(sys, "argv", ["as_processor.py", "amx", "true"])
    assert as_processor.main() == 2
    assert "amx cannot be had here: avx1024" in capsys.readouterr().err
