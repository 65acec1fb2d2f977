"""A real engine with more adapters than slots, whose worker dies, and sleeps: every answer is that
of the model with the adapter merged into its weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers_adapters import merged, toy_adapter
from helpers_models import generated, write_checkpoint
from helpers_runtime import short_dir

from actorium import Engine, SamplingParams
from actorium.actors.client.requests import Request
from actorium.actors.errors import BadModel

NEW = 16
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
PROMPTS = [[5, 9, 100, 3, 77, 20] * 4, [8, 9, 10]]
NAMES = ["", "a", "b", "c"]


def answers(engine: Engine) -> dict[tuple[int, str], list[int]]:
    """Of each prompt with each adapter, all at once."""
    asked = [(at, name) for at in range(len(PROMPTS)) for name in NAMES]
    requests = [Request(prompt=PROMPTS[at], params=GREEDY, adapter=name or None)
                for at, name in asked]
    found: dict[tuple[int, str], list[int]] = {}
    for number, done in engine.client.run(requests):
        assert isinstance(done, list), done
        found[asked[number]] = list(done[0].token_ids)
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adapters_outlive_the_worker(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "model"
    oracle = write_checkpoint(path, "LlamaForCausalLM", num_hidden_layers=2)
    models: dict[str, Any] = {"": oracle}
    for seed, name in enumerate(NAMES[1:]):
        models[name] = merged(oracle, toy_adapter(oracle, tmp_path / name, seed=seed))
    want = {(at, name): generated(models[name], prompt, NEW)
            for at, prompt in enumerate(PROMPTS) for name in NAMES}
    with short_dir() as base, Engine(
            str(path), device="cpu", threads=1, run_dir=str(base), skip_tokenizer=True,
            tensor_parallel_size=ranks, max_num_seqs=8, kv_cache_bytes=1 << 24, enable_lora=True,
            lora_modules=[f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"], max_loras=2,
            crash_reports=False) as engine:
        engine.client.load_adapter("c", str(tmp_path / "c"))
        assert answers(engine) == want
        pids = {own.role: own.pid for own in engine.client.status().actors}
        os.kill(pids[f"worker-{ranks - 1}"], signal.SIGKILL)
        assert answers(engine) == want
        engine.client.sleep(1)
        engine.client.wake_up()
        assert answers(engine) == want
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(BadModel, match="safetensors"):
            engine.client.load_adapter("d", str(tmp_path / "a"))
        assert answers(engine) == want
