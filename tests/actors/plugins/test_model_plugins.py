"""Model families of plug-ins: when they are imported, and what runs their layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_configs import SMALL
from helpers_plugins import write_example, write_package

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.gpu.families.architectures import ARCHITECTURES, read_shape
from actorium.gpu.models.llama import CausalLM, HybridLM
from actorium.gpu.models.registry import decoder_of

EXAMPLE = {"architectures": ["ExampleForCausalLM"], "model_type": "example", "depth": 3}


def shape_of(folder: Path, config: dict[str, Any], plugins: str = "all") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | config))
    return read_shape(folder, Config(runtime=RuntimeConfig(plugins=plugins)))


def test_they_are_imported_for_a_class_that_is_not_ours(site: Path) -> None:
    write_example(site)
    shape_of(site / "llama", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert "actorium_example.family" not in sys.modules
    with pytest.raises(BadModel, match="ExampleForCausalLM is not supported"):
        shape_of(site / "model", EXAMPLE, "none")
    assert shape_of(site / "model", EXAMPLE).layers == 3
    assert decoder_of("ExampleForCausalLM") is CausalLM


def test_a_broken_one_is_named_where_its_model_is_served(site: Path) -> None:
    write_package(site, "broken", {"actorium.models": {
        "ExampleForCausalLM": "nobody_has_this:X", "OtherForCausalLM": "nobody_has_this:Y"}})
    with pytest.raises(BadConfig, match="plug-in actorium.models ExampleForCausalLM of broken 1.0 "
                                        "cannot be used: ModuleNotFoundError"):
        shape_of(site / "model", EXAMPLE)


def test_its_decoder_is_the_one_that_it_names(site: Path) -> None:
    own = ARCHITECTURES["LlamaForCausalLM"]
    for decoder, name in (("actorium.gpu.models.llama:HybridLM", "X"), ("os:getcwd", "Y"),
                          ("nobody_has_this:Z", "Z")):
        ARCHITECTURES[name] = own._replace(decoder=decoder)
    assert decoder_of("X") is HybridLM
    for name, why in (("Y", "'os:getcwd' is no Decoder"), ("Z", "No module named")):
        with pytest.raises(BadModel, match=f"{name}: decoder .*{why}"):
            decoder_of(name)
