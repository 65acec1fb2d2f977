"""A cluster of machines: network namespaces stand for them, each with a wire of its own to the
head. Streams go on when a node's wire is cut, and when a node dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_cli import Cli, cli, eventually
from helpers_keys import free_ports

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

__all__ = ["cli"]
PORT = free_ports()
FILE = f"""
name = "c"
listen = "tcp://0.0.0.0:{PORT}"
[nodes.a]
replicas = 1
[nodes.b]
replicas = 1
[flags]
null_worker = true
skip_tokenizer = true
device = "cpu"
http = false
"""
pytestmark = [pytest.mark.slow]


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Machine:
    """A network namespace with a wire to this one."""

    def __init__(self, number: int) -> None:
        self.name = f"act{uuid.uuid4().hex[:6]}"
        self.wire, self.head = f"v{self.name}", f"10.213.{number}.1"
        sh("ip", "netns", "add", self.name)
        sh("ip", "link", "add", self.wire, "type", "veth", "peer", "name", "eth0", "netns",
           self.name)
        sh("ip", "addr", "add", f"{self.head}/24", "dev", self.wire)
        self.cut(False)
        self.inside("ip", "addr", "add", f"10.213.{number}.2/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")

    def inside(self, *words: str) -> None:
        sh(*self.argv(*words))

    def argv(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self, off: bool) -> None:
        sh("ip", "link", "set", self.wire, "down" if off else "up")

    def remove(self) -> None:
        sh("ip", "link", "del", self.wire)
        sh("ip", "netns", "del", self.name)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made: dict[str, Machine] = {}
    try:
        for number, name in zip(random.sample(range(256), 2), "ab", strict=True):
            made[name] = Machine(number)  # the suite may run twice at the same time
    except subprocess.CalledProcessError as error:
        for machine in made.values():
            machine.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        for machine in made.values():
            machine.remove()


@contextlib.contextmanager
def node(cli: Cli, machine: Machine, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of a machine, with a run directory of its own."""
    base = Path(cli.run_dir) / f"on-{name}"
    argv = cli.argv("cluster", "join", f"tcp://{machine.head}:{PORT}", "--name", "c", "--key",
                    f"{cli.run_dir}/files/keys/{name}.key", *words)
    with open(Path(cli.run_dir) / "files" / f"{name}.log", "ab") as log:
        process = subprocess.Popen(machine.argv(*argv), stderr=log,
                                   env=cli.env | {"ACTORIUM_RUN_DIR": str(base)})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) in (0, -signal.SIGKILL)
        finally:
            process.kill()


@contextlib.contextmanager
def head(cli: Cli) -> Iterator[Cli]:
    """The head; what it makes lies apart from the run directories."""
    files = Path(cli.run_dir) / "files"
    files.mkdir(parents=True)
    (files / "c.toml").write_text(FILE)
    own = Cli(f"{cli.run_dir}/head")
    with open(files / "head.log", "wb") as log:
        process = subprocess.Popen(own.argv("cluster", "up", str(files / "c.toml")),
                                   stdin=subprocess.DEVNULL, stderr=log, env=own.env)
    try:
        assert eventually(lambda: (files / "keys" / "b.key").exists(), 30)
        yield own
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0, (files / "head.log").read_text()
        finally:
            process.kill()


def phases(own: Cli) -> dict[str, str]:
    """Of the replicas, by node; empty while the cluster is not there."""
    done = own.run("cluster", "status", "c", "--json")
    if done.returncode:
        return {}
    return {row["node"]: row["phase"] for row in json.loads(done.stdout)["replicas"]}


