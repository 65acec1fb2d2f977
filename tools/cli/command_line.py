"""Parses a command line: the flags of a command under all their names, and those of other engines.

argparse reads the words; every flag is declared to it as it is written, so that an error names what
the user typed. `translate` understands the flags of other engines. Every error is one line. Nothing
but the standard library and msgspec is imported: this is on the way to the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from actorium.actors.config import sources as settings
from actorium.actors.config.flag_names import SHORT
from actorium.actors.config.tree import SECRETS, Config
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.console import print_notice
from actorium.actors.runtime.process import hide_arguments
from actorium.tools.cli.flags import Flag, command_flags
from actorium.tools.cli.foreign_flags import VALUES
from actorium.tools.cli.foreign_words import LIST, SWITCH, Foreign, ForeignWord
from actorium.tools.cli.translate import foreign_flags_table, translate

Options = TypeVar("Options", bound=Struct)
BY_SPACE, BY_EQUALS = " ", "="
"""How a value was written: `--flag value` or `--flag=value`. It stands before each word that is no
flag, so that argparse takes none of them for one, whatever it begins with."""


class Parsed(NamedTuple, Generic[Options]):
    options: Options
    config: Config
    written: dict[str, str]
    """Field -> flag as the user wrote it, for those that were written."""
    notes: list[str]
    """Lines printed about flags that have no effect here."""
    given: settings.Layer
    """What the flags and the file of `--config` set."""


class Word(NamedTuple):
    """One flag as it stands in argv."""

    flag: Flag
    origin: str
    values: list[str]
    """Empty for a switch."""
    off: bool
    """This spelling means the opposite."""
    key: str = ""
    """What follows a dot: the entry of a table (`--override-generation-config.top_k 5`)."""


class Words(NamedTuple):
    known: list[Word]
    foreign: list[ForeignWord]
    loose: list[str]
    """Words that belong to no flag."""
    config_file: str | None


def parse(prog: str, argv: Sequence[str], options: type[Options], about: str = "",
          model: bool = True, checks: Sequence[Callable[[Config], None]] = ()) -> Parsed[Options]:
    """Read a command line. `model`: one word without a flag is allowed, the model. `checks` are
    called with the configuration; then a line on stderr names the flags that have no effect.

    Raises `BadConfig`, naming the flag as it was written; `--help` prints and exits.
    """
    flags = command_flags(options)

    def show_help(about_what: str) -> NoReturn:
        from actorium.tools.cli.flag_help import print_help

        print_help(prog, options, about, about_what)

    words = _Parser(flags).words(argv, show_help)
    written = {word.flag.dest: word.origin for word in words.known}
    values, notes = _read(words.known)
    loose = words.loose
    if loose and model and "model" not in written:
        values["model"] = loose.pop(0)
        written["model"] = "MODEL"
    if loose:
        raise BadConfig(f"{loose[0]}: unexpected argument", loose[0])
    translation = translate(words.foreign, written)
    own = {flag.dest: values.pop(flag.dest) for flag in flags
           if flag.owner is options and flag.dest in values}
    known = settings.fields()
    layer = {name: settings.setting(known[name], value, written[name])
             for name, value in values.items()} | translation.layer
    config = settings.resolve(layer, words.config_file)
    written |= {name: given.origin for name, given in translation.layer.items()}
    hide_arguments(str(layer[name].value) for _, name in SECRETS if name in layer)
    for check in (*translation.checks, *checks):
        with _named(written):
            check(config)
    notes += translation.notes
    for note in notes:
        print_notice(note, config.runtime)
    given = settings.from_toml(words.config_file) if words.config_file else {}
    return Parsed(options(**own), config, written, notes, given | layer)


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


# --- words ---------------------------------------------------------------------------------------

class _Parser(argparse.ArgumentParser):
    """argparse with the flags that a command line names."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        super().__init__(add_help=False, allow_abbrev=False, exit_on_error=False)
        self.add_argument("--config")
        # The command's own options come first, and win.
        self._own = {name: (flag, off) for flag in reversed(list(flags))
                     for name, off in flag.spellings}
        self._declared = {"-h", "--help", "--config"}

    @functools.cached_property
    def _foreign(self) -> dict[str, Foreign]:
        return foreign_flags_table()

    def words(self, argv: Sequence[str], show_help: Callable[[str], NoReturn]) -> Words:
        """What is written there; shows help instead if that is asked for. Raises `BadConfig` on an
        unknown flag and on a missing value."""
        end = argv.index("--") if "--" in argv else len(argv)
        marked = [self._declare(word) for word in argv[:end]]
        if (asked := _help_wanted(marked)) is not None:
            show_help(asked)
        given = argparse.Namespace(known=[], foreign=[], loose=[])
        try:
            _, more = self.parse_known_args(marked, given)
        except argparse.ArgumentError as error:
            raise BadConfig(f"{error.argument_name}: a value is missing",
                            str(error.argument_name).lstrip("-")) from None
        for word in [*given.loose, *more]:
            if word.startswith("-") or (word.startswith(" -") and word != " -"):
                self._unknown(word.removeprefix(BY_SPACE).partition("=")[0])
        loose = [word[1:] for word in [*given.loose, *more]]
        return Words(given.known, given.foreign, [*loose, *argv[end + 1:]],
                     None if given.config is None else given.config[1:])

    def _declare(self, word: str) -> str:
        """Declare the flag that a word is, if it is one. Returns the word as argparse gets it."""
        if re.match(r"-O\d", word):
            word = f"-O={word[2:]}"
        origin, equals, value = word.partition("=")
        name, _, key = plain(origin).partition(".")
        known = word.startswith("-") and (
            origin in self._declared or name in self._own or name in self._foreign)
        if not known and (not word.startswith("--") or " " in word):
            return BY_SPACE + word
        if known and origin not in self._declared:
            self._declared.add(origin)
            self.add_argument(origin, **self._nargs(name), action=_Written, name=name,
                              key=key.replace("-", "_"),
                              meaning=self._own.get(name) or self._foreign[name])
        return f"{origin}={BY_EQUALS}{value}" if equals else origin

    def _nargs(self, name: str) -> dict[str, Any]:
        if name in self._own:
            flag, _ = self._own[name]
            switch, several = flag.kind is bool, flag.many or flag.joined
        else:
            arity = self._foreign[name].arity
            switch, several = arity == SWITCH, arity == LIST
        return {"nargs": "?" if switch else "+"} if switch or several else {}

    def _unknown(self, origin: str) -> NoReturn:
        """Flags with such a name, of our own or another engine's, as the closest one is; --no-X
        only for a word that begins so."""
        negative, flag = plain(origin).startswith("no-"), f"--{plain(origin)}"
        own, foreign = ([f"--{name}" for name in names if name.startswith("no-") == negative]
                        for names in (self._own, self._foreign))
        closest = get_close_matches(flag, [*own, *foreign], n=1)
        hint = settings.suggestion(flag, own if {*closest} & {*own} else foreign)
        hint = hint or "; --help lists them"
        raise BadConfig(f"{origin}: no such flag{hint}", origin)

    def error(self, message: str) -> NoReturn:
        raise BadConfig(message)


