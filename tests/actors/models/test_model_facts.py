"""Facts of a model from its files' headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers_pooling_files import write_modules

from actorium.actors.models.model_facts import CheckpointFacts, files_digest, model_facts


def checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int]]], **config: Any) -> Path:
    """A directory whose file has a header and no numbers."""
    header = json.dumps({"__metadata__": {"format": "pt"}} | {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    return folder


def test_a_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"a": ("BF16", [30, 20]), "b": ("F32", [7])})
    facts = model_facts(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert (facts.format, facts.family, facts.quantization) == ("safetensors", "qwen3", "BF16")
    assert (facts.parameters, facts.size) == (607, size)
    assert facts.architecture == "Qwen3ForCausalLM"
    assert facts.modified == max(file.stat().st_mtime for file in folder.iterdir())
    digest = files_digest(folder)
    assert len(digest) == 64 and files_digest(folder) == digest
    checkpoint(tmp_path, {"a": ("BF16", [30, 20]), "b": ("F32", [7])}, rope_theta=5)
    assert files_digest(folder) != digest


def test_packed_numbers_are_not_counted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"a": ("I32", [30, 20]), "s": ("F16", [30])},
                        quantization_config={"quant_method": "awq"})
    facts = model_facts(folder)
    assert (facts.quantization, facts.parameters) == ("AWQ", 0)


def test_a_model_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"model_type": "gemma3_text"}}')
    facts = model_facts(tmp_path)
    assert (facts.format, facts.family, facts.parameters) == ("safetensors", "gemma3_text", 0)


def test_what_a_model_does(tmp_path: Path) -> None:
    vectors = ("embed", "token_embed")
    assert model_facts(checkpoint(tmp_path, {}, hidden_size=64)).tasks == ("generate", *vectors)
    classes = ["Qwen3ForSequenceClassification"]
    assert model_facts(checkpoint(tmp_path, {}, hidden_size=64, architectures=classes)).tasks == (
        "classify",)
    folder = checkpoint(tmp_path, {}, hidden_size=64)
    write_modules(folder, "mean_tokens")
    assert model_facts(folder).tasks == vectors
    (folder / "modules.json").write_text("no")  # a start says what is wrong
    facts = model_facts(folder)
    assert (facts.tasks, facts.family) == ((), "qwen3")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]",
                                     struct.pack("<Q", 12) + b'{"a":{"b":1}}'[:12],
                                     struct.pack("<Q", 13) + b'{"a":{"b":1}}'])
def test_of_a_file_that_is_none_the_configuration_is_known(tmp_path: Path, content: bytes) -> None:
    folder = checkpoint(tmp_path, {}, torch_dtype="float16")
    (folder / "model.safetensors").write_bytes(content)
    facts = model_facts(folder)
    assert facts.size > 0 and (facts.family, facts.quantization) == ("qwen3", "float16")
    assert facts.parameters == 0
    (folder / "config.json").write_text("[]")
    facts = model_facts(folder)
    assert facts == CheckpointFacts(facts.size, facts.modified)


@pytest.mark.parametrize(("name", "kind"), [("tiny-Q4_K_M.gguf", "Q4_K_M"), ("tiny.gguf", "F16")])
def test_a_gguf_file(tmp_path: Path, name: str, kind: str) -> None:
    """By its name, or by what most of its numbers are."""
    writer = gguf.GGUFWriter(tmp_path / name, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((10, 8), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = model_facts(tmp_path / name)
    assert (facts.format, facts.family, facts.quantization) == ("gguf", "llama", kind)
    assert (facts.parameters, facts.context_length) == (88, 64)
    assert facts.tasks == ("generate", "embed", "token_embed")
    assert facts.size == (tmp_path / name).stat().st_size
