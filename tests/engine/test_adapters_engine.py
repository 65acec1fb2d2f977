"""A real engine with more adapters than slots, whose worker dies, and sleeps: every answer is that
of the model with the adapter merged into its weights."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers_adapters import merged, toy_adapter
from helpers_models import generated, write_checkpoint
from helpers_runtime import short_dir

from actorium import Client, Engine, SamplingParams
from actorium.actors.client.requests import Request
from actorium.actors.errors import BadModel, UnknownAdapter

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


@pytest.mark.slow
def test_a_thousand_loads_leave_the_memory_of_a_real_worker_as_it_was(tmp_path: Path) -> None:
    """Of adapters of 2 MB each, that come and go while requests with them run."""
    path, cycles = tmp_path / "model", 1000
    oracle = write_checkpoint(path, "LlamaForCausalLM", num_hidden_layers=1, hidden_size=256,
                              intermediate_size=1024)
    models = {"": oracle}
    for seed, name in enumerate(("a", "b0", "b1")):
        models[name] = merged(oracle, toy_adapter(oracle, tmp_path / name, rank=64, seed=seed))
    want = {name: generated(model, PROMPTS[0], NEW) for name, model in models.items()}
    answered: Counter[str] = Counter()
    wrong: list[str] = []
    over = threading.Event()
    with short_dir() as base, Engine(
            str(path), device="cpu", threads=1, run_dir=str(base), skip_tokenizer=True,
            max_num_seqs=8, kv_cache_bytes=1 << 24, enable_lora=True, max_loras=2,
            max_lora_rank=64, lora_modules=[f"a={tmp_path / 'a'}"], crash_reports=False) as engine:

        def ask(client: Client, number: int) -> None:
            while not over.is_set():
                name = ("", "a", "b")[number % 3]
                number += 1
                try:
                    found = client.generate(PROMPTS[0], GREEDY, adapter=name or None).token_ids
                except UnknownAdapter:
                    continue  # b is not loaded now
                answered[name] += 1
                contents = ("b0", "b1") if name == "b" else (name,)
                if list(found) not in [want[own] for own in contents]:
                    wrong.append(f"{name}: {found}")

        with ExitStack() as stack:
            threads = [threading.Thread(target=ask, args=(
                stack.enter_context(Client(engine.name, str(base))), number))
                for number in range(3)]
            for thread in threads:
                thread.start()
            try:
                pid = next(own.pid for own in engine.client.status().actors
                           if own.role == "worker-0")
                for cycle in range(cycles):
                    engine.client.load_adapter("b", str(tmp_path / f"b{cycle % 2}"))
                    if cycle % 10 == 0:  # else few requests would find it
                        engine.client.generate(PROMPTS[0], GREEDY, adapter="b")
                    engine.client.unload_adapter("b")
                    if cycle == cycles // 10:
                        settled = resident(pid)
                end = resident(pid)
            finally:
                over.set()
                for thread in threads:
                    thread.join()
    print(f"{settled >> 20} MB after {cycles // 10} cycles, {end >> 20} after {cycles}; {answered}")
    assert not wrong and min(answered[name] for name in ("", "a", "b")) > 10
    assert end < settled + (48 << 20), "each cycle that is kept would be 2 MB"


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
