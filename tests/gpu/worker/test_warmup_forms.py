"""Requests meet no form of a Triton kernel that the warm-up has not met: nothing is compiled for
them. Forms are those that a CUDA device would compile (see `helpers_specialize`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers_deepseek import add_mtp, write_deepseek
from helpers_fp8 import exact_fp8, write_twins
from helpers_graphs import shapes
from helpers_hybrid import DENSE, SPARSE, write_hybrid
from helpers_mamba import write_granite
from helpers_models import write_checkpoint
from helpers_recurrent import write_recurrent
from helpers_speculation import make_runner
from helpers_worker import CPU, Ring

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SpeculationConfig,
)
from actorium.actors.params import ResolvedParams
from actorium.actors.runtime.beat_gauges import STEP_MODES
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.worker.warmup import (
    ZeroMode,
    dummy_run,
    one_layer_per_kind,
    walk_warmup,
    warm_up_kernels,
)
from actorium.kernels.backends import triton_fault

pytest.importorskip("triton")
if triton_fault(CPU):
    pytest.skip("Triton compiles for CUDA here", allow_module_level=True)

from helpers_specialize import Forms, Rerun

from actorium.kernels.triton.skinny import configs_of
from actorium.kernels.triton.skinny_linear import BUCKETS

BUDGET = 512
KINDS = ("llama", "windows", "hybrid", "latent", "mamba", "both", "conv", "scan", "kda", "sparse",
         "odd", "skinny", "fp8", "fp8 experts", "made", "int8 pages", "sage", "sage, int8 pages",
         "sage alone, int8 pages", "int4", "int8", "int8 rows", "e4m3 pages", "exact",
         "exact windows", "layer norms", "chunks", "draft")
DRAFTS = {"hybrid": 2, "latent": 2, "draft": 2}
CASES = [pytest.param(kind, captured, id=f"{kind}, {'captured' if captured else 'eager'}",
                      marks=[] if captured and kind in ("llama", "hybrid") else pytest.mark.slow)
         for kind in KINDS for captured in (False, True)]


def pages_of(kind: str) -> torch.dtype | None:
    """None: as wide as the model."""
    return (torch.int8 if kind.endswith("int8 pages") else
            torch.float8_e4m3fn if kind == "e4m3 pages" else None)


def model_of(path: Path, kind: str) -> Any:
    """A tiny one."""
    source, small = path / "source", {"max_position_embeddings": 3000}
    long: dict[str, Any] = {"max_position_embeddings": 12_000, "num_hidden_layers": 2}
    if kind.endswith("windows"):
        write_checkpoint(path, "Gemma3ForCausalLM", dtype=torch.bfloat16, sliding_window=1024,
                         layer_types=["sliding_attention", "full_attention"], **long)
    elif kind == "chunks":
        write_checkpoint(path, "Llama4ForCausalLM", dtype=torch.bfloat16, head_dim=32,
                         attention_chunk_size=1024, num_local_experts=5, intermediate_size_mlp=96,
                         interleave_moe_layer_step=2, no_rope_layer_interval=2, **long)
    elif kind == "hybrid":
        add_mtp(path, write_hybrid(path, DENSE, layer_types=["linear_attention", "full_attention"],
                                   mtp_num_hidden_layers=1, **long))
    elif kind == "layer norms":
        write_checkpoint(path, "PhiForCausalLM", dtype=torch.bfloat16, qk_layernorm=True, **long)
    elif kind == "odd":  # rows of a projection are no multiple of 16 bytes
        write_hybrid(path, DENSE, dtype=torch.bfloat16, linear_num_value_heads=6,
                     linear_key_head_dim=32, linear_value_head_dim=32,
                     layer_types=["linear_attention", "full_attention"], **long)
    elif kind == "sparse":
        write_hybrid(path, SPARSE, layer_types=["linear_attention", "full_attention"], **long)
    elif kind == "latent":
        add_mtp(path, write_deepseek(path, num_nextn_predict_layers=1,
                                     **long | small))
    elif kind == "mamba":
        write_granite(path, layer_types=["mamba", "attention"], **long)
    elif kind == "both":
        write_recurrent(path, "FalconH1ForCausalLM", **long)
    elif kind == "scan":
        write_recurrent(path, "JambaForCausalLM", **long, attn_layer_period=2,
                        attn_layer_offset=1)
    elif kind == "kda":
        write_recurrent(path, "KimiLinearForCausalLM", **long,
                        layer_types=["linear_attention", "full_attention"])
    elif kind == "conv":
        write_recurrent(path, "Lfm2ForCausalLM", **long, layer_types=["conv", "full_attention"])
    elif kind == "fp8 experts":
        write_deepseek(source, **long | small)
    else:
        write_checkpoint(source, "LlamaForCausalLM", dtype=torch.bfloat16, head_dim=64,
                         intermediate_size=128, **long)
        path = path if kind == "fp8" else source
    if kind.startswith("fp8"):
        path = path / "fp8"
        write_twins(source, path, path.with_name("twin"), block=True)
    drafts = "draft:2" if kind == "draft" else "auto" if kind in DRAFTS else "off"
    if kind == "draft":
        write_checkpoint(source / "small", "LlamaForCausalLM", dtype=torch.bfloat16, head_dim=32,
                         **long)
    quantization = {"made": "fp8", "int8 rows": "int8"}.get(
        kind, kind if kind in ("int4", "int8") else "auto")
    group = {"int8 rows": 0, "int8": 32, "int4": 32}.get(kind)
    pages = MemoryConfig(kv_cache_dtype={torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}.get(
        pages_of(kind), "auto"))
    sage, alone = kind.startswith("sage"), kind.startswith("sage alone")
    config = Config(model=ModelConfig(model=str(path), quantization=quantization,
                                      quantization_group=group), memory=pages,
                    device=DeviceConfig(kernels="triton",
                                        exact="on" if kind.startswith("exact") else "auto",
                                        prefill_attention_backend="sage" if sage else "",
                                        decode_attention_backend="sage" if alone else ""),
                    speculation=SpeculationConfig(speculative=drafts,
                                                  speculative_model=str(source / "small")))
    # as no CUDA weight can be packed
    with (pytest.MonkeyPatch.context() as rounding,
          patch("actorium.kernels.triton.triton_ops.can_pack", lambda _: False)):
        exact_fp8(rounding)
        model = load_model(path, config, CPU, lambda *_: None)
    if sage:
        model.attention.extend.lib = None  # type: ignore[attr-defined]  # as on CUDA
    if kind == "skinny":  # as if each had been the fastest for its number of rows
        best = [(rows, configs_of(rows)[at % 2 if rows < 128 else 0])
                for at, rows in enumerate(BUCKETS)]
        model.ops.products.config = lambda kind, rows, *_: next(
            (config for most, config in best if rows <= most), None)
    return model


def runner_of(model: Any, drafts: int, pages: torch.dtype | None = None) -> ModelRunner:
    """On Triton's kernels, with transport as on a device."""
    runner = make_runner(model, drafts, slots=17, page_size=16, pages=3000,
                         mtp=model.drafter is not None, draft=model.draft_model,
                         checkpoints=8 if model.shape.state else 0, kv_dtype=pages,
                         arrays=DeviceArrays(CPU, model.ops.apply_plan))
    runner.tables.sampling = model.ops.sampling
    return runner


