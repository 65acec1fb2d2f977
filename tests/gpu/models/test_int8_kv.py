"""KV cache in INT8 through whole models: near wide pages, and the same tokens whether a prefix is
cached or computed anew, sequences are preempted, or drafts are verified.

Kernels by themselves: `test_int8_kv_kernels.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers_kinds import write_kind
from helpers_models import CPU, Seq, Stepper, write_checkpoint
from helpers_pairs import pairs
from helpers_speculation import RUBBISH, Work, make_runner, tokens_of
from helpers_worker import Ring
from test_fp8_kv import FAMILIES, GREEDY, Make, load, off
from torch import Tensor

from actorium.actors.params import ResolvedParams
from actorium.gpu.attention.attention_backend import TritonAttention
from actorium.gpu.attention.capabilities import CARDS, AttentionNeeds, unmet
from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.kv import write_kv

INT8, BF16 = torch.int8, torch.bfloat16
IDS = [(7 * n) % 190 + 3 for n in range(64)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def checkpoint_of(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        if name == "in c":
            write_checkpoint(path, "LlamaForCausalLM", dtype=BF16, head_dim=32)
        else:
            write_kind(path, name)
        return path

    return checkpoint_of


def logits(path: Path, pages: torch.dtype, dtype: str = "auto", chunk: int = 60) -> Tensor:
    """Of a prompt of 60 tokens in chunks, then of decodes."""
    name = {INT8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}.get(pages, "auto")
    stepper, seq = Stepper(load(path, name, dtype=dtype), kv_dtype=pages), Seq(list(IDS))
    found = [stepper.step([(seq, min(chunk, 60 - n))], every_row=True) for n in range(0, 60, chunk)]
    return torch.cat([*found, *(stepper.step([], [seq]) for _ in range(4))])


@pytest.mark.parametrize(("name", "bound", "dtype"), pairs(
    [("llama", 0.03), ("windows", 0.015), ("deepseek", 0.03)], ["float32", "bfloat16"]))
def test_logits_are_near_those_of_wide_pages(make: Make, name: str, bound: float,
                                             dtype: str) -> None:
    """Nearer than those of FP8."""
    want = logits(make(name), getattr(torch, dtype), dtype)
    near, far = (off(logits(make(name), own, dtype), want) for own in (INT8, torch.float8_e4m3fn))
    assert 1e-4 < near < bound and near < far


@pytest.mark.parametrize("name", ["llama", "windows", "deepseek"])
def test_pages_read_are_those_that_were_meant(make: Make, name: str) -> None:
    """As if keys and values were rounded by themselves, and kept wide."""
    got = logits(make(name), INT8)
    stepper, seq = Stepper(load(make(name))), Seq(list(IDS))

    def rounds(pages: Tensor, kv: Tensor, index: Tensor, scales: Tensor | None = None) -> None:
        codes = torch.zeros(pages.shape, dtype=INT8)
        own = torch.zeros(pages.shape[:2], dtype=BF16)
        write_kv(codes, kv, index, own)
        pages[index] = (codes.float() * own.float()[..., None])[index].to(pages.dtype)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("reference.torch_ops", "reference.latent"):
            patch.setattr(f"actorium.kernels.{module}.write_kv", rounds)
        patch.setattr("actorium.gpu.models.attention.write_kv", rounds)
        want = stepper.step([(seq, 60)], every_row=True)
        want = torch.cat([want, *(stepper.step([], [seq]) for _ in range(4))])
    assert off(got, want) < 1e-4


@pytest.mark.parametrize("name", ["llama", "windows", "deepseek", "in c"])
def test_a_prefix_that_is_there_gives_the_same_bits(make: Make, name: str) -> None:
    """What a token leaves depends on it alone: pages that another sequence wrote are those that it
    would have written, codes and scales."""
    stepper = Stepper(load(make(name), "int8"), kv_dtype=INT8)
    first, alone = Seq(list(IDS)), Seq(list(IDS))
    for seq in (first, alone):
        stepper.step([(seq, 48)])
    want = [stepper.step([(alone, 12)], every_row=True), stepper.step([], [alone])]
    reuses = Seq(list(IDS), 48, list(first.pages))
    got = [stepper.step([(reuses, 12)], every_row=True), stepper.step([], [reuses])]
    assert all(map(torch.equal, got, want))
    for g, pool in enumerate(stepper.pools):
        at = [torch.tensor(stepper._table(seq, g))[:, None] * 16 + torch.arange(16)
              for seq in (alone, reuses)]
        for own in pool.tensors:
            ours, theirs = (own[place.flatten()[:61]] for place in at)
            assert torch.equal(ours, theirs) and ours.any()


@pytest.mark.parametrize("name", ["llama", "windows", "hybrid"])
def test_cached_prefixes_and_preemptions_change_no_token(make: Make, name: str) -> None:
    shared = [(11 * n) % 190 + 3 for n in range(40)]
    params = ResolvedParams(max_tokens=12, temperature=0.0)
    prompts = [[*shared, 5], [*shared, 9, 9], [*shared, 5], [65], [7] * 17]
    work = Work(prompts, [params] * len(prompts))
    model, pages = load(make(name), "int8"), {"kv_dtype": INT8, "checkpoints": 3}
    alone = [Work([prompt], [params]).plain(model, pages)[0] for prompt in prompts]
    want = [own.tokens for own in alone]
    assert len({tuple(own) for own in want}) > 2 and not any(own.cached for own in alone)
    ring = work.ring(make_runner(model, 0, **pages), force_preempt_every=3)
    assert [own.tokens for own in ring.run()] == want and ring.preemptions > 2
    again = Ring(make_runner(model, 0, **pages))
    for prompt in prompts:  # one after the other: those that come later find it
        again.submit(prompt, params)
        done = again.run()
    assert [own.tokens for own in done] == want and done[1].cached + done[2].cached > 32


@pytest.mark.parametrize(("name", "drafts"), pairs([*FAMILIES, "in c"], [1, 3]))
def test_speculation_changes_nothing(make: Make, name: str, drafts: int) -> None:
    """Windows of drafts, right ones and wrong ones: the tokens are those of one by one."""
    model, pages = load(make(name), "int8"), {"kv_dtype": INT8}
    want = GREEDY.plain(model, pages)
    for right in (lambda seed, place: True, lambda seed, place: (seed * 31 + place * 17) % 5 < 3):
        _, got = GREEDY.guessed(model, want, drafts, right, runner={"slots": 6, **pages}, budget=24)
        assert tokens_of(got) == tokens_of(want)


@pytest.mark.parametrize("name", ["hybrid", "deepseek"])
def test_the_layer_that_drafts_has_pages_in_int8_too(make: Make, name: str) -> None:
    model = load(make(name), "int8", speculative="auto")
    runner = make_runner(model, 2, mtp=True, kv_dtype=INT8)
    (own,) = runner.draft_pools
    assert own.layers[0].dtype is INT8
    want = GREEDY.plain(model, {"kv_dtype": INT8})
    got = GREEDY.ring(runner, speculative="mtp:2,fixed").run()
    assert tokens_of(got) == tokens_of(want)
    (scales,) = own.scales
    assert (scales != RUBBISH).any() and scales.isfinite().all()


@pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_triton_equals_torch(make: Make, name: str) -> None:
    """A chunk, and one beside a window of drafts."""
    said = []
    for kernels in ("torch", "triton"):
        stepper = Stepper(load(make(name), "int8", kernels=kernels), 64, kv_dtype=INT8)
        seqs = [Seq(list(range(3, 30))), Seq([7] * 18)]
        out = [stepper.step([(seqs[1], 14)]), stepper.step([(seqs[0], 9)], seqs[1:], q_len=3)]
        said.append(torch.cat(out))
    assert off(said[1], said[0]) < 1e-3


def test_cards_say_who_reads_them() -> None:
    needs = AttentionNeeds("cuda", "bfloat16", "int8", 128, 16)
    for latent in (0, 512):
        own = needs._replace(latent_rank=latent)
        assert not TritonAttention.fault("decode", own, CPU) or triton_fault(CPU)
        assert not unmet(CARDS["torch"].extend, own)
    lacks = CARDS["triton"].decode
    assert lacks is not None
    why = unmet(lacks._replace(cache_dtypes=("bfloat16",)), needs)
    assert why == "it reads no pages in int8 (--kv-cache-dtype bfloat16)"
