"""CHANGELOG.md has the form of Keep a Changelog; its newest release is the package's version."""

from __future__ import annotations

import re
import subprocess
from datetime import date

from helpers_code_facts import ROOT

import actorium

TEXT = (ROOT / "CHANGELOG.md").read_text()
RELEASE = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def faults(text: str) -> list[str]:
    """What is not as keepachangelog.com has it."""
    headings = re.findall(r"^(#+) (.*)$", text, re.M)
    titles = [title for level, title in headings if level == "#"]
    releases = [title for level, title in headings if level == "##"]
    found = [] if titles == ["Changelog"] else [f"title {titles}"]
    found += [] if releases[:1] == ["[Unreleased]"] else ["no [Unreleased] at the top"]
    matches = [RELEASE.fullmatch(title) for title in releases[1:]]
    found += [f"release {title!r}" for title, match in
              zip(releases[1:], matches, strict=True) if match is None]
    numbers = [tuple(map(int, match.groups()[:3])) for match in matches if match is not None]
    days = [date.fromisoformat(match[4]) for match in matches if match is not None]
    found += [] if numbers == sorted(numbers, reverse=True) else ["not newest first"]
    found += [] if days == sorted(days, reverse=True) else ["days not newest first"]
    for part in re.split(r"^## .*\n", text, flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)$", part, re.M)
        found += [f"kind {kind!r}" for kind in kinds if kind not in KINDS]
        found += [] if len(kinds) == len({*kinds}) else [f"twice: {kinds}"]
    return found


def test_its_form() -> None:
    assert faults(TEXT) == []


def test_other_forms_are_found() -> None:
    good = "# Changelog\n\n## [Unreleased]\n\n### Added\n- x\n\n## [1.0.0] - 2026-01-02\n"
    assert faults(good) == []
    for old, new in (("# Changelog", "# Changes"), ("[Unreleased]", "Unreleased"),
                     ("Added", "New"), ("[1.0.0]", "1.0.0"), ("2026-01-02", "January"),
                     ("- x", "### Added")):
        assert len(faults(good.replace(old, new, 1))) == 1, new


def test_the_newest_release_is_the_version() -> None:
    release = RELEASE.search(TEXT)
    assert release is not None
    assert ".".join(release.groups()[:3]) == actorium.__version__
    wheels = re.findall(r"actorium_llm-(.+?)-py3", (ROOT / "docs/install.md").read_text())
    assert {*wheels} == {actorium.__version__}


def test_a_tag_is_the_version() -> None:
    """Where one stands at this commit."""
    done = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, text=True,
                          capture_output=True)
    assert set(done.stdout.split()) <= {f"v{actorium.__version__}"}
