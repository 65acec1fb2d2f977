"""Which attention backend is chosen, and what is said of those that cannot serve."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers_models import CPU, write_checkpoint

from actorium.actors.config.attention_names import NAMES, NOT_BUILT, backend_named
from actorium.actors.config.tree import Config, DeviceConfig, MemoryConfig, ModelConfig
from actorium.actors.errors import BadConfig
from actorium.gpu.attention.attention_backend import NativeAttention, SageAttention, TritonAttention
from actorium.gpu.attention.backend_choice import BACKENDS, choose
from actorium.gpu.attention.capabilities import CARDS, DECODE, EXTEND, AttentionNeeds, unmet
from actorium.gpu.models.registry import load_model

NEEDS = AttentionNeeds("cpu", "bfloat16", "bfloat16", 64, 16)
LACKS = NativeAttention.missing(EXTEND, CPU)
native = pytest.mark.skipif(bool(LACKS), reason=LACKS)


def test_every_name_has_one_meaning() -> None:
    assert set(BACKENDS) == set(CARDS) == set(NAMES) - {"auto"}
    every = [name for table in (NAMES, NOT_BUILT) for ours, others in table.items()
             for name in (ours, *others)]
    assert len(every) == len(set(every)) and all(name == name.lower() for name in every)


@pytest.mark.parametrize(("text", "name"), [
    ("TRITON_ATTN", "triton"), ("torch_native", "torch"), ("TORCH_SDPA", "torch"),
    ("CPU_ATTN", "native"), ("intel-amx", "native"), ("SAGE_ATTN", "sage"), ("sage", "sage"),
    ("Native", "native"), ("auto", "auto")])
def test_other_engines_names(text: str, name: str) -> None:
    assert backend_named(text, "attention_backend") == name


@pytest.mark.parametrize(("text", "says"), [
    ("FLASHINFER", "flashinfer is not built in: must be one of auto, torch, native, triton, sage, "
     "got 'FLASHINFER'"),
    ("fa3", "flash_attn is not built in"),
    ("quick", "must be one of auto, torch, native, triton, sage, got 'quick'"),
    ("", "must be one of")])
def test_what_is_not_built_in_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadConfig) as caught:
        backend_named(text, "attention_backend")
    assert caught.value.message.startswith(f"attention_backend: {says}")
    assert caught.value.param == "device.attention_backend"


@native
def test_auto_takes_the_fastest_that_can() -> None:
    auto = DeviceConfig()
    assert choose(DECODE, NEEDS, auto, CPU).name == "native"
    for part, needs, why in (
            (EXTEND, NEEDS._replace(head_dim=72), "multiples of 32 numbers, the model's of 72"),
            (DECODE, NEEDS._replace(head_dim=1024), "512 numbers at most, the model's of 1024"),
            (DECODE, NEEDS._replace(latent_rank=1000), "1024 numbers at most"),
            (DECODE, NEEDS._replace(dtype="float32"), "no queries in float32 (bfloat16)"),
            (DECODE, NEEDS._replace(cache_dtype="float16"), "no pages in float16")):
        found = choose(part, needs, auto, CPU)
        assert found.name == "torch" and "not native: " in found.why and why in found.why
    assert choose(DECODE, NEEDS._replace(head_dim=72), auto, CPU).name == "native"
    assert choose(EXTEND, NEEDS._replace(head_dim=8, latent_rank=64), auto, CPU).name == "native"
    assert choose(DECODE, NEEDS, DeviceConfig(native_kernels=False), CPU).name == "torch"
    assert choose(DECODE, NEEDS, DeviceConfig(kernels="torch"), CPU).name == "torch"


@native
def test_parts_are_asked_for_apart() -> None:
    asked = DeviceConfig(attention_backend="native", prefill_attention_backend="TORCH_SDPA")
    assert choose(EXTEND, NEEDS, asked, CPU).name == "torch"
    assert choose(DECODE, NEEDS, asked, CPU).name == "native"
    asked = DeviceConfig(decode_attention_backend="native")
    with pytest.raises(BadConfig) as caught:
        choose(DECODE, NEEDS._replace(dtype="float16"), asked, CPU)
    assert caught.value.message.startswith(
        "decode_attention_backend: native cannot serve decodes: it takes no queries in float16 "
        "(bfloat16); ")
    assert caught.value.message.endswith("torch could")  # and triton, in its interpreter
    assert caught.value.param == "device.decode_attention_backend"


def test_auto_never_takes_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nothing else could serve: it is coarser, so it is asked for."""
    monkeypatch.setattr(SageAttention, "missing", classmethod(lambda *_: ""))
    for part in (EXTEND, DECODE):
        assert choose(part, NEEDS, DeviceConfig(), CPU).name != "sage"
        asked = DeviceConfig(attention_backend="SAGE_ATTN")
        assert choose(part, NEEDS, asked, CPU).name == "sage"
        for needs, why in ((NEEDS._replace(dtype="float16"), "it takes nothing in float16"),
                           (NEEDS._replace(dtype="float32"), "no queries in float32"),
                           (NEEDS._replace(latent_rank=64), "latents"),
                           (NEEDS._replace(head_dim=72), "multiples of 32 numbers")):
            with pytest.raises(BadConfig, match=f"sage cannot serve .*{why}"):
                choose(part, needs, asked, CPU)
    monkeypatch.setattr(SageAttention, "missing", classmethod(lambda *_: "this CPU has no VNNI"))
    with pytest.raises(BadConfig, match="sage cannot serve prompts: this CPU has no VNNI; "):
        choose(EXTEND, NEEDS, DeviceConfig(prefill_attention_backend="sage"), CPU)


