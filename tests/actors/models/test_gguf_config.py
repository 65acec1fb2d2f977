"""What a GGUF file's metadata says, as config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers_gguf import describe, own_cache, write_model
from helpers_models import tiny_config

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_config import gguf_config
from actorium.actors.models.gguf_file import read_gguf
from actorium.actors.models.gguf_folder import gguf_folder, gguf_source
from actorium.actors.models.model_dir import read_config, resolve

__all__ = ["own_cache"]
More = Callable[[gguf.GGUFWriter], None]


def config_of(path: Path, more: More = lambda _: None, arch: str = "llama",
              tensors: dict[str, np.ndarray] | None = None, **options: Any) -> dict[str, Any]:
    """Of a file without layers."""
    writer = gguf.GGUFWriter(str(path), arch)
    describe(writer, tiny_config("LlamaForCausalLM", **options), arch)
    more(writer)
    for name, tensor in {"token_embd.weight": np.zeros((199, 64), np.float32),
                         **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_config(read_gguf(path))


def refusal(path: Path, *args: Any, **options: Any) -> str:
    with pytest.raises(BadModel) as caught:
        config_of(path, *args, **options)
    return str(caught.value)


def test_plain_fields(tmp_path: Path) -> None:
    found = config_of(tmp_path / "m.gguf", max_position_embeddings=777, rms_norm_eps=1e-3)
    assert found["architectures"] == ["LlamaForCausalLM"] and found["dtype"] == "float32"
    assert (found["vocab_size"], found["hidden_size"], found["num_hidden_layers"]) == (199, 64, 3)
    assert (found["max_position_embeddings"], found["head_dim"]) == (777, 16)
    assert found["tie_word_embeddings"] and math.isclose(found["rms_norm_eps"], 1e-3, rel_tol=1e-6)
    head = {"output.weight": np.zeros((199, 64), np.float16)}
    found = config_of(tmp_path / "m.gguf", tensors=head)
    assert not found["tie_word_embeddings"] and found["dtype"] == "bfloat16"


def test_heads_of_each_layer_alike_and_not(tmp_path: Path) -> None:
    def heads(each: list[int]) -> More:
        def more(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0].pop("llama.attention.head_count_kv")
            writer.add_head_count_kv(each)
        return more

    assert config_of(tmp_path / "m.gguf", heads([2, 2, 2]))["num_key_value_heads"] == 2
    assert "layers that differ" in refusal(tmp_path / "m.gguf", heads([2, 2, 1]))


def test_ropes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32_768)

    assert config_of(path, yarn, "qwen2")["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert "'longrope' is not served" in refusal(
        path, lambda w: w.add_string("llama.rope.scaling.type", "longrope"))


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 131_072)])
def test_llama3s_rope_is_known_by_its_factors(factor: float, original: int,
                                              tmp_path: Path) -> None:
    """As convert_hf_to_gguf.py makes them."""
    theta, dim, found = 500_000.0, 64, []
    low, high = original, original / 4
    for i in range(0, dim, 2):
        length = 2 * math.pi * theta ** (i / dim)
        if length < high:
            found.append(1.0)
        elif length > low:
            found.append(factor)
        else:
            smooth = (original / length - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    def config(numbers: list[float]) -> dict[str, Any]:
        return config_of(tmp_path / "m.gguf", tensors={
            "rope_freqs.weight": np.array(numbers, np.float32)}, head_dim=dim,
            rope_parameters={"rope_type": "default", "rope_theta": theta})

    assert config(found)["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": original}
    assert "rope_scaling" not in config([1.0] * 32)
    assert config([1.0] * 8 + [1e30] * 24)["rope_scaling"] == {
        "rope_type": "proportional", "partial_rotary_factor": 0.25}
    for wrong in ([*found[:-1], 3.3], [float("nan")] * 32, [*found[:-1], float("inf")], found[1:],
                  [1e30, *[1.0] * 31], [2.0, *[1e30] * 31], [1.0] + [float("inf")] * 31):
        with pytest.raises(BadModel, match=r"rope_freqs\.weight"):
            config(wrong)


def test_gemma(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(1024)

    found = config_of(tmp_path / "m.gguf", more, "gemma3")
    assert found["sliding_window"] == 1024
    assert found["layer_types"] == ["sliding_attention"] * 3
    assert found["query_pre_attn_scalar"] == 16 and found["rope_local_base_freq"] == 10_000
    wide = config_of(tmp_path / "m.gguf", more, "gemma3", num_hidden_layers=62)
    assert wide["query_pre_attn_scalar"] == 64 // 4


def test_experts_that_are_not_served(tmp_path: Path) -> None:
    assert "qwen2.expert_count" in refusal(tmp_path / "m.gguf", lambda w: w.add_expert_count(8),
                                           "qwen2")
    assert "'rwkv7' is not served" in refusal(tmp_path / "m.gguf", arch="rwkv7")


def test_the_directory_is_made_once_and_anew_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "LlamaForCausalLM", "Q8_0")
    folder = resolve(str(path))
    assert gguf_folder(path) == folder and gguf_source(folder) == path
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    write_model(path, "LlamaForCausalLM", "Q4_0")
    again = resolve(str(path))
    assert again != folder and read_config(again)["gguf"]["default"] == "Q4_0"
    (tmp_path / "config.json").write_bytes((again / "config.json").read_bytes())
    assert gguf_source(tmp_path) is None, "a config.json elsewhere leads to no file"


def test_a_model_in_several_files(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    write_model(whole, "Qwen2ForCausalLM", "Q8_0")
    reader = gguf.GGUFReader(str(whole))
    config = tiny_config("Qwen2ForCausalLM")
    for i in range(2):
        part = tmp_path / f"m-{i + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(str(part), "qwen2")
        if i == 0:
            describe(writer, config, "qwen2")
            writer.add_uint16("split.count", 2)
        for own in reader.tensors[i::2]:
            writer.add_tensor(own.name, own.data, raw_dtype=own.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    files = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    for named in files:
        found = read_gguf(named)
        assert {own.name: (own.shape, own.type) for own in found.tensors.values()} == {
            own.name: (own.shape, own.type) for own in read_gguf(whole).tensors.values()}
        assert {own.file for own in found.tensors.values()} == set(files)
    data = files[1].read_bytes()
    (tmp_path / "n-00001-of-00002.gguf").write_bytes(data)
    (tmp_path / "n-00002-of-00002.gguf").write_bytes(data)
    with pytest.raises(BadModel, match="lies in an earlier file"):
        read_gguf(tmp_path / "n-00001-of-00002.gguf")
