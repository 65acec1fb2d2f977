"""`--quantization fp8`: weights that are made FP8 when a checkpoint in another dtype is read."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_fp8 import PROJECTION, SINGLE, exact_fp8, write_twins
from helpers_graphs import played, tensors_of, told, with_graphs, with_segments
from helpers_hybrid import DENSE, MOE, SPARSE, write_hybrid
from helpers_models import CPU, Stepper, generate, generated, load, oracle_logits, write_checkpoint
from helpers_peak import peak_of
from helpers_quantised import PROMPT, WRITERS, logits, off, told_of
from helpers_speculation import Work, make_runner, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.models.model_files import INDEX
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.weights.fp8_weights import how_served, keeps
from actorium.kernels.backends import triton_fault
from actorium.kernels.scaled_linear import (
    FP8,
    DequantisedLinear,
    ScaledLinear,
    dequantise,
    exact_mm,
    pack,
    quantise_rows,
)
from actorium.tools.cli import main

pytest.importorskip("triton")
from actorium.kernels.triton.scaled_mm import TritonScaledLinear
from actorium.kernels.triton.triton_ops import TritonOps

GREEDY = [ResolvedParams(max_tokens=8, temperature=0.0)] * 3
PROMPTS = [PROMPT, [7, 3, 3], list(range(40, 75))]
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


def load_quantised(path: Path, kernels: str = "auto", **model: Any) -> Decoder:
    """The model with its weights in FP8."""
    config = Config(model=ModelConfig(quantization="fp8", **model),
                    device=DeviceConfig(kernels=kernels))
    return load_model(path, config, CPU, lambda *_: None)


def calm(path: Path) -> Path:
    """The checkpoint with weights so small that what is rounded stays a small part."""
    tensors = load_file(path / SINGLE)
    save_file({name: t * 0.4 if PROJECTION.search(name) else t for name, t in tensors.items()},
              path / SINGLE, {"format": "pt"})
    return path


# --- against the model as it was, and against plain torch ----------------------------------------

@pytest.mark.parametrize("name", WRITERS)
def test_near_the_model_as_it_was(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path)
    calm(tmp_path)
    got, want = told_of(load_quantised(tmp_path)), told_of(load(tmp_path))
    assert 0 < float((got - want).abs().mean()) < 0.08 * float(want.std())


def quantised_linear(linear: Any, x: Tensor) -> Tensor:
    """The product of a `torch.nn.Linear` as FP8 has it, in the plainest torch."""
    def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
        scales = rows.float().abs().amax(-1, keepdim=True) / 448
        return (rows.float() / scales).to(torch.float8_e4m3fn).double(), scales.double()

    (a, a_scales), (b, b_scales) = parts(x.flatten(0, -2)), parts(linear.weight)
    y = (a @ b.t()) * a_scales * b_scales.t()
    y = y if linear.bias is None else y + linear.bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def patched(oracle: Any) -> Any:
    """A transformers model with all products in FP8 that we have so."""
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(
                ("lm_head", "in_proj_a", "in_proj_b", ".gate", "shared_expert_gate")):
            module.forward = partial(quantised_linear, module)
    return oracle


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_as_plain_torch(tmp_path: Path, name: str) -> None:
    oracle = patched(WRITERS[name](tmp_path))
    want = oracle_logits(oracle, PROMPT)
    got = logits(load_quantised(tmp_path))
    assert off(got, want) < 1e-3 < 0.05 < off(got, logits(load(tmp_path)))


def test_a_hybrid_as_plain_torch(tmp_path: Path) -> None:
    oracle = patched(write_hybrid(tmp_path, DENSE))
    want = [generated(oracle, prompt, 8) for prompt in PROMPTS]
    got = tokens_of(Work(PROMPTS, GREEDY).plain(load_quantised(tmp_path)))
    assert [tokens for tokens, _ in got] == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, dtype=dtype)
    model = load_quantised(tmp_path)
    weight = load_file(tmp_path / SINGLE)["model.layers.0.self_attn.o_proj.weight"]
    own = model.layers[0].mixer.o
    assert model.dtype is dtype and weight.dtype is dtype and own.weight.dtype is FP8
    q, scales = quantise_rows(weight)
    assert torch.equal(own.weight.float(), q.float()) and torch.equal(own.scaled.scales, scales)
    assert off(dequantise(q, scales, torch.float32), weight.float()) < 0.04
    assert logits(model).isfinite().all()


def test_layers_that_are_not_quantised(tmp_path: Path) -> None:
    """Embedding, head, norms, routers and the small gates of recurrent layers."""
    write_hybrid(tmp_path, SPARSE)
    model = load_quantised(tmp_path)
    assert model.embed.dtype is model.head.weight.dtype is torch.float32
    gated, mixture = model.layers[0].mixer, model.layers[0].mlp
    assert [part.weight.dtype is FP8 for part in gated.project.parts] == [True, False]
    assert len(gated.project.parts[1].weight) == 2 * 4, "b and a of four heads"
    assert gated.rule.conv.dtype is mixture.router.weight.dtype is torch.float32
    assert gated.o.weight.dtype is mixture.shared.down.weight.dtype is FP8


# --- the same whatever else is computed ----------------------------------------------------------

def test_rows_do_not_depend_on_others() -> None:
    """Bit for bit: prompts and single tokens, in batches of any size."""
    torch.manual_seed(3)
    linear = ScaledLinear(pack(*quantise_rows(torch.randn(96, 700))), torch.randn(96))
    x = torch.randn(67, 700) * torch.logspace(-3, 3, 67)[:, None]
    whole = linear(x)
    for count in (1, 2, 7, 31):
        assert torch.equal(torch.cat([linear(part) for part in x.split(count)]), whole)


def test_sums_are_exact() -> None:
    """In whatever order they come, and where f32 would lose the small ones."""
    x = torch.full((1, 4096), 2.0 ** -9).to(FP8)
    x[0, 0] = 448.0
    w = torch.ones(1, 4096).to(FP8)
    w[0, 0] = 448.0
    want = 448.0 ** 2 + 4095 * 2.0 ** -9
    assert exact_mm(x, w).item() == torch.tensor(want, dtype=torch.float64).float().item()
    order = torch.randperm(4096)
    assert torch.equal(exact_mm(x[:, order], w[:, order]), exact_mm(x, w))


def test_chunks_and_batches_give_the_same_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    model = load_quantised(tmp_path)
    alone = [generate(Stepper(model), [prompt], 10)[0] for prompt in PROMPTS]
    for chunk in (3, 512):
        assert generate(Stepper(model), PROMPTS, 10, chunk) == alone


# --- graphs --------------------------------------------------------------------------------------

@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", ["qwen3", "hybrid"])
def test_steps_are_captured(tmp_path: Path, name: str) -> None:
    """Nothing of them waits for the device, and no shape depends on what is computed."""
    WRITERS[name](tmp_path)
    model = load_quantised(tmp_path, max_model_len=96)
    _, want = played(make_runner(model, 0, slots=9, arrays=DeviceArrays), PROMPTS, GREEDY, 9)
    runner = make_runner(model, 0, slots=9, arrays=DeviceArrays)
    graphs, segments = with_graphs(runner, [2, 8]), with_segments(runner, [8, 41])
    _, got = played(runner, PROMPTS, GREEDY, 9)
    assert told(got) == told(want)
    assert graphs.replays and segments.replays
    # Also what is carried past the last middle in FP8 is given up when its size is captured.
    kept = tensors_of([list(chain.carried) for chain in segments._chains.values()])
    assert kept and not any(segments._capturer.holds(t) for t in kept)


# --- in Triton, and where a device has no products in FP8 ----------------------------------------

@interpreted
@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_in_triton(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are grouped, each row of their weights with its scale."""
    exact_fp8(monkeypatch)
    WRITERS[name](tmp_path, num_hidden_layers=1)
    calm(tmp_path)
    got, want = logits(load_quantised(tmp_path, "triton")), logits(load_quantised(tmp_path))
    assert off(got, want) < 0.02 < off(got, logits(load(tmp_path)))


