"""The tables of docs/cli.md, made from the configuration tree and the tables of foreign flags.

    python -m actorium.tools.cli.flag_docs docs/cli.md

writes them between the marks in that file; a test asks that they are there as they would be made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from actorium.tools.cli import foreign_flags
from actorium.tools.cli.flag_help import field_docs, metavar, sections, shown_default, shown_names
from actorium.tools.cli.flags import Flag, command_flags, shown_flags
from actorium.tools.cli.foreign_flags import Group
from actorium.tools.cli.serve_command import ServeOptions

BEGIN, END = "<!-- {}: made by tools/cli/flag_docs.py -->\n", "<!-- end of {} -->\n"


def settings_table() -> str:
    """Every flag of `actorium serve` that is for users, by section."""
    flags = shown_flags(ServeOptions)
    parts: list[str] = []
    for name, kind in sections("serve", ServeOptions).items():
        docs = field_docs(kind)
        rows = [_row(_names(flag), shown_default(flag), docs.get(flag.dest, ""))
                for flag in flags if flag.owner is kind]
        about = " ".join((kind.__doc__ or "").split())
        parts.append("\n".join([f"### {name}", "", about, "", "| flag | default | |",
                                "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def accepted_table() -> str:
    own = {name for flag in command_flags(ServeOptions) for name, _ in flag.spellings}
    return _groups("changes nothing, since", foreign_flags.ACCEPTED, own)


def refused_table() -> str:
    return _groups("refused, since", foreign_flags.REFUSED, set())


def _groups(title: str, groups: Iterable[Group], own: set[str]) -> str:
    lines = [f"| {title} | flags |", "|---|---|"]
    for group in groups:
        names = [name for part in (group.switches, group.valued, group.lists)
                 for name in part.split() if name not in own]
        unless = f" (not with `{'`, `'.join(group.unless.split())}`)" if group.unless else ""
        if names:
            flags = " ".join(f"`--{name}`" for name in names)
            lines.append(f"| {_escaped(group.reason)} | {flags}{unless} |")
    return "\n".join(lines) + "\n"


def _names(flag: Flag) -> str:
    names = " ".join(f"`{name}`" for name in shown_names(flag))
    word = metavar(flag)
    return f"{names} {word}" if word else names


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def filled(text: str) -> str:
    """The document with its tables as they are now. Raises `ValueError` if a mark is missing."""
    for name, table in (("settings", settings_table), ("accepted", accepted_table),
                        ("refused", refused_table)):
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        old, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"no marks around {name}")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(filled(file.read_text()))
