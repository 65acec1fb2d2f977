"""Classes of transformers over our pages: logits and tokens as they have them, whatever the batch,
the chunks and the pages; what cannot be served is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers_models import CPU, Seq, Stepper, generate, oracle_logits
from helpers_ranks import near, opened_config, run_ranks, serve, whole
from helpers_worker import Ring, complete, make_runner

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import read_shape, shape_from_config
from actorium.gpu.models.registry import load_model
from actorium.gpu.models.transformers_model import TransformersModel
from actorium.gpu.parallel.rank_group import LoneRank
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.worker.exactness import departures
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.tools.cli import main

BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "head_dim": 16, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = {**MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
          "first_k_dense_replace": 1}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
FAST: list[tuple[str, dict[str, Any]]] = [
    ("Starcoder2ForCausalLM", {"sliding_window": 9, "use_bias": True}),
    ("GPTNeoXForCausalLM", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default",
                                                "partial_rotary_factor": 0.5}}),
    ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 2.0}),
]
CASES = [
    *FAST,
    ("AfmoeForCausalLM", {"sliding_window": 9, "layer_types": MIXED, **MOE, "num_experts": 4,
                          "num_dense_layers": 1, "num_shared_experts": 1}),
    ("ApertusForCausalLM", {}),
    ("ArceeForCausalLM", {"attention_bias": True}),
    ("AriaTextForCausalLM", {"moe_num_experts": 4, "moe_topk": 2}),
    ("BitNetForCausalLM", {}),
    ("CTRLLMHeadModel", {"dff": 96}),
    ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.3}),
    ("Cohere2ForCausalLM", {"sliding_window": 9, "layer_types": MIXED}),
    ("DiffLlamaForCausalLM", {}),
    ("Dots1ForCausalLM", {**ROUTED, "sliding_window": None, "routed_scaling_factor": 1.5}),
    ("Ernie4_5ForCausalLM", {"use_bias": True}),
    ("Ernie4_5_MoeForCausalLM", {**MOE, "moe_num_experts": 4, "moe_k": 2,
                                 "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    ("FlexOlmoForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("GPT2LMHeadModel", {}),
    ("GPTBigCodeForCausalLM", {"multi_query": True}),
    ("GemmaForCausalLM", {}),
    ("Glm4MoeForCausalLM", {**ROUTED, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    ("GptOssForCausalLM", {"sliding_window": 9, "layer_types": MIXED, "num_local_experts": 4,
                           "num_experts_per_tok": 2}),
    ("GraniteSWAForCausalLM", {"sliding_window": 9, "layer_types": MIXED}),
    ("HeliumForCausalLM", {}),
    ("HunYuanDenseV1ForCausalLM", {}),
    ("Jais2ForCausalLM", {}),
    ("MiniMaxM2ForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Ministral3ForCausalLM", {"sliding_window": 9}),
    ("NanoChatForCausalLM", {}),
    ("NemotronForCausalLM", {"partial_rotary_factor": 0.5}),
    ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("OlmoForCausalLM", {"clip_qkv": 2.0}),
    ("PersimmonForCausalLM", {"qk_layernorm": True}),
    ("PhiForCausalLM", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    ("PhimoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("BeamForCausalLM", {}),
    ("Cohere2MoeForCausalLM", {}),
    ("CwmForCausalLM", {}),
    ("Emu3ForCausalLM", {}),
    ("ExaoneMoeForCausalLM", {}),
    ("FlintForCausalLM", {}),
    ("GraniteMoeSWAForCausalLM", {}),
    ("HrmTextForCausalLM", {}),
    ("HyperCLOVAXForCausalLM", {}),
    ("VaultGemmaForCausalLM", {"sliding_window": 9, "layer_types": MIXED,
                               "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
]
NAMES = [name for name, _ in FAST]
LENGTHS = (1, 33, 5, 18, 7)
NEW = 6
THEIRS = ModelConfig(model_impl="transformers")


def write(path: Path, architecture: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Saves a tiny random checkpoint; returns transformers' model."""
    import transformers

    kind: Any = getattr(transformers, architecture)
    config = kind.config_class(**{**BASE, **options})
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.to(dtype).save_pretrained(str(path))
    return model


