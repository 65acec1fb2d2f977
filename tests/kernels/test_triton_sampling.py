"""The Triton sampling kernels against their references, in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_compile import compiled
from helpers_sampling import MIXTURES, drawn_as_reference, resident, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_philox import KNOWN

from actorium.kernels import sampling_tables as columns
from actorium.kernels.backends import select_sampling
from actorium.kernels.reference import philox as philox_reference
from actorium.kernels.reference import sampling
from actorium.kernels.reference.logprobs import logprobs as torch_logprobs
from actorium.kernels.reference.sampling import PROMPT_BIT
from actorium.kernels.reference.torch_ops import TorchSampling
from actorium.kernels.sampling_tables import DecodeState, RowLayout

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; a CUDA "
                                "device runs test_triton_sampling_gpu.py")
INF = float("inf")
KINDS = ("random", "flat", "peaked", "huge", "masked", "ties", "steps")


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        x.fill_(0.25)
    elif kind == "peaked":
        x = x * 12
    elif kind == "huge":
        x = torch.where(x > 0.5, 1e30, torch.where(x < -0.5, -1e30, x))
    elif kind == "masked":
        x[torch.rand(rows, vocab, generator=generator) < 0.9] = -INF
        x[:, vocab // 2] = -1.0
    elif kind == "ties":
        x = (x * 2).round()
    elif kind == "steps":
        x = -torch.arange(vocab).float().expand(rows, vocab) * 0.01 + 3.0
    return x.contiguous()


# --- uniform numbers ------------------------------------------------------------------------------

def test_philox_known_answers_and_uniform_numbers() -> None:
    from actorium.kernels.triton.philox import philox, uniform

    words = torch.tensor([[*row[0], *row[1]] for row in KNOWN]).t().contiguous()
    assert [tuple(row) for row in philox(words).t().tolist()] == [row[2] for row in KNOWN]
    rng = np.random.default_rng(0)
    seeds = torch.from_numpy(rng.integers(-2**31, 2**31, (2, 300)).astype(np.int32))
    where = torch.from_numpy(rng.integers(0, 2**31, 300).astype(np.int32))
    want = philox_reference.uniform(seeds[0].long(), seeds[1].long(), where.long())
    assert torch.equal(uniform(seeds[0], seeds[1], where), want)
    assert len(uniform(seeds[0, :0], seeds[0, :0], seeds[0, :0])) == 0


# --- the choice -----------------------------------------------------------------------------------

@settings(max_examples=16, deadline=None)
@given(st.data())
def test_choice_is_that_of_the_reference(data: st.DataObject) -> None:
    from actorium.kernels.triton.draw import choose

    vocab = data.draw(st.sampled_from((1, 33, 33, 1000, 4099)))
    rows = data.draw(st.lists(st.sampled_from(MIXTURES), max_size=5 if vocab < 4099 else 2))
    logits = logits_of(data.draw(st.sampled_from(KINDS)), len(rows), vocab,
                       data.draw(st.integers(0, 99)))
    tables = resident(rows, vocab)
    slots, positions = slots_of(len(rows))
    # With little room most rows are read again instead of being gathered.
    room = data.draw(st.sampled_from((8, 2048)))
    got = choose(logits, slots, positions, tables, True, True, room)
    assert got.dtype == torch.int64 and got.shape == (len(rows),)
    drawn_as_reference(got, logits, tables)


@pytest.mark.parametrize("room", [16, pytest.param(2048, marks=pytest.mark.slow)])
def test_every_mixture_in_one_batch(room: int) -> None:
    from actorium.kernels.triton.draw import choose

    logits, tables = logits_of("random", len(MIXTURES), 600, 1) * 3, resident(MIXTURES, 600)
    got = choose(logits, *slots_of(len(MIXTURES)), tables, True, True, room)
    drawn_as_reference(got, logits, tables)


@pytest.mark.parametrize("kept", [16, 17, 24])
def test_candidates_that_just_fit_and_that_do_not(kept: int) -> None:
    from actorium.kernels.triton.draw import choose

    logits = torch.full((8, 300), -9.0)
    logits[:, 7:7 * kept + 1:7] = torch.arange(kept) * 0.01
    tables = resident([{"top_k": kept}] * 4 + [{"min_p": 0.5}] * 4, 300)
    drawn_as_reference(choose(logits, *slots_of(8), tables, True, True, 16), logits, tables)


WIDE: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 500}, {"top_k": 700, "top_p": 0.7}, {"min_p": 0.01},
    {"top_k": 900, "top_p": 0.95, "min_p": 0.2}, {"top_p": 0.3, "min_p": 0.5}, {"top_k": 5}]


def wide_passes(logits: torch.Tensor, tables: Any, programs: int,
                monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[int], int]:
    """The tokens of rows that no list holds; which rows were wide; passes over them, the last one
    of which is that of a program that finds nothing more to do."""
    from actorium.kernels.triton import draw

    scratch: list[torch.Tensor] = []
    monkeypatch.setattr(draw, "helpers", lambda device: programs)
    own = draw._scratch
    with monkeypatch.context() as patch:
        patch.setattr(draw, "_scratch",
                      lambda *given: scratch.append(own(*given)[-1]) or own(*given)[:-1] + (
                          scratch[-1],))
        got = draw.choose(logits, *slots_of(len(logits)), tables, True, True, 64)
    wide, tickets, done, *rows = scratch[0].tolist()
    assert done == wide
    count = draw.tiles(len(logits), logits.shape[1]).number
    each = -(-count // max(1, max(len(logits), programs) // max(wide, 1)))
    return got, sorted(rows[:wide]), -(-tickets // max(1, wide * -(-count // each)))


@pytest.mark.parametrize("kind", ["flat", pytest.param("random", marks=pytest.mark.slow), "ties"])
def test_wide_rows_are_read_by_any_number_of_programs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a row's logits are, a few passes find its thresholds; parts do not show."""
    rows = WIDE[3:] if kind == "flat" else WIDE[:3]
    logits, tables = logits_of(kind, len(rows), 700, 8), resident(rows, 700)
    first, wide, _ = wide_passes(logits, tables, 1, monkeypatch)
    drawn_as_reference(first, logits, tables)
    assert len(wide) >= 2
    got, again, passes = wide_passes(logits, tables, 10, monkeypatch)
    assert torch.equal(got, first) and again == wide
    assert passes <= (6 if kind == "flat" else 14)


