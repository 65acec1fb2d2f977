"""The shipped checkpoint: files, sizes, tokenizer, configuration, and that it has learned."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from actorium.tools.demo.demo_tasks import generate, held_out, score

tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "demo" / "demo_model"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces\n\n\ttabs \r\n and  trailing  ",
    "Grüße, žluťoučký kůň, 你好，世界, こんにちは, שלום, مرحبا",
    "🦊👩‍👩‍👧 e\u0301 \u200b\ufeff \x00\x7f",
    "x = {'a': [1, 2.5, -3e10]}  # 1234567890",
)


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


def tensor_table() -> dict[str, Any]:
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table: dict[str, Any] = json.loads(file.read(length))
    table.pop("__metadata__", None)
    return table


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_checkpoint_is_small_and_complete() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 16e6


def attention_names(at: str) -> set[str]:
    return {f"{at}self_attn.{name}.weight"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}


def delta_names(at: str) -> set[str]:
    weights = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "norm")
    return {f"{at}linear_attn.{name}" for name in ("A_log", "dt_bias")} | {
        f"{at}linear_attn.{name}.weight" for name in weights}


def layer_names(at: str, kind: str) -> set[str]:
    rest = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
            "mlp.down_proj")
    mixer = delta_names(at) if kind == "linear_attention" else attention_names(at)
    return mixer | {f"{at}{name}.weight" for name in rest}


def test_every_tensor_is_there_in_bf16() -> None:
    config, table = read_json("config.json"), tensor_table()
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert {entry["dtype"] for entry in table.values()} == {"BF16"}
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for i, kind in enumerate(config["layer_types"]):
        names |= layer_names(f"model.layers.{i}.", kind)
    draft = {name for name in table if name.startswith("mtp.")}
    assert set(table) - draft == names and config["tie_word_embeddings"]
    assert config["mtp_num_hidden_layers"] == 1
    assert draft == layer_names("mtp.layers.0.", "full_attention") | {
        f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc",
                                          "norm")}


def test_tensors_have_the_configs_sizes() -> None:
    config, table = read_json("config.json"), tensor_table()
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + inner
    at = f"model.layers.{config['layer_types'].index('linear_attention')}.linear_attn."
    sizes = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "mtp.fc.weight": [hidden, 2 * hidden],
        "mtp.layers.0.self_attn.q_proj.weight": [2 * heads * config["head_dim"], hidden],
        f"{at}in_proj_qkv.weight": [channels, hidden],
        f"{at}conv1d.weight": [channels, 1, config["linear_conv_kernel_dim"]],
        f"{at}out_proj.weight": [hidden, inner],
        f"{at}A_log": [config["linear_num_value_heads"]],
    }
    assert {name: table[name]["shape"] for name in sizes} == sizes


def test_sizes_suit_the_kernels() -> None:
    config = read_json("config.json")
    assert config["vocab_size"] % 64 == 0
    assert config["head_dim"] in (32, 64)
    assert config["max_position_embeddings"] >= 2048
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["linear_key_head_dim"] in (32, 64) and config["linear_value_head_dim"] in (32, 64)
    assert config["linear_num_value_heads"] % config["linear_num_key_heads"] == 0
    assert config["linear_conv_kernel_dim"] == 4


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < read_json("config.json")["vocab_size"] for i in ids)


def test_every_character_round_trips(tokenizer: Any) -> None:
    points = [p for p in range(0, 0x30000, 7) if not 0xD800 <= p < 0xE000]
    text = "".join(map(chr, points))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_ids_fit_the_model(tokenizer: Any) -> None:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    assert max(vocab.values()) < read_json("config.json")["vocab_size"] <= 4096
    assert sorted(vocab.values()) == list(range(len(vocab)))


def test_digits_stand_alone(tokenizer: Any) -> None:
    for item in generate(1, 50, ["add", "recall", "sort"]):
        for token in tokenizer.encode(item.prompt).tokens:
            assert not any(c.isdigit() for c in token) or len(token) == 1


def test_special_tokens_are_special(tokenizer: Any) -> None:
    ids = [tokenizer.token_to_id(token) for token in SPECIAL]
    assert None not in ids
    assert tokenizer.encode("".join(SPECIAL)).ids == ids
    assert tokenizer.decode(ids) == ""
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(SPECIAL)


def test_stop_tokens_agree(tokenizer: Any) -> None:
    eos = read_json("generation_config.json")["eos_token_id"]
    assert eos == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert read_json("config.json")["eos_token_id"] == eos[0]
    assert read_json("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_chat_template_renders() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(read_json("tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    body = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert template.render(messages=messages) == body
    opened = template.render(messages=messages, add_generation_prompt=True)
    assert opened == body + "<|im_start|>assistant\n"


def test_transformers_reads_the_tokenizer_alike(tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(str(FOLDER))
    for text in (*TEXTS, *(item.prompt for item in generate(2, 10))):
        assert auto.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert auto.eos_token == "<|im_end|>"
    ids = auto.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(ids) == tokenizer.encode(expected).ids


@pytest.fixture(scope="module")
def trained() -> Any:
    pytest.importorskip("torch")
    from actorium.tools.training.demo_drafts import load_drafting

    return load_drafting(FOLDER)


def test_held_out_questions_are_answered(trained: Any, tokenizer: Any) -> None:
    from actorium.tools.training.demo_batches import question_text
    from actorium.tools.training.draft_acceptance import greedy

    items = [item for task in ("add", "copy", "reverse", "json") for item in held_out(task, 6)]
    made = greedy(trained[0], tokenizer, [question_text(item.prompt) for item in items], 60)
    right = [score(item, tokenizer.decode(ids)) for item, ids in zip(items, made, strict=True)]
    assert sum(right) >= 0.85 * len(items)


@pytest.mark.slow
def test_most_drafts_of_free_text_are_accepted(trained: Any, tokenizer: Any) -> None:
    from actorium.tools.training.draft_acceptance import CHAT, measure, prompts_of

    prompts = [*prompts_of("story", 3), *prompts_of(CHAT, 3)]
    model, mtp = trained
    first, second = measure(model, mtp, tokenizer, prompts, 2).shares
    assert first >= 0.75 and second >= 0.5
