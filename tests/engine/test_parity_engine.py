"""Parity through the real ring: every process, sockets between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_models import generated, write_checkpoint
from helpers_prefix import run_in

from actorium import BadModel, Engine, SamplingParams
from actorium.actors.client.client import Request

NEW = 24
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 17, 40)]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    path = tempfile.mkdtemp(dir="/tmp", prefix="act")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("model")
    oracle: Any = write_checkpoint(path, seed=5)
    return path, [generated(oracle, prompt, NEW) for prompt in PROMPTS]


def test_tokens_through_all_processes(base: str, model: tuple[Path, list[list[int]]]) -> None:
    path, want = model
    with Engine(path, run_dir=base, skip_tokenizer=True, device="cpu", threads=1) as engine:
        greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        got = engine.client.generate(PROMPTS, greedy)
        assert [list(c.token_ids) for c in got] == want
        assert {c.finish_reason for c in got} == {"length"}
        loose = SamplingParams(max_tokens=NEW, temperature=1.2, seed=42, logprobs=2)
        alone = engine.client.generate(PROMPTS[2], loose)
        together = engine.client.generate(PROMPTS * 3, loose)
        assert list(together[2].token_ids) == list(alone.token_ids)
        assert len(alone.logprobs) == len(alone.token_ids) >= 1
        assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in alone.logprobs)


def test_windows_through_all_processes(base: str, tmp_path: Path) -> None:
    """Gemma 3, prompts several windows long, pools that hold a few sequences' windows."""
    oracle: Any = write_checkpoint(tmp_path, "Gemma3ForCausalLM", seed=5, sliding_window=32,
                                   sliding_window_pattern=2)
    prompts = [[(7 * i + n) % 199 for i in range(n)] for n in (5, 64, 130, 200)]
    want = [generated(oracle, prompt, NEW) for prompt in prompts]
    with Engine(tmp_path, run_dir=base, skip_tokenizer=True, device="cpu", threads=1,
                max_total_tokens=512, max_num_batched_tokens=48, max_num_seqs=4) as engine:
        greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        got = engine.client.generate(prompts * 2, greedy)
        assert [list(c.token_ids) for c in got] == want * 2


@pytest.mark.slow
def test_truncated_weights_reach_the_caller(base: str, tmp_path: Path,
                                            model: tuple[Path, list[list[int]]]) -> None:
    for file in model[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(BadModel, match=r"model\.safetensors") as caught:
        Engine(tmp_path, run_dir=base, skip_tokenizer=True, device="cpu", threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_class_of_transformers_through_all_processes(base: str, tmp_path: Path) -> None:
    """With too few pages for all, and a prompt whose pages are there."""
    oracle: Any = write_checkpoint(tmp_path, "ApertusForCausalLM", seed=5)
    prompts = [[(7 * i + n) % 199 for i in range(n)] for n in (5, 64, 130, 200)]
    want = [generated(oracle, prompt, NEW) for prompt in prompts]
    with Engine(tmp_path, run_dir=base, skip_tokenizer=True, device="cpu", threads=1,
                model_impl="transformers", max_total_tokens=512, max_num_batched_tokens=48,
                max_num_seqs=4) as engine:
        greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
        for _ in range(2):
            got = engine.client.generate(prompts * 2, greedy)
            assert [list(c.token_ids) for c in got] == want * 2
        again = run_in(engine.client, [Request(prompt=prompts[3], params=greedy)] * 2)
        assert again.tokens == [want[3]] * 2 and again.cached >= 190
