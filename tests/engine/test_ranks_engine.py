"""A real model on two ranks of a CPU: the tokens of one rank, through the death and the hang of
either, preempted and held to a schema. And a tiny one on four, as it is served."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx2 as httpx
import pytest
from helpers_cli import Cli, cli
from helpers_models import generated as generated_by
from helpers_models import write_checkpoint
from helpers_runtime import processes_naming, short_dir
from helpers_text import byte_level

from actorium.actors.launcher.engine import Engine
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams, Structured

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(),
                                reason="the demo model is not there")
__all__ = ["cli"]
PROMPTS = [[17, 5, 9] * 4, list(range(40, 75)), [3], [88, 12] * 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)


SCHEMA = SamplingParams(max_tokens=12, temperature=0.9, seed=6, structured=Structured(
    json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'))


def generated(engine: Engine, params: SamplingParams) -> list[Sequence[int]]:
    return [done.token_ids for done in engine.client.generate(PROMPTS, params)]


def outputs(ranks: int, dtype: str, faults: Sequence[tuple[str, int]] = (),
            preempts: int = 0) -> list[list[Sequence[int]]]:
    """Of an engine at rest, then after each fault; nothing is left behind. preempts: every so many
    steps somebody is."""
    with short_dir() as base:
        with Engine(str(DEMO_MODEL), device="cpu", dtype=dtype, tensor_parallel_size=ranks,
                    run_dir=str(base), kv_cache_bytes=1 << 24, force_preempt_every=preempts,
                    max_num_batched_tokens=64, max_num_seqs=8, crash_reports=False) as engine:
            found = [generated(engine, GREEDY), generated(engine, SEEDED),
                     generated(engine, SCHEMA)]
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
    assert all(alone[2])
    assert outputs(2, "float32", [("worker-1", signal.SIGKILL)], 5) == [*alone, alone[0]]


@pytest.mark.slow
def test_in_bfloat16_and_through_a_hang() -> None:
    """There a batch of another make-up rounds otherwise, so tokens are counted alone."""
    found = outputs(2, "bfloat16", [("worker-0", signal.SIGSTOP)])
    greedy, seeded, schema, after = found
    assert {len(tokens) for step in (greedy, seeded, after) for tokens in step} == {12}
    assert all(schema)


@pytest.mark.slow
def test_four_ranks_as_they_are_served(cli: Cli, tmp_path: Path) -> None:
    """Of two key heads each rank has one that its neighbour has as well."""
    tokenizer = byte_level()
    oracle = write_checkpoint(tmp_path, num_key_value_heads=2, seed=5,
                              vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with cli.serve(str(tmp_path), "--tp", "4", "--device", "cpu", "--dtype", "float32", "--port",
                   "0", "--kv-cache-bytes", "4m", "--name", "four"):
        rows, ids = {row["role"]: row for row in cli.actors()}, [5, 9, 30, 2, 77]
        assert set(rows) >= {f"worker-{rank}" for rank in range(4)}
        url = rows["gateway-0"]["detail"].removeprefix("HTTP at ")
        done = httpx.post(f"{url}/generate", timeout=60, json={
            "input_ids": ids, "sampling_params": {
                "max_new_tokens": 20, "temperature": 0, "ignore_eos": True}})
        assert done.status_code == 200, done.text
        assert done.json()["output_ids"] == generated_by(oracle, ids, 20)
