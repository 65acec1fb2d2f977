"""The text part of checkpoints of text with images, video or sound: log-probabilities as
transformers' whole class has them of text alone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import load
from helpers_speculation import Work
from helpers_toys import toy_fields
from safetensors.torch import save_file
from torch import Tensor

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.models.model_classes import MODEL_TYPES
from actorium.actors.models.model_dir import _LEFT_OUT, takes_media, text_config
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import ARCHITECTURES, shape_from_config
from actorium.gpu.families.text_parts import FLAT, TEXT_TYPES, WITH_TEXT_PART, text_model
from actorium.gpu.families.transformers_config import text_classes
from actorium.tools.models_table import GROUPS, PAGE, names_in

IDS = [3 + 7 * i % 190 for i in range(20)]
SPECIAL = 198
"""The token that stands for an image, say."""
DAILY = ("LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration")
AS_IN_MEMORY = ("Kimi_K25ForConditionalGeneration", "QianfanOCRForConditionalGeneration")
"""Of which transformers writes names that published files do not have."""
FIRST_TOWER = ("Idefics3ForConditionalGeneration",)
"""Which bring tokens to where their towers lie."""
AXES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl_text", "glm4v_text"), {"hidden_size": 128}),
    "glm4v_moe_text": {"use_qk_norm": False}}


def mixed_classes() -> set[str]:
    """Of transformers' tables of classes for text with images or sound."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return {name for table in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                               auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
            for names in table.values()
            for name in ((names,) if isinstance(names, str) else names)}


def text_toy(kind: str) -> dict[str, Any]:
    """Fields of a text part of this type."""
    name = MODEL_TYPES[kind].name if kind in MODEL_TYPES else TEXT_TYPES[kind]
    fields = {**toy_fields(name, "float32"), "model_type": kind, **AXES.get(kind, {})}
    del fields["architectures"]
    if kind in ("qwen2_vl_text", "glm4v_text"):  # heads' sizes follow from the width
        del fields["head_dim"]
    if kind in TEXT_TYPES:
        share = {"partial_rotary_factor": 0.5} if "glm" in kind else {}
        fields["rope_parameters"] = {
            "rope_type": "default", "rope_theta": 1e4, **share,
            "mrope_section": [2, 3, 3] if share else [4, 6, 6]}
    return fields


def write_text_part(path: Path, name: str) -> Any:
    """A checkpoint of the class with its text part alone, at toy size; returns transformers' model,
    whose other parts are on torch's meta device."""
    import transformers

    made: Any = getattr(transformers, name)
    kind = made.config_class().get_text_config().model_type
    config = made.config_class(text_config=text_toy(kind))
    for field in ("image_token_id", "image_token_index", "video_token_id", "video_token_index",
                  "audio_token_id", "audio_token_index"):
        if getattr(config, field, None) is not None:
            setattr(config, field, SPECIAL)
    with torch.device("meta"):
        model = made(config).eval()
    text, head = model.get_decoder(), model.get_output_embeddings()
    fresh = type(text)(text.config)
    text.to_empty(device="cpu")
    if head is not None:
        head.to_empty(device="cpu")
    for own, right in zip(text.buffers(), fresh.buffers(), strict=True):
        own.copy_(right)
    torch.manual_seed(3)
    with torch.no_grad():
        heads = [] if head is None else [(own, own) for own in head.parameters()]
        for weight, right in [*zip(text.parameters(), fresh.parameters(), strict=True), *heads]:
            weight.copy_(torch.randn_like(weight) * 0.1 + (right if weight.ndim == 1 else 0))
    model.tie_weights()
    held = {key: own for key, own in model.state_dict().items() if own.device.type != "meta"}
    model.save_pretrained(path, state_dict=held)
    if name in FIRST_TOWER:
        model.model.vision_model = model.model.connector = torch.nn.Identity()
    if name in AS_IN_MEMORY:
        save_file({key: own.clone() for key, own in held.items()}, path / "model.safetensors",
                  {"format": "pt"})
    return model


