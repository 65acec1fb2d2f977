"""Answers about images in bf16, `--exact on`: tokens and log-probabilities to the bit, alone and
together, in other chunks, on other threads, with rows of the tower kept or made again, preempted.
"""

from __future__ import annotations

import io
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_images import write_text_side
from helpers_runtime import short_dir
from helpers_vision import write_vl
from PIL import Image as Pillow

from actorium import Engine, Image, SamplingParams, Video
from actorium.actors.client.client import Client
from actorium.actors.client.requests import Request

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, logprobs=2)


def noise(seed: int, width: int, height: int) -> bytes:
    """A picture in which every patch is another one."""
    out = io.BytesIO()
    data = random.Random(seed).randbytes(3 * width * height)
    Pillow.frombytes("RGB", (width, height), data).save(out, "PNG")
    return out.getvalue()


ASKED: list[list[Any]] = [
    [Image(noise(1, 64, 64)), "what?"], ["first: ", Image(noise(2, 40, 24)), " what is it?"],
    ["no picture"], [Image(noise(1, 64, 64)), "what else?"],
    [Image(noise(3, 24, 56)), Image(noise(2, 40, 24)), "both?"],
    [Video([noise(seed, 40, 32) for seed in range(4, 10)]), "and now?"],
    ["x" * 100, Image(noise(10, 8, 8)), "y" * 30]]


def write(path: Path, kind: str) -> None:
    """Heads and rows of the tower are no multiples of 32 numbers, as those that are served."""
    tower = {"hidden_size": 144, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 128}
    text: dict[str, Any] = {"hidden_size": 128, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 6, 6]}}
    if kind == "3":
        text["head_dim"] = 32
    write_vl(path, kind, tower=tower, vocab_size=288, max_position_embeddings=2048,
             eos_token_id=257, **text)
    write_text_side(path, kind)


def engine(path: Path, base: Path, **settings: Any) -> Engine:
    return Engine(path, run_dir=str(base), **{
        "device": "cpu", "dtype": "bfloat16", "exact": "on", "threads": 2, "max_num_seqs": 8,
        "max_model_len": 1024, "max_total_tokens": 8192, **settings})


def heard(own: Engine, asked: Sequence[list[Any]], params: SamplingParams = GREEDY) -> list[Any]:
    """Everything that a client is told of requests that are sent at once, number by number."""
    requests = [Request(messages=[{"role": "user", "content": parts}], params=params)
                for parts in asked]
    found: list[Any] = [None] * len(requests)
    for number, got in own.client.run(requests):
        assert isinstance(got, list), got
        found[number] = [(list(c.token_ids), [(entry.logprob, entry.top) for entry in c.logprobs])
                         for c in got]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_an_answer_is_the_same_in_any_company(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    with short_dir() as base, engine(tmp_path, base) as one:
        alone = [heard(one, [parts])[0] for parts in ASKED]
        assert len({str(own) for own in alone}) == len(ASKED)
        assert heard(one, ASKED) == alone, "together, prefixes and rows of the tower cached"
    with short_dir() as base, engine(
            tmp_path, base, threads=1, max_num_batched_tokens=16, force_preempt_every=5,
            disable_radix_cache=True, encoder_cache_bytes=0) as other:
        assert heard(other, ASKED[::-1])[::-1] == alone, "made again, in pieces, by one thread"


@pytest.mark.slow
def test_the_same_on_two_ranks(tmp_path: Path) -> None:
    """DeepStack's rows are added once, not by each rank, and where nobody else notices."""
    write(tmp_path, "3")
    with short_dir() as base, engine(tmp_path, base, tensor_parallel_size=2) as two:
        alone = [heard(two, [parts])[0] for parts in ASKED]
        assert len({str(own) for own in alone}) == len(ASKED)
        assert heard(two, ASKED) == alone


@pytest.mark.slow
def test_one_rank_and_two_have_the_same_bits(tmp_path: Path) -> None:
    """Every rank has all of the tower."""
    write(tmp_path, "2.5")
    with short_dir() as base, engine(tmp_path, base, exact_ranks=2) as one:
        alone = [heard(one, [parts])[0] for parts in ASKED]
    with short_dir() as base, engine(
            tmp_path, base, exact_ranks=2, tensor_parallel_size=2, max_num_batched_tokens=16,
            force_preempt_every=5, encoder_cache_bytes=0) as two:
        assert heard(two, ASKED) == alone


@pytest.mark.slow
def test_a_replica_that_dies_changes_no_bit(tmp_path: Path) -> None:
    """What it had begun goes on at the other one, behind images that are made there again."""
    write(tmp_path, "3")
    asked = [parts for parts in ASKED for _ in range(2)]
    with short_dir() as base, engine(tmp_path, base) as one:
        whole = heard(one, asked, LONG)
    with short_dir() as base, engine(tmp_path, base, replicas=2, restart=True) as two:
        assert two.status is not None
        pid = next(row.pid for row in two.status.actors if row.role == "replica-0")

        def kill_on_the_way() -> None:
            """As soon as somebody else has 40 tokens."""
            with Client(two.name, run_dir=str(base)) as client:
                count = 0
                for delta in client.chat([{"role": "user", "content": ASKED[4]}], LONG,
                                         stream=True):
                    if count < 40 <= count + len(delta.token_ids):
                        os.kill(pid, signal.SIGKILL)
                    count += len(delta.token_ids)

        killer = threading.Thread(target=kill_on_the_way)
        killer.start()
        assert heard(two, asked, LONG) == whole
        killer.join()
        gauges = next(row.gauges for row in two.client.status().actors if row.role == "scheduler")
        assert gauges["migrated_tokens"] > 0
