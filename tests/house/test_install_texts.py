"""No text sends a reader to a package index for this project: nothing of it is published there, and
what is called `actorium` on PyPI is somebody else's. It is installed from a checkout."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from helpers_code_facts import ROOT

FOLDERS = ("actors", "gpu", "kernels", "tools", "docs", "tests", "benchmarks")
KINDS = (".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".html", ".js", ".mjs", ".json")
SENDS = re.compile(r"pip3? install (?:-\S+ )*['\"`]?actorium(?!_llm-[\w.-]+\.whl)"
                   r"|\bactorium(?:-llm)?\[")
"""By name, or by an extra of the name; a wheel's file is none."""
EXTRA = re.compile(r"pip install (?:-e )?['\"]?\.\[([\w,]+)\]")


def texts() -> Iterator[tuple[Path, str]]:
    """Every text of the project."""
    found = [path for path in ROOT.iterdir() if path.is_file() and
             (path.suffix in KINDS or path.name == "Makefile")]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS
                  and path.is_file() and "results" not in path.parts]
    yield from ((path, path.read_text(errors="replace")) for path in found
                if path != Path(__file__))


def test_no_text_installs_by_a_name_on_an_index() -> None:
    assert [f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts()
            for match in SENDS.finditer(text)] == []


def test_what_would_is_found() -> None:
    for text in ("`pip install actorium`", "pip install 'actorium[engine]'", "with actorium[video]",
                 "pip install --upgrade actorium-llm"):
        assert SENDS.search(text), text
    for text in ("pip install -e '.[engine]' in a checkout of actorium", "import actorium",
                 "pip install 'actorium_llm-0.1.0-py3-none-any.whl[engine]'"):
        assert not SENDS.search(text), text


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for _, text in texts() for match in EXTRA.finditer(text)
             for extra in match[1].split(",")}
    assert named and named <= set(project["optional-dependencies"])


def test_the_distribution_is_not_the_strangers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "actorium-llm" and set(project["scripts"]) == {"actorium"}
