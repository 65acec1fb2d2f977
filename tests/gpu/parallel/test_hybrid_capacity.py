"""The capacity that `actorium plan --tp 2` promises a hybrid of Qwen3.5-27B's make, scaled down:
its ranks allocate that to the byte, and requests fill it."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_ranks import run_ranks, whole
from helpers_runtime import short_dir
from helpers_worker import Ring

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import ResolvedParams, SamplingParams
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.worker.device import open_device
from actorium.tools.cli import main

REAL = Path(__file__).parents[2] / "data" / "qwen3.5-27b" / "config.json"
SMALLER = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
           "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
           "max_position_embeddings": 4096}
"""Heads, kinds of layers in their order, the MTP layer and the dtype are the real one's."""
BUDGET, REQUESTS, STEP = 3 << 19, 4, 128


def scaled(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**json.loads(REAL.read_text()), **SMALLER}))
    return path


def planned(path: Path, capsys: pytest.CaptureFixture[str], pages: str = "auto"
            ) -> dict[str, Any]:
    assert main(["plan", str(path), "--memory", str(BUDGET), "--tp", "2", "--max-num-seqs",
                 str(REQUESTS), "--max-num-batched-tokens", str(STEP), "--speculative", "mtp:2",
                 "--kv-cache-dtype", pages, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def lengths(capacity: int) -> list[int]:
    """Of requests, uneven, that take the capacity together."""
    first = [capacity // 2, capacity // 4 + 5, 33]
    return [*first, capacity - sum(first)]


class Rank(NamedTuple):
    """What one rank allocated, and gave."""

    pools: list[list[int]]
    """Bytes of each layer, with its scales."""
    states: int
    tokens: list[list[int]]
    preemptions: float
    live: int
    """The most tokens that sequences had at once."""


def filled(path: Path, capacity: int, pages: str, group: RankGroup) -> Rank:
    config = Config(
        model=ModelConfig(model=str(path), load_format="dummy"),
        memory=MemoryConfig(kv_cache_bytes=BUDGET, kv_cache_dtype=pages),
        scheduler=SchedulerConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=STEP),
        device=DeviceConfig(device="cpu", threads=2),
        speculation=SpeculationConfig(speculative="mtp:2"))
    runner = open_device(config, 1, lambda *_: None, {}, group).runner
    ring = Ring(runner, budget=STEP)
    for number, length in enumerate(lengths(capacity)):
        params = ResolvedParams(max_tokens=24, temperature=0.0)
        ring.submit([(number * 31 + i) % 500 for i in range(length - 24)], params)
    live, tables = 0, runner.tables
    while ring.step():
        live = max(live, int(tables.seq_len[list(tables.sequences)].sum()))
    tokens = [out.tokens for out in ring.run()]
    assert runner.states is not None
    held = [part for layer in runner.states.layers for part in layer]
    every = [zip_longest(pool.layers, pool.scales) for pool in runner.all_pools]
    return Rank([[sum(own.nbytes for own in layer if own is not None) for layer in pool]
                 for pool in every],
                sum(part.nbytes for part in held), tokens, ring.preemptions, live)


@pytest.mark.parametrize(("flags", "tokens"), [
    ([], 343_167), (["--kv-cache-dtype", "int8"], 681_503),
    (["--kv-cache-dtype", "int8", "--checkpoints", "0"], 690_271)])
def test_the_real_one_promises_what_documents_say(flags: list[str], tokens: int,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(REAL.parent), "--memory", "13.61GiB", "--tp", "2", "--max-num-seqs",
                 "32", "--speculative", "mtp:2", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_capacity"] == tokens


@pytest.mark.parametrize("pages", [pytest.param("auto", marks=pytest.mark.slow), "int8"])
def test_two_ranks_allocate_and_serve_what_is_planned(pages: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    path = scaled(tmp_path / "model")
    plan = planned(path, capsys, pages)
    capacity = plan["token_capacity"]
    one, other = whole(run_ranks(tmp_path / "group", 2, lambda group: filled(
        path, capacity, pages, group)))
    assert one == other
    assert [sum(own) for own in one.pools] == [pool["bytes"] for pool in plan["pools"]]
    assert [len(own) for own in one.pools] == [pool["layers"] for pool in plan["pools"]] == [2, 1]
    assert sum(map(sum, one.pools)) + one.states == plan["used"] <= BUDGET
    assert [len(tokens) for tokens in one.tokens] == [24] * REQUESTS
    assert one.preemptions == 0 and 0.95 * capacity < one.live <= capacity > 900


@pytest.mark.slow
def test_an_engine_serves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scaled(tmp_path / "model")
    plan = planned(path, capsys)
    prompts = [[(number * 31 + i) % 500 for i in range(length - 24)]
               for number, length in enumerate(lengths(plan["token_capacity"]))]
    with short_dir() as base, Engine(
            str(path), device="cpu", load_format="dummy", tensor_parallel_size=2, threads=2,
            speculative="mtp:2", kv_cache_bytes=BUDGET, max_num_seqs=REQUESTS, skip_tokenizer=True,
            max_num_batched_tokens=STEP, run_dir=str(base), crash_reports=False) as engine:
        done = list(engine.client.generate(prompts, SamplingParams(
            max_tokens=24, temperature=0.0, ignore_eos=True)))
        assert [len(own.token_ids) for own in done] == [24] * REQUESTS
        gauges = [actor.gauges for actor in engine.client.status().actors
                  if actor.role.startswith("worker-")]
    pages = sum(pool["bytes"] for pool in plan["pools"])
    assert len(gauges) == 2
    for own in gauges:
        assert own["pages_bytes"] == own["pages_bytes_planned"] == pages
        assert own["states_bytes"] == own["states_bytes_planned"] == plan["used"] - pages