def test_cuda_does_not_fall_back_to_torch_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, needs = torch.device("cuda", 0), NEEDS._replace(device="cuda")
    for own in (TritonAttention, SageAttention):
        monkeypatch.setattr(own, "missing", classmethod(lambda *_: ""))
    assert choose(DECODE, needs, DeviceConfig(), cuda).name == "triton"
    with pytest.raises(BadConfig, match="native cannot serve decodes: its kernels are C's.*; "
                                        "triton or torch or sage could"):
        choose(DECODE, needs, DeviceConfig(attention_backend="native"), cuda)
    monkeypatch.setattr(TritonAttention, "missing", classmethod(lambda *_: "no triton"))
    assert choose(DECODE, needs, DeviceConfig(), cuda) == ("torch", "auto; no triton")


def test_limits_of_backends_that_are_not_built_in_yet() -> None:
    """A cache in four bits, a backend for prompts alone, one of few drafts."""
    can = CARDS["torch"].decode
    assert can is not None
    assert "reads no pages in int4" in unmet(can, NEEDS._replace(cache_dtype="int4"))
    able = can._replace(cache_dtypes=("int8",), query_len=2, page_sizes=(64, 128), windows=False,
                        soft_caps=False)
    assert not unmet(able, NEEDS._replace(cache_dtype="int8", page_size=64, query_len=2))
    why = unmet(able, NEEDS._replace(query_len=4, windows=True, soft_cap=True))
    assert why == ("it reads no pages in bfloat16 (--kv-cache-dtype int8), its pages are of 64 or "
                   "128 tokens, not 16, it has no sliding windows, it verifies 1 drafts at most, "
                   "not 3, it does not cap scores")
    assert unmet(None, NEEDS)


@native
def test_a_model_runs_what_is_asked_for_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, head_dim=32)
    config = Config(device=DeviceConfig(attention_backend="TORCH_SDPA",
                                        decode_attention_backend="native"))
    with caplog.at_level(logging.INFO, "actorium.attention"), \
            pytest.raises(BadConfig, match="no queries in float32"):
        load_model(tmp_path, config, CPU, lambda *_: None)
    config = Config(memory=MemoryConfig(kv_cache_dtype="fp8_e5m2"), device=config.device,
                    model=ModelConfig(dtype="bfloat16"))
    with caplog.at_level(logging.INFO, "actorium.attention"):
        model = load_model(tmp_path, config, CPU, lambda *_: None)
    assert (model.attention.extend.name, model.attention.decode.name) == ("torch", "native")
    assert str(model.attention) == "prompts torch, decodes C, built for this CPU"
    assert [line for line in caplog.messages if line.startswith("attention")][-2:] == [
        "attention of prompts: torch (attention_backend: TORCH_SDPA)",
        "attention of decodes: native (decode_attention_backend: native)"]
