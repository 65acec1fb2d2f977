"""The smaller model that drafts for another one (`--speculative draft`): how it is read, and which
models can."""

from __future__ import annotations

from pathlib import Path

import msgspec

from actorium.actors.config.parsed_values import parse_speculative
from actorium.actors.config.tree import AdapterConfig, Config, SpeculationConfig
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import max_model_len, read_config, resolve
from actorium.gpu.families.model_shape import ModelShape

FLAG, PARAM = "--speculative-model", "speculation.speculative_model"


def draft_model_config(config: Config, longest: int) -> Config | None:
    """What the smaller model is read and loaded by; None where none is asked for. It has its
    weights as its files have them. longest: tokens of a sequence of the model that it drafts for.

    Raises `BadModel` and `BadConfig`.
    """
    own = config.speculation
    if "draft" not in parse_speculative(own.speculative).methods:
        return None
    path = resolve(own.speculative_model)
    replace = msgspec.structs.replace
    model = replace(config.model, model=str(path), quantization="auto", quantization_group=None,
                    quantization_head="auto", language_model_only=True, runner="generate",
                    convert="auto", pooler_config={},
                    max_model_len=min(longest, max_model_len(read_config(path))))
    return replace(config, model=model, speculation=SpeculationConfig(speculative="off"),
                   adapters=AdapterConfig())


def check_draft_model(path: Path, draft: ModelShape, target: ModelShape) -> None:
    """Raise `BadConfig` where this model cannot draft for that one. path: of its directory."""
    faults = [
        (target.bidirectional, f"nothing is drafted for {target.architecture}, which does not "
         "generate"),
        (0 not in {group.window for group in target.groups}, "a draft model keeps its keys and "
         f"values by pages of full attention, which {target.architecture} has not: all of its "
         "layers have a window"),
        (draft.by_transformers > 0, f"{draft.architecture} cannot draft: classes of ours alone "
         "can"),
        (draft.bidirectional, f"{draft.architecture} cannot draft: it does not generate"),
        (draft.recurrence is not None, f"{draft.architecture} cannot draft: it has recurrent "
         "layers, whose states are not kept by pages"),
        (draft.index is not None, f"{draft.architecture} cannot draft: an indexer chooses its "
         "tokens"),
        (len({draft.of_layer(i).kv_row for i in kept_layers(draft)}) > 1,
         f"{draft.architecture} cannot draft: its layers have keys of several sizes"),
    ]
    for wrong, why in faults:
        if wrong:
            raise BadConfig(f"{FLAG}: {path}: {why}", PARAM)


def kept_layers(shape: ModelShape) -> list[int]:
    """The layers that keep keys and values, in the order of their groups."""
    return [i for group in shape.groups for i in group.layers]
