"""The runner on both kinds of arrays: sampling, ends, logprobs, plans that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import load, write_checkpoint
from helpers_worker import CPU, Ring, complete, make_runner

from actorium.actors.messages import Admit, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.worker.timing import make_timer
from actorium.gpu.worker.warmup import dummy_run
from actorium.kernels.reference.sampling import PROMPT_BIT
from actorium.kernels.sampling_tables import COUNT_ROW

GREEDY = ResolvedParams(max_tokens=8, temperature=0.0)
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5, max_position_embeddings=256)
    return load(path)


@pytest.fixture(params=[HostArrays, DeviceArrays], ids=["numpy", "torch"])
def runner(request: pytest.FixtureRequest, model: Any) -> Iterator[ModelRunner]:
    """Tables as numpy arrays, as on a CPU; and as tensors, as on a GPU."""
    yield make_runner(model, arrays=request.param(CPU))


MIXED = [
    ResolvedParams(max_tokens=24, temperature=0.9),
    ResolvedParams(max_tokens=24, temperature=0.0),
    ResolvedParams(max_tokens=24, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
    ResolvedParams(max_tokens=24, temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5,
                   frequency_penalty=0.3),
    ResolvedParams(max_tokens=24, temperature=1.0, logit_bias={5: 6.0, 77: -100.0}, logprobs=2),
    ResolvedParams(max_tokens=24, temperature=1.0, top_p=0.7, eos_ids=(3, 9), min_tokens=6),
]
SEEDS = [11, 2**63 - 1, 2**40 + 3, 0, 5, 6]


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    """Each request by itself."""
    return [complete(make_runner(model), [prompt], params, [seed])[0]
            for prompt, params, seed in zip(PROMPTS, MIXED, SEEDS, strict=True)]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(runner: ModelRunner,
                                                           alone: list[list[int]]) -> None:
    n = 5
    out = complete(runner, PROMPTS * n + [[1, 2]] * 2, MIXED * n + [GREEDY] * 2,
                   SEEDS * n + [1, 1], budget=64)
    assert out[:n * 6] == alone * n


def test_a_seed_gives_the_same_tokens_after_preemptions(model: Any,
                                                        alone: list[list[int]]) -> None:
    ring = Ring(make_runner(model, pages=20, page_size=8), budget=32, force_preempt_every=3)
    for prompt, params, seed in zip(PROMPTS, MIXED, SEEDS, strict=True):
        ring.submit(prompt, params, seed)
    assert [o.tokens for o in ring.run()] == alone
    assert ring.preemptions >= 5


def test_different_seeds_give_different_tokens(runner: ModelRunner) -> None:
    params = ResolvedParams(max_tokens=16, temperature=1.5)
    out = complete(runner, [[1, 2, 3]] * 8, params, list(range(8)))
    assert len({tuple(tokens) for tokens in out}) == 8


def test_min_tokens_beyond_any_length_holds_eos_back_to_the_end(runner: ModelRunner) -> None:
    params = ResolvedParams(max_tokens=5, temperature=0.0, min_tokens=2**31 - 1,
                            eos_ids=tuple(range(64)))
    assert [len(tokens) for tokens in complete(runner, [[5, 6, 7]], params)] == [5]


def test_eos_ends_a_sequence_and_min_tokens_holds_it_back(runner: ModelRunner) -> None:
    plain = complete(runner, PROMPTS, GREEDY)
    eos = tuple(tokens[2] for tokens in plain)
    ring = Ring(runner)
    for prompt, stop in zip(PROMPTS, eos, strict=True):
        ring.submit(prompt, ResolvedParams(max_tokens=8, temperature=0.0, eos_ids=(stop,)))
        ring.submit(prompt, ResolvedParams(max_tokens=8, temperature=0.0, eos_ids=(stop, 10_000),
                                           min_tokens=7))
    outputs = ring.run()
    for tokens, stop, early, held in zip(plain, eos, outputs[::2], outputs[1::2], strict=True):
        assert early.tokens == tokens[:tokens.index(stop) + 1]
        assert early.finish == "stop"
        assert stop not in held.tokens[:7]
        assert len(held.tokens) == 8


def test_greedy_adjustments_equal_transformers(runner: ModelRunner, model: Any,
                                               tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("oracle")
    oracle = write_checkpoint(path, seed=5, max_position_embeddings=256)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        want = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30,
            repetition_penalty=1.5, sequence_bias=[[[12], 4.0], [[190], -9.0]], min_new_tokens=9,
            eos_token_id=[12, 60], pad_token_id=0)[0, len(prompt):].tolist()
        got = complete(runner, [prompt], ResolvedParams(
            max_tokens=30, min_tokens=9, temperature=0.0, repetition_penalty=1.5,
            logit_bias={12: 4.0, 190: -9.0}, eos_ids=(12, 60)))[0]
        assert got == want


def test_logprobs_are_those_of_the_raw_distribution(runner: ModelRunner, model: Any) -> None:
    ring = Ring(runner)
    params = ResolvedParams(max_tokens=6, temperature=0.7, top_k=50, logit_bias={4: 5.0},
                            logprobs=3)
    ring.submit(PROMPTS[0], params, seed=9)
    ring.submit(PROMPTS[2], ResolvedParams(max_tokens=6, temperature=0.0), seed=9)
    ring.submit(PROMPTS[3], ResolvedParams(max_tokens=6, temperature=0.0, logprobs=0), seed=9)
    first, _, third = ring.run()
    scored = Ring(runner)
    scored.submit(PROMPTS[0] + first.tokens, ResolvedParams(max_tokens=1, prompt_logprobs=3))
    whole = scored.run()[0].prompt_logprobs[0]
    n = len(PROMPTS[0])
    chosen = np.frombuffer(whole.chosen, np.float32)[n - 1:]
    got = np.concatenate([np.frombuffer(p.chosen, np.float32) for p in first.logprobs])
    np.testing.assert_allclose(got, chosen, atol=1e-4)
    ids = np.frombuffer(whole.top_ids, np.int32).reshape(-1, 3)[n - 1:]
    assert np.concatenate([np.frombuffer(p.top_ids, np.int32) for p in first.logprobs]).tolist() \
        == ids.ravel().tolist()
    assert all(len(p.top_ids) == 0 for p in third.logprobs)
    ranks = np.concatenate([np.frombuffer(p.ranks, np.int32) for p in third.logprobs])
    assert ranks.tolist() == [1] * 6


def test_prompt_logprobs_in_small_blocks(runner: ModelRunner,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    params = ResolvedParams(max_tokens=1, prompt_logprobs=2)
    parts = []
    for limit in (256 << 20, 4 * 199 * 3):
        monkeypatch.setattr("actorium.gpu.step.runner.LOGITS_BYTES", limit)
        ring = Ring(runner)
        for prompt in PROMPTS:
            ring.submit(prompt, params)
        parts.append([o.prompt_logprobs for o in ring.run()])
    for one, other in zip(*parts, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.start, a.top_ids, a.ranks) == (b.start, b.top_ids, b.ranks)
            np.testing.assert_allclose(np.frombuffer(a.chosen, np.float32),
                                       np.frombuffer(b.chosen, np.float32), atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_models_length_ends_a_sequence(model: Any, page_size: int) -> None:
    ring = Ring(make_runner(model, pages=1024, page_size=page_size))
    for prompt in ([4] * 5, [4] * 255):
        ring.submit(prompt, ResolvedParams(max_tokens=5000, temperature=0.0))
    outputs = ring.run()
    assert [len(o.tokens) for o in outputs] == [251, 1]
    assert {o.finish for o in outputs} == {"length"}


def test_idle_time_counts_while_a_sequence_goes_on(model: Any,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 5.0, 7.0, 9.0, 9.5, 20.0, 21.0])
    monkeypatch.setattr("actorium.gpu.worker.timing.perf_counter", lambda: next(times))
    runner, timer = make_runner(model), make_timer(CPU)
    short = ResolvedParams(max_tokens=2, temperature=0.0)
    plans = [StepPlan(1, 1, admit=[_admit(params=short)], extend=_i4((1, 3))),
             StepPlan(1, 2, decode=_i4(1)),  # the last token
             StepPlan(1, 3, release=_i4(1), admit=[_admit(2)], extend=_i4((2, 3))),
             StepPlan(1, 4, release=_i4(2))]
    results = [timer.launch(runner, plan).result() for plan in plans]
    assert [r.busy_us for r in results] == [1e6, 2e6, 5e5, 1e6]
    assert [r.idle_us for r in results] == [0, 3e6, 0, 10.5e6]


# --- plans made by hand --------------------------------------------------------------------------

def _i4(*values: Any) -> bytes:
    return np.array(values, np.int32).tobytes()


def _admit(slot: int = 1, tokens: tuple[int, ...] = (5, 6, 7), pages: tuple[int, ...] = (3,),
           params: ResolvedParams = GREEDY, cached: int = 0) -> Admit:
    return Admit(slot, _i4(*tokens), len(tokens), cached, _i4(*pages), params, 1)


def _tokens(result: StepResult) -> list[int]:
    return np.frombuffer(result.tokens, np.int32).tolist()


def test_an_ended_sequence_writes_and_emits_nothing(runner: ModelRunner) -> None:
    """A decode that was on its way when the sequence ended: count 0, and its pages untouched."""
    short = ResolvedParams(max_tokens=2, temperature=0.0)
    first = runner.run(StepPlan(1, 1, admit=[_admit(params=short), _admit(2, pages=(4,))],
                                extend=_i4((1, 3), (2, 3))))
    assert first.counts == b"\1\1" and first.finish == b"\0\0"
    last = runner.run(StepPlan(1, 2, decode=_i4(1, 2)))
    assert last.counts == b"\1\1" and last.finish == b"\2\0"
    before = [layer[16:].clone() for layer in runner.pools[0].layers]
    after = runner.run(StepPlan(1, 3, decode=_i4(1, 2)))
    assert after.counts == b"\0\1" and after.finish == b"\0\0"
    assert len(_tokens(after)) == 1
    changed = sorted({int(row) // 16 + 1 for was, layer in zip(
        before, runner.pools[0].layers, strict=True)
                      for row in (was != layer[16:]).flatten(1).any(1).nonzero()})
    assert changed == [4]
    assert int(runner.tables.seq_len[1]) == 5


def test_penalties_distinguish_prompt_and_output(runner: ModelRunner) -> None:
    """A sequence re-admitted after a preemption: 2 tokens of prompt, 3 of output."""
    params = ResolvedParams(max_tokens=9, temperature=0.0, frequency_penalty=0.1)
    admit = Admit(1, _i4(5, 6, 6, 7, 7), 2, 0, _i4(3), params, 1)
    result = runner.run(StepPlan(1, 1, admit=[admit], extend=_i4((1, 5))))
    want = np.zeros(199, np.int64)
    want[[5, 6]] = PROMPT_BIT
    np.add.at(want, [6, 7, 7, *_tokens(result)], 1)
    row = int(runner.tables.record[1][COUNT_ROW])
    assert np.array_equal(np.asarray(runner.tables.counts[row]), want)


def test_an_extend_that_does_not_end_samples_nothing(runner: ModelRunner) -> None:
    result = runner.run(StepPlan(1, 1, admit=[_admit()], extend=_i4((1, 2))))
    assert (result.counts, result.tokens, result.finish, result.step) == (b"", b"", b"", 1)
    result = runner.run(StepPlan(1, 2, extend=_i4((1, 1))))
    assert result.counts == b"\1"


def test_a_slot_serves_the_next_sequence_as_if_it_were_new(runner: ModelRunner) -> None:
    loaded = ResolvedParams(max_tokens=3, temperature=0.5, top_k=4, frequency_penalty=1.0,
                            logit_bias={1: 50.0}, eos_ids=(1, 2, 3), logprobs=1)
    fresh = runner.run(StepPlan(1, 1, admit=[_admit(2)], extend=_i4((2, 3))))
    runner.run(StepPlan(1, 2, release=_i4(2), admit=[_admit(1, params=loaded)],
                        extend=_i4((1, 3))))
    again = runner.run(StepPlan(1, 3, release=_i4(1), admit=[_admit(1)], extend=_i4((1, 3))))
    assert _tokens(again) == _tokens(fresh)
    assert again.logprobs == []
    runner.reset()
    assert not runner.tables.sequences
    assert not runner.tables.flags.any()


@pytest.mark.parametrize(("plan", "message"), [
    ({"admit": [_admit(slot=99)]}, "slot 99 is not in"),
    ({"admit": [_admit(tokens=(5, 199))]}, "token id is not below 199"),
    ({"admit": [_admit(tokens=(-5, 3))]}, "token id is not below 199"),
    ({"admit": [_admit(tokens=())]}, "0 tokens"),
    ({"admit": [_admit(tokens=(1,) * 300)]}, "300 tokens"),
    ({"admit": [_admit(cached=3)]}, "3 cached"),
    ({"admit": [_admit(pages=(1,) * 50)]}, "50 pages exceed"),
    ({"extend": _i4((1, 1))}, "slot 1 cannot take 1 tokens: it is empty"),
    ({"admit": [_admit()], "extend": _i4((1, 4))}, "0 of 3 are done"),
    ({"page_appends": _i4((1, 5000, 3))}, "do not fit"),
    ({"page_appends": _i4((99, 0, 3))}, "do not fit"),
])
def test_plans_that_do_not_fit(runner: ModelRunner, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(StepPlan(1, 1, **plan))


@pytest.mark.parametrize("tokens", [1, 2, 100, 5000])
def test_rehearsal_needs_the_sink_page_alone_and_leaves_nothing(model: Any, tokens: int) -> None:
    runner = make_runner(model, pages=1, slots=5)
    dummy_run(runner, tokens)
    assert not runner.tables.sequences
    assert not runner.tables.flags.any()
    assert runner.pools[0].layers[0].any()
