"""KV cache in FP8: the scales that checkpoints have, what is refused, and models that run on it.

Kernels by themselves: `test_fp8_kv_kernels.py`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_fp8 import SINGLE, exact_fp8, write_twins
from helpers_kinds import write_kind
from helpers_models import CPU, Seq, Stepper, generate, write_checkpoint
from helpers_pairs import pairs
from helpers_speculation import RUBBISH, Work, make_runner, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SpeculationConfig,
)
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.attention.attention_backend import TritonAttention
from actorium.gpu.attention.backend_choice import choose
from actorium.gpu.attention.capabilities import DECODE, AttentionNeeds
from actorium.gpu.models.registry import load_model
from actorium.kernels.backends import triton_fault

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYER = "model.layers.{}.self_attn."
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [7] * 17, [150, 20] * 5]
GREEDY = Work(PROMPTS, [ResolvedParams(max_tokens=14, temperature=0.0)] * len(PROMPTS))
Make = Callable[[str], Path]


def load(path: Path, kv: str = "fp8_e4m3", speculative: str = "off", dtype: str = "auto",
         kernels: str = "auto") -> Any:
    config = Config(model=ModelConfig(max_model_len=96, dtype=dtype),
                    memory=MemoryConfig(kv_cache_dtype=kv), device=DeviceConfig(kernels=kernels),
                    speculation=SpeculationConfig(speculative=speculative))
    return load_model(path, config, CPU, lambda *_: None)


def scales_of(model: Any) -> list[Tensor | None]:
    """Of each layer with attention, the one that drafts behind the others."""
    layers = [*model.layers, *([model.drafter.layer] if model.drafter else [])]
    mixers = [layer.mixer for layer in layers]
    return [getattr(m, "kv_scales", getattr(m, "kv_scale", None)) for m in mixers
            if hasattr(m, "kv_scales") or hasattr(m, "kv_scale")]


def retensor(path: Path, **tensors: Any) -> None:
    """With these tensors more in the checkpoint; `__` stands for a dot."""
    found = load_file(path / SINGLE)
    found |= {name.replace("__", "."): torch.as_tensor(own) for name, own in tensors.items()}
    save_file(found, path / SINGLE, metadata={"format": "pt"})


def at(i: int, name: str) -> str:
    return LAYER.format(i) + name


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def checkpoint_of(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_kind(path, name)
        return path

    return checkpoint_of


FAMILIES = ["llama", "windows", "hybrid", "deepseek"]


# --- scales of checkpoints -----------------------------------------------------------------------

@pytest.mark.parametrize(("keys", "values"), [
    ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_scales_by_every_name(keys: str, values: str, tmp_path: Path,
                              caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "actorium.model")
    write_checkpoint(tmp_path, "LlamaForCausalLM")
    for i in range(3):
        own = torch.tensor([0.02, 3.0]).view(2, 1, 1) if i == 1 else torch.tensor(0.5)
        retensor(tmp_path, **{at(i, keys): own.bfloat16(), at(i, values): [0.25 + i]})
    first, second, third = scales_of(load(tmp_path))
    assert first is not None and first.tolist() == [0.5, 0.5, 0.25, 0.25]
    assert second is not None and second.tolist() == pytest.approx([0.02, 3, 1.25, 1.25], rel=4e-3)
    assert third is not None and third[2] == 2.25 and third.dtype is torch.float32
    assert "scaled as the checkpoint says" in caplog.messages[-1]
    assert scales_of(load(tmp_path, "auto")) == [None] * 3, "not for pages in the weights' dtype"
    assert scales_of(load(tmp_path, "fp8_e5m2"))[0] is not None


def test_one_scale_of_keys_and_values_and_none(tmp_path: Path,
                                               caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM")
    assert scales_of(load(tmp_path)) == [None] * 3
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "KV cache in fp8_e4m3: the checkpoint has scales of 0 of 3 attention layers, the others' "
        "are 1"]
    retensor(tmp_path, **{at(0, "kv_scale"): 0.5, at(2, "v_scale"): 0.75})
    one, none, other = scales_of(load(tmp_path))
    assert one is not None and one.tolist() == [0.5] * 4 and none is None
    assert other is not None and other.tolist() == [0.75] * 4, "the keys have the values'"
    assert "2 of 3" in caplog.messages[-1]


def test_scales_beside_weights_in_fp8_and_of_the_layer_that_drafts(tmp_path: Path,
                                                                   make: Make) -> None:
    write_checkpoint(tmp_path / "source", "LlamaForCausalLM", hidden_size=128)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", False)
    retensor(tmp_path / "fp8", **{at(1, "k_scale"): 0.5, at(1, "v_scale"): 0.25})
    (own,) = [s for s in scales_of(load(tmp_path / "fp8")) if s is not None]
    assert own.tolist() == [0.5, 0.5, 0.25, 0.25]
    for name, last in (("hybrid", "mtp.layers.0.self_attn."), ("deepseek", LAYER)):
        path = tmp_path / name
        path.mkdir()
        for file in make(name).iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        count = len(scales_of(load(path, speculative="auto")))
        last = last.format(count - 1)
        retensor(path, **{f"{last}k_scale": 0.5, f"{last}v_scale": 0.25})
        *others, drafts = scales_of(load(path, speculative="auto"))
        assert all(scales is None for scales in others) and drafts is not None
        assert drafts.tolist() == ([0.5] if name == "deepseek" else [0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize(("bad", "says"), [
    (0.0, "not a positive, finite number"), (-1.0, "not a positive"), (math.inf, "not a positive"),
    (math.nan, "not a positive"), (1e-42, "not a positive"),
    ([1.0, 2.0, 3.0], r"\[3\], scales of a KV cache are 1 or 2 floating point numbers"),
    (1, "int64")])
def test_wrong_scales_are_refused_by_name(bad: Any, says: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM")
    retensor(tmp_path, **{at(1, "v_scale"): bad})
    with pytest.raises(BadModel, match=f"tensor {at(1, 'v_scale')}.*{says}") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    load(tmp_path, "auto")


def test_devices_that_do_not_convert_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    needs = AttentionNeeds("cuda", "bfloat16", "fp8_e4m3", 128, 16)
    found = TritonAttention.fault(DECODE, needs, cuda)
    assert found == ("pages in fp8_e4m3 need CUDA capability 8.9, this device has 8.0 "
                     "(--kv-cache-dtype fp8_e5m2 needs none)")
    with pytest.raises(BadConfig, match="8.9, this device has 8.0.*; torch could"):
        choose(DECODE, needs, DeviceConfig(), cuda)
    assert choose(DECODE, needs, DeviceConfig(kernels="torch"), cuda).name == "torch"
    for other in (needs._replace(cache_dtype="fp8_e5m2"), needs._replace(cache_dtype="bfloat16")):
        assert choose(DECODE, other, DeviceConfig(), cuda).name == "triton"
    capability = (8, 9)
    assert choose(DECODE, needs, DeviceConfig(), cuda).name == "triton"


# --- models --------------------------------------------------------------------------------------

def test_scales_are_those_that_weights_would_hold(tmp_path: Path) -> None:
    """Powers of two, folded into the projections on both sides of the pages, change nothing in
    what is multiplied; they differ from head to head."""
    scaled, folded = tmp_path / "scaled", tmp_path / "folded"
    write_checkpoint(scaled, "LlamaForCausalLM", seed=2)
    write_checkpoint(folded, "LlamaForCausalLM", seed=2)
    tensors = load_file(folded / SINGLE)
    for i in range(3):
        keys, values = torch.tensor([[2.0**-3, 2.0], [8.0, 2.0**-2]]).roll(i, 0)
        retensor(scaled, **{at(i, "k_scale"): keys, at(i, "v_scale"): values})
        for name, by in (("q", keys.repeat_interleave(2)), ("k", 1 / keys), ("v", 1 / values)):
            tensors[at(i, f"{name}_proj.weight")] *= by.repeat_interleave(16)[:, None]
        tensors[at(i, "o_proj.weight")] *= values.repeat_interleave(2).repeat_interleave(16)
    save_file(tensors, folded / SINGLE, metadata={"format": "pt"})
    got, want, plain = (_logits(path, kv) for path, kv in (
        (scaled, E4M3), (folded, E4M3), (scaled, torch.float32)))
    assert off(got, want) < 1e-5 < 1e-3 < off(got, plain) < 0.1


def _logits(path: Path, kv_dtype: torch.dtype, name: str = "fp8_e4m3", dtype: str = "auto",
            chunk: int = 60) -> Tensor:
    """Of a prompt of 60 tokens in chunks, then of decodes."""
    stepper = Stepper(load(path, name, dtype=dtype), kv_dtype=kv_dtype)
    seq = Seq([(7 * n) % 190 + 3 for n in range(64)])
    found = [stepper.step([(seq, min(chunk, 60 - n))], every_row=True)
             for n in range(0, 60, chunk)]
    return torch.cat([*found, *(stepper.step([], [seq]) for _ in range(4))])


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("name", "e4m3", "e5m2", "dtype"), pairs(
    [("llama", 0.12, 0.22), ("windows", 0.06, 0.1)], ["float32", "bfloat16"]))
def test_logits_are_near_those_of_wide_pages(make: Make, name: str, e4m3: float, e5m2: float,
                                             dtype: str) -> None:
    want = _logits(make(name), getattr(torch, dtype), "auto", dtype)
    near = off(_logits(make(name), E4M3, dtype=dtype), want)
    far = off(_logits(make(name), E5M2, "fp8_e5m2", dtype), want)
    assert 1e-3 < near < e4m3 and near < far < e5m2


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_a_cached_prefix_gives_the_same(make: Make, name: str) -> None:
    """Tokens of one step are read back from the pages, as those of earlier steps are: nothing
    depends on where prompts are cut."""
    want = _logits(make(name), E4M3)
    for chunk in (16, 7, 1):
        assert torch.allclose(_logits(make(name), E4M3, chunk=chunk), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("name", "drafts"), pairs(FAMILIES, [1, 3]))
def test_speculation_changes_nothing(make: Make, name: str, drafts: int) -> None:
    """Windows of drafts, right ones and wrong ones: the tokens are those of one by one."""
    model, pages = load(make(name)), {"kv_dtype": E4M3}
    want = GREEDY.plain(model, pages)
    for right in (lambda seed, place: True, lambda seed, place: (seed * 31 + place * 17) % 5 < 3):
        _, got = GREEDY.guessed(model, want, drafts, right, runner={"slots": 6, **pages}, budget=24)
        assert tokens_of(got) == tokens_of(want)


@pytest.mark.parametrize("name", ["hybrid", "deepseek"])
def test_the_layer_that_drafts_has_pages_in_fp8_too(make: Make, name: str) -> None:
    model = load(make(name), speculative="auto")
    runner = make_runner(model, 2, mtp=True, kv_dtype=E4M3)
    (own,) = runner.draft_pools
    assert own.layers[0].dtype is E4M3
    want = GREEDY.plain(model, {"kv_dtype": E4M3})
    got = GREEDY.ring(runner, speculative="mtp:2,fixed").run()
    assert tokens_of(got) == tokens_of(want)
    written = own.layers[0].float()
    assert (written != RUBBISH).any() and written.isfinite().all()


def test_greedy_tokens_agree_with_wide_pages(make: Make) -> None:
    """Random weights say little for sure: most first tokens, not all that follow."""
    model = load(make("llama"))
    wide, narrow = (generate(Stepper(model, kv_dtype=kv), PROMPTS, 6)
                    for kv in (torch.float32, E4M3))
    assert sum(a[0] == b[0] for a, b in zip(wide, narrow, strict=True)) >= 4


@pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_triton_equals_torch(make: Make, name: str, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, and one beside a window of drafts, with scales."""
    exact_fp8(monkeypatch)
    for file in make(name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    retensor(tmp_path, **{at(i, f"{kind}_scale"): 0.3 + i / 7 + (kind == "k")
                          for i in range(2) for kind in "kv"})
    said = []
    for kernels in ("torch", "triton"):
        stepper = Stepper(load(tmp_path, kernels=kernels), 64, kv_dtype=E4M3)
        seqs = [Seq(list(range(3, 30))), Seq([7] * 18)]
        out = [stepper.step([(seqs[1], 14)]), stepper.step([(seqs[0], 9)], seqs[1:], q_len=3)]
        said.append(torch.cat(out))
    assert off(said[1], said[0]) < 1e-3
