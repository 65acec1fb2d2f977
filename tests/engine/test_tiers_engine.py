"""A working set of ten pools goes through the host's memory and a disk: every token as without."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_hybrid import DENSE, write_hybrid
from helpers_mamba import write_granite
from helpers_models import write_checkpoint
from helpers_prefix import gauges
from helpers_recurrent import write_recurrent
from helpers_redis import redis_server

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Request
from actorium.gpu.step.disk_pages import LOCK

BF16, PAGE, POOL = torch.bfloat16, 16, 480
"""Tokens of the pool: two sequences fit."""
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
DICE = random.Random(11)
SHARED = [DICE.randrange(199) for _ in range(70)]
PROMPTS = [[DICE.randrange(199) for _ in range(150)] for _ in range(24)] + [
    SHARED + [DICE.randrange(199) for _ in range(80)] for _ in range(8)]
"""Ten times the pool."""
WRITERS: dict[str, Callable[[Path], Any]] = {
    "full attention": lambda path: write_checkpoint(path, dtype=BF16, head_dim=32),
    "windows": lambda path: write_checkpoint(
        path, "Gemma3ForCausalLM", dtype=BF16, head_dim=32, sliding_window=32,
        sliding_window_pattern=2),
    "GatedDeltaNet": lambda path: write_hybrid(
        path, DENSE, 5, BF16, head_dim=32, num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2),
    "Mamba-2": lambda path: write_granite(
        path, dtype=BF16, num_local_experts=4, mamba_n_groups=2, hidden_size=128,
        mamba_n_heads=16),
    "no attention": lambda path: write_recurrent(path, "Mamba2ForCausalLM", dtype=BF16),
    "short convolutions": lambda path: write_recurrent(path, "Lfm2ForCausalLM", dtype=BF16,
                                                       hidden_size=128,
                                                       block_multiple_of=32),
}

ROOM = {"Mamba-2": 3_000_000, "no attention": 1_000_000}
"""Bytes on the host: some of the pages, or of the states, and by far not all."""


@pytest.fixture
def base() -> Iterator[Path]:
    path = tempfile.mkdtemp(dir="/tmp", prefix="act")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def engine(path: Path, base: Path, **settings: Any) -> Engine:
    return Engine(path, run_dir=str(base), **{
        "skip_tokenizer": True, "device": "cpu", "threads": 2, "exact": "on",
        "max_num_batched_tokens": 64, "max_num_seqs": 4, "page_size": PAGE,
        "max_total_tokens": POOL, "debug_memory": True, **settings})


def told(running: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[Any]:
    """Tokens and log-probabilities of all prompts, four at a time."""
    found: dict[int, Any] = {}
    requests = [Request(prompt=prompt, params=PARAMS) for prompt in prompts]
    for number, result in running.client.run(requests, window=4):
        if isinstance(result, Exception):
            raise result
        (one,) = result
        found[number] = list(one.token_ids), [str(row) for row in one.logprobs or ()]
    return [found[number] for number in range(len(prompts))]


def actors(running: Engine) -> dict[str, Any]:
    """As `actorium ps` shows them."""
    return {actor.role: actor for actor in running.client.status().actors}


def flip(directory: Path, every: int) -> int:
    """Flips a bit in each so many files; returns how many."""
    pages = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != LOCK)[::every]
    for page in pages:
        data = bytearray(page.read_bytes())
        data[DICE.randrange(len(data))] ^= 1 << DICE.randrange(8)
        page.write_bytes(data)
    return len(pages)


@pytest.mark.parametrize("kind", [kind if kind == "full attention" else pytest.param(
    kind, marks=pytest.mark.slow) for kind in WRITERS])
def test_every_token_is_as_without_tiers(kind: str, tmp_path: Path, base: Path) -> None:
    WRITERS[kind](tmp_path)
    with engine(tmp_path, base / "a", prefix_cache=False, max_total_tokens=8 * POOL) as running:
        wanted = told(running)
    disk = base / "pages"
    tiers = {"host_cache": ROOM.get(kind, 200_000), "disk_cache": f"{disk}:256MiB"}
    with engine(tmp_path, base / "b", **tiers) as running:
        assert told(running) == wanted and told(running) == wanted
        found = gauges(running.client)
    assert found["evicted_pages"] > 300
    assert found["host_pages_hit"] > 0 and found["disk_pages_hit"] > 0
    assert not found["host_pages_corrupt"] and not found["disk_pages_corrupt"]
    with engine(tmp_path, base / "c", **tiers) as running:  # finds them again
        assert told(running) == wanted
        assert gauges(running.client)["disk_pages_hit"] > 50
    planted = flip(disk, 3)
    with engine(tmp_path, base / "d", **tiers) as running:
        assert told(running) == wanted
        found = gauges(running.client)
    assert planted > 20 and 0 < found["disk_pages_corrupt"] <= planted


@contextlib.contextmanager
def hanging(directory: Path, whole: bool = False) -> Iterator[int]:
    """Who opens one of a directory's files waits: each has a lease, and its holder does not hear
    that it shall give it back. whole: nor can the cache be opened. Yields their number."""
    fds = [os.open(path, os.O_RDONLY) for path in directory.rglob("*")
           if path.is_file() and (whole or path.name != LOCK)]
    try:
        for fd in fds:
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # which nobody minds
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield len(fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, base: Path) -> None:
    WRITERS["full attention"](tmp_path)
    disk, asked = base / "pages", PROMPTS[:12]
    with engine(tmp_path, base, disk_cache=f"{disk}:64MiB", disk_timeout=0.3) as running:
        wanted = told(running, asked)
        before = gauges(running.client)
        with hanging(disk) as count:
            began = time.monotonic()
            assert told(running, asked) == wanted
            took = time.monotonic() - began
        found = gauges(running.client)
        assert told(running, asked) == wanted
    assert count > 50 and before["disk_pages_late"] == 0
    assert found["disk_pages_late"] > 0
    assert took < 20.0, "the kernel gives up a lease after 45 s, of one file"


@pytest.mark.slow
def test_a_worker_starts_while_the_disk_hangs(tmp_path: Path, base: Path) -> None:
    """It has streams to go on with."""
    WRITERS["full attention"](tmp_path)
    disk, asked = base / "pages", PROMPTS[:12]
    with engine(tmp_path, base, disk_cache=f"{disk}:64MiB", disk_timeout=0.3) as running:
        wanted = told(running, asked)
        with hanging(disk, whole=True):
            began = time.monotonic()
            os.kill(actors(running)["worker-0"].pid, signal.SIGKILL)
            assert told(running, asked) == wanted
            took = time.monotonic() - began
    assert took < 30.0, "the kernel gives up a lease after 45 s"


@pytest.mark.slow
@pytest.mark.parametrize("host", [200_000, 0], ids=["host and disk", "disk"])
def test_deaths_over_tiers(host: int, tmp_path: Path, base: Path) -> None:
    """Worker and scheduler die while pages are on their way: each comes back in a moment, with
    what the tiers have, or without."""
    WRITERS["full attention"](tmp_path)
    disk = base / "pages"
    with engine(tmp_path, base, host_cache=host, disk_cache=f"{disk}:64MiB") as running:
        wanted = told(running)
        for _ in range(4):
            for role in ("worker-0", "scheduler"):
                answers: list[Any] = []
                pid = actors(running)[role].pid
                asking = threading.Thread(target=lambda said=answers: said.extend(told(running)))
                began = time.monotonic()
                asking.start()
                time.sleep(DICE.uniform(0.05, 1.0))
                os.kill(pid, signal.SIGKILL)
                asking.join()
                assert answers == wanted
                assert time.monotonic() - began < 50.0, "a hang is ended after 60 s"
                while actors(running)[role].pid == pid:
                    time.sleep(0.05)
        assert {role: actors(running)[role].epoch for role in ("worker-0", "scheduler")} == {
            "worker-0": 5, "scheduler": 5}
        assert not gauges(running.client)["disk_pages_corrupt"]


@pytest.mark.slow
def test_ranks_keep_their_own_slices(tmp_path: Path, base: Path) -> None:
    """A page of which one rank has lost its part is lost."""
    WRITERS["full attention"](tmp_path)
    ranks = {"tensor_parallel_size": 2, "exact": "off", "dtype": "float32"}
    with engine(tmp_path, base / "a", prefix_cache=False, max_total_tokens=8 * POOL,
                **ranks) as running:
        wanted = [tokens for tokens, _ in told(running)]
    disk = base / "pages"
    tiers = {"host_cache": 400_000, "disk_cache": f"{disk}:256MiB", **ranks}
    with engine(tmp_path, base / "b", **tiers) as running:
        for _ in range(2):
            assert [tokens for tokens, _ in told(running)] == wanted
        found = gauges(running.client)
    assert found["host_pages_hit"] > 0 and found["disk_pages_hit"] > 0
    namespaces = [path for path in disk.iterdir() if path.is_dir()]
    assert len(namespaces) == 2
    for page in namespaces[0].rglob("*"):
        if page.is_file():
            page.unlink()
    with engine(tmp_path, base / "c", **tiers) as running:
        assert [tokens for tokens, _ in told(running)] == wanted
        found = gauges(running.client)
    assert not found["disk_pages_corrupt"]


@pytest.mark.slow
def test_a_remote_store_that_is_lost_lies_and_hangs(tmp_path: Path, base: Path) -> None:
    """Every token is as without it, and what one engine has evicted another one finds."""
    WRITERS["full attention"](tmp_path)
    (base / "password").write_text("pass\n")
    asked, flags = PROMPTS[:12], ("--requirepass", "pass")
    with redis_server(base, *flags, password="pass") as server:
        tiers = {"remote_cache": server.url, "disk_timeout": 0.3,
                 "remote_cache_password_file": str(base / "password")}
        with engine(tmp_path, base / "a", **tiers) as running:
            wanted = told(running, asked)
            assert told(running, asked) == wanted
            assert gauges(running.client)["disk_pages_hit"] > 0
        copy = tmp_path.with_name("copy")  # as on another machine: other times of the files
        shutil.copytree(tmp_path, copy)
        with engine(copy, base / "b", **tiers) as running:
            assert told(running, asked) == wanted
            assert gauges(running.client)["disk_pages_hit"] > 20
            keys = sorted(server.client.keys())[::3]
            for key in keys:
                value = bytearray(server.client.get(key))
                value[DICE.randrange(len(value))] ^= 1 << DICE.randrange(8)
                server.client.set(key, bytes(value))
            assert told(running, asked) == wanted
            found = gauges(running.client)
            assert 0 < found["disk_pages_corrupt"] <= len(keys)
            server.process.send_signal(signal.SIGSTOP)
            assert told(running, asked) == wanted
            assert gauges(running.client)["disk_pages_late"] > 0
            server.process.send_signal(signal.SIGCONT)
            server.process.kill()
            assert told(running, asked) == wanted