def test_no_row_is_wide_where_all_candidates_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of("random", 4, 900, 8) * 9
    tables = resident([{"top_p": 0.5}, {"top_k": 20}, {}, {"temperature": 0.0}], 900)
    got, rows, passes = wide_passes(logits, tables, 5, monkeypatch)
    drawn_as_reference(got, logits, tables)
    assert (rows, passes) == ([], 0)


@pytest.mark.slow
def test_wide_rows_of_a_real_vocabulary() -> None:
    from actorium.kernels.triton.draw import choose

    rows: list[dict[str, Any]] = [{"top_p": 0.95}, {"top_k": 50_000, "top_p": 0.5}]
    logits, tables = logits_of("random", 2, 151_936, 9) * 0.3, resident(rows, 151_936)
    logits[1] = 0.5
    drawn_as_reference(choose(logits, *slots_of(2), tables, True, True), logits, tables)


def test_draws_without_truncation_and_greedy_ones() -> None:
    from actorium.kernels.triton.draw import choose

    rows = [{}, {"temperature": 0.0}, {"temperature": 0.7}]
    logits, tables = logits_of("random", 3, 700, 2), resident(rows, 700)
    slots, positions = slots_of(3)
    drawn_as_reference(choose(logits, slots, positions, tables, True, False), logits, tables)
    # Ties go to the first, in a tile and between tiles.
    logits[:, [5, 300, 301, 699]] = 9.0
    assert choose(logits, slots, positions, tables, False, False).tolist() == [5, 5, 5]
    logits[:, 5] = -INF
    assert choose(logits, slots, positions, tables, False, False).tolist() == [300, 300, 300]


