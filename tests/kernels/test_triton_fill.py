"""The rows of decodes, read from the tables in one launch, beside those of torch's operations."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_compile import compiled
from helpers_worker import CPU

from actorium.gpu.step.input_batch import InputBatch, decode_batch, fill_decodes
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.step.tables import SlotTables
from actorium.kernels.backends import select_sampling, triton_fault
from actorium.kernels.reference.torch_ops import TorchSampling
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import LIMIT, ROPE_DELTA

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(
        bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device")])]
COMPILED = """
import torch
from actorium.kernels.sampling_tables import WindowSizes, DecodeState, WindowRows
from actorium.kernels.triton.fill import fill

i32, i64 = (lambda *s: torch.zeros(s, dtype=torch.int32)), (lambda *s: torch.zeros(
    s, dtype=torch.int64))
progress = DecodeState(i64(9), i32(9), torch.zeros(9, dtype=torch.bool), i64(9))
for most, q_len in ((0, 1), (2, 3)):
    fill(i32(4), progress, i64(9, most), i32(9, 13), i32(2, 9, 512),
         WindowSizes(q_len, 16, 512, 8192), WindowRows(
             i64(4 * q_len), i64(4 * q_len), i64(2, 4 * q_len), i32(2, 4, 512), i32(4),
             i32(4 * q_len), i32(4 * q_len)))
"""


def tables(device: torch.device, ops: SamplingOps, seed: int, groups: int, most: int, pages: int,
           size: int, images: bool) -> SlotTables:
    """Of 11 slots, some of whose sequences have ended, or are at their limit or the model's, or
    have images."""
    t = SlotTables(DeviceArrays(device), 11, pages, size, 100, pages * size - 3, groups, most, ops)
    rng = np.random.default_rng(seed)
    length = rng.integers(1, t.max_len + 1, 11).astype(np.int32)
    length[3:5] = t.max_len
    limit = np.minimum(length + rng.integers(0, 4, 11), t.max_len)
    delta = np.maximum(rng.integers(-9, 2, 11), 1 - length) * (rng.random(11) < 0.6) * images
    t.images = object() if images else None  # type: ignore[assignment]
    for array, values in ((t.last_token, rng.integers(0, 100, 11)), (t.seq_len, length),
                          (t.ended, rng.random(11) < 0.3), (t.record[:, LIMIT], limit),
                          (t.record[:, ROPE_DELTA], delta),
                          (t.drafts.tokens, rng.integers(0, 100, (11, most))),
                          (t.page_tables, rng.integers(1, 1 << 20, t.page_tables.shape))):
        array.copy_(torch.from_numpy(np.asarray(values)))
    return t


def filled(device: torch.device, ops: SamplingOps, seed: int, groups: int, q_len: int, pages: int,
           size: int, keep: bool = False, images: bool = False) -> InputBatch:
    most = max(q_len - 1, seed % 2 * 3)
    t = tables(device, ops, seed, groups, most, pages, size, images)
    slots = np.random.default_rng(seed).permutation(11)[:7].astype(np.int32)
    step = decode_batch(t, slots, q_len, t.max_len - seed % 2)
    kept = tuple(torch.full((7 * q_len,), -7, dtype=torch.int32, device=device) for _ in range(2))
    fill_decodes(t, step, torch.from_numpy(slots).to(device), kept if keep else ())
    if keep:
        assert step.positions is kept[0] and step.row_slots_d is kept[1]
    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("groups", "q_len", "pages", "size"), [
    (1, 1, 5, 16), (2, 1, 3, 8), (1, 2, 4, 16), (2, 3, 6, 4), (3, 4, 600, 1)])
def test_rows_are_those_of_torch(device: str, groups: int, q_len: int, pages: int, size: int,
                                 keep: bool) -> None:
    for seed in range(3):
        want, got = (
            filled(torch.device(device), ops, seed, groups, q_len, pages, size, keep, seed == 2)
            for ops in (TorchSampling(), select_sampling(torch.device(device), "triton")))
        for name in ("positions", "row_slots_d", "slots_d"):
            assert getattr(got, name).equal(getattr(want, name)), name
        assert len(got.batches) == len(want.batches) == groups
        for one, other in zip(got.batches, want.batches, strict=True):
            for own in fields(one):
                a, b = getattr(one, own.name), getattr(other, own.name)
                same = a.equal(b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
                assert same, own.name


@pytest.mark.slow
def test_they_compile(tmp_path: Path) -> None:
    assert compiled(COMPILED, tmp_path) == ["_fill"] * 2
