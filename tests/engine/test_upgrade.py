"""A running engine goes over to another version or to other flags, under requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers_runtime import child_env, short_dir
from helpers_upgrade import other_version, upgrade

from actorium import Client, SamplingParams, __version__
from actorium.actors.config import sources
from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.roles import roles_of
from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

TOKENS, LONG = 600, 2000


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose tokens take their time."""
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    with short_dir() as base, slow_engine(base) as found:
        yield found


def slow_engine(base: Path, **config: Any) -> Engine:
    config = {"null_worker": True, "device": "cpu", "port": 0, "run_dir": str(base),
              "max_num_seqs": 32, "log_stderr": False, **config}
    roles = roles_of(sources.from_kwargs("", **config))
    return Engine("", roles=roles | {"worker-0": "helpers_upgrade:build_slow"}, **config)


def sdk_tokens(engine: Engine, number: int, tokens: int = TOKENS) -> list[int]:
    """All tokens of a stream of the SDK."""
    with Client(engine.name, run_dir=engine.config.runtime.run_dir) as client:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
        return [token for delta in client.stream([5, 6], params) for token in delta.token_ids]


def http_tokens(engine: Engine, number: int, tokens: int = TOKENS) -> list[int]:
    """The same over HTTP, of a client that knows nothing of upgrades."""
    where = actor.where(engine_dir(engine.name, engine.config.runtime.run_dir))
    assert where is not None
    body = {"prompt": [5, 6], "seed": number, "max_tokens": tokens, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{where.url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=90) as answer:
        events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    assert len({event["id"] for event in parsed}) == 1
    assert parsed[-1]["usage"]["completion_tokens"] == tokens
    return [token for event in parsed for choice in event["choices"]
            for token in choice["token_ids"] or ()]


def right_tokens(number: int, tokens: int = TOKENS) -> list[int]:
    """Those of an engine that nobody disturbs."""
    return [null_worker.next_token(choice_seed(number, 0), 2 + at, null_worker.VOCAB)
            for at in range(tokens)]


def epochs(engine: Engine) -> dict[str, int]:
    return {each.role: each.epoch for each in engine.client.status().actors}


def under_streams(engine: Engine, *flags: str, python: str = sys.executable, streams: int = 3,
                  tokens: int = LONG) -> subprocess.CompletedProcess[str]:
    """Upgrades under so many streams of the SDK and over HTTP, whose tokens must be right."""
    with ThreadPoolExecutor(2 * streams) as pool:
        running = [(number, pool.submit(ask, engine, number, tokens)) for number in range(streams)
                   for ask in (sdk_tokens, http_tokens)]
        time.sleep(0.2)
        done = upgrade(engine, *flags, python=python)
        for number, each in running:
            assert each.result() == right_tokens(number, tokens)
    return done


def test_streams_go_on_with_other_flags(engine: Engine) -> None:
    pid, before = engine.pid, engine.client.status()
    done = under_streams(engine, "--max-num-seqs", "16", "--json", tokens=TOKENS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed"] == {"max_num_seqs": 16}
    assert set(epochs(engine).values()) == {2}
    assert engine.pid == pid and engine.client.status() != before
    os.kill(next(each.pid for each in engine.client.status().actors if each.role == "tokenizer"),
            signal.SIGKILL)
    assert len(sdk_tokens(engine, 7)) == TOKENS
    refused = upgrade(engine, "--dtype", "float16")
    assert refused.returncode == 2 and "--dtype: cannot change" in refused.stderr
    assert epochs(engine)["scheduler"] == 2


@pytest.mark.parametrize("ledger", [8, 11])
@pytest.mark.slow
def test_another_version_with_more_gateways(engine: Engine, tmp_path: Path, ledger: int) -> None:
    """Which writes the ledger as this one, or so that this one could not read it."""
    python = other_version(tmp_path, "9.9", ledger=ledger)
    done = under_streams(engine, "--max-num-seqs", "16", python=python, streams=6)
    assert done.returncode == 0, done.stderr
    assert "runs actorium 9.9 with max_num_seqs 16" in done.stdout
    assert facts(engine)["version"] == "9.9"
    assert facts(engine)["formats"]["ledger"] == ledger
    again = upgrade(engine, python=python)
    assert again.returncode == 0, again.stderr
    back = under_streams(engine)
    if ledger == 11:
        assert back.returncode == 2 and "ledger has version 11" in back.stderr
    assert facts(engine)["version"] == ("9.9" if ledger == 11 else __version__)


@pytest.mark.slow
def test_a_version_whose_actors_do_not_start(engine: Engine, tmp_path: Path) -> None:
    python = other_version(tmp_path, "9.9", ledger=11)
    null = tmp_path / "tree" / "tools" / "null" / "null_worker.py"
    null.write_text(null.read_text().replace("def build(", "def build(*_: object) -> None:\n"
                                             "    raise RuntimeError('it is broken')\n\n\n"
                                             "def build_not("))
    done = under_streams(engine, "--max-num-seqs", "16", python=python)
    assert done.returncode == 1 and "it is broken" in done.stderr
    assert facts(engine)["version"] == __version__
    engine.client.wait_ready(60.0)
    done = under_streams(engine, "--max-num-seqs", "16")
    assert done.returncode == 0, done.stderr


def facts(engine: Engine) -> dict[str, Any]:
    path = engine_dir(engine.name, engine.config.runtime.run_dir)
    return dict(json.loads((path / "engine.json").read_bytes()))


@pytest.mark.slow
def test_refused(engine: Engine, tmp_path: Path) -> None:
    wire = other_version(tmp_path, "9.9", wire=3)
    lacking = str(Path(sys.base_prefix) / "bin" / "python3")
    for python, flags, why in (
            (wire, [], "messages to clients has version 2; actorium 9.9 reads 3"),
            (lacking, [], "runs no actorium"), ("/nowhere/python", [], "No such file"),
            (sys.executable, ["--tp", "2"], "--tp: cannot change"),
            (sys.executable, ["--seed", "3"], "--seed: cannot change"),
            (sys.executable, ["--max-connections", "8"], "cannot become less than the 4096"),
            (sys.executable, ["--max-num-seqs", "0"], "--max-num-seqs: must be between"),
            (sys.executable, ["--name", "nobody"], "no engine named 'nobody' is running")):
        done = upgrade(engine, *flags, python=python)
        assert done.returncode in (1, 2) and why in done.stderr, (why, done.stderr)
    assert set(epochs(engine).values()) == {1}


@pytest.mark.parametrize("fault", [
    "preparing=tokenizer", "preparing=scheduler", "loading=worker-0", "loading=scheduler",
    "loading=watchdog", "loading=gateway-0", "loading=detokenizer"])
@pytest.mark.slow
def test_an_actor_is_killed_meanwhile(engine: Engine, fault: str) -> None:
    """An old actor has to end anyway; the death of a new one is as if it did not start."""
    done = under_streams(engine, "--max-num-seqs", "16", "--upgrade-fault", fault)
    failed = fault.startswith("loading")
    assert done.returncode == int(failed), done.stderr
    if failed:
        role = fault.partition("=")[2]
        assert f"{role} (pid " in done.stderr and "was killed by SIGKILL" in done.stderr
    engine.client.wait_ready(60.0)
    assert set(epochs(engine).values()) == {3 if failed else 2}


@pytest.mark.parametrize("fault", [
    "preparing=stop", "ending=stop", "loading=stop", "starting=stop",
    "loading=stop,loading=worker-0",
    "loading=worker-0,going-back=stop", "loading=worker-0,continuing=stop"])
@pytest.mark.slow
def test_the_engine_is_stopped_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                         fault: str) -> None:
    """Whichever version is there by then drains. What is started at the step "starting" is what
    writes another version's ledger."""
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    python = other_version(tmp_path, "9.9", ledger=11) if "starting" in fault else sys.executable
    with short_dir() as base, ThreadPoolExecutor(3) as pool, slow_engine(
            base, upgrade_fault=fault, drain_timeout=120.0) as engine:
        running = [pool.submit(ask, engine, 3, LONG) for ask in (sdk_tokens, http_tokens)]
        time.sleep(0.3)
        done = pool.submit(upgrade, engine, "--max-num-seqs", "16", python=python)
        for stream in running:
            assert stream.result() == right_tokens(3, LONG)
        assert done.result().returncode in (0, 1)
        assert engine._launcher is not None and engine._launcher.wait(30) == 0


@pytest.mark.slow
def test_further_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with short_dir() as base, slow_engine(base, port=port) as engine:
        flags = ["--gateways", "3"]
        done = under_streams(engine, *flags, "--upgrade-fault", "loading=gateway-0")
        assert done.returncode == 1, done.stderr
        for number in range(12):  # nobody else listens
            assert http_tokens(engine, number, 3) == right_tokens(number, 3)
        done = under_streams(engine, *flags)
        assert done.returncode == 0, done.stderr
        engine.client.wait_ready(60.0)
        for number in range(12):
            assert http_tokens(engine, number, 3) == right_tokens(number, 3)
        served = [each.gauges["http_requests"] for each in engine.client.status().actors
                  if each.role.startswith("gateway-")]
        assert len(served) == 3
        done = under_streams(engine, "--max-num-seqs", "16")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["preparing", "ending", "loading"])
@pytest.mark.slow
def test_the_launcher_is_killed_meanwhile(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The engine ends with it, as at any time. The next one goes on with what the ledger has."""
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    with short_dir() as base:
        ledger = str(base / "kept")
        with slow_engine(base, ledger_dir=ledger) as engine, ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(sdk_tokens, engine, number, LONG) for number in range(3)]
            time.sleep(0.5)
            done = upgrade(engine, "--upgrade-fault", step)
            assert done.returncode == 1 and "has ended during the upgrade" in done.stderr
            for stream in streams:
                with pytest.raises(EngineUnavailable):
                    stream.result()
        with slow_engine(base, ledger_dir=ledger) as engine:
            assert engine_gauge(engine, "resumed_sequences") == 3


def engine_gauge(engine: Engine, name: str) -> float:
    [scheduler] = [each for each in engine.client.status().actors if each.role == "scheduler"]
    return scheduler.gauges.get(name, 0.0)
