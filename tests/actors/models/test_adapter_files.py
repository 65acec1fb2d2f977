"""What is read of a LoRA adapter's files, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers_adapter_files import MODULES, PREFIX, adapter_tensors, write_adapter

from actorium.actors.errors import BadModel
from actorium.actors.models.adapter_files import read_adapter

Q, DOWN = MODULES


def test_an_adapter_of_peft_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a"), 16)
    assert list(sorted(adapter.modules)) == sorted(MODULES)
    module = adapter.modules[Q]
    assert (module.rank, module.scale) == (4, 2.0)
    assert (module.a.shape, module.b.shape, module.a.dtype) == ((4, 8), (16, 4), "F32")
    assert module.a.name == f"{PREFIX}{Q}.lora_A.weight"
    assert (adapter.rank, adapter.base, adapter.gguf) == (4, "org/base", False)
    assert len(adapter.digest) == 32


@pytest.mark.parametrize(("config", "scale"), [
    ({"lora_alpha": 4}, 1.0),
    ({"lora_alpha": 4, "use_rslora": True}, 4 / math.sqrt(4)),
    ({"alpha_pattern": {"q_proj": 12}}, 3.0),
    ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 12}}, 3.0),
    ({"alpha_pattern": {"^q_proj": 12}}, 2.0),
    ({"alpha_pattern": {"roj": 12}}, 2.0),
    ({"alpha_pattern": {"self_attn.q_proj": 16, "q_proj": 12}}, 4.0),
    ({"r": 2, "rank_pattern": {"q_proj": 4, "down_proj": 4}}, 2.0),
])
def test_scales_follow_the_config(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a", **config), 16)
    assert adapter.modules[Q].scale == scale


def test_the_digest_is_of_all_bytes(tmp_path: Path) -> None:
    first = read_adapter(write_adapter(tmp_path / "a"), 16).digest
    assert read_adapter(write_adapter(tmp_path / "b"), 16).digest == first
    assert read_adapter(write_adapter(tmp_path / "c", lora_alpha=9), 16).digest != first
    other = write_adapter(tmp_path / "d", adapter_tensors(seed=1))
    assert read_adapter(other, 16).digest != first


@pytest.mark.parametrize(("config", "named"), [
    ({"peft_type": "IA3"}, "peft_type: must be LORA, got 'IA3'"),
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias: must be none, got 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"r": 0}, "'r': must be a number above 0"),
    ({"r": True}, "'r': must be a number above 0"),
    ({"lora_alpha": "big"}, "'lora_alpha': must be a number above 0, got 'big'"),
    ({"r": 5}, "has rank 4, and adapter_config.json says 5"),
    ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern: '(a+)+$'"),
    ({"rank_pattern": [1]}, "rank_pattern: must be an object"),
])
def test_what_is_more_than_lora_is_refused_by_name(tmp_path: Path, config: dict[str, Any],
                                                   named: str) -> None:
    folder = write_adapter(tmp_path / "a", **config)
    with pytest.raises(BadModel) as error:
        read_adapter(folder, 16)
    assert named in error.value.message
    assert str(folder) in error.value.message


def _with(**changed: np.ndarray[Any, Any] | None) -> dict[str, np.ndarray[Any, Any]]:
    tensors = adapter_tensors(modules=(Q,))
    for name, value in changed.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    return tensors


ZEROS = np.zeros((4, 8), np.float32)
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


@pytest.mark.parametrize(("tensors", "named"), [
    (_with(**{B: None}), "has no matrix B"),
    (_with(**{A: None}), "has no matrix A"),
    (_with(**{B: np.zeros((16, 3), np.float32)}), "have different ranks"),
    (_with(**{A: np.zeros(4, np.float32)}), "has shape [4]"),
    (_with(**{A: np.zeros((0, 8), np.float32)}), "has shape [0, 8]"),
    (_with(**{A: ZEROS.astype(np.int8)}), "is I8"),
    (_with(**{f"{PREFIX}{Q}.lora_magnitude_vector": ZEROS}), "lora_magnitude_vector"),
    (_with(**{f"{PREFIX}model.embed_tokens.lora_embedding_A": ZEROS}), "lora_embedding_A"),
    (_with(**{f"{PREFIX}lm_head.weight": ZEROS}), "lm_head.weight"),
    ({}, "it has no tensors"),
])
def test_other_tensors_are_refused_by_name(
        tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]], named: str) -> None:
    with pytest.raises(BadModel) as error:
        read_adapter(write_adapter(tmp_path / "a", tensors), 16)
    assert named in error.value.message


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    read_adapter(folder, 4)
    with pytest.raises(BadModel, match="has rank 4, more than --max-lora-rank, which is 3"):
        read_adapter(folder, 3)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="there is no such folder or file"):
        read_adapter(tmp_path / "nowhere", 16)
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    for broken in (b"", data[:7], data[:100], data[:-1], b"\xff" * 8 + data[8:]):
        weights.write_bytes(broken)
        with pytest.raises(BadModel, match="not a readable safetensors file"):
            read_adapter(folder, 16)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(BadModel, match="is pickled, which is never read"):
        read_adapter(folder, 16)
    for text in ("", "[]", "{", "\udcff"):
        (folder / "adapter_config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(BadModel, match="is not a JSON object"):
            read_adapter(folder, 16)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(BadModel, match=r"adapter_config\.json is missing"):
        read_adapter(folder, 16)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder, other = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(other / "adapter_model.safetensors")
    with pytest.raises(BadModel, match="leads out of"):
        read_adapter(folder, 16)


def write_gguf(path: Path, kind: str = "lora", alpha: float = 8.0,
               tensors: tuple[str, ...] = ("lora_a", "lora_b"), aloras: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    if aloras:
        writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    shapes = {"lora_a": (4, 8), "lora_b": (16, 4)}
    for side in tensors:
        writer.add_tensor(f"blk.0.attn_q.weight.{side}",
                          np.zeros(shapes.get(side, (4, 4)), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write_gguf(tmp_path / "a.gguf"), 16)
    module = adapter.modules["blk.0.attn_q"]
    assert (module.rank, module.scale, module.a.dtype) == (4, 2.0, "F16")
    assert (module.a.shape, module.b.shape) == ((4, 8), (16, 4))
    assert adapter.gguf and adapter.weights == tmp_path / "a.gguf"
    assert read_adapter(write_gguf(tmp_path / "b.gguf", alpha=0.0), 16).modules[
        "blk.0.attn_q"].scale == 1.0


@pytest.mark.parametrize(("settings", "named"), [
    ({"kind": "control_vector"}, "adapter.type: must be lora"),
    ({"aloras": True}, "adapter.alora.invocation_tokens"),
    ({"tensors": ("lora_a",)}, "has no matrix B"),
    ({"tensors": ("lora_a", "lora_b", "scale")}, "scale"),
])
def test_other_gguf_files_are_refused(tmp_path: Path, settings: dict[str, Any],
                                      named: str) -> None:
    with pytest.raises(BadModel) as error:
        read_adapter(write_gguf(tmp_path / "a.gguf", **settings), 16)
    assert named in error.value.message


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadModel, match=r"general\.type: must be adapter"):
        read_adapter(tmp_path / "m.gguf", 16)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BadModel, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path / "config", 16)
