"""The sampler of devices, in torch and in Triton, beside that of the host: token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_speculation import i4
from helpers_worker import CPU

from actorium.actors.messages import Admit, RowMask, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.layer_weights import RoutingTape
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.tables import SlotTables
from actorium.kernels.backends import select_sampling
from actorium.kernels.sampling_ops import SamplingOps

VOCAB = 45
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.4}, {"top_k": 3}, {"top_p": 0.7},
    {"temperature": 0.0, "repetition_penalty": 3.0, "logprobs": 3},
    {"logit_bias": {0: 1.5, 3: -2.0, 44: 3.0}, "logprobs": 0}, {"presence_penalty": 1.2},
    {"frequency_penalty": 1.5, "temperature": 0.5}, {"eos_ids": (1, 2, 7), "min_tokens": 4},
    {"min_p": 0.2, "masked": True},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "logit_bias": {1: 4.0, 5: 2.0},
     "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5,
     "eos_ids": (2, 1), "min_tokens": 3},
]


class Bigrams:
    """A model whose logits depend on the last token alone."""

    drafter, dtype, tape = None, torch.float32, RoutingTape()
    logits_of = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2

    def forward(self, batches: Any, pools: Any, recurrent: Any = None) -> torch.Tensor:
        """The tokens of the wanted rows."""
        rows: torch.Tensor = batches[0].tokens[batches[0].logit_rows]
        return rows[:, None]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, VOCAB], in numbers that bf16 has."""
        return self.logits_of[rows[:, 0]].bfloat16().to(self.dtype)


def likely(slots: Any, positions: Any, k: int) -> Any:
    """Drafts that are sometimes right."""
    return ((slots[:, None] * 7 + positions[:, None] + np.arange(k)) % VOCAB).astype(np.int32)


def mask(slot: int, row: int) -> RowMask:
    bits = np.random.default_rng(10 * slot + row).random(VOCAB) < 0.6
    bits[row] = True
    padded = np.packbits(np.pad(bits, (0, 64 - VOCAB)), bitorder="little")
    return RowMask(slot, row, padded.tobytes()[:4 * -(-VOCAB // 32)])


def admit(slot: int, params: dict[str, Any], seed: int) -> Admit:
    prompt = [5, slot, 8]
    return Admit(slot, i4(*prompt), 3, 0, i4(0), ResolvedParams(max_tokens=14, **params), seed)


def results(arrays: Any, most: int, ops: SamplingOps | None = None,
            dtype: torch.dtype = torch.float32) -> list[StepResult]:
    """Steps with all parameters in one batch, windows of 1 to 4 rows (most: drafts of a model that
    makes any), and slots that are used again by sequences that want other things."""
    slots = list(range(1, len(PARAMS) + 1))
    tables = SlotTables(arrays(CPU), len(slots) + 2, 2, 16, VOCAB, 32, drafts=most,
                        sampling=ops)
    pool = KVPagePool(SimpleNamespace(kv_row=(1, 1), layers=1),  # type: ignore[arg-type]
                      1, 16, torch.float32, CPU)
    model = Bigrams()
    model.dtype = dtype
    runner = ModelRunner(model, [pool], tables, propose=likely)  # type: ignore[arg-type]
    masked = 1 + next(i for i, params in enumerate(PARAMS) if params.get("masked"))
    out = [runner.run(StepPlan(
        1, 0, admit=[admit(slot, PARAMS[slot - 1], slot) for slot in slots],
        extend=i4(*((slot, 3) for slot in slots)), drafts=min(2, most), masks=[mask(masked, 0)]))]
    for i, (drafts, window) in enumerate(((3, 3), (0, 4), (0, 1)), 1):
        drafts, window = min(drafts, most), min(window, most + 1)
        out.append(runner.run(StepPlan(
            1, i, decode=i4(*slots), drafts=drafts,
            masks=[mask(masked, row) for row in range(window)])))
    # The same slots, each with the parameters of another; and a window beside them.
    again, rest = slots[:-1], slots[-1:]
    out.append(runner.run(StepPlan(1, 4, decode=i4(*rest), drafts=min(2, most))))
    out.append(runner.run(StepPlan(
        1, 5, release=i4(*again), admit=[admit(slot, PARAMS[slot], slot + 50) for slot in again],
        extend=i4(*((slot, 3) for slot in again)), decode=i4(*rest), drafts=0)))
    out += [runner.run(StepPlan(1, i, decode=i4(*slots))) for i in range(6, 9)]
    return out


@pytest.mark.parametrize(("kernels", "most"), [
    ("torch", 0), ("torch", 3), pytest.param("triton", 3, marks=pytest.mark.slow),
    pytest.param("triton", 0, marks=pytest.mark.slow)])
def test_devices_sample_what_the_host_samples(kernels: str, most: int) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a CUDA device")
    ops = select_sampling(CPU, kernels)
    assert ops.name == kernels
    want, got = results(HostArrays, most), results(DeviceArrays, most, ops, torch.bfloat16)
    assert sum(sum(result.counts) for result in want) > 60
    for own_step, other in zip(got, want, strict=True):
        assert own_step.counts == other.counts and own_step.finish == other.finish
        assert np.array_equal(np.frombuffer(own_step.tokens, np.int32),
                              np.frombuffer(other.tokens, np.int32))
        assert own_step.drafts == other.drafts
        for a, b in zip(own_step.logprobs, other.logprobs, strict=True):
            assert (a.row, a.ranks, a.top_ids) == (b.row, b.ranks, b.top_ids)
            np.testing.assert_allclose(np.frombuffer(a.chosen, np.float32),
                                       np.frombuffer(b.chosen, np.float32), rtol=1e-5)
