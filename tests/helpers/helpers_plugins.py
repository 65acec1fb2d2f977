"""Installed packages with plug-ins, without installing any: metadata and modules in a folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

from helpers_code_facts import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "plugin"
"""The example of docs/plugins.md."""


def write_package(folder: Path, name: str, groups: dict[str, dict[str, str]],
                  version: str = "1.0") -> None:
    """Writes a package's metadata, as an installer does. groups: of entry points, name -> target.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in points.items())
        for group, points in groups.items()))


def write_example(folder: Path) -> None:
    """Makes the example visible by `folder` on sys.path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    write_package(folder, project["name"], project["entry-points"], project["version"])
    (folder / "actorium_example").symlink_to(EXAMPLE / "actorium_example")
