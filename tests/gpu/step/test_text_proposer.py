"""Drafts by text in a ring: what they read, which windows steps have, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_drafting import follow_tokens
from helpers_models import load, write_checkpoint
from helpers_speculation import make_runner
from helpers_worker import Ring

from actorium.actors.config.tree import SpeculationConfig
from actorium.actors.messages import StepResult
from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler.step_results import BadResult
from actorium.gpu.step import text_proposer
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.step.text_proposer import text_proposers

MOST, PROMPTS = 4, [[5, 6, 7, 8, 5, 6], [*range(40, 75), *range(40, 60)], [9, 10, 11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5)
    follow_tokens(path)
    return load(path)


def runner_of(model: Any, speculative: str, **more: Any) -> ModelRunner:
    runner = make_runner(model, MOST, **more)
    runner.tables.keep_history()
    runner.proposers = text_proposers(SpeculationConfig(speculative=speculative), runner.tables)
    return runner


def ring_of(runner: ModelRunner, speculative: str, **more: Any) -> Ring:
    ring = Ring(runner, speculative=speculative, **more)
    for i, prompt in enumerate(PROMPTS * 2):
        ring.submit(prompt, ResolvedParams(max_tokens=30, temperature=0.4), i + 1)
    return ring


@pytest.mark.parametrize("way", [{}, {"force_preempt_every": 3}, {"budget": 24}])
def test_the_whole_text_is_read(model: Any, way: dict[str, int]) -> None:
    """Also of prompts in the prefix cache, and after a preemption."""
    runner = runner_of(model, "suffix:4")
    (own,) = runner.proposers.values()
    ring, propose = ring_of(runner, "suffix:4", overlap=False, **way), own.propose
    checked = 0

    def checking(step: Any, *rest: Any) -> None:
        nonlocal checked
        propose(step, *rest)
        for slot in step.slots.tolist():
            sequence = ring.core.state.table.sequences[slot]
            if sequence is None or not sequence.slot:
                continue
            prompt = np.frombuffer(sequence.request.submit.prompt, np.int32)
            text = np.concatenate((prompt, ring.core.state.table.emitted_of(sequence)))
            assert (runner.tables.history[slot, :len(text)] == text).all()
            checked += len(text)

    own.propose = checking  # type: ignore[method-assign]
    ring.run()
    for i, prompt in enumerate(PROMPTS):  # again: they are cached now
        ring.submit(prompt, ResolvedParams(max_tokens=9, temperature=0.4), 50 + i)
    assert any(out.cached for out in ring.run()[6:]) and checked > 3000


@pytest.mark.parametrize("overlap", [True, False])
def test_only_drafts_that_were_made_are_counted(model: Any, overlap: bool) -> None:
    """In results, of sequences at their end, in metrics; a step has the longest window in it."""
    runner = runner_of(model, "ngram:4,fixed")
    ring, run = ring_of(runner, "ngram:4,fixed", overlap=overlap), runner.run
    made, accepted, windows = 0, 0, list[int]()

    def counting(plan: Any) -> StepResult:
        nonlocal made, accepted
        result, decodes = run(plan), len(plan.decode) // 4
        if decodes and runner.window > 1 or result.draft_counts:
            drafts = result.draft_counts or bytes([runner.window - 1]) * decodes
            counts = result.counts[len(result.counts) - decodes:]
            assert len(drafts) == decodes and runner.window == 1 + max(drafts)
            assert all(count <= own + 1 for count, own in zip(counts, drafts, strict=True))
            made += sum(own for count, own in zip(counts, drafts, strict=True) if count)
            accepted += sum(count - 1 for count in counts if count)
        if decodes:
            windows.append(runner.window)
        return result

    runner.run = counting  # type: ignore[method-assign]
    ends = list[tuple[int, int]]()
    finish = ring.core.state.finish

    def finishing(sequence: Any) -> None:
        finish(sequence)
        ends.append((sequence.drafted, sequence.accepted))

    ring.core.state.finish = finishing  # type: ignore[method-assign]
    ring.run()
    gauges = ring.core.health().gauges
    assert 1 in windows and MOST + 1 in windows and made > accepted > 20
    assert gauges["spec_decode_num_draft_tokens"] == made
    assert gauges["spec_decode_num_accepted_tokens"] == accepted
    assert tuple(map(sum, zip(*ends, strict=True))) == (made, accepted)


@pytest.mark.parametrize("lie", [lambda counts: counts + b"\0", lambda counts: bytes(len(counts)),
                                 lambda counts: bytes([9]) * len(counts)])
def test_a_result_that_counts_wrong_is_refused(model: Any, lie: Callable[[bytes], bytes]) -> None:
    runner = runner_of(model, "ngram:4,fixed")
    ring, run = ring_of(runner, "ngram:4,fixed"), runner.run

    def lying(plan: Any) -> StepResult:
        result = run(plan)
        if max(result.counts, default=0) < 2 or not result.draft_counts:
            return result
        return msgspec.structs.replace(result, draft_counts=lie(result.draft_counts))

    runner.run = lying  # type: ignore[method-assign]
    with pytest.raises(BadResult, match="drafts"):
        ring.run()


def test_nothing_is_made_on_a_device_without_triton(model: Any,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker refuses the method then."""
    pytest.importorskip("triton")
    assert runner_of(model, "ngram:4", arrays=DeviceArrays).proposers
    monkeypatch.setattr(text_proposer, "triton_fault", lambda device: "there is no Triton")
    assert not runner_of(model, "ngram:4", arrays=DeviceArrays).proposers
