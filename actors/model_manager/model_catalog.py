"""The models that a server of several models serves: those of the file of `--models`, and those of
the folder of `--models-dir`. Reads files; run `scan` on a thread."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.config import sources
from actorium.actors.config.graph_settings import level_settings
from actorium.actors.config.models_settings import ModelsConfig, parse_keep_alive
from actorium.actors.config.tree import Config, GatewayConfig, ProbeConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import ActoriumError, BadConfig
from actorium.actors.model_manager.model_record import CatalogEntry
from actorium.actors.models.model_facts import CheckpointFacts, files_digest, model_facts
from actorium.actors.models.model_names import (
    WHEEL_MODELS,
    cached_model,
    gguf_by_model,
    hub_cache,
    is_fetched,
    wheel_model_file,
)
from actorium.actors.models.obtain import named
from actorium.actors.runtime.rundir import LEDGERS, engine_dir

LOG = logging.getLogger("actorium.models")
OF_THE_TABLE = ("keep_alive", "pinned", "load_on_start", "default")
"""Keys of a model's table that are no flags of its engine."""
OF_PARSERS = ("tool_call_parser", "reasoning_parser")
"""What an engine's configuration keeps of [gateway]: its gateway reads it there."""
OF_THE_SERVER = ("name", "run_dir", "listen", "keys_dir")
"""What an engine's configuration cannot have of its own, besides [models], [cluster] and the rest
of [gateway]."""
MAX_NAME = 256
"""Characters of a model's name."""
LONGEST_NAME = 40
"""Of an engine; see `validation`."""


class ModelCatalog:
    """The served models, read again by `scan`."""

    def __init__(self, config: Config, engine_of: str, lenient: bool = False) -> None:
        """config: the server's; engine_of: the setting of its engines; lenient: what is wrong is
        logged, and left out. Raises `BadConfig`."""
        self._config, self._engine_of = config, engine_of
        self._folder = None if config.models.models_dir is None else Path(
            config.models.models_dir).expanduser().absolute()
        self._facts: dict[str, CheckpointFacts] = {}
        """By digest."""
        self._tables: list[CatalogEntry] = []
        try:
            if self._folder is not None and not self._folder.is_dir():
                raise BadConfig(f"models_dir: no such folder: {self._folder}", "models.models_dir")
            if config.models.models is not None:
                self._tables = self._read_file(Path(config.models.models).expanduser())
        except BadConfig as error:
            if not lenient:
                raise
            LOG.error("%s", error)

    def scan(self, pulled: Sequence[str] = ()) -> list[CatalogEntry]:
        """The models that are there now: those of the file in its order, then those of the folder
        by name, then `pulled`, names of models. What a name means, the first of them says."""
        entries = [self._completed(entry) for entry in self._tables]
        names = {name for entry in entries for name in entry.names}
        for name, model in (*self._in_folder(), *zip(pulled, pulled, strict=True)):
            if name not in names:
                names.add(name)
                entries.append(self._completed(self._without_table(name, model)))
        return entries

    def _without_table(self, name: str, model: str) -> CatalogEntry:
        own = engine_config(self._config, name, (), model, self._engine_of)
        return CatalogEntry((name,), own,
                            keep_alive=parse_keep_alive(self._config.models.keep_alive))

    # --- the folder ---

    def _in_folder(self) -> Iterator[tuple[str, str]]:
        """(name, path) of each model."""
        if self._folder is None:
            return
        try:
            children = sorted(self._folder.iterdir())
        except OSError as error:
            LOG.warning("models_dir: cannot read %s: %s", self._folder, error.strerror)
            return
        yield from self._ggufs_of(self._folder, "")
        for child in children:
            if not _is_name(child.name) or not child.is_dir():
                continue
            if (child / "config.json").is_file():
                yield child.name, str(child)
                continue
            ggufs = list(self._ggufs_of(child, f"{child.name}/"))
            yield from ((child.name, path) for _, path in ggufs) if len(ggufs) == 1 else ggufs

    @staticmethod
    def _ggufs_of(folder: Path, prefix: str) -> Iterator[tuple[str, str]]:
        try:
            files = [file.name for file in folder.iterdir()
                     if _is_name(file.name) and file.is_file()]
        except OSError:
            return
        for stem, parts in gguf_by_model(files).items():
            yield prefix + stem, str(folder / parts[0])

    # --- the file ---

    def _read_file(self, path: Path) -> list[CatalogEntry]:
        """Raises `BadConfig`, naming the file, the table and the key."""
        try:
            tables = msgspec.toml.decode(path.read_bytes())
        except OSError as error:
            raise BadConfig(f"models: cannot read {path}: {error.strerror}",
                            "models.models") from None
        except Exception as error:  # a TOML or a UTF-8 error, by the decoder's choice
            raise BadConfig(f"models: {path} is not TOML: {error}", "models.models") from None
        entries = []
        for name, table in tables.items():
            where = f"models: {path}: {name}"
            if not isinstance(table, dict):
                raise BadConfig(f"{where}: must be a table, [{name}]", "models.models")
            try:
                entries.append(self._of_table(name, table, path.parent))
            except (ActoriumError, ValueError) as error:
                raise BadConfig(f"{where}: {error}", "models.models") from None
        _check_distinct(entries, path)
        return entries

    def _of_table(self, name: str, table: dict[str, Any], folder: Path) -> CatalogEntry:
        """Raises `BadConfig` and `ValueError`, naming the key."""
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise ValueError(f"a name must have 1 to {MAX_NAME} printable characters")
        values = {key.replace("-", "_"): value for key, value in table.items()}
        model = values.pop("model", name)
        if not isinstance(model, str) or not model:
            raise ValueError("model: must be a path or a name")
        switches = {key: values.pop(key, False) for key in OF_THE_TABLE[1:]}
        for key, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{key}: must be true or false, got {value!r}")
        keep_alive = values.pop("keep_alive", self._config.models.keep_alive)
        try:
            seconds = parse_keep_alive(keep_alive)
        except ValueError as error:
            raise ValueError(f"keep_alive: {error}") from None
        beside = folder / Path(model).expanduser()
        own = engine_config(self._config, name, values,
                            str(beside.absolute()) if beside.exists() else model, self._engine_of)
        return CatalogEntry((name, *own.model.served_model_name[1:]), own, keep_alive=seconds,
                            **switches)

    # --- what the files say ---

    def _completed(self, entry: CatalogEntry) -> CatalogEntry:
        """With what its files say now."""
        try:
            path = files_of(entry.config)
            if path is None:
                return entry
            digest = files_digest(path)
            if digest not in self._facts:
                self._facts[digest] = model_facts(path)
        except (OSError, ActoriumError):
            return entry  # a start says what is wrong
        return entry._replace(digest=digest, facts=self._facts[digest])