def logprobs(model: Any) -> Tensor:
    """Of each token of IDS but the first, by the worker."""
    params = ResolvedParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (out,) = Work([list(IDS)], [params]).plain(model)
    return torch.tensor(np.frombuffer(b"".join(part.chosen for part in out.prompt_logprobs),
                                      np.float32).copy())


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in DAILY else [pytest.mark.slow])
    for name in sorted(WITH_TEXT_PART)])
def test_as_the_whole_class(tmp_path: Path, name: str,
                            record_property: Callable[[str, object], None]) -> None:
    oracle = write_text_part(tmp_path, name)
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([IDS])).logits[0].float()
    want = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    model = load(tmp_path)
    torch.testing.assert_close(logprobs(model), want, rtol=0, atol=1e-4)
    record_property("text_part", f"{name} {model.shape.architecture}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(mixed_classes() - WITH_TEXT_PART - set(ARCHITECTURES)
                                        - text_classes()))
def test_other_classes_are_refused(tmp_path: Path, name: str,
                                   record_property: Callable[[str, object], None]) -> None:
    import transformers

    config = getattr(transformers, name).config_class()
    kind = config.get_text_config().model_type
    raw = json.dumps({**config.to_dict(), "architectures": [name]}, default=str)
    (tmp_path / "config.json").write_text(raw.replace("Infinity", "1e30"))
    with pytest.raises(BadModel, match=f"architecture {name} is not supported"):
        load(tmp_path)
    known = kind in MODEL_TYPES or kind in TEXT_TYPES
    record_property("text_part", f"{name} refused: " + (
        "not shown to be equal" if known else "none of ours"))


def test_flat_configs_of_old() -> None:
    """As Qwen2-VL's were published."""
    raw = {**text_toy("qwen2_vl_text"), "architectures": ["Qwen2VLForConditionalGeneration"],
           "model_type": "qwen2_vl", "vision_config": {"embed_dim": 32}}
    raw["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    del raw["rope_parameters"]
    shape = shape_from_config(raw, Path("config.json"))
    assert (shape.architecture, shape.vision, shape.head_dim) == ("Qwen2ForCausalLM", None, 32)
    assert set(FLAT) <= WITH_TEXT_PART


def test_a_text_part_that_no_class_runs_is_refused_by_name() -> None:
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {
        "model_type": "phi"}}
    assert text_model(raw["architectures"][0], raw, Path("c"))[0] == "PhiForCausalLM"
    for kind in ("no such", ["a"], None):
        raw["text_config"] = {"model_type": kind}
        with pytest.raises(BadModel, match="text_config.model_type: the text part of Llava"):
            shape_from_config(raw, Path("config.json"))


def test_no_images_are_taken(tmp_path: Path) -> None:
    for name, taken in (("LlavaForConditionalGeneration", False),
                        ("Qwen3VLForConditionalGeneration", True)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        (tmp_path / "preprocessor_config.json").write_text("{}")
        assert takes_media(Config(model=ModelConfig(model=str(tmp_path)))) == taken


def test_the_table_names_every_class() -> None:
    listed = names_in(PAGE.read_text(), GROUPS["text_part"][0])
    assert len(listed) == len(set(listed))
    assert set(listed) == (mixed_classes() - set(ARCHITECTURES) - text_classes()) | WITH_TEXT_PART


def test_types_and_defaults_are_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert set(TEXT_TYPES.values()) <= set(ARCHITECTURES)
    assert not WITH_TEXT_PART & set(ARCHITECTURES)
    for kind, fields in _LEFT_OUT.items():
        config = CONFIG_MAPPING[kind]().to_dict()
        assert fields == {name: config[name] for name in fields}
        assert text_config({"text_config": {"model_type": kind}}) == {**fields, "model_type": kind}
    assert json.dumps(sorted(FLAT.values())) == '["qwen2_vl_text"]'
