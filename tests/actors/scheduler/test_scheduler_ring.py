"""The scheduler in its process: null worker, real sockets, every token checked against its seed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorium.actors.client.client import SamplingParams
from actorium.actors.errors import ContextOverflow, DeadlineExceeded, QueueFull
from actorium.actors.launcher.engine import Engine
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null.null_worker import VOCAB, next_token


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def said(prompt: int, tokens: int, seed: int, index: int = 0) -> list[int]:
    own = choice_seed(seed, index)
    return [next_token(own, prompt + i, VOCAB) for i in range(tokens)]


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_survive_a_crowded_ring(run_dir: Path, overlap: bool) -> None:
    """More requests than slots, a pool that preempts, small odd chunks; audited at every step."""
    lengths = [1 + 5 * i % 29 for i in range(24)]
    params = [SamplingParams(max_tokens=10 + 13 * i % 40, seed=i, n=1 + i % 2, ignore_eos=True)
              for i in range(24)]
    with Engine("", null_worker=True, skip_tokenizer=True, run_dir=str(run_dir), page_size=2,
                max_total_tokens=160, max_num_seqs=9, max_num_batched_tokens=13, overlap=overlap,
                force_preempt_every=5, debug_memory=True) as engine:
        for n in (1, 2):
            mine = [i for i in range(24) if params[i].n == n]
            answers = engine.client.generate([[7] * lengths[i] for i in mine],
                                             [params[i] for i in mine])
            for i, answer in zip(mine, answers, strict=True):
                for index, choice in enumerate(answer if n > 1 else [answer]):
                    tokens = params[i].max_tokens or 0
                    assert choice.token_ids == said(lengths[i], tokens, i, index)
                    assert choice.finish_reason == "length"


def test_limits_reach_the_client_as_typed_errors(run_dir: Path) -> None:
    with Engine("", null_worker=True, skip_tokenizer=True, run_dir=str(run_dir), page_size=16,
                max_total_tokens=2048, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        client = engine.client
        with pytest.raises(ContextOverflow, match="2049 tokens need 129 pages of 16, .* has 128"):
            client.generate([7] * 2049, SamplingParams(max_tokens=1))
        long = SamplingParams(max_tokens=700, seed=3, ignore_eos=True)
        running, waiting, refused = (client.stream([7] * 9, long) for _ in range(3))
        with pytest.raises(QueueFull, match="[12] requests are waiting already"):
            list(refused)
        for stream in (running, waiting):
            assert sum((delta.token_ids for delta in stream), []) == said(9, 700, 3)
        with pytest.raises(DeadlineExceeded):
            client.generate([7], long, timeout=1e-4)
        assert client.generate([7], SamplingParams(max_tokens=1, seed=9)).token_ids == said(1, 1, 9)
