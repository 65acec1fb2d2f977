"""Flags of other engines as they stand in a command line, and what they are translated to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config import sources as settings
from actorium.actors.config.sources import Setting
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.foreign_flags import Group

SWITCH, VALUE, LIST = "switch", "value", "list"


class Foreign(NamedTuple):
    """A flag that is no setting here."""

    arity: str
    """SWITCH, VALUE or LIST."""
    family: str
    """What treats it: "accepted", "refused", or a key of `translate.FAMILIES`."""
    group: Group | None = None
    off: bool = False
    """This form of a switch means the opposite of the one in the table."""


class ForeignWord(NamedTuple):
    """Such a flag as it stands in argv."""

    name: str
    """Less the dashes, and less what follows a dot."""
    key: str
    """What follows the dot in `--speculative-config.method`; "" without one."""
    origin: str
    values: list[str]
    off: bool
    flag: Foreign


class Family(NamedTuple):
    """Flags that mean something here; their names less the dashes, with spaces between."""

    treat: Callable[[list[ForeignWord], Translation], None]
    switches: str = ""
    valued: str = ""
    lists: str = ""


class Translation:
    """What the words come to."""

    def __init__(self, written: Mapping[str, str]) -> None:
        """written: field -> flag, of the settings' own flags."""
        self._written = written
        self.layer: dict[str, Setting] = {}
        self.notes: list[str] = []
        self.checks: list[Callable[[Config], None]] = []

    def has(self, field: str) -> bool:
        """Whether its own flag is there, or it was set before."""
        return field in self._written or field in self.layer

    def set(self, field: str, value: Any, origin: str) -> None:
        """Raises `BadConfig` where the field's own flag is there as well."""
        if field in self._written:
            raise BadConfig(f"{origin}: cannot be combined with {self._written[field]}", field)
        self.layer[field] = settings.setting(settings.fields()[field], value, origin)


def json_object(word: ForeignWord) -> dict[str, Any]:
    """Its last value. Raises `BadConfig`."""
    try:
        return msgspec.json.decode(word.values[-1], type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadConfig(f"{word.origin}: is not a JSON object: {error}", word.name) from None


def keys_of(words: Iterable[ForeignWord]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, its origin) of flags that take JSON objects, or one key behind a dot. Raises
    `BadConfig`."""
    for word in words:
        given = {word.key: word.values[-1]} if word.key else json_object(word)
        for key, value in given.items():
            yield key, value, word.origin if word.key else f"{word.origin} {key}"


def number_of(word: ForeignWord) -> int:
    """Its last value, at least 1. Raises `BadConfig`."""
    try:
        number = int(settings.coerce(int, word.values[-1]))
    except ValueError as error:
        raise BadConfig(f"{word.origin}: {error}", word.name) from None
    if number < 1:
        raise BadConfig(f"{word.origin}: must be at least 1, got {number}", word.name)
    return number
