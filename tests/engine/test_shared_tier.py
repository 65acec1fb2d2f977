"""Two replicas of one machine over one directory of pages: what one has evicted the other finds,
and a page that one was writing when it was killed is nobody's."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cli import eventually
from helpers_models import write_checkpoint

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Request
from actorium.actors.cluster.cluster_control import AskCluster, DrainReplica, UndrainReplica
from actorium.actors.config.cluster_settings import replica_name
from actorium.actors.messages import ActorStatus
from actorium.actors.runtime.rundir import engine_dir
from actorium.gpu.step.disk_pages import LOCK
from actorium.gpu.step.page_store import HEADER, MAGIC
from actorium.tools.cli import status
from actorium.tools.cli.cluster_command import ClusterAsker

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
DICE = random.Random(12)
POOL, PAGE, WHOLE = 480, 16, 9
"""Tokens of a replica's pool, of a page, and whole pages of a prompt: three prompts fit."""


def prompts(count: int) -> list[list[int]]:
    return [[DICE.randrange(199) for _ in range(150)] for _ in range(count)]


@pytest.fixture
def base() -> Iterator[Path]:
    path = tempfile.mkdtemp(dir="/tmp", prefix="act")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Shared memory, as a directory."""
    path = tempfile.mkdtemp(dir="/dev/shm", prefix="act")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def engine(model: Path, base: Path, **settings: Any) -> Engine:
    return Engine(model, run_dir=str(base), **{
        "skip_tokenizer": True, "device": "cpu", "threads": 2, "exact": "on",
        "max_num_batched_tokens": 256, "max_num_seqs": 4, "page_size": PAGE,
        "max_total_tokens": POOL, "debug_memory": True, **settings})


def told(running: Engine, asked: list[list[int]], window: int = 4) -> list[Any]:
    """Tokens and log-probabilities, so many prompts at a time."""
    found: dict[int, Any] = {}
    requests = [Request(prompt=prompt, params=PARAMS) for prompt in asked]
    for number, result in running.client.run(requests, window=window):
        if isinstance(result, Exception):
            raise result
        (one,) = result
        found[number] = list(one.token_ids), [str(row) for row in one.logprobs or ()]
    return [found[number] for number in range(len(asked))]


def only(running: Engine, base: Path, index: int) -> None:
    """Has this replica of two take all requests, and the other one none."""
    with ClusterAsker(running.name, str(base)) as asker:
        asker.ask(UndrainReplica, index)
        asker.ask(DrainReplica, 1 - index)
        phases = {index: "ready", 1 - index: "drained"}
        assert eventually(lambda: {row.replica: row.phase for row in asker.ask(AskCluster).rows}
                          == phases, 30)


def actors(name: str, base: Path) -> dict[str, ActorStatus]:
    """Of an engine, by role, as its watchdog says."""
    told = status.ask(engine_dir(name, str(base)), 30.0)
    assert told is not None
    return {actor.role: actor for actor in told.actors}


def gauges(running: Engine, base: Path, index: int) -> dict[str, float]:
    """Of a replica's scheduler."""
    return actors(replica_name(running.name, index), base)["scheduler"].gauges


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*")
            if path.is_file() and path.name != LOCK and not path.name.startswith(".")]


def assert_none_is_torn(directory: Path) -> None:
    """Each file is a page: its header and its bytes have the checksums that it names."""
    for path in files(directory):
        data = path.read_bytes()
        magic, _, name, size, crc, of_header = HEADER.unpack_from(data)
        assert magic == MAGIC and of_header == zlib.crc32(data[:HEADER.size - 4]), path
        assert path.parent.name + path.name == name.hex() and size == len(data) - HEADER.size
        assert crc == zlib.crc32(data[HEADER.size:]), path


@pytest.mark.slow
@pytest.mark.parametrize("place", ["base", "memory"])
def test_what_one_has_evicted_the_other_finds(tmp_path: Path, base: Path, place: str,
                                              request: pytest.FixtureRequest) -> None:
    write_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=32)
    asked, disk = prompts(12), request.getfixturevalue(place) / "pages"
    with engine(tmp_path, base / "a", prefix_cache=False, max_total_tokens=8 * POOL) as running:
        wanted = told(running, asked)
    evicted, found_whole = 12 * WHOLE - POOL // PAGE, 8 * WHOLE  # of four the pool has a part
    with engine(tmp_path, base / "b", replicas=2, disk_cache=f"{disk}:64MiB") as running:
        only(running, base / "b", 0)
        assert told(running, asked, 1) == wanted
        assert eventually(lambda: len(files(disk)) >= evicted), "all that it has no room for"
        only(running, base / "b", 1)
        assert told(running, asked, 1) == wanted
        assert eventually(
            lambda: gauges(running, base / "b", 1).get("disk_pages_hit", 0) >= found_whole)
        found = [gauges(running, base / "b", index) for index in range(2)]
    assert found[0]["disk_pages_hit"] == 0 and found[0]["computed_prompt_tokens"] == 12 * 150
    assert found[1]["computed_prompt_tokens"] <= 12 * 150 - found_whole * PAGE
    assert not any(own["disk_pages_corrupt"] for own in found)
    assert_none_is_torn(disk)


@pytest.mark.slow
def test_who_is_killed_while_it_writes_leaves_no_torn_page(tmp_path: Path, base: Path) -> None:
    """Three times, with the requests that it had: they go on at the other replica."""
    write_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=32)
    asked, disk = prompts(60), base / "pages"
    with engine(tmp_path, base / "a", prefix_cache=False, max_total_tokens=8 * POOL) as running:
        wanted = told(running, asked)
    with engine(tmp_path, base / "b", replicas=2, disk_cache=f"{disk}:64MiB") as running:
        for epoch, begin in enumerate((0, 20, 40), 1):
            part, got = asked[begin:begin + 20], list[Any]()
            before, victim = len(files(disk)), actors(running.name, base / "b")["replica-0"]
            assert victim.epoch == epoch
            thread = threading.Thread(target=lambda part=part, got=got: got.extend(
                told(running, part)))
            thread.start()
            assert eventually(lambda before=before: len(files(disk)) >= before + 10, 60)
            os.kill(victim.pid, signal.SIGKILL)
            thread.join(120)
            assert got == wanted[begin:begin + 20]
            assert_none_is_torn(disk)
            with ClusterAsker(running.name, str(base / "b")) as asker:
                assert eventually(lambda asker=asker: all(
                    row.phase == "ready" for row in asker.ask(AskCluster).rows), 60)
        assert told(running, asked) == wanted
        found = [gauges(running, base / "b", index) for index in range(2)]
    assert any(own["disk_pages_hit"] > 0 for own in found)
    assert not any(own["disk_pages_corrupt"] for own in found)
