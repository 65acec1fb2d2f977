"""What of a model's files is taken as it is, and what is left out with a line of the log: a slip in
a generation_config.json is no reason not to serve the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.models.model_dir import eos_ids, max_model_len, trained_length
from actorium.actors.params import SamplingParams

LOG = logging.getLogger("actorium.model")


def known_eos_ids(path: Path, config: dict[str, Any], generation: dict[str, Any],
                  size: int) -> tuple[int, ...]:
    """Those of `eos_ids` within a vocabulary of so many tokens. Where generation_config.json has
    none of these, as when it is another model's, config.json's count. Raises `BadModel`."""
    for source in (generation, {}):
        found = eos_ids(config, source)
        inside = tuple(i for i in found if 0 <= i < size)
        if outside := [str(i) for i in found if i not in inside]:
            LOG.warning("%s: eos_token_id: %s: outside the vocabulary of %d, and left out", path,
                        ", ".join(outside), size)
        if inside or source is not generation or "eos_token_id" not in source:
            break
    return inside


def longest_sequence(path: Path, config: dict[str, Any], wanted: int | None) -> int:
    """`max_model_len`. Raises as that does."""
    found = max_model_len(config, wanted)
    if trained_length(config) is None:
        LOG.warning("%s: config.json does not say how long a sequence may be "
                    "(max_position_embeddings): %d tokens are served", path, found)
    return found


def usable_defaults(path: Path, generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults of `generation_defaults` that a request could ask for as well."""
    kept = {}
    for name, value in generation.items():
        if name == "eos_token_id":
            continue
        try:
            msgspec.convert({name: value}, SamplingParams).check()
            kept[name] = value
        except (msgspec.ValidationError, ValueError) as error:
            LOG.warning("%s: no default that can be used, and left out: %s",
                        path / "generation_config.json", error)
    return kept
