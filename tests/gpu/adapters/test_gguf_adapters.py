"""Adapters in GGUF files, as llama.cpp's converter writes them, and adapters of models in GGUF."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from helpers_adapters import AdapterDriver, ToyAdapter, merged, open_with_adapters, toy_adapter
from helpers_gguf import own_cache, paired, stored, write_model
from helpers_models import assert_greedy, write_checkpoint

from actorium.actors.errors import BadModel

__all__ = ["own_cache"]
PROMPT = [5, 9, 100, 3, 77, 20]
CALLED = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
          "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def write_adapter(path: Path, at: str, adapter: ToyAdapter, kind: str, alpha: float,
                  heads: tuple[int, int] | None = None) -> None:
    """heads: of families whose queries and keys lie in pairs of rows."""
    writer = gguf.GGUFWriter(str(path), at)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in adapter.matrices.items():
        _, _, layer, _, module = name.split(".")
        if heads is not None and module in ("q_proj", "k_proj"):
            b = paired(b, heads[module == "k_proj"])
        for side, own in (("a", a), ("b", b)):
            raw, _ = stored(own, kind)
            writer.add_tensor(f"blk.{layer}.{CALLED[module]}.weight.lora_{side}", raw,
                              raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("architecture", "at", "heads"), [
    ("LlamaForCausalLM", "llama", (4, 2)), ("Qwen3ForCausalLM", "qwen3", None)])
def test_an_adapter_in_gguf(tmp_path: Path, architecture: str, at: str,
                            heads: tuple[int, int] | None) -> None:
    oracle = write_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2)
    adapter = toy_adapter(oracle, tmp_path / "adapter", dtype=torch.bfloat16)
    write_adapter(tmp_path / "adapter.gguf", at, adapter, "BF16", 8.0, heads)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    driver.load(1, tmp_path / "adapter.gguf")
    [tokens] = driver.generate([PROMPT], [1], 5)
    assert_greedy(merged(oracle, adapter), PROMPT, tokens, 5)


def test_a_model_in_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    oracle = write_model(file, "LlamaForCausalLM", "Q8_0", num_hidden_layers=2)
    adapter = toy_adapter(oracle, tmp_path / "adapter")
    driver = AdapterDriver(open_with_adapters(file))
    driver.load(1, tmp_path / "adapter")
    [tokens] = driver.generate([PROMPT], [1], 5)
    assert_greedy(merged(oracle, adapter), PROMPT, tokens, 5)


def test_what_gguf_adapters_cannot_have(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    own = toy_adapter(oracle, tmp_path / "adapter")
    write_adapter(tmp_path / "other.gguf", "llama", ToyAdapter(
        {"model.layers.3.mlp.up_proj": own.matrices["model.layers.0.mlp.up_proj"]}, 1.0), "F32", 8)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    with pytest.raises(BadModel, match=r"'blk.3.ffn_up' cannot have an adapter"):
        driver.load(1, tmp_path / "other.gguf")