def _help_wanted(marked: Sequence[str]) -> str | None:
    """What help is asked about ("" = all); None = `--help` is not there. It wins over any error."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const=BY_SPACE)
    # argparse would read llama-server's -hf as -h f.
    words = [word for word in marked if word.partition("=")[0] not in SHORT]
    asked = parser.parse_known_args(words)[0].help
    return None if asked is None else str(asked[1:])


class _Written(argparse.Action):
    """Collects one flag with its values; words behind it that cannot be its own are loose."""

    def __init__(self, *args: Any, name: str, key: str, meaning: tuple[Flag, bool] | Foreign,
                 **more: Any) -> None:
        super().__init__(*args, **more)
        self._name, self._key, self._meaning = name, key, meaning

    def __call__(self, _parser: object, given: argparse.Namespace, values: Any,
                 origin: str | None = None) -> None:
        words: list[str] = [values] if isinstance(values, str) else values or []
        meaning = self._meaning
        assert origin is not None
        if isinstance(meaning, Foreign):
            numbers = meaning.arity == LIST and meaning.family == "graphs"
            words, off = self._own_values(words, given, meaning.arity == SWITCH, numbers), \
                meaning.off
            if meaning.arity == SWITCH and words:
                off = off == _is_on(origin, words[0])
            given.foreign.append(ForeignWord(self._name, self._key, origin, words, off, meaning))
        else:
            flag, off = meaning
            words = self._own_values(words, given, flag.kind is bool, flag.joined)
            given.known.append(Word(flag, origin, words, off, self._key))

    @staticmethod
    def _own_values(words: list[str], given: argparse.Namespace, switch: bool, joined: bool
                    ) -> list[str]:
        """A switch takes a separate word only if that is true or false; a text with commas only
        further numbers."""
        count = len(words)
        if switch and words and words[0].startswith(BY_SPACE):
            count = int(words[0][1:].lower() in ("true", "false"))
        elif joined and words:
            numbers = words[0][1:2].isdigit()
            count = next((i for i, word in enumerate(words)
                          if i and not (numbers and word[1:].isdigit())), count)
        given.loose += words[count:]
        return [word[1:] for word in words[:count]]


def plain(origin: str) -> str:
    """The name less the dashes, as the tables have it; a key behind a dot stays."""
    if origin.startswith("--"):
        name, dot, key = origin[2:].partition(".")
        return name.replace("_", "-") + dot + key
    name, dot, key = origin.partition(".")
    return SHORT.get(name, name) + dot + key


# --- values --------------------------------------------------------------------------------------

def _read(words: list[Word]) -> tuple[dict[str, Any], list[str]]:
    """Field -> value, the last one written (all of them for a list, entries of a table together);
    and lines about values that other engines have."""
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