def load(path: Path, impl: str = "transformers", **model: Any) -> Any:
    return load_model(path, Config(model=ModelConfig(model_impl=impl, **model)), CPU,
                      lambda *_: None)


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(3, 199, (n,), generator=gen).tolist() for n in LENGTHS]


def greedy(oracle: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """By whole forward passes: a cache of transformers' is not what is compared."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(oracle_logits(oracle, ids)[-1].argmax()))
    return ids[len(prompt):]


@pytest.mark.parametrize(("architecture", "options"), [
    pytest.param(name, options, id=name, marks=[] if name in NAMES else [pytest.mark.slow])
    for name, options in CASES])
def test_parity_with_transformers(tmp_path: Path, architecture: str, options: dict[str, Any]
                                  ) -> None:
    """Every logit, in chunks beside others' chunks; then tokens, decoded beside chunks."""
    theirs = write(tmp_path, architecture, **options)
    ours = load(tmp_path)
    assert isinstance(ours, TransformersModel)
    stepper, seqs = Stepper(ours, 1000, 4), [Seq(list(prompt)) for prompt in prompts()]
    want = [oracle_logits(theirs, seq.tokens) for seq in seqs]
    while any(seq.done < len(seq.tokens) for seq in seqs):
        chunks = [(seq, min(7, len(seq.tokens) - seq.done)) for seq in seqs
                  if seq.done < len(seq.tokens)]
        expected = torch.cat([want[seqs.index(seq)][seq.done:seq.done + count]
                              for seq, count in chunks])
        got = stepper.step(chunks, every_row=True)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert generate(Stepper(ours, 1000, 4), prompts(), NEW, chunk=7) == [
        greedy(theirs, prompt) for prompt in prompts()]


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("model")
    theirs = write(path, "Starcoder2ForCausalLM", sliding_window=None)
    return theirs, load(path)


@pytest.mark.parametrize(("pages", "page_size", "budget", "overlap"), [
    (512, 16, 2048, True), (512, 1, 7, False), (11, 8, 64, True)])
def test_steps_of_an_engine(starcoder: tuple[Any, Any], pages: int, page_size: int, budget: int,
                            overlap: bool) -> None:
    """Batches, chunks, page sizes, preemption and log-probabilities change nothing."""
    theirs, ours = starcoder
    ring = Ring(make_runner(ours, pages, page_size=page_size), budget=budget, overlap=overlap)
    for prompt in prompts():
        ring.submit(prompt, ResolvedParams(max_tokens=24, temperature=0.0, prompt_logprobs=2,
                                           logprobs=2))
    for prompt, out in zip(prompts(), ring.run(), strict=True):
        assert out.tokens == greedy(theirs, prompt, 24)
        want = oracle_logits(theirs, prompt + out.tokens).log_softmax(-1)
        parts = sorted(out.prompt_logprobs, key=lambda part: part.start)
        got = np.concatenate([np.frombuffer(part.chosen, np.float32) for part in parts]
                             or [np.zeros(0, np.float32)])
        places = torch.tensor(prompt[1:], dtype=torch.long)[:, None]
        np.testing.assert_allclose(
            got, want[:len(prompt) - 1].gather(1, places)[:, 0].numpy(), atol=1e-4)
    assert (ring.preemptions > 0) == (pages == 11)


def test_bf16_and_pages_of_8_bits_stay_near_fp32(tmp_path: Path) -> None:
    theirs = write(tmp_path, "Starcoder2ForCausalLM", torch.bfloat16, sliding_window=9).float()
    ids = prompts()[1]
    want = oracle_logits(theirs, ids)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        ours = load(tmp_path)
        assert ours.dtype is torch.bfloat16
        got = Stepper(ours, 1000, 4, kv_dtype=kv_dtype).step([(Seq(ids), len(ids))],
                                                             every_row=True)
        assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize(("architecture", "replaced"), [
    ("ArceeForCausalLM", True), ("GemmaForCausalLM", True), ("OlmoForCausalLM", False)])
def test_norms_in_c(tmp_path: Path, architecture: str, replaced: bool) -> None:
    """RMSNorms of weights, or of 1 more, are ours where they give the same."""
    theirs = write(tmp_path, architecture, torch.bfloat16).float()
    ours, ids = load(tmp_path), prompts()[1]
    if not isinstance(ours.ops, NativeOps):
        pytest.skip("no kernels in C here")
    kinds = {type(own).__name__ for name, own in ours._body.named_modules()
             if name.endswith("norm")}
    assert (kinds == {"_Product"}) == replaced
    got, want = Stepper(ours, 1000, 4).step([(Seq(ids), len(ids))], every_row=True), oracle_logits(
        theirs, ids)
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.slow
def test_by_kernels_of_triton(tmp_path: Path) -> None:
    theirs, config = write(tmp_path, "Starcoder2ForCausalLM", sliding_window=9), Config(
        model=THEIRS, device=DeviceConfig(kernels="triton"))
    ours, ids = load_model(tmp_path, config, CPU, lambda *_: None), prompts()[4]
    assert ours.attention.decode.name == ours.attention.extend.name == "triton"
    stepper, seq = Stepper(ours, 100, 4), Seq(list(ids))
    got = torch.cat((stepper.step([(seq, 3)], every_row=True),
                     stepper.step([(seq, len(ids) - 3)], every_row=True)))
    torch.testing.assert_close(got, oracle_logits(theirs, ids), rtol=0, atol=1e-4)
    seq.tokens.append(7)
    torch.testing.assert_close(stepper.step([], [seq]), oracle_logits(theirs, [*ids, 7])[-1:],
                               rtol=0, atol=1e-4)
    assert complete(make_runner(ours), [ids], ResolvedParams(max_tokens=3, temperature=0.0)) == [
        greedy(theirs, ids, 3)]


def test_one_of_our_classes_by_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "LlamaForCausalLM")
    ids = prompts()[1]
    with caplog.at_level(logging.INFO, "actorium.model"):
        got = [Stepper(load(tmp_path, impl)).step([(Seq(ids), len(ids))], every_row=True)
               for impl in ("auto", "transformers")]
    torch.testing.assert_close(*got, rtol=0, atol=1e-4)
    assert [line for line in caplog.messages if "slower than classes of ours" in line] == [
        line for line in caplog.messages if "LlamaForCausalLM is run by the class of tr" in line]
    assert len([line for line in caplog.messages if "slower" in line]) == 1


