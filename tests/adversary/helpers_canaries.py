"""Words that are nowhere but where a test has put them, and the places where they could turn up."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

SAID = {name: f"xyzzy{name}9c{number}" for number, name in enumerate((
    "prompt", "output", "system", "tool", "toolargument", "stop", "user", "schema", "property",
    "regex", "idempotency", "salt", "template", "metadata", "field", "value", "query", "badjson",
    "hidden", "poison", "suffix", "model", "header", "wrongkey"))}
"""What callers send and are told."""
KEYS = {name: f"sk-xyzzy-{name}-4f8a" for name in ("flag", "admin", "filed", "toml")}
HUB_TOKENS = {"HF_TOKEN": "hf_xyzzyhub51d", "HUGGING_FACE_HUB_TOKEN": "hf_xyzzyold51d"}


def files_under(base: Path) -> list[tuple[str, bytes]]:
    """Every file below a directory, archives unpacked as well."""
    found = []
    for path in sorted(base.rglob("*")):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            found.append((str(path.relative_to(base)), data))
            if path.name.endswith(".tar.gz"):
                found += [(f"{path.name}!{name}", inner) for name, inner in _unpacked(data)]
    return found


def _unpacked(data: bytes) -> Iterable[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def leaks(places: Iterable[tuple[str, bytes]], words: Mapping[str, str]) -> list[str]:
    """Which words stand where."""
    return [f"{name} in {where}" for where, data in places for name, word in words.items()
            if word.encode() in data]


def loose(base: Path) -> list[str]:
    """What under a directory, itself as well, other users could read, were they let in."""
    found = []
    for path in [base, *base.rglob("*")]:
        info = path.lstat()
        if not stat.S_ISLNK(info.st_mode) and info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            found.append(f"{path.relative_to(base.parent)} {stat.filemode(info.st_mode)}")
    return found


def processes_below(pid: int) -> list[tuple[str, bytes]]:
    """What any user can read of a process and of all that it has started: their command lines and
    names; and, as environ, what their own user can."""
    family = {pid}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                rest = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(rest[1])
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    found = []
    for one in sorted(family):
        for what in ("cmdline", "comm", "environ"):
            try:
                data = Path(f"/proc/{one}/{what}").read_bytes()
            except OSError:
                continue
            kind = "launcher" if one == pid else "child"
            found.append((f"{what} of the {kind} {one} {os.path.basename(_name(one))}", data))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return "?"
