"""Of a served engine: actors that are killed are forked off the process that has their imports."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers_models import write_checkpoint
from helpers_runtime import child_env, processes_naming, short_dir
from helpers_served import serving

from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import TokenLogprob
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.process import process_activity
from actorium.actors.runtime.roles import WORKER
from actorium.actors.runtime.rundir import engine_dir

pytestmark = pytest.mark.usefixtures("real_starts")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2,
                        deterministic=True)
IMPORTED = b"libtorch_cpu"
OTHERS_IMPORT = b"msgspec"
OTHERS = ("gateway-0", "tokenizer", "scheduler", "detokenizer", "watchdog")


def rests(pid: int) -> bool:
    """Whether all its threads sleep for a while: what imports has no reason to."""
    for _ in range(10):
        time.sleep(0.02)
        activity = process_activity(pid)
        if activity is None or activity.runnable:
            return False
    return True


def loaded_at(pid: int, library: bytes = IMPORTED) -> list[bytes]:
    """Where a process has a library: chosen anew by the system with each start, and handed on
    by a fork."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if library in line and b" r-xp " in line]


def servers_of(base: Path, library: bytes) -> list[int]:
    """The fork servers of an engine that have a library and all other imports."""
    return [pid for pid in processes_naming(str(base))
            if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and loaded_at(pid, library) and rests(pid)]


def test_a_killed_worker_is_forked_and_says_the_same(tmp_path: Path) -> None:
    """Once the server has its imports, of which nothing outside can tell the end. The engine is
    exact because its first worker found that cheap: the others, which find it dear, are no less."""
    write_checkpoint(tmp_path, dtype=torch.bfloat16, head_dim=32)
    with short_dir() as base, Engine(
            str(tmp_path), device="cpu", exact_costs="2,9", run_dir=str(base), skip_tokenizer=True,
            kv_cache_bytes=1 << 22, fork_server="on", max_restarts=100,
            crash_reports=False) as engine:
        def worker() -> int:
            return next(own.pid for own in engine.client.status().actors if own.role == WORKER)

        def says() -> tuple[Sequence[int], list[TokenLogprob] | None]:
            done = engine.client.generate([5, 7, 11], GREEDY)
            return done.token_ids, done.logprobs

        before, first, until = says(), worker(), time.monotonic() + 60
        while not (servers := servers_of(base, IMPORTED)):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert loaded_at(first) != loaded_at(servers[0])
        while loaded_at(worker()) != loaded_at(servers[0]):
            assert time.monotonic() < until
            os.kill(worker(), signal.SIGKILL)
            assert says() == before


@pytest.mark.slow
def test_all_other_actors_are_forked_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own process, which has none of it; and the caller's connection goes on."""
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    with serving(null_worker=True, fork_server="on", crash_reports=False) as served:
        def pids() -> dict[str, int]:
            return {own.role: own.pid for own in served.engine.client.status().actors}

        caller = http.client.HTTPConnection(served.host, served.port, timeout=60)
        first, until = pids(), time.monotonic() + 200
        while not (servers := servers_of(Path(str(engine_dir(served.engine.name))),
                                         OTHERS_IMPORT)):
            assert time.monotonic() < until
            time.sleep(0.1)
        for role in OTHERS:
            os.kill(first[role], signal.SIGKILL)
            while loaded_at(pids().get(role, 0), OTHERS_IMPORT) != loaded_at(
                    servers[0], OTHERS_IMPORT):
                assert time.monotonic() < until
                time.sleep(0.02)
            caller.request("POST", "/v1/completions", json.dumps(
                {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True}))
            answer = caller.getresponse()
            assert answer.status == 200 and json.loads(answer.read())["usage"]["total_tokens"] == 4
        assert all(not loaded_at(pid, b"torch") for pid in (servers[0], *(
            pids()[role] for role in OTHERS)))
        server = Path(f"/proc/{servers[0]}")
        assert len(os.listdir(server / "task")) == 1, "no thread is lost in a fork"
        assert sum(os.readlink(fd).startswith("socket:") for fd in (server / "fd").iterdir()) == 1
