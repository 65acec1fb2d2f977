"""The flags of a command: its own options and the whole configuration tree, as one declaration.

`command_line` parses them, `flag_help` and `flag_docs` show them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import OF_TESTS, flag_names, spellings
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig

JOINED = ("graph_batch_sizes", "graph_token_counts", "cors_origins", "plugins")
"""Texts with commas, which other engines write as several words or as a JSON list."""


class NoOptions(Struct, frozen=True):
    """A command without options of its own."""


class Flag(NamedTuple):
    dest: str
    """Field that it sets."""
    kind: type
    optional: bool
    many: bool
    """Takes one or more values, and may be repeated."""
    names: tuple[str, ...]
    """Without the dashes, the chief one first."""
    owner: type[Struct]
    """The section of the configuration tree that holds it, or the command's options."""
    default: Any

    @property
    def joined(self) -> bool:
        """Its value is a text with commas, which may be several words."""
        return self.dest in JOINED

    @property
    def spellings(self) -> list[tuple[str, bool]]:
        """Every word that sets it, and whether that means the opposite."""
        return spellings(self.dest, self.kind is bool, self.names)


def shown_flags(options: type[Struct]) -> list[Flag]:
    """Those of a command that users see in its help and in docs/cli.md."""
    return [flag for flag in command_flags(options) if flag.dest not in OF_TESTS]


def command_flags(options: type[Struct]) -> list[Flag]:
    """Every flag of a command with these options; an option hides a setting of the same name.
    `ALIASES` of the options' class are further names of its flags, by field."""
    flags = [_option(options, field) for field in msgspec.structs.fields(options)]
    own = {flag.dest for flag in flags}
    sections = {section.name: section.type for section in msgspec.structs.fields(Config)}
    for field in settings.fields().values():
        if field.name not in own:
            owner = sections[field.section]
            default = getattr(owner(), field.name)
            many = field.kind == settings.Names
            flags.append(Flag(field.name, str if many else field.kind, field.optional, many,
                              field.names, owner, default))
    return flags


def _option(options: type[Struct], field: msgspec.structs.FieldInfo) -> Flag:
    kind, optional = settings.split_optional(field.type)
    many = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if many else kind
    default = () if many else field.default
    names = (*flag_names(field.name), *getattr(options, "ALIASES", {}).get(field.name, ()))
    return Flag(field.name, kind, optional, many, names, options, default)


def check_least(options: Struct, least: Mapping[str, int]) -> None:
    """Raises `BadConfig`, naming the flag, on an option below its least value; of a list, on one
    entry."""
    for name, low in least.items():
        value = getattr(options, name)
        if isinstance(value, list):
            value = min(value, default=None)
        if value is not None and value < low:
            raise BadConfig(f"--{name.replace('_', '-')}: must be at least {low}, got {value}",
                            name)
