"""A real model on two ranks of a CPU: the tokens of one rank, through the death and the hang of
either."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from helpers_runtime import processes_naming, short_dir

from actorium.actors.launcher.engine import Engine
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(),
                                reason="the demo model is not there")
PROMPTS = [[17, 5, 9] * 4, list(range(40, 75)), [3], [88, 12] * 30]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)


def generated(engine: Engine, params: SamplingParams) -> list[Sequence[int]]:
    return [done.token_ids for done in engine.client.generate(PROMPTS, params)]


def outputs(ranks: int, dtype: str, faults: Sequence[tuple[str, int]] = ()
            ) -> list[list[Sequence[int]]]:
    """Of an engine at rest, then after each fault; nothing is left behind."""
    with short_dir() as base:
        with Engine(str(DEMO_MODEL), device="cpu", dtype=dtype, tensor_parallel_size=ranks,
                    run_dir=str(base), skip_tokenizer=True, kv_cache_bytes=1 << 24,
                    max_num_batched_tokens=64, max_num_seqs=8, crash_reports=False) as engine:
            found = [generated(engine, GREEDY), generated(engine, SEEDED)]
            for role, number in faults:
                pids = {actor.role: actor.pid for actor in engine.client.status().actors}
                os.kill(pids[role], number)
                found.append(generated(engine, GREEDY))
            steps = {actor.role: actor.epoch for actor in engine.client.status().actors
                     if actor.role.startswith("worker-")}
            assert len(steps) == ranks and set(steps.values()) == {1 + len(faults)}
        assert processes_naming(str(base)) == [] and os.listdir(base) == []
    return found


def test_tokens_are_those_of_one_rank_also_after_a_death() -> None:
    alone = outputs(1, "float32")
    assert outputs(2, "float32", [("worker-1", signal.SIGKILL)]) == [*alone, alone[0]]


@pytest.mark.slow
def test_in_bfloat16_and_through_a_hang() -> None:
    """There a batch of another make-up rounds otherwise, so tokens are counted alone."""
    found = outputs(2, "bfloat16", [("worker-0", signal.SIGSTOP)])
    assert {len(tokens) for step in found for tokens in step} == {24}