OPTIONS: Sequence[dict[str, Any]] = (
    {"temperature": 0.7}, {"top_p": 0.8}, {"presence_penalty": 0.3}, {"logit_bias": {3: 1.0}},
    {"eos_ids": (5,), "min_tokens": 2}, {"logprobs": 2})
"""Each asks something else of the sampler."""


class Requests:
    """Requests of all kinds, at random."""

    def __init__(self, seed: int, vocab: int, most: int) -> None:
        """most: tokens of the longest prompt."""
        self._random, self._vocab, self._most = random.Random(seed), vocab, most
        self._texts = [self._tokens(n) for n in (most - 100, most // 2, 300, 40)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def prompt(self) -> list[int]:
        """A new one, or something behind the beginning of a text that others begin with, too."""
        draw = self._random
        if draw.random() < 0.4:
            text = draw.choice(self._texts)
            own = self._tokens(draw.choice([0, 1, 3, 17, 60]))
            return text[:draw.randint(1, len(text))] + own
        return self._tokens(draw.choice([1, 2, 5, 17, 64, draw.randint(1, 900)]))

    def params(self) -> ResolvedParams:
        """Of every kind but masks, which come from grammars."""
        draw = self._random
        fields: dict[str, Any] = {
            "top_k": 5, "top_p": 0.8, "min_p": 0.05, "presence_penalty": 0.3, "min_tokens": 3,
            "frequency_penalty": 0.2, "repetition_penalty": 1.2, "logit_bias": {3: 1.0, 9: -2.0},
            "eos_ids": (self._vocab - 1,), "logprobs": draw.randint(0, 5),
            "prompt_logprobs": draw.randint(0, 5), "logprob_ids": (1, 2, 3)}
        return ResolvedParams(max_tokens=draw.randint(1, 10),
                              temperature=draw.choice([0.0, 0.0, 0.7]),
                              **{name: value for name,
                                 value in fields.items() if draw.random() < 0.15})

    def serve(self, runner: ModelRunner, number: int, speculative: str) -> int:
        """So many of them, to their ends; prompt tokens that were found in the cache."""
        ring = Ring(runner, BUDGET, force_preempt_every=9, speculative=speculative)
        for i in range(number):
            ring.submit(self.prompt(), self.params(), i)
            for _ in range(self._random.randint(0, 4)):
                ring.step()
        return sum(out.cached for out in ring.run())

    def serve_alone(self, runner: ModelRunner) -> None:
        """One after the other, each with some of `OPTIONS`: what steps need follows from all that
        are in them, so that few of those above need this and nothing else."""
        ring, sets = Ring(runner, BUDGET, speculative="off"), range(1 << len(OPTIONS))
        for chosen in sets:
            fields: dict[str, Any] = {"temperature": 0.0}
            for number, option in enumerate(OPTIONS):
                fields |= option if chosen >> number & 1 else {}
            ring.submit(self._tokens(3), ResolvedParams(max_tokens=2, **fields), chosen)
            ring.run()


@pytest.mark.parametrize(("kind", "captured"), CASES)
def test_requests_need_no_form_that_the_warm_up_has_not_compiled(kind: str, captured: bool,
                                                            tmp_path: Path) -> None:
    model = model_of(tmp_path, kind)
    drafts = DRAFTS.get(kind, 0)
    runner = runner_of(model, drafts, pages_of(kind))
    ahead, warm, met = Forms(), Forms(), Forms()
    with ahead.recording(doubles=False), one_layer_per_kind(model), ZeroMode():
        walk_warmup(runner, model.ops, BUDGET)
    with warm.recording():
        warm_up_kernels(runner, BUDGET, lambda *_: None)
    assert warm.beyond(ahead) == []
    if captured:
        with warm.recording():
            capture(runner, warm, drafts)
    requests = Requests(5, model.shape.vocab_size, model.shape.max_model_len)
    with met.recording():
        ways = ("off", "mtp:1,fixed", "auto") if drafts else ("off",)
        cached = sum(requests.serve(runner, 24 // len(ways), way) for way in ways)
        if kind == "llama":  # all sample alike
            requests.serve_alone(runner)
    assert met.launches > 500 and cached > 0
    assert met.beyond(warm) == []
    exact = {f"exact_attention.{name}" for name in ("_exact", "_pieces", "_fold_parts")}
    if kind.startswith("exact"):
        assert exact | {"exact_product._exact_product"} < met.names()
    assert bool(exact & met.names()) == kind.startswith("exact")
    assert met.names() & {"extend._extend", "latent._latent", "sage._sage", *exact}
    assert {"commit._commit", "penalties._penalise", "logprobs._join"} < met.names()
    assert kind != "skinny" or sum(name == "skinny._skinny" for name, _ in met.found) > 3
    if captured:
        assert all(runner.served[mode] for mode in STEP_MODES if mode != "program")


def capture(runner: ModelRunner, forms: Forms, drafts: int) -> None:
    """Graphs of a few sizes, which a launcher would not see; as `worker.device` does it.
    """
    capturer = Rerun(forms)
    runner.graphs = runner.decode_graphs(capturer, shapes([1, 4], range(1, drafts + 2)))
    runner.segments = PiecewiseGraphRunner(runner.model, runner.pools, capturer, [32, 8])
    runner.graphs.capture(lambda *_: None)
    runner.segments.capture(lambda *_: None)
    warm_up_kernels(runner, 32, lambda *_: None)


def test_a_single_step_is_no_warm_up(tmp_path: Path) -> None:
    """Which the comparison shows: it sees forms that are missing, and says in what."""
    model = model_of(tmp_path, "llama")
    runner, warm, met = runner_of(model, 0), Forms(), Forms()
    with warm.recording():
        dummy_run(runner, 2)
    with met.recording():
        Requests(5, model.shape.vocab_size, model.shape.max_model_len).serve(runner, 12, "off")
    missing = met.beyond(warm)
    assert any(line.startswith("extend._extend: ") and "SPLIT=True" in line for line in missing)
    assert any(line.startswith("merge._merge: no other form") for line in missing)


def test_forms_are_those_of_tritons_launcher() -> None:
    """An integer is 1, a multiple of 16, or any; an address is a multiple of 16, or any; neither
    where the kernel says so."""
    from actorium.kernels.triton.apply_plan import apply_plan
    from actorium.kernels.triton.norm import rms_norm

    def count(*launches: Any) -> int:
        forms = Forms()
        with forms.recording():
            for launch in launches:
                launch()
        assert forms.launches == len(launches)
        return len(forms.found)

    wide, weight = torch.zeros(9, 48), torch.zeros(32)
    rows = [wide[:, :32], wide[:, 1:33], torch.zeros(3, 33)[:, :32], torch.zeros(4, 1)[:, :1]]
    assert count(*[lambda x=x: rms_norm(x, weight, 1e-5) for x in rows[:1]] * 2) == 1
    assert count(*[lambda n=n: rms_norm(rows[0][:n], weight, 1e-5) for n in (1, 2, 7, 9)]) == 1
    assert count(*[lambda x=x: rms_norm(x, weight, 1e-5) for x in rows[:3]]) == 3
    assert count(*[lambda x=x: rms_norm(x, weight, 1e-5) for x in (*rows, rows[3][:2])]) == 4
    table = torch.zeros(4, dtype=torch.int32)
    addresses, entries = torch.tensor([table.data_ptr()]), torch.zeros(3, 40, dtype=torch.int32)
    assert count(*[lambda n=n: apply_plan([table], addresses, entries[:, n:n + n])
                   for n in (1, 2, 16)]) == 1


@pytest.mark.parametrize("vocab", [1000, 32_000, 248_320])
def test_forms_of_the_samplers_kernels_do_not_depend_on_the_number_of_rows(vocab: int) -> None:
    from actorium.kernels.triton.logprobs import logprobs
    from actorium.kernels.triton.masks import mask

    forms = Forms()
    with forms.recording():
        for rows in (1, 2, 3, 16, 33, 100, 512):
            logits, own = torch.empty(rows, vocab), torch.zeros(rows, dtype=torch.int64)
            logprobs(logits, own, 0)
            mask(logits, own.int(), torch.zeros(rows, -(-vocab // 32), dtype=torch.int32))
    assert len(forms.found) == 3


@pytest.mark.parametrize("votes", [False, True])
def test_forms_of_drafts_by_text_do_not_depend_on_the_step(votes: bool) -> None:
    from actorium.kernels.reference.text_drafts import TextRules
    from actorium.kernels.triton.text_drafts import text_drafts

    forms = Forms()
    history, drafts = torch.ones(40, 4100, dtype=torch.int32), torch.zeros(40, 8, dtype=torch.int64)
    lens, slots = torch.full((40,), 9, dtype=torch.int32), torch.arange(40, dtype=torch.int32)
    with forms.recording():
        for first, rows, bound, count in ((0, 1, 9, 1), (1, 2, 16, 8), (3, 33, 4096, 5)):
            text_drafts(history, lens, slots[first:first + rows], bound,
                        TextRules(2, 24, 8, votes, 1.0, 0.1), drafts, count)
    assert len(forms.found) == 2
