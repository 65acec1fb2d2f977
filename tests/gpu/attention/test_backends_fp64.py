"""Every attention backend against the formula in fp64, over shapes drawn from what its card says
that it can do: prompts, decodes, windows of drafts, and steps of both."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers_attention import FEW, INTERPRETED, Paged, error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorium.gpu.attention.attention_backend import AttentionBackend
from actorium.gpu.attention.backend_choice import BACKENDS, StepAttention, make_backend
from actorium.gpu.attention.capabilities import CARDS, DECODE, EXTEND, AttentionNeeds
from actorium.gpu.models.forward_context import plan_attention
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.weights.dtypes import TORCH_DTYPES

CPU = torch.device("cpu")
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Of an error, by the dtype of the queries; with scales these are rounded once more."""
SAGE_BOUND = 0.03
"""Of queries and keys in 8 bits: each is off by 0.4 % of the largest number of its row at most."""
COUNTS = {"triton": 4}
"""Examples: the interpreter is slow."""
EVERY = [pytest.param(name, marks=INTERPRETED if name == "triton" else ()) for name in CARDS]
pytestmark = pytest.mark.usefixtures("all_threads")


@dataclass
class Drawn:
    """A step of one backend."""

    case: Paged
    backend: AttentionBackend
    cap: float
    scales: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    bound: float

    def check(self, got: Tensor) -> None:
        want = self.case.wanted(self.cap, self.scales, self.sinks, self.slopes)
        assert error(got, want) < self.bound


def backend_for(name: str, part: str, needs: AttentionNeeds) -> AttentionBackend:
    if why := BACKENDS[name].missing(part, CPU):
        pytest.skip(why)
    assert not BACKENDS[name].fault(part, needs, CPU)
    return make_backend(name, needs)


def draw_case(data: st.DataObject, name: str, part: str, window: int, cap: bool,
              spans: list[tuple[int, int]]) -> Drawn:
    can = CARDS[name].part(part)
    assert can is not None
    if why := BACKENDS[name].missing(part, CPU):
        pytest.skip(why)
    dtype, cache = data.draw(st.sampled_from([
        (own, kept) for own in can.dtypes for kept in can.cache_dtypes if not BACKENDS[name].fault(
            part, AttentionNeeds("cpu", own, kept, 64, 16), CPU)]), "dtypes")
    step = can.head_dim_step
    dim = data.draw(st.sampled_from([d for d in (8, 24, 32, 64, 96, 128, 256, 512) if d % step == 0
                                     and (not can.most_head_dim or d <= can.most_head_dim)]), "dim")
    kv_heads = data.draw(st.integers(1, 3), "kv heads")
    heads = kv_heads * data.draw(st.sampled_from([1, 2, 3, 5, 8]), "group")
    size = data.draw(st.sampled_from(can.page_sizes or (1, 4, 16, 64)), "page size")
    window = window if can.windows else 0
    case = Paged(spans, heads, kv_heads, dim, size, window, TORCH_DTYPES[dtype],
                 TORCH_DTYPES[cache])
    capped = 2.0 if cap and can.soft_caps else 0.0
    if capped:
        case.q *= 8
    scaled = cache.startswith("fp8") and data.draw(st.booleans(), "scales")
    scales = (2.0 ** torch.linspace(-2.3, 1.1, 2 * kv_heads).flip(0) if scaled else case.scales)
    sinks = (torch.linspace(-8, 8, heads) if can.sinks and data.draw(st.booleans(), "sinks")
             else None)
    slopes = (2.0 ** -torch.linspace(0.5, 8, heads) if can.alibi and not capped
              and data.draw(st.booleans(), "slopes") else None)
    needs = AttentionNeeds("cpu", dtype, cache, dim, size, window > 0, soft_cap=capped > 0,
                           sinks=sinks is not None, alibi=slopes is not None)
    return Drawn(case, backend_for(name, part, needs), capped, scales, sinks, slopes,
                 SAGE_BOUND if name == "sage" else BOUNDS[dtype] * (2 if scaled else 1))


