"""`--help`: flags by section, each with all its names, its text and its default."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import INVERSES
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.flags import Flag, shown_flags

INDENT = " " * 8
ORDER = (
    "Every setting may also stand in a TOML file (--config FILE, sections as below) or in an "
    "ACTORIUM_<NAME> variable; flags win over variables, variables over the file. Numbers take "
    "the suffixes k, m and g (32k = 32768). A switch X is written --X or --enable-X, and --no-X or "
    "--disable-X. Flags of vLLM and SGLang that have no meaning here are taken with a line that "
    "says so (docs/cli.md).")


def print_help(prog: str, options: type[Struct], about: str, what: str) -> NoReturn:
    """Print the flags of a command and exit 0. what: "" or all, a section, or a part of a flag's
    name. Raises `BadConfig` if nothing is called so."""
    flags = shown_flags(options)
    width = min(100, max(60, shutil.get_terminal_size().columns))
    parts = sections(prog.split()[1].replace("-", "_"), options)
    if what in ("", "all"):
        names = ", ".join(parts)
        intro = [f"usage: {prog} [FLAGS]", "", *_wrapped(about, width), "", *_wrapped(ORDER, width),
                 "", *_wrapped(f"--help=WORD shows a section ({names}) or the flags with that word "
                               "in their names.", width)]
        print("\n".join(intro + [line for name, kind in parts.items()
                                 for line in _section(name, kind, flags, width)]))
    elif what in parts:
        print("\n".join(_section(what, parts[what], flags, width)).strip())
    else:
        _show_some(what, flags, width)
    raise SystemExit(0)


def _show_some(what: str, flags: list[Flag], width: int) -> None:
    word = what.lstrip("-").replace("_", "-")
    found = [flag for flag in flags if any(word in name for name, _ in flag.spellings)]
    if not found:
        raise BadConfig(f"--help: no section and no flag is called {what!r}", "help")
    for flag in found:
        print("\n".join(_lines(flag, field_docs(flag.owner), width)))


def sections(name: str, options: type[Struct]) -> dict[str, type[Struct]]:
    """Section -> class, the command's own options first."""
    own = {name: options} if msgspec.structs.fields(options) else {}
    return own | {section.name: section.type for section in msgspec.structs.fields(Config)}


def _section(name: str, kind: type[Struct], flags: list[Flag], width: int) -> list[str]:
    docs = field_docs(kind)
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    lines = ["", *_wrapped(f"[{name}] {about}", width)]
    for flag in flags:
        if flag.owner is kind:
            lines += _lines(flag, docs, width)
    return lines


def _lines(flag: Flag, docs: dict[str, str], width: int) -> list[str]:
    """The names of a flag with its default, and its text below."""
    heads = textwrap.wrap(f"{', '.join(shown_names(flag))} {metavar(flag)}".rstrip()
                          + f"  [{shown_default(flag)}]", width - 2, subsequent_indent=INDENT,
                          break_on_hyphens=False, break_long_words=False)
    text = docs.get(flag.dest, "")
    return [f"  {line}" for line in heads] + textwrap.wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)


def shown_names(flag: Flag) -> list[str]:
    """Its names: of a switch those that turn it the other way than its default, since these are
    what anybody writes, behind the chief one."""
    if flag.kind is not bool:
        return [f"--{name}" for name in flag.names]
    if not flag.default:
        return [f"--{flag.names[0]}", *(f"--enable-{name}" for name in flag.names[1:]),
                *(f"--disable-{name}" for name, dest in INVERSES.items() if dest == flag.dest)]
    return [f"--no-{flag.names[0]}", *(f"--disable-{name}" for name in flag.names[1:]),
            f"--{flag.names[0]}", *(f"--enable-{name}" for name in flag.names[1:])]


def metavar(flag: Flag) -> str:
    if flag.kind is bool:
        return ""
    words: dict[Any, str] = {settings.Table: "NAME=NUMBER,...", settings.JsonObject: "JSON"}
    word = words.get(flag.kind) or flag.kind.__name__.upper()
    return f"{word} [{word} ...]" if flag.many else word


def shown_default(flag: Flag) -> str:
    if flag.kind is bool:
        return "on" if flag.default else "off"
    empty: tuple[Any, ...] = (None, (), {}, "")
    if flag.default in empty:
        return "none"
    if flag.kind is int and flag.default and flag.default % (1 << 20) == 0:
        return f"{flag.default >> 20}m"
    return str(flag.default)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def field_docs(kind: type) -> dict[str, str]:
    """The strings under the fields of a class and of those that it extends, from their sources."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            docs |= _own_docs(base)
    return docs


def _own_docs(kind: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(kind)).body[0]
    docs: dict[str, str] = {}
    name = ""
    for node in getattr(body, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = ""
    return docs
