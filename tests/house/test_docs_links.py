"""Links between documents lead to files and headings that are there, on GitHub and on the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers_code_facts import ROOT

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")),
             ROOT / "benchmarks/README.md"]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|<)([^)\s]*)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def anchors(document: Path) -> frozenset[str]:
    """Those that GitHub gives the headings: lower case, spaces to dashes, without punctuation."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
                     for heading in plain)


def dead_links(document: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", document.read_text())):
        path, _, anchor = link.partition("#")
        target = document.parent.joinpath(path).resolve() if path else document
        if not target.exists() or anchor and anchor not in anchors(target):
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert list(dead_links(document)) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n\n[a](#one-two-three) [b](#four) [c](none.md) `[d](e.md)` "
                    "[f](https://g.example)\n\n```sh\n# four\n```\n")
    assert list(dead_links(page)) == ["#four", "none.md"]
    assert sum(len(LINK.findall(document.read_text())) for document in DOCUMENTS) > 300
