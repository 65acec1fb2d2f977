"""Granite-4 hybrid through a whole engine: batches, preemption, prefixes through checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_mamba import write_granite
from helpers_models import oracle_logits
from helpers_parity import tokens
from helpers_prefix import engine, run_in

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Request

NEW, BUDGET = 48, 450_000
"""Bytes that hold the states of 4 sequences and too few pages for all of them."""


class Served(NamedTuple):
    running: Engine
    oracle: Any


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="act"))
    oracle = write_granite(folder, 7, num_local_experts=4, mamba_n_groups=2)
    with engine(model=str(folder), skip_tokenizer=True, kv_cache_bytes=BUDGET, page_size=16,
                max_num_seqs=4, max_num_batched_tokens=64, checkpoints=4, threads=1) as running:
        yield Served(running, oracle)
    shutil.rmtree(folder, ignore_errors=True)


def run(served: Served, prompts: list[list[int]]) -> Any:
    """What came of these prompts; every token is the greedy choice of transformers."""
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    done = run_in(served.running.client,
                  [Request(prompt=prompt, params=params) for prompt in prompts])
    for prompt, found in zip(prompts, done.tokens, strict=True):
        logits = oracle_logits(served.oracle, prompt + found)
        assert found == logits[len(prompt) - 1:-1].argmax(-1).tolist()
        assert len(found) == NEW
    return done


def test_more_sequences_than_memory_holds(served: Served) -> None:
    done = run(served, [tokens(n, n) for n in (90, 100, 40, 110, 7, 95)])
    assert done.gauges["preemptions"] > 0


def test_a_prefix_is_used_again(served: Served) -> None:
    prefix = tokens(96, 50)
    run(served, [prefix + tokens(5, 51)])
    assert run(served, [prefix + tokens(20, 52)]).cached >= 64
