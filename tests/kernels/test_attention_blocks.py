"""The reference in blocks, as it goes on devices where torch keeps no scores to itself: against the
formula, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_attention import FEW, Paged, error
from helpers_memory import most_held
from helpers_pairs import pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.kernels.reference import attention_blocks, paged_attention
from actorium.kernels.reference.paged_attention import torch_decode, torch_extend

DTYPES = [(torch.float64, torch.float64, 1e-12), (torch.float32, torch.float32, 1e-6),
          (torch.bfloat16, torch.bfloat16, 1e-2), (torch.float32, torch.int8, 1e-6),
          (torch.bfloat16, torch.float8_e4m3fn, 1e-2)]
MIB = 1 << 20


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on CUDA, with blocks of a few tokens."""
    monkeypatch.setattr(paged_attention, "keeps_scores", lambda _: False)
    monkeypatch.setattr(attention_blocks, "BYTES", 20_000)
    return monkeypatch


def drawn(data: st.DataObject, spans: list[tuple[int, int]]) -> tuple[Paged, float]:
    dtype, kept, bound = data.draw(st.sampled_from(DTYPES))
    kv_heads = data.draw(st.integers(1, 3))
    heads = kv_heads * data.draw(st.sampled_from([1, 2, 5]))
    return Paged(spans, heads, kv_heads, data.draw(st.sampled_from([8, 24, 64])),
                 data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([0, 0, 1, 40])),
                 dtype, kept), bound


def test_prompts(blocks: pytest.MonkeyPatch) -> None:
    @settings(FEW, max_examples=30)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spans = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 24)), min_size=1,
                                   max_size=3))
        if data.draw(st.booleans()):
            spans = [(0, spans[0][1])] * len(spans)
        case, bound = drawn(data, spans)
        attend = torch_extend(case.rows, case.page_size, case.window, case.scale)
        got = attend(case.q, case.layer, case.poisoned(), case.scales)
        assert error(got, case.wanted()) < bound

    check()


def test_decodes(blocks: pytest.MonkeyPatch) -> None:
    @settings(FEW, max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        q_len = data.draw(st.sampled_from([1, 1, 3]))
        case, bound = drawn(data, [(n, q_len) for n in data.draw(
            st.lists(st.integers(0, 90), min_size=1, max_size=4))])
        tables, lens = case.tables()
        attend = torch_decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window,
                              case.scale)
        got = attend(case.q, case.layer, case.poisoned(), case.scales)
        assert error(got, case.wanted()) < bound

    check()


@pytest.mark.parametrize("parts", [[(0, 9), (0, 9), (50, 20)], [(70, 1)], [(0, 33)]])
def test_latents(parts: list[tuple[int, int]], blocks: pytest.MonkeyPatch) -> None:
    """The whole row is value as well; by blocks and at once."""
    def run() -> Tensor:
        return TorchAttention(32).extend(case.rows, 16, 0, case.scale)(case.q[..., :40], latents)

    case = Paged(parts, 6, 1, 40, 16, dtype=torch.float64)
    latents = case.layer[:, :1]
    got = run()
    blocks.undo()
    torch.testing.assert_close(got, run(), rtol=1e-12, atol=1e-12)


# --- memory --------------------------------------------------------------------------------------

class Held:
    """A call of DeepSeek's heads, of one device in eight, or of Llama-3.1-8B's, and its memory."""

    def __init__(self, latents: bool, part: tuple[int, int], dtype: torch.dtype) -> None:
        heads, row = (16, (1, 576)) if latents else (32, (16, 128))
        start, count = part
        pages = -(-(start + count) // 16)
        self.backend = TorchAttention(512 if latents else 0)
        self.layer = torch.zeros((pages * 16, *row), dtype=dtype)
        self.q = torch.zeros((count, heads, row[1]), dtype=dtype)
        self.table, self.part = torch.arange(pages, dtype=torch.int32), part

    def prompt(self) -> int:
        class Row:
            start, count = self.part
            pages = self.table

        return most_held(lambda: self.backend.extend([Row()], 16, 0, 0.1)(self.q, self.layer))


@pytest.fixture
def math_path() -> Any:
    """What torch does on CUDA where none of its kernels takes the heads, the mask or the dtype."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize(("latents", "part", "dtype"), pairs(
    [(latents, part) for latents in (True, False) for part in ((4000, 96), (0, 512))],
    [torch.bfloat16, torch.float32]))
def test_a_prompt_takes_no_more_than_its_bound(
    latents: bool, part: tuple[int, int], dtype: torch.dtype, math_path: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which torch's own path exceeds."""
    case, bound = Held(latents, part, dtype), 8 * MIB
    monkeypatch.setattr(attention_blocks, "BYTES", bound)
    assert case.prompt() > bound + 2 * case.q.nbytes
    monkeypatch.setattr(paged_attention, "keeps_scores", lambda _: False)
    assert case.prompt() <= bound + case.q.nbytes


def test_decodes_take_no_more_than_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose keys are read for all sequences at once otherwise."""
    def run() -> int:
        attend = TorchAttention().decode(tables, lens, 4096, 1, 16, 0, 0.1)
        return most_held(lambda: attend(q, layer))

    bound, layer = 8 * MIB, torch.zeros((256 * 16, 4, 64))
    tables = torch.arange(256, dtype=torch.int32).expand(20, -1).contiguous()
    lens, q = torch.full((20,), 4096, dtype=torch.int32), torch.zeros((20, 8, 64))
    monkeypatch.setattr(attention_blocks, "BYTES", bound)
    assert run() > 4 * bound
    monkeypatch.setattr(paged_attention, "keeps_scores", lambda _: False)
    assert run() <= bound + q.nbytes
