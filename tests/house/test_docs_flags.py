"""README.md and docs/ name flags that exist: a reader pastes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from helpers_benchmarks import benchmark
from msgspec import Struct

from actorium.tools import cli
from actorium.tools.cli.flags import command_flags
from actorium.tools.cli.translate import foreign_flags_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
ARGPARSE = re.compile(r"""add_argument\(\s*["'](--[\w-]+)["']""")
COMMON = {"--help", "--version", "--config"}
"""Of every command."""
PLACEHOLDERS = {"--X", "--no-X", "--enable-X", "--disable-X", "--no-enable-X", "--no-disable-X",
                "--flag"}
"""They stand for any switch, or any flag."""
OTHERS = {"curl": {"--unix-socket", "--fail", "--silent", "--retry", "--retry-delay",
                   "--retry-connrefused"},
          "docker": {"--build", "--build-arg", "--read-only", "--tmpfs", "--gpus", "--shm-size"},
          "llama-server": {"--temp"}, "pip": {"--no-deps", "--index-url"},
          "pyright": {"--verifytypes"}, "systemctl": {"--now"}}
"""Of other programs that the documents speak of."""


def options() -> Iterator[type[Struct]]:
    """What every command has beside the configuration."""
    for file in sorted(Path(cli.__file__).parent.glob("*.py")):
        module = import_module(f"{cli.__name__}.{file.stem}") if file.stem != "__main__" else cli
        for name, found in vars(module).items():
            if name.endswith("Options") and isinstance(found, type) and issubclass(found, Struct):
                yield found


@cache
def known_flags(foreign: bool) -> set[str]:
    """Every word that some command takes, or a script of this repository. foreign: also those of
    other engines' flags which change nothing, or are refused."""
    names = {name for kind in options() for flag in command_flags(kind)
             for name, _ in flag.spellings}
    if foreign:
        names |= set(foreign_flags_table())
    scripts = {flag for folder in ("benchmarks", "tools", "tests")
               for file in (ROOT / folder).rglob("*.py")
               for flag in ARGPARSE.findall(file.read_text())}
    scenarios = {flag for _, parts in benchmark("harness").all_scenarios().values()
                 for part in parts for flag in part.flags}
    return {f"--{name}" for name in names} | scripts | scenarios | COMMON


def unknown_flags(text: str, known: set[str]) -> list[str]:
    """Those that a text names and nobody takes."""
    return sorted(set(FLAG.findall(text)) - known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_flag_that_a_document_names_exists(document: Path) -> None:
    known = known_flags(foreign=document.name == "cli.md" or document.name.startswith("from-"))
    others = set().union(*OTHERS.values()) | PLACEHOLDERS
    assert set(unknown_flags(document.read_text(), known)) <= others


def test_an_unknown_flag_is_found() -> None:
    text = "`--max-num-seqs 4 --max-num-sequences=4`, --no-overlap; --grammar-backend a-- --- b"
    found = unknown_flags(text, known_flags(foreign=False))
    assert found == ["--grammar-backend", "--max-num-sequences"]
    assert unknown_flags(text, known_flags(foreign=True)) == ["--max-num-sequences"]
    assert len(list(options())) > 10


def test_no_exception_is_left_over() -> None:
    known = known_flags(foreign=True)
    named = set().union(*(unknown_flags(file.read_text(), known) for file in DOCUMENTS))
    assert named == set().union(*OTHERS.values()) | PLACEHOLDERS