def test_the_plan_counts_the_files_weights(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    theirs = write(tmp_path, "GPT2LMHeadModel")
    held = sum(p.nbytes for p in theirs.parameters())
    counted = weight_bytes(read_shape(tmp_path, Config(model=THEIRS)))
    assert held <= counted <= 1.1 * held + 20_000
    assert main(["plan", str(tmp_path), "--model-impl", "transformers"]) == 0
    said = capsys.readouterr().out
    assert "none: the model's class is transformers'" in said
    assert "note: transformers' class runs the model" in said
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes(read_shape(tmp_path, Config(model=THEIRS))) > held // 2
    dummy = [load(tmp_path, load_format="dummy", seed=seed)._body.wte.weight for seed in (1, 1, 2)]
    assert torch.equal(dummy[0], dummy[1]) and not torch.equal(dummy[1], dummy[2])


def test_a_config_does_not_choose_the_code_or_the_files(tmp_path: Path) -> None:
    theirs, file = write(tmp_path, *FAST[2][:1], **FAST[2][1]), tmp_path / "config.json"
    file.write_text(json.dumps({
        **json.loads(file.read_text()), "experts_implementation": "sonicmoe",
        "attn_implementation": "kernels-community/evil", "_attn_implementation": "evil",
        "transformers_weights": "../evil.safetensors", "auto_map": {"AutoConfig": "evil.Config"},
        "_name_or_path": "evil/evil", "max_position_embeddings": 1 << 22}))
    ids = prompts()[1]
    got = Stepper(load(tmp_path)).step([(Seq(ids), len(ids))], every_row=True)
    torch.testing.assert_close(got, oracle_logits(theirs, ids), rtol=0, atol=1e-4)


# --- What is refused -----------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("BertLMHeadModel", {}, "its masks are neither causal nor sliding windows"),
    ("DogeForCausalLM", {}, "cannot be run without its weights"),
    ("DeepseekV2ForCausalLM", {}, "kv_lora_rank: attention over latents (MLA) is not served"),
    ("MiniCPM3ForCausalLM", {}, "kv_lora_rank: attention over latents"),
    ("RecurrentGemmaForCausalLM", {},
     "2 of its 3 layers have no attention"),
    ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}, "layer_types: conv"),
    ("Llama4ForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("StableLmForCausalLM", {}, "does not support its attention interface"),
    ("JetMoeForCausalLM", {}, "cannot be run without its weights"),
    ("Gemma4UnifiedForCausalLM", {}, "the heads of its layers differ in number or size"),
    ("ElectraForCausalLM", {}, "its masks are neither causal nor sliding windows"),
    ("NoSuchForCausalLM", {}, "nor has transformers 5"),
    ("NoSuchForCausalLM", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
     "(auto_map) is never run, whatever --trust-remote-code says"),
    ("BartForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder: cross attention"),
    ("ArceeForCausalLM", {"quantization_config": {"quant_method": "aqlm"}},
     "quantization_config.quant_method: must be"),
    ("ArceeForCausalLM", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
     "rope_type: longrope beyond 64 tokens"),
    ("ArceeForCausalLM", {"num_hidden_layers": None}, "num_hidden_layers: must be a positive"),
    ("ArceeForCausalLM", {"hidden_act": "no such"}, "no such"),
]


