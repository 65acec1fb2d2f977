"""Every command line of actorium in README.md and docs/ is one that it takes, and a mark says
whether tests run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers_code_facts import ROOT
from helpers_documents import MARKS, PAGES, SHELLS, blocks, commands, commands_of, indented

from actorium.actors.errors import BadConfig
from actorium.tools import cli
from actorium.tools.cli import bench_command, upgrade_command
from actorium.tools.cli.command_line import parse

MODULES = [*sorted({module for module, _ in cli.COMMANDS.values() if module})]
OTHERS = ("bench_serve", "bench_offline", "cluster_nodes")
"""Modules that read the words of a command's second word."""
FORM = re.compile(r"\[[A-Z]|^COMMAND")
"""In a line that shows a form, as `serve MODEL [FLAGS]`."""


class WordsRead(Exception):
    """The words of a command were all taken; nothing of it is run."""


def then_stop(reader: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **options: Any) -> Any:
        reader(*args, **{name: value for name, value in options.items() if name != "checks"})
        raise WordsRead

    return read


@pytest.fixture
def reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop when they have read their words."""
    for name in [*(f"{module}_command" for module in MODULES), *OTHERS]:
        module = import_module(f"{cli.__name__}.{name}")
        if hasattr(module, "parse"):
            monkeypatch.setattr(module, "parse", then_stop(parse))
    monkeypatch.setattr(upgrade_command, "_other_python", lambda words: (None, words))
    comparing = bench_command._CompareParser
    monkeypatch.setattr(comparing, "parse_intermixed_args", then_stop(
        comparing.parse_intermixed_args))


def read(words: list[str]) -> None:
    """Raises `BadConfig` for a command or a flag that there is not."""
    with pytest.raises((WordsRead, SystemExit)):
        cli._command(words[0])(words[0], words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_command_lines_are_taken(page: Path, reads_alone: None) -> None:
    for words in commands_of(page):
        if not FORM.search(" ".join(words)):
            read(words)


def test_a_command_line_that_is_not_taken_is_seen(reads_alone: None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n    actorium ps\n    actorium serve M --port 1 \\\n"
                    "        --nonsense\n\n"
                    "```sh run\nactorium stop mine; actorium plan --tp=2 > out\n```\n")
    found = list(commands_of(page))
    assert found == [["stop", "mine"], ["plan", "--tp=2"], ["ps"],
                     ["serve", "M", "--port", "1", "--nonsense"]]
    for words in found[:3]:
        read(words)
    with pytest.raises(BadConfig, match="--nonsense"):
        read(found[3])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_shell_block_has_a_mark(page: Path) -> None:
    shells = [block for block in blocks(page) if block.language in SHELLS]
    assert [block for block in shells if not MARKS.fullmatch(f" {block.mark}")] == []
    if page.parent == ROOT / "docs":  # blocks without a language, and indented ones, have no mark
        assert "\n\n```\n" not in page.read_text()
        assert list(commands(*indented(page))) == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "tools/docs/mkdocs.yml").read_text()
    named = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *PAGES]}
    assert sorted(named) == sorted(pages | {"benchmarks/README.md"})


def test_commands_are_found() -> None:
    assert sum(len(list(commands_of(page))) for page in PAGES) > 60
    assert sum(block.mark == "run" for page in PAGES for block in blocks(page)) > 10