@interpreted
@pytest.mark.parametrize("block", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_norms_and_gates_quantise_on_their_way(tmp_path: Path, block: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what attention gives is quantised by a launch of its own. Where torch's product cannot
    sum, the next norm does."""
    exact_fp8(monkeypatch)
    write_checkpoint(tmp_path / "made", hidden_size=256, intermediate_size=384, head_dim=64,
                     num_hidden_layers=2, dtype=torch.bfloat16)
    write_twins(tmp_path / "made", tmp_path / "fp8", tmp_path / "twin", True)
    calls: Counter[str] = Counter()
    for owner, name in ((TritonScaledLinear, "quantise"), (TritonOps, "rms_norm"),
                        *((TritonOps, name) for name in (
                            "rms_norm_quant", "add_rms_norm_quant", "silu_mul", "silu_mul_quant"))):
        plain = inspect.getattr_static(owner, name)
        fixed = isinstance(plain, staticmethod)

        def counted(*args: Any, plain: Any = plain, name: str = name) -> Any:
            calls.update([name])
            return plain(*args)

        monkeypatch.setattr(owner, name, staticmethod(counted) if fixed else counted)
    model = load_quantised(tmp_path / ("fp8" if block else "made"), "triton")
    calls.clear()  # those of the layers' check at the start
    got = logits(model)
    normed = {"rms_norm_quant": 4} if block else {"rms_norm_quant": 1, "add_rms_norm_quant": 3}
    assert calls == {"quantise": 2, "silu_mul_quant": 2, "rms_norm": 1, **normed}
    assert got.isfinite().all()


@interpreted
def test_weights_alone_are_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:
    """As on CUDA before 8.9: what the weights stand for is multiplied, and experts are not
    grouped."""
    monkeypatch.setattr("actorium.kernels.triton.triton_ops.has_products", lambda _: False)
    monkeypatch.setattr("actorium.gpu.models.mlp.has_products", lambda _: False)
    write_hybrid(tmp_path / "made", MOE, num_hidden_layers=1)
    tensors = {name: dequantise(*quantise_rows(t), torch.float32) if PROJECTION.search(name) else t
               for name, t in load_file(tmp_path / "made" / SINGLE).items()}
    model = load_quantised(tmp_path / "made", "triton")
    assert isinstance(model.layers[0].mixer.qkv, DequantisedLinear) and model.waits
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "config.json").write_bytes(
        (tmp_path / "made" / "config.json").read_bytes())
    save_file(tensors, tmp_path / "twin" / SINGLE, {"format": "pt"})
    assert off(logits(model), logits(load(tmp_path / "twin"))) < 1e-5


@pytest.mark.parametrize(("capability", "kernels", "said"), [
    ((8, 0), "auto", "compute capability 8.0 has no products in FP8"), ((8, 9), "auto", ""),
    ((9, 0), "torch", "by reference"), ((9, 0), "triton", "")])
def test_how_fp8_is_served_is_reported(capability: tuple[int, int], kernels: str, said: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda")
    assert (said in how_served(device, kernels)) and bool(said) == bool(how_served(device, kernels))
    assert keeps(device, kernels, "fp8") and not keeps(device, kernels, "none")
    assert keeps(device, kernels, "auto") == (not said)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device(tmp_path: Path) -> None:
    """torch's product with a scale a row, as the reference."""
    write_checkpoint(tmp_path, hidden_size=256, intermediate_size=384, head_dim=64,
                     dtype=torch.bfloat16)
    calm(tmp_path)
    cuda = load_model(tmp_path, Config(model=ModelConfig(quantization="fp8")),
                      torch.device("cuda"), lambda *_: None)
    assert cuda.layers[0].mixer.qkv.weight.dtype is FP8
    assert off(logits(cuda).float().cpu(), logits(load_quantised(tmp_path, dtype="float32"))) < 0.1


# --- what is asked for ---------------------------------------------------------------------------

def test_none_dequantises_a_checkpoint_in_fp8(tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "source", hidden_size=256, intermediate_size=384)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", True)
    for quantization in ("none", "auto"):
        got = load(tmp_path / "fp8", quantization=quantization)
        assert got.layers[0].mixer.qkv.weight.dtype is torch.float32
    assert off(logits(got), logits(load(tmp_path / "twin"))) < 1e-5
    scales = load_quantised(tmp_path / "fp8").layers[0].mixer.qkv.scaled.scales
    assert scales.shape[1] == 2, "its own blocks"
    counted = {}
    for argv in (["fp8", "--quantization", "none"], ["fp8"], ["twin"],
                 ["twin", "--quantization", "fp8"]):
        assert main(["plan", str(tmp_path / argv[0]), *argv[1:], "--json"]) == 0
        counted[" ".join(argv)] = json.loads(capsys.readouterr().out)["outside"][0]["bytes"]
    assert counted["fp8 --quantization none"] == counted["twin"]
    assert counted["fp8"] < counted["twin --quantization fp8"] < counted["twin"]


def test_weights_that_are_quantised_otherwise_are_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quanto", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match="quant_method: must be fp8, .*'quanto'"):
        load_quantised(tmp_path)
    assert main(["plan", str(tmp_path), "--quantization", "fp8"]) != 0
    assert "quant_method" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--weights", "1m"]) == 0, "as it is it can be planned"


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_dummy_weights(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path)
    (tmp_path / SINGLE).unlink()
    got = load_quantised(tmp_path, load_format="dummy")
    assert got.layers[0].mixer.qkv.weight.dtype is FP8
    assert 0 < off(logits(got), logits(load(tmp_path, load_format="dummy"))) < 0.2


# --- memory --------------------------------------------------------------------------------------

LOAD = """
model = load_model(Path(sys.argv[1]), Config(model=ModelConfig(quantization="fp8")),
                   torch.device("cpu"), lambda *_: None)
"""
MEDIUM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 500,
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512}


@pytest.mark.slow
def test_loading_never_holds_what_was_read(tmp_path: Path) -> None:
    """At its peak: the weights in FP8, one file (which is mapped), and a few matrices; less than
    the checkpoint has bytes, and so never both."""
    wants = model_tensors(shape_from_config(MEDIUM, tmp_path))
    block, placed = torch.randn(1 << 22).bfloat16(), {}
    for i in range(8):
        own = {want.name: block[:math.prod(want.shape)].view(want.shape).clone()
               for want in wants[i * len(wants) // 8:(i + 1) * len(wants) // 8]}
        save_file(own, tmp_path / f"{i}.safetensors")
        placed |= dict.fromkeys(own, f"{i}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "config.json").write_text(json.dumps(MEDIUM))
    planned, peak = peak_of(LOAD, str(tmp_path))
    whole = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0.5 * whole < planned < peak < whole, "of bytes that the checkpoint has"