@pytest.mark.parametrize(("architecture", "fields", "why"), REFUSED, ids=[
    f"{name}-{i}" for i, (name, *_) in enumerate(REFUSED)])
def test_refused_before_weights_are_read(tmp_path: Path, architecture: str,
                                         fields: dict[str, Any], why: str) -> None:
    """There are no weights."""
    import transformers

    kind: Any = getattr(transformers, architecture, None)
    raw = {} if kind is None or architecture == "BartForCausalLM" else kind.config_class(
        **BASE).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(
        {**BASE, **raw, "architectures": [architecture], **fields}))
    with pytest.raises(BadModel) as caught:
        load(tmp_path)
    line = str(caught.value)
    assert why in line and "\n" not in line and "config.json" in line


@pytest.mark.parametrize(("name", "value"), [
    ("intermediate_size", [1, "a"]), ("intermediate_size", [[]]), ("pad_token_id", 10**30),
    ("layer_types", [[]] * 3), ("rope_parameters", [1]), ("text_config", {"model_type": []}),
    ("num_attention_heads", 10**30), ("hidden_size", 3.5), ("dtype", [1]),
    ("max_position_embeddings", {}), ("hidden_act", 7), ("clip_qkv", 1e308)])
@pytest.mark.parametrize("case", [0, 2])
def test_hostile_fields(tmp_path: Path, case: int, name: str, value: Any) -> None:
    """Served all the same, or refused on one line."""
    import transformers

    architecture, options = FAST[case]
    kind: Any = getattr(transformers, architecture)
    (tmp_path / "config.json").write_text(json.dumps({
        **kind.config_class(**{**BASE, **options}).to_dict(), "architectures": [architecture],
        "dtype": "float32", name: value}))
    try:
        load(tmp_path, load_format="dummy")
    except (BadConfig, BadModel) as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(("config", "why"), [
    (Config(model=THEIRS, device=DeviceConfig(passes="norm_quant")), "passes: "),
    (Config(model=THEIRS, device=DeviceConfig(exact="on")), "exact: "),
    (Config(model=THEIRS, device=DeviceConfig(exact_ranks=2)), "exact_ranks: "),
    (Config(model=THEIRS, device=DeviceConfig(dump_passes="d")), "dump_passes: "),
    (Config(model=ModelConfig(model_impl="transformers", quantization="awq")),
     "--quantization awq: "),
    (Config(model=THEIRS, device=DeviceConfig(attention_backend="sage")),
     "attention_backend: sage cannot serve"),
])
def test_flags_that_do_not_go_with_it(tmp_path: Path, config: Config, why: str) -> None:
    import transformers

    raw = transformers.Starcoder2Config(**BASE).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(
        {**raw, "architectures": ["Starcoder2ForCausalLM"], "dtype": "float32"}))
    with pytest.raises(BadConfig) as caught:
        load_model(tmp_path, config, CPU, lambda *_: None)
    assert str(caught.value).startswith(why)


