"""Flags of every command: its own options plus the whole configuration tree, read by tyro.

`scan` goes over the words first. It settles what tyro's grammar cannot say (MODEL anywhere among
the flags, `--prompt A B`, names that switch a flag off) and remembers how each flag was written, so
that every error is one line about the words that the user typed.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from actorium.actors import settings
from actorium.actors.config import Config
from actorium.actors.errors import BadConfig

Options = TypeVar("Options", bound=Struct)


_ORDER = (
    "Every setting may also stand in a TOML file (--config FILE, sections as below) or in an "
    "ACTORIUM_<NAME> variable; flags win over variables, variables over the file. Numbers take "
    "the suffixes k, m and g (32k = 32768)."
)


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


class Word(NamedTuple):
    """One flag as it stands in argv. `value` is None for a boolean written without one (the words
    `true` and `false` behind it are its value: `--enable-prefix-caching false`)."""

    flag: Flag
    origin: str
    value: str | None
    off: bool


class Parsed(NamedTuple, Generic[Options]):
    """What a command line says."""

    options: Options
    config: Config
    written: dict[str, str]
    """Field -> flag as the user wrote it, for those that were written."""


def command_flags(options: type[Struct]) -> list[Flag]:
    """Every flag of a command with these options; an option hides a setting of the same name."""
    flags = [_option(options, field) for field in msgspec.structs.fields(options)]
    own = {flag.dest for flag in flags}
    sections = {section.name: section.type for section in msgspec.structs.fields(Config)}
    for field in settings.fields().values():
        if field.name not in own:
            owner = sections[field.section]
            default = getattr(owner(), field.name)
            flags.append(Flag(field.name, field.kind, field.optional, False, field.names, owner,
                              default))
    return flags


def _option(options: type[Struct], field: msgspec.structs.FieldInfo) -> Flag:
    kind, optional = settings.split_optional(field.type)
    many = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if many else kind
    default = () if many else field.default
    names = (field.name.replace("_", "-"), *settings.ALIASES.get(field.name, ()))
    return Flag(field.name, kind, optional, many, names, options, default)


# --- words ---------------------------------------------------------------------------------------

def scan(argv: Sequence[str], flags: Iterable[Flag]) -> tuple[list[Word], list[str]]:
    """The flags written in `argv`, and the words that belong to none.

    Raises `BadConfig` on an unknown flag and on a missing value.
    """
    table = {name: (flag, off) for flag in flags for name, off in _spellings(flag)}
    words: list[Word] = []
    loose: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            loose += rest
            break
        if not word.startswith("-") or word == "-":
            loose.append(word)
            continue
        words += _take(word, rest, table)
    return words, loose


def _spellings(flag: Flag) -> list[tuple[str, bool]]:
    names = [(name, False) for name in flag.names]
    if flag.kind is bool:
        names += [(f"no-{name}", True) for name in flag.names]
        names += [(name, True) for name, dest in settings.INVERSES.items() if dest == flag.dest]
    return names


def _take(word: str, rest: list[str], table: dict[str, tuple[Flag, bool]]) -> list[Word]:
    origin, equals, value = word.partition("=")
    found = table.get(_plain(origin))
    if found is None:
        negative = _plain(origin).startswith("no-")
        known = [f"--{name}" for name in table if name.startswith("no-") == negative]
        hint = settings.suggestion(f"--{_plain(origin)}", known)
        raise BadConfig(f"{origin}: no such flag{hint}", origin)
    flag, off = found
    if equals:
        return [Word(flag, origin, value, off)]
    if flag.kind is bool:
        spoken = bool(rest) and rest[0].lower() in ("true", "false")
        return [Word(flag, origin, rest.pop(0) if spoken else None, off)]
    values: list[str] = []
    while rest and (flag.many or not values) and not _is_flag(rest[0], table):
        values.append(rest.pop(0))
    if not values:
        raise BadConfig(f"{origin}: a value is missing", origin)
    return [Word(flag, origin, value, False) for value in values]


def _plain(origin: str) -> str:
    """The name less the dashes; `-tp`, as fingers know it, is `--tp`."""
    if origin == "-tp":
        return "tp"
    return origin[2:].replace("_", "-") if origin.startswith("--") else origin


def _is_flag(word: str, table: dict[str, tuple[Flag, bool]]) -> bool:
    if not word.startswith("--"):
        return False
    return word == "--" or _plain(word.partition("=")[0]) in table or " " not in word


# --- tyro ----------------------------------------------------------------------------------------

def parse(prog: str, argv: Sequence[str], options: type[Options], about: str = "",
          model: bool = True) -> Parsed[Options]:
    """Read a command line. `model` = one word without a flag is allowed: the model.

    Raises `BadConfig`, naming the flag as it was written; `--help` prints and exits.
    """
    flags = command_flags(options)
    if _wants_help(argv):
        show_help(prog, options, flags, f"{about}\n\n{_ORDER}")
    config_file, argv = _pop_config(argv)
    words, loose = scan(argv, flags)
    written = {word.flag.dest: word.origin for word in words}
    tokens = _tokens(words)
    if loose and model and "model" not in written:
        tokens.append(f"--model={loose.pop(0)}")
        written["model"] = "MODEL"
    if loose:
        raise BadConfig(f"{loose[0]}: unexpected argument", loose[0])
    values = msgspec.structs.asdict(_read(prog, tokens, flags, written)) if written else {}
    known = settings.fields()
    own = {flag.dest: values.pop(flag.dest) for flag in flags
           if flag.owner is options and flag.dest in values}
    layer = {name: settings.setting(known[name], value, written[name])
             for name, value in values.items()}
    return Parsed(options(**own), settings.resolve(layer, config_file), written)


def _wants_help(argv: Sequence[str]) -> bool:
    before = list(argv)[:list(argv).index("--")] if "--" in argv else argv
    return "--help" in before or "-h" in before


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


def _tokens(words: list[Word]) -> list[str]:
    """The words in tyro's grammar; the values of a repeated flag as one JSON list."""
    lists: dict[str, list[str | None]] = {}
    tokens: list[str] = []
    for word in words:
        name = word.flag.names[0]
        if word.flag.many:
            lists.setdefault(name, []).append(word.value)
        elif word.flag.kind is bool:
            tokens.append(f"--{name}" if _is_on(word) else f"--no-{name}")
        else:
            tokens.append(f"--{name}={word.value}")
    return tokens + [f"--{name}={msgspec.json.encode(many).decode()}"
                     for name, many in lists.items()]