def test_a_row_draws_the_same_alone_as_in_a_batch() -> None:
    """A row alone is split among many programs, the rows of a batch are not."""
    from actorium.kernels.triton import draw

    rows = [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.1}]
    logits, tables = logits_of("random", 4, 1500, 3), resident(rows, 1500)
    slots, positions = slots_of(4)
    many = draw.tiles
    try:
        draw.tiles = lambda rows, vocab: many(10**6, vocab)  # type: ignore[assignment]
        want = draw.choose(logits, slots, positions, tables, True, True)
    finally:
        draw.tiles = many
    for i in range(4):
        got = draw.choose(logits[i:i + 1], slots[i:i + 1], positions[i:i + 1], tables, True, True)
        assert got.tolist() == want[i:i + 1].tolist()


@pytest.mark.parametrize("room", [8, 2048])
def test_a_row_of_nan_disturbs_no_other(room: int) -> None:
    from actorium.kernels.triton.draw import choose

    rows = [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.01}]
    logits, tables = logits_of("random", 3, 300, 4), resident(rows, 300)
    slots, positions = slots_of(3)
    want = choose(logits, slots, positions, tables, True, True, room)
    hurt = logits.clone()
    hurt[0], hurt[1, ::2], hurt[2] = float("nan"), float("nan"), -INF
    got = choose(hurt, slots, positions, tables, True, True, room)
    assert ((got >= 0) & (got < 300)).all()
    for broken in range(3):
        one = logits.clone()
        one[broken] = hurt[broken]
        got = choose(one, slots, positions, tables, True, True, room)
        assert ((got == want) | (torch.arange(3) == broken)).all()


@pytest.mark.parametrize(("dtype", "room"), [(torch.bfloat16, 8), (torch.float16, 2048)])
def test_narrow_logits_choose_as_the_same_numbers_in_fp32(dtype: torch.dtype, room: int) -> None:
    from actorium.kernels.triton.draw import choose

    rows = [{}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.01}]
    logits, tables = logits_of("random", 4, 300, 6).to(dtype), resident(rows, 300)
    got, want = (choose(x, *slots_of(4), tables, True, True, room) for x in (logits,
                                                                            logits.float()))
    assert torch.equal(got, want)