UNSPLIT = {
    "it cannot be run in parts": ("CohereForCausalLM",),
    "it has no plan for ranks (base_model_tp_plan; --tp)": (
        "BitNetForCausalLM", "CTRLLMHeadModel", "DiffLlamaForCausalLM", "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM", "GptOssForCausalLM", "OPTForCausalLM", "PersimmonForCausalLM")}
"""What the start says of classes that ranks do not share."""


@pytest.mark.parametrize(("architecture", "options"), [
    pytest.param(name, options, id=name, marks=[] if name in NAMES[::2] else [pytest.mark.slow])
    for name, options in CASES])
def test_ranks(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    """Two ranks give the tokens of the model alone, or say by name why they cannot."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", architecture, **options)
    plain = opened_config(tmp_path / "model")
    config = msgspec.structs.replace(plain, model=msgspec.structs.replace(
        plain.model, model_impl="transformers"))
    why = next((why for why, names in UNSPLIT.items() if architecture in names), "")
    found = run_ranks(tmp_path / "group", 2, lambda group: serve(config, group))
    if why:
        assert all(isinstance(own, BadModel) and why in str(own) for own in found)
        return
    alone, (one, other) = serve(config, LoneRank()), whole(found)
    assert str(one.outputs) == str(other.outputs)
    assert near(one.logits, alone.logits)
    assert [out.tokens for out in one.outputs] == [out.tokens for out in alone.outputs]


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_at_load(tmp_path: Path, quantization: str) -> None:
    """By our products: near the weights as they were, and as the dequantised twin; the plan counts
    them; two ranks quantise their parts."""
    theirs, ids = write(tmp_path, "Starcoder2ForCausalLM", sliding_window=9), prompts()[1]
    want = oracle_logits(theirs, ids)
    ours = load(tmp_path, quantization=quantization)
    got = Stepper(ours, 1000, 4).step([(Seq(ids), len(ids))], every_row=True)
    away = float((got - want).norm() / want.norm())
    assert 1e-3 < away < {"int8": 0.02, "fp8": 0.1, "int4": 0.3}[quantization]
    kinds = {type(own.product).__name__ for own in ours._body.modules() if hasattr(own, "product")}
    assert kinds == {"ScaledLinear" if quantization == "fp8" else "GroupedLinear"}
    plain, held = (weight_bytes(read_shape(tmp_path, Config(model=ModelConfig(
        model_impl="transformers", quantization=asked)))) for asked in ("auto", quantization))
    assert held < plain


def test_routers_stay_and_experts_in_one_tensor_too(tmp_path: Path) -> None:
    write(tmp_path, *FAST[2][:1], **FAST[2][1])
    ours = load(tmp_path, quantization="int8")
    names = {name.rpartition(".")[2]: type(getattr(own, "product", None)).__name__
             for name, own in ours._body.named_modules()}
    assert names["q_proj"] == "GroupedLinear" and names["gate"] != "GroupedLinear"


def test_ranks_and_our_classes_alone() -> None:
    raw, here = {**BASE, "architectures": ["BitNetForCausalLM"]}, Path("config.json")
    part = shape_from_config(raw, here).split(2)
    assert (part.tp, part.heads, part.kv_heads, part.vocabulary) == (2, 2, 1, 199)
    with pytest.raises(BadConfig, match="4 GPUs cannot share 2 key heads"):
        shape_from_config(raw, here).split(4)
    with pytest.raises(BadModel, match="--model-impl transformers serves many others"):
        shape_from_config(raw, here, impl="actorium")


def test_what_mixes_tokens_elsewhere_is_refused(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

    write(tmp_path, "Starcoder2ForCausalLM")
    assert departures(load(tmp_path), "auto")[0].startswith("layers by transformers 5")
    plain: Any = Starcoder2MLP.forward
    monkeypatch.setattr(Starcoder2MLP, "forward", lambda own, x: plain(own, x.roll(1, 1) + x))
    with pytest.raises(BadModel, match="brings tokens together outside attention"):
        load(tmp_path)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write(tmp_path, "Starcoder2ForCausalLM")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.c_fc.bias"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadModel, match="no tensor model.layers.1.mlp.c_fc.bias"):
        load(tmp_path)
