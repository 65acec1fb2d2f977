"""Where configuration comes from: defaults < TOML file < `ACTORIUM_*` < flags or keyword arguments.

Every source becomes a `Layer`: field name -> (value, the name its writer used for it), so that an
error names `--block-size`, `ACTORIUM_PAGE_SIZE` or `engine.toml: memory.page_size`, whichever
was written. The flags themselves are parsed by `actorium.tools.cli.command_line`.
"""

from __future__ import annotations

import difflib
import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from actorium.actors.config.flag_names import ALIASES, flag_names, spellings
from actorium.actors.config.graph_settings import level_settings
from actorium.actors.config.parsed_values import whole_number
from actorium.actors.config.tree import SECRETS, Config
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security.private_paths import UnsafePath, read_trusted

ENV_PREFIX = "ACTORIUM_"
ENV_CONFIG = "ACTORIUM_CONFIG"
"""Names the TOML file, like `--config`; the one ACTORIUM_ variable that mirrors no field."""

DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16",
           "half": "float16", "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3",
           "float8_e5m2": "fp8_e5m2", "int8_per_token_head": "int8"}
"""Short names of dtypes."""
Names: TypeAlias = tuple[str, ...]
"""Several texts: in TOML a list, as flags several words, elsewhere separated by commas."""
Table: TypeAlias = dict[str, float]
"""Names to numbers: in TOML a table, elsewhere `name=number,...` or a JSON object."""

JsonObject: TypeAlias = dict[str, Any]
"""Names to any values of JSON: in TOML a table, elsewhere a JSON object."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Field(NamedTuple):
    """One value of the tree."""

    section: str
    name: str
    kind: type
    """int | float | bool | str | Names | Table | JsonObject"""
    optional: bool

    @property
    def key(self) -> str:
        """Its name in TOML and in `BadConfig.param`."""
        return f"{self.section}.{self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its flags without the dashes, the main one first."""
        return flag_names(self.name)

    @property
    def spellings(self) -> list[tuple[str, bool]]:
        """(flag that sets it, whether it means the opposite), all of them."""
        return spellings(self.name, self.kind is bool)


class Setting(NamedTuple):
    """A value and the name its writer used for the field."""

    value: Any
    origin: str


Layer = dict[str, Setting]


@functools.cache
def fields() -> dict[str, Field]:
    """The fields of the tree by name; names are unique across sections."""
    fields: dict[str, Field] = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            if field.name in fields:
                raise TypeError(f"two sections have a field {field.name}")
            kind, optional = split_optional(field.type)
            fields[field.name] = Field(section.name, field.name, kind, optional)
    return fields


