"""An engine with a draft model: tokens are those without one, through sleeps and a killed worker.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_drafting import follow_tokens
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.actors.messages import ActorStatus

PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]
EACH = [SamplingParams(max_tokens=300, ignore_eos=True, logprobs=0, **how) for how in (
    {"temperature": 0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0})]


def worker(client: Client) -> ActorStatus:
    return next(own for own in client.status().actors if own.role == "worker-0")


def eventually(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def told(completions: list[Any]) -> list[Any]:
    return [(list(c.token_ids), [entry.logprob for entry in c.logprobs]) for c in completions]


@pytest.mark.slow
def test_drafts_go_on_through_sleeps_and_a_killed_worker() -> None:
    """Of a hybrid target, to the bit, with a tier on the host."""
    base = Path(tempfile.mkdtemp(dir="/tmp", prefix="act"))
    target, draft = base / "target", base / "draft"
    write_hybrid(target, DENSE, 5, torch.bfloat16, head_dim=32, num_hidden_layers=4,
                 layer_types=["linear_attention", "full_attention"] * 2)
    write_checkpoint(draft, "LlamaForCausalLM", 3, dtype=torch.bfloat16, head_dim=32)
    for path in (target, draft):
        follow_tokens(path)
    common = {"skip_tokenizer": True, "device": "cpu", "threads": 1, "exact": "on",
              "max_num_seqs": 4, "host_cache": 32 << 20}
    try:
        with Engine(target, speculative="off", **common) as engine:
            want = told(engine.client.generate(PROMPTS, EACH))
        with Engine(target, speculative="draft:4,fixed", speculative_model=str(draft),
                    **common) as engine:
            client, answers = engine.client, list[Any]()
            first = client.generate(PROMPTS, EACH)
            assert told(first) == want
            usage = [own.usage for own in first]
            assert sum(own.accepted_tokens for own in usage) > 100
            client.flush_cache()
            thread = threading.Thread(target=lambda: answers.append(
                Client(engine.name).generate(PROMPTS, EACH)))
            thread.start()
            time.sleep(0.1)
            for level in (1, 2):
                client.sleep(level, "keep")
                client.wake_up()
                time.sleep(0.1)
            before = worker(client)
            assert thread.is_alive(), "it was over too early to show anything"
            os.kill(before.pid, signal.SIGKILL)
            eventually(lambda: worker(client).epoch > before.epoch and client.status().ready,
                       "no worker comes back")
            thread.join(60)
            assert told(answers[0]) == want
            again = client.generate(PROMPTS[2], EACH[2])
            assert told([again]) == want[2:] and again.usage.accepted_tokens > 20
    finally:
        shutil.rmtree(base, ignore_errors=True)