def streams(own: Cli, then: Callable[[], Any], count: int = 6, tokens: int = 3000) -> None:
    """Streams of which `then` is called when all are under way; none misses a token, or has one
    twice."""
    found: list[list[int]] = [[] for _ in range(count)]

    def follow(number: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
        with Client("c", own.run_dir, resume_timeout=60.0) as client:
            for delta in client.stream([1 + number, 2, 3], params):
                found[number].extend(delta.token_ids)

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: all(len(tokens) > 100 for tokens in found), 60)
    before = [len(tokens) for tokens in found]
    then()
    for thread in threads:
        thread.join(120)
    assert max(before) < tokens
    assert found == [[null_worker.next_token(choice_seed(number, 0), position, null_worker.VOCAB)
                      for position in range(3, 3 + tokens)] for number in range(count)]


def test_a_wire_is_cut_and_a_node_dies(cli: Cli, machines: dict[str, Machine]) -> None:
    both = {"a": "ready", "b": "ready"}
    with head(cli) as own, node(cli, machines["a"], "a"), \
            node(cli, machines["b"], "b") as dying:
        assert eventually(lambda: phases(own) == both, 60)
        streams(own, lambda: machines["b"].cut(True))
        assert phases(own) == both | {"b": "silent"}
        machines["b"].cut(False)
        assert eventually(lambda: phases(own) == both, 30)
        streams(own, dying.kill)
        assert eventually(lambda: phases(own) == both | {"b": "silent"}, 10)
        with node(cli, machines["b"], "b"):
            assert eventually(lambda: phases(own) == both, 60)
            streams(own, lambda: None, tokens=500)
    assert [path.name for path in Path(cli.run_dir).iterdir() if path.name != "files"
            and any(path.iterdir())] == []


def test_nobody_joins_without_a_key(cli: Cli, machines: dict[str, Machine]) -> None:
    """One with a key that the head has not made is not even answered."""
    from actorium.actors.runtime.security import curve_keys

    with head(cli) as own, node(cli, machines["a"], "a"):
        assert eventually(lambda: phases(own).get("a") == "ready", 60)
        keys = Path(cli.run_dir) / "files" / "keys"
        server = curve_keys.read_pair(keys / "server.key").public
        curve_keys.revoke(keys, "b")
        (keys / "b.key").unlink()
        curve_keys.make_client(keys, "b", keys / "b.key", server)
        with node(cli, machines["b"], "b"):
            log = Path(own.run_dir) / "c" / "nodes.log"
            assert eventually(lambda: b"its key is not known" in log.read_bytes(), 30)
            assert phases(own) == {"a": "ready", "b": "starting"}


def test_nobody_joins_as_another(cli: Cli, machines: dict[str, Machine]) -> None:
    """Not even with a generation that would take the other's place."""
    with head(cli) as own, node(cli, machines["a"], "a"):
        assert eventually(lambda: phases(own).get("a") == "ready", 60)
        with node(cli, machines["b"], "b", "--node", "a", "--generation", "7") as other:
            words = b"it has the key of 'b' and calls itself 'a'"
            for log in (Path(own.run_dir) / "c" / "nodes.log", Path(cli.run_dir) / "files/b.log"):
                assert eventually(lambda log=log: words in log.read_bytes(), 30)
            assert other.poll() is None and phases(own) == {"a": "ready", "b": "starting"}
            streams(own, lambda: None)
        with node(cli, machines["b"], "b"):
            assert eventually(lambda: phases(own) == {"a": "ready", "b": "ready"}, 60)


def test_a_join_that_cannot_be(cli: Cli) -> None:
    for words, why in ((("tcp://h:1",), b"--key is missing"), ((), b"HEAD is missing"),
                       (("tcp://h:1", "--key", "/nowhere"), b"cannot read"),
                       (("tcp://h:1", "--key", "k", "--dtype", "float32"), b"is the head's to say"),
                       (("tcp://h:1", "--key", "k", "--node", "a/b"), b"--node: 'a/b' is no name"),
                       (("h", "--key", "k"), b"HEAD: must be")):
        done = cli.run("cluster", "join", *words)
        assert done.returncode == 2 and why in done.stderr, done.stderr
