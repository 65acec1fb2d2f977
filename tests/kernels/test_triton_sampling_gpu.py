"""The sampling kernels on a CUDA device, at the size of real vocabularies: against references in
fp64, captured in graphs, without a synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers_sampling import MIXTURES, drawn_as_reference, resident, slots_of

from actorium.kernels.backends import select_sampling
from actorium.kernels.reference import philox as philox_reference
from actorium.kernels.reference import sampling
from actorium.kernels.reference.sampling import PROMPT_BIT
from actorium.kernels.sampling_ops import SamplingOps
from actorium.kernels.sampling_tables import RowLayout, SamplingTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCABS = (151_936, 128_257, 4099)


@pytest.fixture
def ops() -> SamplingOps:
    own = select_sampling(torch.device("cuda"))
    assert own.name == "triton"
    return own


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_of(rows: int, vocab: int, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, device="cuda") * spread


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows, spread", [(1, 3.0), (16, 6.0), (48, 3.0), (48, 0.3)])
def test_choice(ops: SamplingOps, vocab: int, rows: int, spread: float) -> None:
    """spread 0.3: every nucleus holds tens of thousands, so that rows are read again."""
    parameters = [MIXTURES[(i + rows) % len(MIXTURES)] for i in range(rows)]
    logits, tables = rows_of(rows, vocab, rows, spread), resident(parameters, vocab, "cuda")
    slots, positions = slots_of(rows, "cuda")
    with no_waiting():
        got = ops.choose(logits, slots, positions, tables, True, True)
        again = ops.choose(logits, slots, positions, tables, True, True)
    assert torch.equal(got, again)
    drawn_as_reference(got.cpu(), logits.cpu(), SamplingTables(*(
        None if table is None else table.cpu() for table in tables)))
    alone = torch.cat([ops.choose(logits[i:i + 1], slots[i:i + 1], positions[i:i + 1], tables,
                                  True, True) for i in range(min(rows, 16))])
    assert torch.equal(alone, got[:16])


def test_draws_and_likeliest(ops: SamplingOps) -> None:
    logits = rows_of(256, 151_936, 1, 4.0)
    tables = resident([{"temperature": 0.8 * (i % 3)} for i in range(256)], 151_936, "cuda")
    slots, positions = slots_of(256, "cuda")
    with no_waiting():
        got = ops.choose(logits, slots, positions, tables, True, False)
        greedy = ops.choose(logits, slots, positions, tables, False, False)
    assert torch.equal(greedy, logits.argmax(1))
    want = sampling.choose(logits.double(), slots, positions, tables, True, False)
    # A uniform number right at the border between two tokens falls to either.
    assert int((got != want).sum()) <= 2
    logits[:, [77, 150_000]] = 99.0
    assert set(ops.choose(logits, slots, positions, tables, False, False).tolist()) == {77}


def test_uniform_numbers() -> None:
    from actorium.kernels.triton.philox import uniform

    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(-2**31, 2**31, (3, 5000)).astype(np.int32))
    words[2] &= 0x7FFFFFFF
    want = philox_reference.uniform(*words.long())
    assert torch.equal(uniform(*words.cuda()).cpu(), want)


def adjustable(vocab: int, q_len: int) -> tuple[SamplingTables, torch.Tensor, torch.Tensor]:
    """Tables of 8 slots that ask for all or nothing, and the rows of 2 ends and 5 windows."""
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 3, (9, vocab)) | (rng.random((9, vocab)) < 0.1) * PROMPT_BIT
    values = rng.normal(size=(9, 100)).astype(np.float32)
    values[::3] = 0
    tables = resident(
        [{"count_row": i if i % 2 else 0, "repetition": 1.7, "presence": 0.3, "frequency": -0.2,
          "min_len": 15} for i in range(1, 9)], vocab, "cuda", most=3,
        counts=torch.from_numpy(counts).int(),
        drafts=torch.from_numpy(rng.integers(0, vocab, (9, 3))),
        eos=torch.from_numpy(rng.integers(-1, vocab, (9, 64))).int(),
        bias_ids=torch.from_numpy(np.stack([rng.permutation(vocab)[:100] for _ in range(9)])).int(),
        bias_values=torch.from_numpy(values.view(np.int32)))
    slots = torch.tensor([3, 0, *np.repeat([1, 2, 4, 7, 5], q_len)]).int().cuda()
    return tables, slots, slots * 4


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("q_len", [1, 4])
def test_adjustments_bit_for_bit(ops: SamplingOps, vocab: int, q_len: int) -> None:
    tables, slots, positions = adjustable(vocab, q_len)
    logits = rows_of(len(slots), vocab, 2, 3.0)
    want = logits.clone()
    with no_waiting():
        ops.adjust(logits, slots, positions, tables, RowLayout(2, q_len), True, True, True)
    sampling.adjust(want, slots, positions, tables, RowLayout(2, q_len), True, True, True)
    assert torch.equal(logits, want)


def test_masks(ops: SamplingOps) -> None:
    logits, vocab = rows_of(9, 128_257, 3, 3.0), 128_257
    words = torch.randint(-2**31, 2**31, (2, -(-vocab // 32)), device="cuda").int()
    want, rows = logits.clone(), torch.tensor([7, 2]).int().cuda()
    with no_waiting():
        ops.mask(logits, rows, words)
    sampling.mask(want, rows, words)
    assert torch.equal(logits, want)


@pytest.mark.parametrize("rows", [1, 37])
def test_log_probabilities(ops: SamplingOps, rows: int) -> None:
    logits = rows_of(rows, 151_936, 4, 5.0)
    tokens = torch.randint(0, 151_936, (rows,), device="cuda")
    with no_waiting():
        got = ops.logprobs(logits, tokens, 20)
    norm = logits.double().log_softmax(1)
    chosen = norm.gather(1, tokens[:, None])
    torch.testing.assert_close(got.chosen.double()[:, None], chosen, rtol=1e-6, atol=2e-6)
    assert torch.equal(got.ranks[:, None].long(), (norm > chosen).sum(1, keepdim=True) + 1)
    torch.testing.assert_close(got.top.double(), norm.topk(20).values, rtol=1e-6, atol=2e-6)


def test_replayed_in_a_graph(ops: SamplingOps) -> None:
    """Everything is read anew: logits, parameters, counts."""
    vocab, q_len = 151_936, 3
    tables, slots, positions = adjustable(vocab, q_len)
    logits = rows_of(len(slots), vocab, 5, 4.0)

    def run() -> torch.Tensor:
        work = logits.clone()
        ops.adjust(work, slots, positions, tables, RowLayout(2, q_len), True, True, True)
        return ops.choose(work, slots, positions, tables, True, True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(4):
        logits.copy_(rows_of(len(slots), vocab, 10 + seed, 1.0 + 2 * seed))
        changed = resident([{**MIXTURES[(i + 3 * seed) % len(MIXTURES)], "count_row": i,
                             "repetition": 1.1 + seed / 10, "min_len": 20} for i in range(8)],
                           vocab, "cuda")
        tables.record.copy_(changed.record)
        positions.add_(1)
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out, run())
