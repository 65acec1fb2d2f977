"""Flags of every command: its own options plus the whole configuration tree.

`scan` finds what was written: our flags under all their names, and those of other engines, which
`translate` understands. Every error is one line about the words that the user typed. Nothing but
the standard library and msgspec is imported: this is on the way to the first token.
"""

from __future__ import annotations

import contextlib
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import SHORT, flag_names, spellings
from actorium.actors.config.tree import SECRETS, Config
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.console import print_notice
from actorium.actors.runtime.process import hide_arguments
from actorium.tools.cli.foreign_flags import VALUES
from actorium.tools.cli.translate import (
    LIST,
    SWITCH,
    Foreign,
    ForeignWord,
    foreign_flags_table,
    translate,
)

Options = TypeVar("Options", bound=Struct)
JOINED = ("graph_batch_sizes", "graph_token_counts", "cors_origins")
"""Texts with commas, which others write as several words or as a JSON list."""


class NoOptions(Struct, frozen=True):
    """A command without options of its own."""


class Flag(NamedTuple):
    """One flag of a command."""

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


class Word(NamedTuple):
    """One flag as it stands in argv."""

    flag: Flag
    origin: str
    values: list[str]
    """Empty for a switch."""
    off: bool
    key: str = ""
    """What follows a dot: the entry of a table (`--override-generation-config.top_k 5`)."""


class Parsed(NamedTuple, Generic[Options]):
    """What a command line says."""

    options: Options
    config: Config
    written: dict[str, str]
    """Field -> flag as the user wrote it, for those that were written."""
    notes: list[str]
    """What was said of flags that change nothing here."""


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


# --- words ---------------------------------------------------------------------------------------

class Scanned(NamedTuple):
    """A command line, cut up."""

    words: list[Word]
    foreign: list[ForeignWord]
    loose: list[str]
    """Words that belong to no flag."""


class _Table:
    """Every name that a command knows."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        # The command's own options come first, and win.
        self.own = {name: (flag, off) for flag in reversed(list(flags))
                    for name, off in flag.spellings}

    @functools.cached_property
    def foreign(self) -> dict[str, Foreign]:
        return foreign_flags_table()

    def knows(self, word: str) -> bool:
        name = plain(word.partition("=")[0]).partition(".")[0]
        return name in self.own or name in self.foreign

    def suggestion(self, origin: str) -> str:
        """Flags with such a name, our own first; --no-X only for a word that begins so."""
        negative = plain(origin).startswith("no-")
        return next(filter(None, (
            settings.suggestion(f"--{plain(origin)}", [
                f"--{name}" for name in names if name.startswith("no-") == negative])
            for names in (self.own, self.foreign))), "")


def scan(argv: Sequence[str], flags: Iterable[Flag]) -> Scanned:
    """What is written in `argv`. Raises `BadConfig` on an unknown flag and on a missing value."""
    table = _Table(flags)
    found = Scanned([], [], [])
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            found.loose.extend(rest)
            break
        if not word.startswith("-") or word == "-":
            found.loose.append(word)
            continue
        _take(word, rest, table, found)
    return found


def _take(word: str, rest: list[str], table: _Table, found: Scanned) -> None:
    """Take one flag and its values."""
    if re.match(r"-O\d", word):
        word = f"-O={word[2:]}"
    origin, equals, value = word.partition("=")
    name, _, key = plain(origin).partition(".")
    given = [value] if equals else None
    if name in table.own:
        flag, off = table.own[name]
        values = given if given is not None else _values(origin, rest, table, flag)
        found.words.append(Word(flag, origin, values, off, key.replace("-", "_")))
    elif name in table.foreign:
        foreign = table.foreign[name]
        off = foreign.off
        if foreign.arity == SWITCH:
            said = _spoken(rest) if given is None else given
            off = off != (bool(said) and not _is_on(origin, said[0]))
        else:
            said = _some(origin, rest, table, foreign.arity == LIST) if given is None else given
        found.foreign.append(ForeignWord(name, key.replace("-", "_"), origin, said, off, foreign))
    else:
        raise BadConfig(f"{origin}: no such flag{table.suggestion(origin)}", origin)


def _values(origin: str, rest: list[str], table: _Table, flag: Flag) -> list[str]:
    if flag.kind is bool:
        return _spoken(rest)
    values = _some(origin, rest, table, flag.many)
    while flag.joined and rest and values[0][:1].isdigit() and rest[0].isdigit():
        values.append(rest.pop(0))
    return values


def _spoken(rest: list[str]) -> list[str]:
    """The words true and false behind a switch are its value."""
    return [rest.pop(0)] if rest and rest[0].lower() in ("true", "false") else []


def _some(origin: str, rest: list[str], table: _Table, many: bool) -> list[str]:
    values: list[str] = []
    while rest and (many or not values) and not _is_flag(rest[0], table):
        values.append(rest.pop(0))
    if not values:
        raise BadConfig(f"{origin}: a value is missing", origin)
    return values


def plain(origin: str) -> str:
    """The name less the dashes, as the tables have it; a key behind a dot stays."""
    if origin.startswith("--"):
        name, dot, key = origin[2:].partition(".")
        return name.replace("_", "-") + dot + key
    name, dot, key = origin.partition(".")
    return SHORT.get(name, name) + dot + key


def _is_flag(word: str, table: _Table) -> bool:
    if not word.startswith("--"):
        return False
    return word == "--" or table.knows(word) or " " not in word


# --- values --------------------------------------------------------------------------------------

def parse(prog: str, argv: Sequence[str], options: type[Options], about: str = "",
          model: bool = True, checks: Sequence[Callable[[Config], None]] = ()) -> Parsed[Options]:
    """Read a command line. `model` = one word without a flag is allowed: the model. `checks` are
    asked of the configuration; then what changes nothing is told on stderr.

    Raises `BadConfig`, naming the flag as it was written; `--help` prints and exits.
    """
    flags = command_flags(options)
    asked = _help_wanted(argv)
    if asked is not None:
        from actorium.tools.cli.help import show_help

        show_help(prog, options, flags, about, asked)
    config_file, argv = _pop_config(argv)
    words, foreign, loose = scan(argv, flags)
    written = {word.flag.dest: word.origin for word in words}
    values, notes = _read(words)
    if loose and model and "model" not in written:
        values["model"] = loose.pop(0)
        written["model"] = "MODEL"
    if loose:
        raise BadConfig(f"{loose[0]}: unexpected argument", loose[0])
    translation = translate(foreign, written)
    own = {flag.dest: values.pop(flag.dest) for flag in flags
           if flag.owner is options and flag.dest in values}
    known = settings.fields()
    layer = {name: settings.setting(known[name], value, written[name])
             for name, value in values.items()} | translation.layer
    config = settings.resolve(layer, config_file)
    written |= {name: given.origin for name, given in translation.layer.items()}
    hide_arguments(str(layer[name].value) for _, name in SECRETS if name in layer)
    for check in (*translation.checks, *checks):
        with _named(written):
            check(config)
    notes += translation.notes
    for note in notes:
        print_notice(note, config.runtime)
    return Parsed(options(**own), config, written, notes)


@contextlib.contextmanager
def _named(written: Mapping[str, str]) -> Iterator[None]:
    """An error about a field speaks of the flag that set it."""
    try:
        yield
    except BadConfig as error:
        field = (error.param or "").rpartition(".")[2]
        what = error.message.removeprefix(f"{field}: ")
        if field not in written or what == error.message:
            raise
        raise BadConfig(f"{written[field]}: {what}", error.param) from None


def _help_wanted(argv: Sequence[str]) -> str | None:
    """What help is asked about ("" = all); None = it is not asked for."""
    before = list(argv)[:list(argv).index("--")] if "--" in argv else list(argv)
    for at, word in enumerate(before):
        if word in ("--help", "-h"):
            following = before[at + 1:at + 2]
            return following[0] if following and not following[0].startswith("-") else ""
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def _pop_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config FILE` out: it is read before the flags count."""
    rest: list[str] = []
    found = None
    words = iter(argv)
    for word in words:
        if word == "--config":
            found = next(words, None)
            if found is None:
                raise BadConfig("--config: a value is missing", "config")
        elif word.startswith("--config="):
            found = word.partition("=")[2]
        else:
            rest.append(word)
    return found, rest


