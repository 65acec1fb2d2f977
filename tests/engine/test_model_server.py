"""A server of several models in whole processes: engines come, give way, fail, outlive the manager
and end with the server. Their workers compute nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers_adapter_files import adapter_tensors, write_adapter
from helpers_cli import NULL, Cli, alive, cli, eventually
from helpers_configs import SMALL
from helpers_runtime import Peer
from helpers_speed import slowness

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.errors import EngineUnavailable
from actorium.actors.model_manager.manager_messages import (
    FromManagerFront,
    KeepUses,
    ListModels,
    ModelUse,
    ReleaseModel,
    ServedModelInfo,
    UseModel,
    UseProgress,
    UseReady,
    UseRefused,
)
from actorium.actors.model_manager.model_record import FIRST_RETRY, MAX_DEATHS
from actorium.actors.runtime.process import processes_of_session
from actorium.actors.runtime.rundir import is_running

__all__ = ["cli"]

LLAMA = {"architectures": ["LlamaForCausalLM"], **SMALL, "max_position_embeddings": 4096}


def write_model(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(LLAMA))


class Gateway(Peer):
    """A client of the manager, which keeps its uses."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, "manager", FromManagerFront)
        self.uses: dict[str, ModelUse] = {}

    def use(self, id: str, name: str, keep_alive: float | None = None) -> UseReady | UseRefused:
        self.uses[id] = ModelUse(id, name, keep_alive)
        self.send(UseModel(self.uses[id]))
        return self.answer(id)

    def answer(self, id: str) -> UseReady | UseRefused:
        """What the manager says of a use in the end."""
        until = time.monotonic() + 60 * slowness()
        while time.monotonic() < until:
            self.send(KeepUses(list(self.uses.values())))
            while self.socket.poll(500):
                message = self.receive()
                if not isinstance(message, UseProgress) and message.id == id:
                    if isinstance(message, UseRefused):
                        del self.uses[id]
                    return message
        raise AssertionError(f"no answer for {id}")

    def release(self, id: str) -> None:
        del self.uses[id]
        self.send(ReleaseModel(id))

    def models(self) -> dict[str, ServedModelInfo]:
        self.send(ListModels("list"))
        while not hasattr(message := self.receive(), "models"):
            pass
        return {model.name: model for model in message.models}


def tokens_of(ready: UseReady | UseRefused) -> list[int]:
    assert isinstance(ready, UseReady), ready
    with Client(ready.run_dir) as client:
        answer = client.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True, seed=3))
    return list(answer.token_ids)


@contextmanager
def server(cli: Cli, folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Returns its launcher, and its run directory."""
    flags = ["--models-dir", str(folder), "--name", "s", *NULL, "--kv-cache-bytes", "1m", *words]
    with cli.serve(*flags) as process:
        yield process, Path(cli.run_dir) / "s"


def pid_of(run_dir: Path) -> int:
    """Of an engine's launcher."""
    return int(json.loads((run_dir / "engine.json").read_text())["pid"])


def test_engines_come_give_way_fail_and_end_with_the_server(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    with server(cli, tmp_path, "--models-max", "1") as (process, run_dir), Gateway(run_dir) as peer:
        a = peer.use("1", "a:latest")
        tokens = tokens_of(a)
        peer.release("1")
        write_model(tmp_path, "b")  # seen without a restart
        b = peer.use("2", "b")
        assert tokens_of(b) == tokens != []
        assert isinstance(a, UseReady) and isinstance(b, UseReady)
        assert not is_running(Path(a.run_dir)) and is_running(Path(b.run_dir))
        shown = peer.models()
        assert [(shown[name].state, shown[name].in_use) for name in "ab"] == [
            ("unloaded", 0), ("ready", 1)]
        assert shown["b"].memory > 1 << 20 and shown["b"].architecture == "LlamaForCausalLM"
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
        refused = peer.use("3", "bad")
        assert isinstance(refused, UseRefused) and refused.code == "model_failed"
        assert "NoSuchModel" in refused.message
        pid = pid_of(Path(b.run_dir))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60 * slowness()) == 0
    assert not alive(pid) and cli.entries() == []


def test_engines_outlive_the_manager_and_no_server(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    with server(cli, tmp_path, "--keep-alive", "0") as (process, run_dir), Gateway(run_dir) as peer:
        ready = peer.use("1", "a")
        assert isinstance(ready, UseReady)
        engine = Path(ready.run_dir)
        pid = pid_of(engine)
        os.kill(manager_pid(cli), signal.SIGKILL)
        assert eventually(lambda: manager_pid(cli, epoch=2) > 0, 20 * slowness())
        assert peer.answer("1") == ready, "the client's list is all that the new manager has"
        assert len(tokens_of(ready)) == 5
        with (pytest.raises(EngineUnavailable, match="s.MODEL"),
              Client(run_dir) as client):
            client.generate([1])
        assert pid_of(engine) == pid and peer.models()["a"].in_use == 1
        assert peer.models()["a"].memory > 0
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: not alive(pid), 20 * slowness())
        process.wait(10 * slowness())
    shutil.rmtree(run_dir, ignore_errors=True)
    assert cli.entries() == []


def manager_pid(cli: Cli, epoch: int = 1) -> int:
    """0 = not there, or not ready."""
    rows: list[dict[str, Any]] = [row for row in cli.actors() if row["role"] == "manager"]
    return next((int(row["pid"]) for row in rows
                 if row["epoch"] == epoch and row["phase"] == "ready"), 0)


BODY = {"model": "a", "prompt": [1, 2], "max_tokens": 2500, "ignore_eos": True, "temperature": 1.0,
        "return_token_ids": True}


class Asking(Thread):
    """Somebody who asks for a completion over HTTP, as a stream or whole."""

    def __init__(self, port: int, **more: Any) -> None:
        super().__init__(daemon=True)
        self._port, self._body = port, BODY | more
        self.tokens: list[int] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60 * slowness())
        with closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(self._body),
                               {"Content-Type": "application/json"})
            answer = connection.getresponse()
            lines = answer if self._body.get("stream") else [b"data: " + answer.read()]
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                data = json.loads(line.removeprefix(b"data: "))
                self.error = self.error or data.get("error", {}).get("message", "")
                for choice in data.get("choices", ()):
                    self.tokens += choice["token_ids"] or ()

    def answer(self) -> list[int]:
        self.join(60 * slowness())
        assert not self.is_alive() and not self.error, self.error
        return self.tokens