LENGTHS, WINDOWS = st.integers(0, 90), st.sampled_from([0, 0, 1, 7, 40])


@pytest.mark.parametrize("name", EVERY)
def test_prompts(name: str) -> None:
    @settings(FEW, max_examples=COUNTS.get(name, 40))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        spans = data.draw(st.lists(st.tuples(LENGTHS, st.integers(1, 40)), min_size=1, max_size=3))
        if data.draw(st.booleans(), "alike"):
            spans = [(0, spans[0][1])] * len(spans)
        own = draw_case(data, name, EXTEND, data.draw(WINDOWS), data.draw(st.booleans()), spans)
        case = own.case
        attend = own.backend.extend(case.rows, case.page_size, case.window, case.scale, own.cap,
                                    own.slopes)
        own.check(attend(case.q, case.layer, case.poisoned(), own.scales, own.sinks))

    check()


@pytest.mark.parametrize("name", EVERY)
def test_decodes_and_windows_of_drafts(name: str) -> None:
    @settings(FEW, max_examples=COUNTS.get(name, 40))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        q_len = data.draw(st.sampled_from([1, 1, 2, 3, 5]), "rows")
        spans = [(n, q_len) for n in data.draw(st.lists(LENGTHS, min_size=1, max_size=4))]
        own = draw_case(data, name, DECODE, data.draw(WINDOWS), data.draw(st.booleans()), spans)
        case, (tables, lens) = own.case, own.case.tables()
        span = int(lens.max()) + data.draw(st.sampled_from([0, 3]))
        tables = torch.nn.functional.pad(tables, (0, 3), value=case.stranger)
        attend = own.backend.decode(tables, lens, span, q_len, case.page_size, case.window,
                                    case.scale, own.cap, own.slopes)
        own.check(attend(case.q, case.layer, case.poisoned(), own.scales, own.sinks))

    check()


@pytest.mark.parametrize("extend", EVERY)
@pytest.mark.parametrize("decode", EVERY)
def test_any_two_share_a_step(extend: str, decode: str) -> None:
    """Over the same pages: prompts, then windows of two drafts; with the rows that are wanted at
    the last layer."""
    needs = AttentionNeeds("cpu", "bfloat16", "bfloat16", 32, 16)
    both = StepAttention(backend_for(extend, EXTEND, needs), backend_for(decode, DECODE, needs))
    bound = SAGE_BOUND if "sage" in (extend, decode) else BOUNDS["bfloat16"]
    codes = not any(BACKENDS[name].fault(part, needs._replace(cache_dtype="int8"), CPU)
                    for name, part in ((extend, EXTEND), (decode, DECODE)))
    assert codes or "sage" in (extend, decode)
    for window, pages in ((0, None), (20, torch.int8 if codes else None)):
        case = Paged([(0, 30), (17, 9), (40, 3), (2, 3)], 6, 2, 32, 16, window, torch.bfloat16,
                     pages)
        prompts, rows, want = case.rows[:2], case.rows[2:], case.wanted()
        total = sum(row.count for row in prompts)
        tables, lens = case.tables()
        positions = torch.cat([torch.arange(row.start, row.start + row.count)
                               for row in case.rows])
        wanted = torch.tensor([29, total - 1, total + 2, total + 5])
        plan = plan_attention(ForwardBatch(
            positions, positions, positions,
            [ExtendRow(i, row.start, row.count, row.pages) for i, row in enumerate(prompts)],
            total, len(rows), tables[2:], lens[2:], int(lens.max()), wanted, 3), 16, window,
            case.scale, both)
        assert error(plan.attend(case.q, case.layer, case.poisoned(), case.scales), want) < bound
        assert plan.few is not None
        few = plan.attend_rows(case.q, case.layer, wanted, case.scales)
        assert error(few, want[wanted]) < bound