def _read(words: list[Word]) -> tuple[dict[str, Any], list[str]]:
    """Field -> value, the last one written (all of them for a list, entries of a table together);
    and what is to be told of values that other engines have."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for word in words:
        dest, flag = word.flag.dest, word.flag
        if flag.kind is bool:
            values[dest] = (not word.values or _is_on(word.origin, word.values[0])) != word.off
        elif flag.many:
            values.setdefault(dest, []).extend(_coerced(word, value) for value in word.values)
        elif flag.kind in (settings.Table, settings.JsonObject):
            values[dest] = {**values.get(dest, {}), **_coerced(word, _entry(word))}
        else:
            _read_one(word, values, notes)
    return values, notes


def _read_one(word: Word, values: dict[str, Any], notes: list[str]) -> None:
    if word.key:
        raise BadConfig(f"{word.origin}: no such flag (did you mean "
                        f"{word.origin.partition('.')[0]}?)", word.origin)
    dest, text = word.flag.dest, _joined(word)
    ours, note = VALUES.get(dest, {}).get(text.lower(), (text, ""))
    if note:
        notes.append(f"{word.origin} {text} changes nothing here: {note}")
    if ours is None:
        values.pop(dest, None)
    else:
        values[dest] = _coerced(word, ours)


def _entry(word: Word) -> str | dict[str, Any]:
    """One entry of a table, or all of it. A value of JSON that is none is a text."""
    text = word.values[0]
    if not word.key:
        return text
    if word.flag.kind == settings.Table:
        return f"{word.key}={text}"
    try:
        return {word.key: msgspec.json.decode(text)}
    except msgspec.DecodeError:
        return {word.key: text}


def _joined(word: Word) -> str:
    if not word.flag.joined:
        return word.values[0]
    text = ",".join(word.values)
    if text.startswith("["):
        try:
            return ",".join(map(str, msgspec.json.decode(text, type=list[Any])))
        except msgspec.DecodeError as error:
            raise BadConfig(f"{word.origin}: is not a JSON list: {error}", word.origin) from None
    return text


def _coerced(word: Word, value: str | dict[str, Any]) -> Any:
    try:
        return settings.coerce(word.flag.kind, value, word.flag.optional)
    except ValueError as error:
        raise BadConfig(f"{word.origin}: {error}", word.flag.dest) from None


def _is_on(origin: str, text: str) -> bool:
    try:
        return bool(settings.coerce(bool, text))
    except ValueError as error:
        raise BadConfig(f"{origin}: {error}", origin) from None
