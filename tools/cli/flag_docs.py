"""The tables of docs/cli.md, made from the configuration tree and the tables of foreign flags, that
of docs/tools.md, made from the formats of calls; and
what becomes of the flags of other engines that docs/from-*.md list.

    python -m actorium.tools.cli.flag_docs docs/cli.md docs/tools.md docs/from-*.md

writes them between the marks in these files; a test asks that they are there as they would be made.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from actorium.actors.config.call_format_names import ALIASES as CALL_FORMAT_ALIASES
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.parsers.call_formats import FORMATS
from actorium.tools.cli import foreign_flags
from actorium.tools.cli.command_line import parse, plain
from actorium.tools.cli.flag_help import field_docs, metavar, sections, shown_default, shown_names
from actorium.tools.cli.flags import Flag, command_flags, shown_flags
from actorium.tools.cli.foreign_flags import Group
from actorium.tools.cli.serve_command import ServeOptions

ROW = re.compile(r"^\| `(-[^`]+)` \|.*$", re.MULTILINE)
"""Of a table whose first column has a flag of another engine, with a value."""
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


def call_formats_table() -> str:
    """The formats of tool calls: names, models, and how a call begins."""
    lines = ["| `--tool-call-parser` | also accepted | models | calls begin with |",
             "|---|---|---|---|"]
    for name, row in FORMATS.items():
        others = " ".join(f"`{one}`" for one, own in CALL_FORMAT_ALIASES.items() if own == name)
        marks = " or ".join(f"`{mark.strip()}`" for mark in row.begins).replace("|", "\\|")
        lines.append(f"| `{name}` | {others} | {row.models} | {marks} |")
    return "\n".join(lines) + "\n"


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


def outcome(words: str) -> tuple[str, str]:
    """What `actorium serve` makes of a flag of another engine: (what it is here, why or for what).
    Raises `ValueError` for a flag that it does not know.

    >>> outcome("--disable-radix-cache")[0]
    'the same, or `--no-prefix-cache`'
    """
    try:
        parsed = parse("actorium serve [MODEL]", shlex.split(words), ServeOptions)
    except BadConfig as error:
        if "no such flag" in error.message:
            raise ValueError(error.message) from None
        return "refused", re.sub(r"^\S+: (not here: |must be \S+: )?| \(''\)|, got .*$", "",
                                 error.message)
    notes = [note.partition(" here: ")[2] or note for note in parsed.notes]
    ours = [_written(name, parsed.given[name].value) for name in parsed.given]
    if not ours:
        return ("no effect", notes[0]) if notes else ("the same", "")
    known = command_flags(ServeOptions)
    flag = words.split()[0]
    spelled = next((own for own in known if plain(flag) in dict(own.spellings)), None)
    if spelled is None:
        here = " ".join(f"`{word}`" for word in ours)
    else:
        main = ours[0].split()[0]
        here = "the same" if main == flag else f"the same, or `{main}`"
    owner = next(own.owner for own in known if own.dest == next(iter(parsed.given)))
    why = field_docs(owner)[next(iter(parsed.given))].partition(". ")[0].rstrip(".")
    return here, "; ".join([why, *notes])


def _written(field: str, value: object) -> str:
    """A setting as a flag."""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, int) and value and value % (1 << 30) == 0:
        value = f"{value >> 30}GiB"
    if isinstance(value, dict):
        value = f"'{json.dumps(value)}'"
    return f"--{name} {value}"


def with_outcomes(text: str) -> str:
    """A page with what becomes of each flag that stands in a table's first column."""
    return ROW.sub(lambda row: _row(f"`{row[1]}`", *outcome(row[1])), text)


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
    tables = {"call formats": call_formats_table} if BEGIN.format("call formats") in text else {
        "settings": settings_table, "accepted": accepted_table, "refused": refused_table}
    for name, table in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        old, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"no marks around {name}")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        change = with_outcomes if file.name.startswith("from-") else filled
        file.write_text(change(file.read_text()))
