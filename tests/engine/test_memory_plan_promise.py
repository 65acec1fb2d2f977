"""The capacity that `actorium plan` promises, through a whole engine with recurrent layers."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_prefix import engine, run_in

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Request
from actorium.tools.cli import main

SEQUENCES, PAGE, OUTPUT = 4, 16, 40
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 199, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "dtype": "bfloat16", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="act"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    yield str(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module",
                params=["auto", *(pytest.param(other, marks=pytest.mark.slow)
                                  for other in ("fp8", "int8"))])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(model: str, kv_cache_dtype: str) -> Iterator[Engine]:
    with engine(model=model, load_format="dummy", skip_tokenizer=True, kv_cache_bytes=200_000,
                page_size=PAGE, max_num_seqs=SEQUENCES, max_num_batched_tokens=4096,
                kv_cache_dtype=kv_cache_dtype) as started:
        yield started


@pytest.fixture
def plan(model: str, kv_cache_dtype: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", model, "--memory", "200000", "--page-size", str(PAGE), "--max-num-seqs",
                 str(SEQUENCES), "--max-num-batched-tokens", "4096", "--kv-cache-dtype",
                 kv_cache_dtype, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def preemptions(running: Engine, lengths: list[int], seed: int) -> float:
    """In all since the start, after sequences that come to hold so many tokens, all at once: the
    last token of each is never computed. No two prompts share a page."""
    chance = random.Random(seed)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    done = run_in(running.client, [
        Request(prompt=[chance.randrange(3, 190) for _ in range(length + 1 - OUTPUT)],
                params=params) for length in lengths])
    assert all(len(tokens) == OUTPUT for tokens in done.tokens) and done.cached == 0
    return done.gauges["preemptions"]


def test_the_capacity_is_kept_and_is_not_more(running: Engine, plan: dict[str, Any]) -> None:
    tokens, pages = plan["token_capacity"], plan["page_tokens"] // PAGE
    assert plan["limited_by"] == "memory" and plan["checkpoints"] > 0
    # All but one end just behind the start of a page: the worst that lengths can be.
    worst = [tokens // SEQUENCES // PAGE * PAGE + 1] * (SEQUENCES - 1)
    worst.append(tokens - sum(worst))
    assert sum(-(-length // PAGE) for length in worst) == pages
    assert preemptions(running, worst, seed=0) == 0
    whole = [pages // SEQUENCES * PAGE] * (SEQUENCES - 1)
    whole.append(plan["page_tokens"] - sum(whole))
    assert preemptions(running, whole, seed=1) == 0, "every page full"
    more = [*whole[:-1], whole[-1] + PAGE]
    # More than once, in case a busy machine lets one sequence start when another is about to end.
    assert any(preemptions(running, more, seed) for seed in range(2, 7)), "and one more page"