def engine_config(server: Config, name: str, flags: Any, model: str, engine_of: str) -> Config:
    """The configuration of a model's engine: the server's, less what is the gateways', with the
    flags of its table (field or alias -> value). Raises `BadConfig`, naming the key."""
    layer = sources.from_mapping(dict(flags))
    for field, given in layer.items():
        section = sources.fields()[field].section
        if (section in ("models", "cluster") or field in OF_THE_SERVER
                or (section == "gateway" and field not in OF_PARSERS)):
            raise BadConfig(f"{given.origin}: is the server's, not a model's", field)
    replace = msgspec.structs.replace
    own = engine_name(server.runtime.name, name)
    aliases = tuple(layer.pop("served_model_name").value) if "served_model_name" in layer else ()
    parsers = {field: getattr(server.gateway, field) for field in OF_PARSERS}
    recovery = server.recovery
    config = replace(
        server, model=replace(server.model, model=model, served_model_name=tuple(
            dict.fromkeys((name, *aliases)))),
        gateway=GatewayConfig(**parsers), probes=ProbeConfig(),
        models=ModelsConfig(engine_of=engine_of),
        # The ledger outlives the engine's own run directory: its next engine goes on with it.
        recovery=replace(recovery, ledger_dir=_within(
            recovery.ledger_dir or str(ledgers_of(server)), own),
                         # A process that waits to replace a dead actor would double an idle
                         # engine's memory.
                         fork_server="off" if recovery.fork_server == "auto"
                         else recovery.fork_server),
        device=replace(server.device, dump_passes=_within(server.device.dump_passes, own)),
        runtime=replace(server.runtime, name=own, log_stderr=False,
                        trace_dir=_within(server.runtime.trace_dir, own)))
    changes: dict[str, dict[str, Any]] = {}
    if (level := layer.get("optimization_level")) is not None:
        changes["device"] = dict(level_settings(level.value, layer.keys()))
    for field, given in layer.items():
        changes.setdefault(sources.fields()[field].section, {})[field] = given.value
    return validate(replace(config, **{section: replace(getattr(config, section), **values)
                                       for section, values in changes.items()}))


def _is_name(file: str) -> bool:
    """Returns whether a file's name may be a model's: lists could not show those of bytes that are
    no UTF-8."""
    return not file.startswith(".") and len(file) <= MAX_NAME and file.isprintable()


def ledgers_of(server: Config) -> Path:
    """Where the ledgers of a server's engines lie, unless --ledger-dir says so."""
    return engine_dir(server.runtime.name, server.runtime.run_dir) / LEDGERS


def _within(folder: str | None, engine: str) -> str | None:
    """Where engines must not share a folder, each has one in it."""
    return None if folder is None else str(Path(folder).expanduser().absolute() / engine)


def engine_name(server: str, model: str) -> str:
    """The name of a model's engine. It tells models apart, and is short enough for sockets."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", model)
    name = f"{server}.{plain}"
    if plain == model and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{f'{server[:16]}.{plain}'[:LONGEST_NAME - 9]}-{digest}"


def files_of(config: Config) -> Path | None:
    """The folder or the GGUF file of a model; None where it is to be fetched. Raises `BadModel` and
    `BadConfig`."""
    name = named(config)
    if name is None:
        return Path(config.model.model).expanduser().absolute()
    if name.repo in WHEEL_MODELS and not name.revision and not name.file:
        return wheel_model_file(name.repo) if is_fetched(name.repo) else None
    cache = config.model.download_dir
    return cached_model(name, Path(cache).expanduser() if cache else hub_cache())


def _check_distinct(entries: Iterable[CatalogEntry], path: Path) -> None:
    """Raises `BadConfig` if two models have a name, or several are the default."""
    names: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if (other := names.setdefault(name, entry.name)) != entry.name:
                raise BadConfig(f"models: {path}: {name!r} is a name of both {other} and "
                                f"{entry.name}", "models.models")
    if len(chosen := [entry.name for entry in entries if entry.default]) > 1:
        raise BadConfig(f"models: {path}: {' and '.join(chosen)} cannot all be the default",
                        "models.models")