def _is_on(word: Word) -> bool:
    try:
        return (word.value is None or settings.coerce(bool, word.value)) != word.off
    except ValueError as error:
        raise BadConfig(f"{word.origin}: {error}", word.origin) from None


def _read(prog: str, tokens: list[str], flags: list[Flag], written: dict[str, str]) -> Struct:
    """The values of the flags that were written, as tyro reads them.

    The struct holds these flags alone: building tyro's parser for the whole tree would cost 100 ms
    of the time to the first token.
    """
    import tyro

    members = [_annotated(flag, written) for flag in flags if flag.dest in written]
    struct = msgspec.defstruct("Flags", members, kw_only=True, frozen=True)
    try:
        return tyro.cli(struct, prog=prog, args=tokens)
    except SystemExit as stop:
        raise BadConfig(f"cannot read the flags: {' '.join(tokens)}") from stop


def show_help(prog: str, options: type[Struct], flags: list[Flag], about: str) -> NoReturn:
    """Print every flag, by section, with its text and its default; exit 0."""
    import tyro

    kinds: dict[str, type[Struct]] = {prog.split()[1].replace("-", "_"): options}
    kinds |= {section.name: section.type for section in msgspec.structs.fields(Config)}
    parts: list[tuple[str, Any, Any]] = []
    for name, kind in kinds.items():
        docs = field_docs(kind)
        mine = [flag for flag in flags if flag.owner is kind]
        struct = msgspec.defstruct(
            kind.__name__, [_annotated(flag, {}, docs) for flag in mine],
            kw_only=True, frozen=True, namespace={"__doc__": inspect.cleandoc(kind.__doc__ or "")})
        parts.append((name, struct, struct()))
    tree = msgspec.defstruct("Command", parts, kw_only=True, frozen=True)
    tyro.cli(tyro.conf.OmitArgPrefixes[tree],  # type: ignore
             prog=prog, args=["--help"], description=about)
    raise SystemExit(0)


def _annotated(flag: Flag, written: dict[str, str],
               docs: dict[str, str] | None = None) -> tuple[str, Any, Any]:
    """One field of a struct, with its names, its text and its reader, for tyro."""
    import tyro

    about = tyro.conf.arg(aliases=[f"--{name}" for name in flag.names[1:]] or None,
                          help=(docs or {}).get(flag.dest, ""))
    if flag.kind is bool:
        return flag.dest, Annotated[bool, about], flag.default
    # `object`, because tyro imports typeguard (50 ms) to check a default against a richer type.
    return flag.dest, Annotated[object, _reader(flag, written), about], flag.default


def _reader(flag: Flag, written: dict[str, str]) -> Any:
    from tyro.constructors import PrimitiveConstructorSpec

    def read(args: list[str]) -> Any:
        origin = written.get(flag.dest, flag.dest)
        values = msgspec.json.decode(args[0]) if flag.many else args
        try:
            read = [settings.coerce(flag.kind, value, flag.optional) for value in values]
        except ValueError as error:
            raise BadConfig(f"{origin}: {error}", flag.dest) from None
        return read if flag.many else read[0]

    metavar = "NAME=NUMBER,..." if flag.kind == settings.Table else flag.kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs=1, metavar=f"{metavar} [{metavar} ...]" if flag.many else metavar,
        instance_from_str=read, is_instance=lambda value: True,
        str_from_instance=lambda value: ["none" if value in (None, (), {}) else str(value)])


def field_docs(kind: type) -> dict[str, str]:
    """The strings under the fields of a class, from its source."""
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
