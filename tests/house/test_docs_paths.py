"""Documents name files and folders that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers_code_facts import ROOT

DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"}
                   - {ROOT / "CHANGELOG.md"})  # which names what was there then
NAMED = re.compile(r"`((?:actors|gpu|kernels|tools|tests|benchmarks|docs)/[\w./-]*\w/?)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_and_files_exist(document: Path) -> None:
    named = NAMED.findall(document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_names_are_found() -> None:
    assert len(NAMED.findall((ROOT / "READING.md").read_text())) > 60