def test_padding_rows_take_the_likeliest_token() -> None:
    from actorium.kernels.triton.draw import choose

    logits, tables = logits_of("random", 3, 50, 5), resident([{"top_k": 3}], 50)
    slots = torch.tensor([0, 1, 0], dtype=torch.int32)
    got = choose(logits, slots, slots * 7, tables, True, True)
    assert got[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()


# --- what comes before ----------------------------------------------------------------------------

@settings(max_examples=20, deadline=None)
@given(st.data())
def test_adjustments_are_those_of_the_reference(data: st.DataObject) -> None:
    from actorium.kernels.triton.penalties import adjust

    vocab, most = data.draw(st.sampled_from((1, 33, 700))), data.draw(st.integers(0, 3))
    single, windows = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    q_len = data.draw(st.integers(1, most + 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = [{"count_row": i if rng.random() < 0.7 else 0, "repetition": rng.uniform(0.5, 2),
             "presence": rng.normal(), "frequency": rng.normal(), "min_len": int(rng.integers(20))}
            for i in range(1, 5)]
    counts = rng.integers(0, 3, (5, vocab)) | (rng.random((5, vocab)) < 0.3) * PROMPT_BIT
    biases = data.draw(st.integers(0, 1)) * rng.integers(1, 70)
    ids = np.stack([np.resize(rng.permutation(vocab), biases) for _ in range(5)])
    values = rng.normal(size=(5, biases)).astype(np.float32)
    values[:, vocab:] = 0  # no token twice
    values[0] = values[2] = 0
    tables = resident(
        rows, vocab, most=most, counts=torch.from_numpy(counts).int(),
        drafts=torch.from_numpy(rng.integers(0, vocab, (5, most))),
        eos=torch.from_numpy(rng.integers(-1, vocab, (5, 3))).int(),
        bias_ids=torch.from_numpy(ids).int(),
        bias_values=torch.from_numpy(values.view(np.int32)))
    slots = torch.from_numpy(np.concatenate((
        rng.integers(0, 5, single), np.repeat(rng.integers(0, 5, windows), q_len)))).int()
    layout, positions = RowLayout(single, q_len), slots * 4
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    logits = logits_of("random", len(slots), vocab, 7).to(dtype)
    wants = [data.draw(st.booleans()) for _ in range(3)]
    own, want = logits.clone(), logits.clone().float()
    got = adjust(own, slots, positions, tables, layout, *wants)
    sampling.adjust(want, slots, positions, tables, layout, *wants)
    assert torch.equal(got.float(), want)
    assert torch.equal(got[slots == 0].float(), logits[slots == 0].float())
    if dtype is torch.float32:
        assert got is own
    elif wants[0] or wants[1]:
        assert got.dtype is torch.float32 and torch.equal(own, logits), "what is added is not cut"
    other = TorchSampling().adjust(logits.clone(), slots, positions, tables, layout, *wants)
    assert torch.equal(other, want)


def test_masks_are_those_of_the_reference() -> None:
    from actorium.kernels.triton.masks import mask

    rng = np.random.default_rng(3)
    for vocab, dtype in ((1, torch.float32), (33, torch.bfloat16), (700, torch.float32)):
        words = torch.from_numpy(rng.integers(-2**31, 2**31, (2, -(-vocab // 32))).astype(np.int32))
        got, rows = logits_of("random", 4, vocab, 8).to(dtype), torch.tensor([3, 1]).int()
        want, before = got.clone(), got.clone()
        mask(got, rows, words)
        sampling.mask(want, rows, words)
        assert torch.equal(got, want) and torch.equal(got[[0, 2]], before[[0, 2]])
        mask(got, rows[:0], words[:0])
        assert torch.equal(got, want)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from((1, 33, 1000, 3000)), st.integers(0, 4),
       st.sampled_from((torch.float32, torch.float32, torch.bfloat16)))
def test_log_probabilities(kind: str, vocab: int, rows: int, dtype: torch.dtype) -> None:
    from actorium.kernels.triton.logprobs import logprobs

    logits = logits_of(kind, rows, vocab, 9).to(dtype)
    assert logprobs(logits, torch.zeros(rows, dtype=torch.int64), 1).top.dtype is torch.float32
    tokens = torch.arange(rows) * 997 % vocab
    got, want = logprobs(logits, tokens, min(vocab, 5)), torch_logprobs(logits, tokens,
                                                                        min(vocab, 5))
    for name in ("chosen", "top"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=2e-6, atol=2e-6)
    assert torch.equal(got.ranks, want.ranks)
    if dtype is torch.float32:  # of ties either may be named
        assert torch.equal(got.top_ids, want.top_ids)
    named = torch.arange(rows * want.top.shape[1]).reshape(want.top.shape) * 31 % (vocab + 1) - 1
    got, want = (of(logits, tokens, min(vocab, 5), named) for of in (logprobs, torch_logprobs))
    torch.testing.assert_close(got.top, want.top, rtol=2e-6, atol=2e-6)
    if dtype is torch.float32:
        assert torch.equal(got.top_ids, want.top_ids)
    assert bool((want.top_ids == named)[named >= 0].all())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(0, 2), st.integers(0, 3),
       st.sampled_from([(), (0.5,), (0.9, 0.4)]))
def test_commit(seed: int, q_len: int, single: int, windows: int, force: tuple[float, ...]
                ) -> None:
    """Against the definition, one sequence after the other; drafts are often right, and some of
    those end their sequence. With forced acceptance it does not matter whether they are."""
    from actorium.kernels.triton.commit import commit

    rng, vocab, slots = np.random.default_rng(seed), 4, rng_slots(seed, single + windows)
    rows = [{"count_row": i % 3, "min_len": int(rng.integers(9))} for i in range(7)]
    tables = resident(rows, vocab, most=3, counts=torch.zeros(3, vocab, dtype=torch.int32),
                      drafts=torch.from_numpy(rng.integers(0, vocab, (8, 3))),
                      eos=torch.from_numpy(rng.integers(-1, vocab, (8, 2))).int())
    tables.record[1:, columns.LIMIT] = torch.from_numpy(rng.integers(6, 16, 7)).int()
    seeds = rng.integers(0, 1 << 32, (7, 2))
    tables.record[1:, columns.SEED_LOW:columns.SEED_LOW + 1] = signed(seeds[:, :1])
    tables.record[1:, columns.SEED_HIGH:columns.SEED_HIGH + 1] = signed(seeds[:, 1:])
    progress = DecodeState(torch.full((8,), -7), torch.full((8,), 5).int(),
                           torch.from_numpy(rng.random(8) < 0.3), torch.full((8,), -7))
    count = single + windows * q_len
    tokens = torch.from_numpy(rng.integers(0, vocab, count))
    positions = torch.from_numpy(np.concatenate((
        rng.integers(4, 12, single), *(rng.integers(4, 12) + np.arange(q_len)
                                       for _ in range(windows))))).int()
    want = [t.clone() for t in progress]
    counts = torch.zeros(3, vocab, dtype=torch.int32)
    told = torch.zeros(2 + q_len, len(slots), dtype=torch.int64)
    for i, slot in enumerate(slots.tolist()):
        at = i if i < single else single + (i - single) * q_len
        n, record = (1 if i < single else q_len), tables.record[slot]
        for j in range(n):
            token, position = int(tokens[at + j]), int(positions[at + j])
            ends = 1 if token in tables.eos[slot] and position >= record[columns.MIN_LEN] else (
                2 if position + 1 >= record[columns.LIMIT] else 0)
            right = int(tables.drafts[slot, j]) == token if j + 1 < n else False
            if force and j + 1 < n:
                low, high, at_ = (np.array([word]) for word in (
                    *seeds[slot - 1].tolist(), position + philox_reference.FORCED))
                drawn = philox_reference.uniform(low, high, at_)[0]
                right = bool(drawn < force[min(j, len(force) - 1)])
            accepted = right and not ends
            if not accepted:
                break
        want[0][slot] = token
        if not want[2][slot]:
            want[1][slot], want[2][slot], want[3][slot] = position + 1, ends > 0, j
            told[0, i], told[1, i] = j + 1, ends
            for k in range(j + 1):
                counts[record[columns.COUNT_ROW], tokens[at + k]] += 1
        else:
            want[3][slot] = 0
        told[2:2 + n, i] = tokens[at:at + n]
    counts[0] = 0
    got = commit(slots, positions, tokens, tables, progress, RowLayout(single, q_len), True,
                 force)
    assert torch.equal(got, told) and torch.equal(tables.counts, counts)
    for own, other in zip(progress, want, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(("vocab", "dtype"), [
    (5, torch.float32), (700, torch.bfloat16), (4099, torch.float32)])
@pytest.mark.parametrize(("q_len", "single", "windows"), [(1, 0, 3), (3, 1, 2), (4, 2, 0)])
def test_greedy_steps_choose_and_commit_at_once(
    vocab: int, dtype: torch.dtype, q_len: int, single: int, windows: int,
) -> None:
    """What the two do apart."""
    ops, kinds = select_sampling(torch.device("cpu"), "triton"), ("ties", "flat", "masked")
    rows = single + windows * q_len
    for seed, kind in enumerate(kinds):
        logits = logits_of(kind, rows, vocab, seed).to(dtype)
        slots = rng_slots(seed, single + windows)
        positions = torch.arange(rows).int() + 3
        done = []
        for at_once in (False, True):
            tables = resident([{"count_row": i % 3} for i in range(7)], vocab, most=3,
                              counts=torch.zeros(3, vocab, dtype=torch.int32),
                              drafts=logits.argmax(1)[:1].expand(8, 3).contiguous(),
                              eos=torch.full((8, 2), vocab // 3, dtype=torch.int32))
            tables.record[1:, columns.LIMIT] = torch.arange(7).int() + 2
            progress = DecodeState(torch.full((8,), -7), torch.full((8,), 5).int(),
                                   torch.arange(8) == slots[0], torch.full((8,), -7))
            more = slots, positions, tables, progress, RowLayout(single, q_len), True
            tokens = torch.full((rows,), -1)
            told = torch.full((2 + q_len, len(slots)), -1)
            if at_once:
                out = ops.commit_likeliest(logits, *more, tokens=tokens, packed=told)
                assert out[0] is tokens and out[1] is told
            else:
                ops.choose(logits, slots, positions, tables, False, False, tokens)
                ops.commit(slots, positions, tokens, *more[2:], packed=told)
            assert torch.equal(tokens, logits.float().argmax(1))
            done.append([tokens, told, tables.counts, *progress])
        assert all(torch.equal(a, b) for a, b in zip(*done, strict=True))


def signed(words: Any) -> torch.Tensor:
    """i32 of the same bits."""
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def rng_slots(seed: int, count: int) -> torch.Tensor:
    """Distinct slots but that of padding."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(7)[:count] + 1).int()


# --- which kernels --------------------------------------------------------------------------------

def test_selection() -> None:
    cpu = torch.device("cpu")
    assert type(select_sampling(cpu)) is TorchSampling
    assert select_sampling(cpu, "triton").name == "triton"


STEP = """
import torch
from actorium.kernels.sampling_tables import RowLayout, DecodeState, SamplingTables
from actorium.kernels.backends import select_sampling
ops, i32 = select_sampling(torch.device("cuda")), torch.int32
slot = torch.zeros(2, dtype=i32)
for V in (151936, 4099):
    logits = torch.zeros(2, V, dtype=torch.bfloat16)
    tables = SamplingTables(torch.zeros(3, 12, dtype=i32), torch.zeros(3, 64, dtype=i32),
                      torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, V, dtype=i32),
                      torch.zeros(3, 4, dtype=i32), torch.zeros(3, 4, dtype=i32))
    for samples, truncates in ((False, False), (True, False), (True, True)):
        ops.choose(logits, slot, slot, tables, samples, truncates)
    ops.adjust(logits, slot, slot, tables, RowLayout(), True, True, True)
    ops.mask(logits, slot, torch.zeros(2, -(-V // 32), dtype=i32))
    ops.logprobs(logits, slot.long(), 3)
    progress = DecodeState(slot.long(), slot, slot.bool(), slot.long())
    for q_len, counts in ((1, False), (3, True)):
        ops.commit(slot, slot, slot.long(), tables, progress, RowLayout(1, q_len), counts)
        ops.commit_likeliest(logits, slot, slot, tables, progress, RowLayout(1, q_len), counts)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    assert compiled(STEP, tmp_path) == 2 * [
        "_tops", "_choose", "_tops", "_weigh", "_choose", "_tops", "_weigh", "_gather", "_choose",
        "_penalise", "_scatter", "_mask", "_part", "_join",
        *["_commit", "_likeliest", "_commit"] * 2]