def port_of(run_dir: Path) -> int:
    port: int = json.loads((run_dir / "gateway.json").read_text())["port"]
    return port


def kill_engine(run_dir: Path, actors: bool) -> None:
    """Kills its launcher, or all of its processes at once."""
    pid = pid_of(run_dir)
    for victim in [pid, *processes_of_session(pid)] if actors else [pid]:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def test_nothing_is_lost_with_a_whole_engine(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    with server(cli, tmp_path, "--port", "0", "--models-max", "1") as (process, run_dir):
        port, engine = port_of(run_dir), Path(cli.run_dir) / "s.a"
        expected = Asking(port, seed=1).answer(), Asking(port, seed=2).answer()
        assert len(expected[0]) == 2500 and expected[0] != expected[1]
        for actors in (False, True):
            streams = [Asking(port, seed=seed, stream=True) for seed in (1, 2)]
            whole = Asking(port, seed=1)
            assert eventually(lambda: all(len(one.tokens) > 100 for one in streams),  # noqa: B023
                              20 * slowness())
            pid = pid_of(engine)
            kill_engine(engine, actors)
            late = Asking(port, seed=2)
            assert max(len(one.tokens) for one in streams) < 2500, "in mid-stream"
            assert [one.answer() for one in (*streams, whole, late)] == [*expected, *expected]
            assert pid_of(engine) != pid and processes_of_session(pid) == []
        kill_engine(engine, True)
        assert eventually(lambda: not is_running(engine))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60 * slowness()) == 0
    assert cli.entries() == ["s.a"], "what an engine leaves that nobody wanted any more"


def test_each_model_has_adapters_of_its_own(cli: Cli, tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    adapter = write_adapter(tmp_path / "lora", adapter_tensors())
    (tmp_path / "models.toml").write_text(
        f'[a]\nmodel = "a"\nenable_lora = true\nlora_modules = ["own={adapter}"]\n'
        '[b]\nmodel = "a"\n')
    with server(cli, tmp_path, "--models", str(tmp_path / "models.toml"), "--port", "0") as (
            _, run_dir):
        asked = [Asking(port_of(run_dir), model=model, seed=1, max_tokens=8, **more)
                 for model, more in (("a", {}), ("a", {"lora_path": "own"}), ("b", {}))]
        base, adapted, other = (own.answer() for own in asked)
        assert base == other != adapted, "the null worker's depend on the adapter alone"
        for model, lora, why in (("a", "other", "'other' is not served"),
                                 ("b", "own", "--enable-lora")):
            wrong = Asking(port_of(run_dir), model=model, lora_path=lora)
            wrong.join(60 * slowness())
            assert why in wrong.error and not wrong.tokens, wrong.error


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again_fails_its_requests(cli: Cli, tmp_path: Path
                                                                      ) -> None:
    write_model(tmp_path, "a")
    with server(cli, tmp_path, "--port", "0") as (_, run_dir):
        port, engine = port_of(run_dir), Path(cli.run_dir) / "s.a"
        stream = Asking(port, stream=True, max_tokens=4000)
        for deaths in range(MAX_DEATHS):
            before = len(stream.tokens)
            assert eventually(lambda: len(stream.tokens) > before + 50, 30 * slowness())  # noqa: B023
            assert not stream.error, deaths
            kill_engine(engine, False)
        stream.join(30 * slowness())
        assert "the engine of a has ended: its launcher was killed by SIGKILL" in stream.error
        time.sleep(FIRST_RETRY)
        assert len(Asking(port).answer()) == 2500


@pytest.mark.slow
def test_a_model_that_comes_back_gives_the_same_tokens(cli: Cli, tmp_path: Path) -> None:
    """With real workers: three checkpoints take turns where there may be one engine."""
    from helpers_models import write_checkpoint  # which imports torch

    for seed in range(3):
        write_checkpoint(tmp_path / f"m{seed}", seed=seed)
    flags = ("--models-dir", str(tmp_path), "--name", "s", "--skip-tokenizer", "--device", "cpu",
             "--kv-cache-bytes", "64m", "--models-max", "1")
    tokens: dict[int, list[int]] = {}
    with cli.serve(*flags), Gateway(Path(cli.run_dir) / "s") as peer:
        for seed in (0, 1, 2, 0):
            answer = tokens_of(peer.use("use", f"m{seed}"))
            assert tokens.setdefault(seed, answer) == answer
            peer.release("use")
            states = [model.state for model in peer.models().values()]
            assert states.count("ready") == 1
    assert len({tuple(answer) for answer in tokens.values()}) == 3