def split_optional(hint: Any) -> tuple[Any, bool]:
    """`int | None` -> (int, True); `int` -> (int, False)."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        return kinds[0], True
    return hint, False


# --- one value -----------------------------------------------------------------------------------

def coerce(kind: type, value: Any, optional: bool = False) -> Any:
    """`value` as `kind`; texts are read (`32k` = 32,768, `true`, `none`).

    Raises `ValueError` with what is wanted ("must be a whole number, ...").
    """
    more = ""
    try:
        if isinstance(value, str) and kind is not str:
            more = " (suffixes k, m, g allowed)" if kind is int else ""
            value = value.strip()
            value = _parsed(kind, value, optional)
        if kind == Table and isinstance(value, Mapping):
            return {_table_name(name): _table_number(name, number)
                    for name, number in value.items()}
        if kind == JsonObject and isinstance(value, Mapping):
            return _as_json(value)
        converted = msgspec.convert(value, kind | None if optional else kind)
    except _TableError:
        raise
    except ValueError:
        raise ValueError(f"must be {_WANT[kind]}{more}, got {value!r}") from None
    return _split_names(converted) if kind == Names else converted


_WANT = {int: "a whole number", float: "a number", bool: "true or false", str: "a string",
         Names: "names (as a list, or with commas between them)",
         Table: "a table (name=number,... or a JSON object)",
         JsonObject: "a table or a JSON object"}


def _parsed(kind: type, text: str, optional: bool) -> Any:
    """The value that a text stands for. Raises `ValueError`."""
    if optional and text.lower() in ("", "none", "null"):
        return None
    if kind is bool:
        return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(
            text.lower(), text)
    if kind is int:
        number = whole_number(text)
        return text if number is None else number
    if kind is float:
        return float(text)
    if kind == Names:
        return [text]
    return _parse_table(text) if kind == Table else _json_object(text)


def _split_names(values: Iterable[str]) -> Names:
    # A JSON object among them, as of lora_modules, has commas of its own.
    return tuple(stripped for value in values
                 for name in ([value] if value.lstrip()[:1] in ("{", "[") else value.split(","))
                 if (stripped := name.strip()))


def _parse_table(text: str) -> Mapping[str, Any]:
    """`a=2,b=0.5` or `{"a": 2, "b": 0.5}`; what is not a number stays text."""
    if text.startswith("{"):
        return _json_object(text)
    pairs = [pair.rpartition("=") for pair in text.split(",") if pair.strip()]
    for name, equals, number in pairs:
        if not equals:
            raise _TableError(f"must be {_WANT[Table]}, got {number.strip()!r} without '='")
        if sum(name.strip() == other.strip() for other, _, _ in pairs) > 1:
            raise _TableError(f"{name.strip()} is given twice")
    return {name.strip(): number.strip() for name, _, number in pairs}


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _TableError(f"is not a JSON object: {error}") from None


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same values in JSON's types: it has no dates, sets and infinities."""
    import json

    try:
        return _json_object(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _TableError(f"must be what JSON can say: {error}") from None


class _TableError(ValueError):
    """An entry of a table is wrong."""


def _table_name(name: Any) -> str:
    if not isinstance(name, str):
        raise _TableError(f"a name must be a string, got {name!r}")
    return name


def _table_number(name: Any, number: Any) -> float:
    try:
        read = coerce(float, number)
    except ValueError as error:
        raise _TableError(f"{name}: {error}") from None
    assert isinstance(read, float)
    return read


def setting(field: Field, value: Any, origin: str) -> Setting:
    """`value` checked for its kind. Raises `BadConfig` that names `origin`."""
    try:
        read = coerce(field.kind, value, field.optional)
    except ValueError as error:
        what = "must be a string" if (field.section, field.name) in SECRETS else str(error)
        raise BadConfig(f"{origin}: {what}", field.key) from None
    if field.name.endswith("dtype"):
        read = DTYPES.get(read, read)
    return Setting(read, origin)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`" (did you mean a or b?)"`, or nothing."""
    spelt = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(spelt[one] for one in close)}?)" if close else ""


# --- the layers ----------------------------------------------------------------------------------

def from_toml(path: str) -> Layer:
    """The settings of a TOML file whose sections are the tree's."""
    try:
        tree = msgspec.toml.decode(Path(path).read_bytes())
    except OSError as error:
        raise BadConfig(f"--config: cannot read {path}: {error.strerror}", "config") from None
    except Exception as error:  # a TOML or a UTF-8 error, by the decoder's choice
        raise BadConfig(f"--config: {path} is not TOML: {error}", "config") from None
    layer: Layer = {}
    for section, body in tree.items():
        names = _section_names(path, section)
        if not isinstance(body, dict):
            raise BadConfig(f"{path}: {section}: must be a table", section)
        for name, value in body.items():
            origin = f"{path}: {section}.{name}"
            if name not in names:
                raise BadConfig(f"{origin}: unknown key{_where(name) or suggestion(name, names)}",
                                f"{section}.{name}")
            layer[name] = setting(fields()[name], value, origin)
    if why := why_unsafe(path, layer):
        raise BadConfig(f"--config: {why}", "config")
    return layer


def why_unsafe(path: str | Path, names: Iterable[str]) -> str:
    """Why a file that sets these fields, or flags, must not count: there is a key in it, and others
    could change it. Empty = it may."""
    secret = {field.replace("-", "_") for _, name in SECRETS
              for field in (name, *ALIASES.get(name, ()))}
    if secret.isdisjoint(name.replace("-", "_") for name in names):
        return ""
    try:
        read_trusted(Path(path))
    except UnsafePath as error:
        return f"there is a key in it, and {error}"
    return ""


def _section_names(path: str, section: str) -> list[str]:
    names = [field.name for field in fields().values() if field.section == section]
    if not names:
        sections = sorted({field.section for field in fields().values()})
        hint = _where(section) or suggestion(section, sections)
        raise BadConfig(f"{path}: {section}: unknown key{hint}", section)
    return names


def _where(name: str) -> str:
    field = fields().get(name)
    return f" (it belongs in [{field.section}])" if field else ""


def from_environ(environ: Mapping[str, str]) -> Layer:
    """The settings of `ACTORIUM_<FIELD>` variables."""
    known = {ENV_PREFIX + name.upper(): field for name, field in fields().items()}
    layer: Layer = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_CONFIG:
            continue
        field = known.get(variable)
        if field is None:
            hint = suggestion(variable, known)
            raise BadConfig(f"{variable}: no such setting{hint}", variable)
        layer[field.name] = setting(field, value, variable)
    return layer


def from_mapping(values: Mapping[str, Any]) -> Layer:
    """The settings of keyword arguments: field names, or their aliases in snake case."""
    known = {name.replace("-", "_"): (field, off) for field in fields().values()
             for name, off in field.spellings}
    layer: Layer = {}
    for name, value in values.items():
        if name not in known:
            raise BadConfig(f"{name}: no such setting{suggestion(name, known)}", name)
        field, off = known[name]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if field.name in layer:
            raise BadConfig(f"{name}: given twice, also as {layer[field.name].origin}", field.key)
        given = setting(field, value, name)
        layer[field.name] = Setting(not given.value, name) if off else given
    return layer


# --- together ------------------------------------------------------------------------------------

def resolve(flags: Layer, config_file: str | None = None,
            environ: Mapping[str, str] | None = None) -> Config:
    """The checked tree: defaults < `optimization_level` < `config_file` < `environ` (the process's
    by default) < flags.

    Raises `BadConfig`, naming the field as its writer did.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(ENV_CONFIG)
    merged = (from_toml(config_file) if config_file else {}) | from_environ(environ) | flags
    sections: dict[str, dict[str, Any]] = {f.section: {} for f in fields().values()}
    for name, given in merged.items():
        sections[fields()[name].section][name] = given.value
    if (level := merged.get("optimization_level")) is not None:
        sections["device"] |= level_settings(level.value, merged.keys())
    kinds = {section.name: section.type for section in msgspec.structs.fields(Config)}
    config = Config(**{name: kinds[name](**values) for name, values in sections.items()})
    return _checked(config, merged)


def _checked(config: Config, merged: Layer) -> Config:
    try:
        return validate(config)
    except BadConfig as error:
        name = (error.param or "").rpartition(".")[2]
        if name not in merged:
            raise
        what = error.message.removeprefix(f"{name}: ")
        raise BadConfig(f"{merged[name].origin}: {what}", error.param) from None


def from_kwargs(model: str | os.PathLike[str] | None = None, *, config: str | None = None,
                **values: Any) -> Config:
    """The tree for `Engine(model, **values)`: field names or aliases; `config` = a TOML file.

    >>> from_kwargs("some/dir", context_length="32k").model.max_model_len
    32768

    Raises `BadConfig`, naming the argument.
    """
    if model is not None:
        values["model"] = model
    return resolve(from_mapping(values), config)
