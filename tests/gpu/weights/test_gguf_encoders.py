"""Encoders from GGUF files: their rows, heads and tokens against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers_encoders import VOCABULARY, encoded, write_encoder
from helpers_gguf import own_cache
from helpers_models import load
from helpers_pooling import assert_near, pool_all, resolved
from helpers_worker import make_runner
from tokenizers import Tokenizer

from actorium.actors.errors import BadModel
from actorium.actors.models.model_dir import resolve

__all__ = ["own_cache"]
PROMPTS = [[5, 9, 100, 33], list(range(3, 40)), [198]]
OUTER = {"word_embeddings": "token_embd", "tok_embeddings": "token_embd", "norm": "token_embd_norm",
         "LayerNorm": "token_embd_norm", "position_embeddings": "position_embd",
         "token_type_embeddings": "token_types"}
LAYER = {"attention.self.query": "attn_q", "attention.self.key": "attn_k",
         "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
         "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
         "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
         "self_attn.o_proj": "attn_output", "post_attention_layernorm": "attn_output_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "post_mlp_layernorm": "layer_output_norm", "attn.Wqkv": "attn_qkv",
         "attn.Wo": "attn_output",
         "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down"}
HEADS = {"pooler.dense": "cls", "classifier": "cls.output", "final_norm": "output_norm"}


def stored_name(name: str) -> str:
    """What llama.cpp's converters call this tensor of transformers."""
    module, _, kind = name.rpartition(".")
    for wrapper in ("bert.", "model."):
        module = module.removeprefix(wrapper)
    if module in HEADS:
        return f"{HEADS[module]}.{kind}"
    if module.startswith("embeddings."):
        return f"{OUTER[module.removeprefix('embeddings.')]}.{kind}"
    at, own = module.removeprefix("encoder.").removeprefix("layer").removeprefix("s")[1:].split(
        ".", 1)
    return f"blk.{at}.{LAYER[own]}.{kind}"


def write_gguf(path: Path, at: str, model: Any, pooling: int, tokens: list[str] | None = None,
               **keys: float) -> None:
    """A model of transformers as a GGUF file of this architecture."""
    config, writer = model.config, gguf.GGUFWriter(str(path), at)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    for key, value in keys.items():
        writer.add_float32(f"{at}.{key}", value)
    if tokens is not None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(tokens)
    tensors = {name: own.detach().float() for name, own in model.named_parameters()}
    for name in [name for name in tensors if name.endswith("self_attn.q_proj.weight")]:
        each = [tensors.pop(name.replace("q_proj", f"{own}_proj")) for own in "qkv"]
        layer = name.removeprefix("layers.").partition(".")[0]
        writer.add_tensor(f"blk.{layer}.attn_qkv.weight", torch.cat(each).numpy())
    for name, own in tensors.items():
        if "pooler" not in name or any("classifier" in other for other in tensors):
            writer.add_tensor(stored_name(name), np.ascontiguousarray(own.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("at", "architecture", "keys", "options"), [
    ("bert", "BertModel", {}, {}), ("bert", "BertModel", {}, {"type_vocab_size": 1}),
    ("nomic-bert", "NomicBertModel", {"rope.freq_base": 1000.0}, {}),
    ("modern-bert", "ModernBertModel", {"rope.freq_base": 160_000.0,
                                        "rope.freq_base_swa": 10_000.0}, {"local_attention": 128})])
def test_rows_are_those_of_transformers(tmp_path: Path, at: str, architecture: str,
                                        keys: dict[str, float], options: dict[str, Any]) -> None:
    oracle = write_encoder(tmp_path / "hf", architecture, **options)
    write_gguf(tmp_path / "own.gguf", at, oracle, 1, **keys)
    model = load(resolve(str(tmp_path / "own.gguf")))
    assert model.shape.pooling is not None and model.shape.pooling.kind == "mean"
    with torch.no_grad():
        want = [oracle(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    assert_near(encoded(model, PROMPTS), want)


def test_scores_of_a_cross_encoder(tmp_path: Path) -> None:
    oracle = write_encoder(tmp_path / "hf", "BertForSequenceClassification", num_labels=1)
    write_gguf(tmp_path / "own.gguf", "bert", oracle, 4)
    runner = make_runner(load(resolve(str(tmp_path / "own.gguf"))))
    with torch.no_grad():
        want = [oracle(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    assert_near(pool_all(runner, PROMPTS, resolved("classify", True, activation=False)), want)


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "em", "##bed", "##ding", "##s", "of",
          "a", "text", ",", ".", "!", "中", "国", "e", "##te", "##x", "##t", "uber", "'", "s", "[",
          "]"]
TEXTS = ["The embeddings of a text.", "Über 中国, été!", "[unknown] text's", "a" * 120, "",
         "the [MASK] of\ta\ntext", "THE ExTeXt"]


@pytest.mark.parametrize("cased", [False, True])
def test_tokens_are_those_of_transformers(tmp_path: Path, cased: bool) -> None:
    import transformers

    pieces = [*PIECES, *["The", "Text"] * cased,
              *(f"x{i}" for i in range(VOCABULARY - len(PIECES) - 2 * cased))]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=not cased)
    stored = [own if own.startswith("[") and len(own) > 2 else own[2:] if own.startswith("##")
              else f"\u2581{own}" for own in pieces]
    oracle = write_encoder(tmp_path / "hf", "BertModel")
    write_gguf(tmp_path / "own.gguf", "bert", oracle, 2, stored)
    ours = Tokenizer.from_file(str(resolve(str(tmp_path / "own.gguf")) / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    pair, want = ours.encode("the text", "of a"), theirs("the text", "of a")
    assert (pair.ids, pair.type_ids) == (want["input_ids"], want["token_type_ids"])


def test_a_vocabulary_without_the_ends_of_texts_is_refused(tmp_path: Path) -> None:
    oracle = write_encoder(tmp_path / "hf", "BertModel")
    write_gguf(tmp_path / "own.gguf", "bert", oracle, 2, ["\u2581the", "text"])
    with pytest.raises(BadModel, match=r"tokenizer.ggml.tokens: \[CLS\] must be among them"):
        resolve(str(tmp_path / "own.gguf"))
