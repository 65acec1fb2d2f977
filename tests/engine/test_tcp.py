"""An engine that listens on tcp: who gets in, and what strangers can do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers_keys import free_ports, key_dir
from helpers_runtime import short_dir

from actorium.actors.client import target as client_target
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.errors import BadConfig, EngineFailed, EngineUnavailable
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import (
    Attach,
    Attached,
    FromDetokenizerFront,
    FromTokenizerFront,
    FromWatchdogFront,
    GetStatus,
    Info,
    ServerInfo,
    Status,
)
from actorium.actors.runtime.security import curve_keys as keys

PROMPT, PARAMS = list(range(1, 40)), SamplingParams(max_tokens=12, seed=3)
NULL: dict[str, Any] = {"null_worker": True, "skip_tokenizer": True, "drain_timeout": 5.0,
                        "crash_reports": False}


class Tcp:
    """An engine on tcp, and its keys."""

    def __init__(self, base: Path, **config: Any) -> None:
        self.base = base
        self.port = free_ports()
        self.target = f"tcp://127.0.0.1:{self.port}"
        self.keys = key_dir(base, "ann", "gone")
        self.engine = Engine(run_dir=str(base), listen=self.target, keys_dir=str(self.keys),
                             **(NULL | config))

    def client(self, name: str = "ann") -> Client:
        return Client(self.target, key=self.base / f"{name}.key")


@pytest.fixture(scope="module")
def tcp() -> Iterator[Tcp]:
    with short_dir() as base:
        made = Tcp(base)
        with made.engine:
            yield made


@pytest.fixture(scope="module")
def revived() -> Iterator[Tcp]:
    """One whose actors are started again."""
    with short_dir() as base:
        made = Tcp(base, restart=True)
        with made.engine:
            yield made


def stranger(tcp: Tcp, name: str, server: str | None = None) -> Path:
    """The key file of somebody who is not let in."""
    path = tcp.base / f"{name}.key"
    keys.make_client(tcp.keys, name, path, server or keys.read_server(tcp.keys).public)
    return path


def dealer(context: zmq.Context[Any], pair: keys.KeyPair | None = None) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.ROUTING_ID, os.urandom(8).hex().encode())
    if pair is not None:
        made.setsockopt(zmq.CURVE_SERVERKEY, pair.server.encode())
        made.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    return made


def test_the_right_key_works_from_end_to_end(tcp: Tcp) -> None:
    expected = tcp.engine.client.generate(PROMPT, PARAMS)
    with tcp.client() as client:
        client.wait_ready(30)
        assert client.generate(PROMPT, PARAMS).token_ids == expected.token_ids
        streamed = [t for delta in client.stream(PROMPT, PARAMS) for t in delta.token_ids]
        assert streamed == expected.token_ids
        assert client.server_info()["memory"] and client.status().ready


def test_many_at_once_and_asyncio(tcp: Tcp) -> None:
    expected = tcp.engine.client.generate(PROMPT, PARAMS).token_ids

    async def run() -> list[list[int]]:
        async with AsyncClient(tcp.target, key=tcp.base / "ann.key") as client:
            found = await asyncio.gather(*(client.generate(PROMPT, PARAMS) for _ in range(40)))
            return [completion.token_ids for completion in found]

    assert asyncio.run(run()) == [expected] * 40


def test_an_unknown_key_is_refused_with_an_error(tcp: Tcp) -> None:
    path = stranger(tcp, "stranger")
    with Client(tcp.target, key=path) as client:
        with pytest.raises(EngineUnavailable, match="refuses this key"):
            client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineUnavailable, match="refuses this key"):
            client.wait_ready(20)
        keys.authorise(tcp.keys, "stranger", keys.read_pair(path).public)
        assert client.generate(PROMPT, PARAMS).token_ids, "let in without a restart"


def test_the_async_client_raises_a_refusal(tcp: Tcp) -> None:
    async def run() -> None:
        async with AsyncClient(tcp.target, key=stranger(tcp, "stranger2")) as client:
            await client.generate(PROMPT, PARAMS)

    with pytest.raises(EngineUnavailable, match="refuses this key"):
        asyncio.run(run())


def test_a_revoked_key_is_refused(tcp: Tcp) -> None:
    with tcp.client("gone") as client:
        assert client.generate(PROMPT, PARAMS).token_ids
    keys.revoke(tcp.keys, "gone")
    with tcp.client("gone") as client, pytest.raises(EngineUnavailable, match="refuses this key"):
        client.generate(PROMPT, PARAMS)


def test_a_server_with_another_key_is_not_talked_to(tcp: Tcp) -> None:
    path = stranger(tcp, "misled", keys.make_server(tcp.base / "other").public)
    with Client(tcp.target, key=path) as client, pytest.raises(EngineUnavailable, match="refuses"):
        client.generate(PROMPT, PARAMS)


@pytest.mark.parametrize("role", [0, 1, 2])
def test_every_front_refuses_clients_without_a_key(tcp: Tcp, role: int) -> None:
    """NULL and PLAIN mechanisms, and a CURVE key that is not let in, at each of the ports; beside
    them, one that is."""
    message, union = ((ServerInfo("x"), FromTokenizerFront), (Attach(), FromDetokenizerFront),
                      (GetStatus("x"), FromWatchdogFront))[role]
    good = keys.read_pair(tcp.base / "ann.key")
    public, secret = zmq.curve_keypair()
    bad = keys.KeyPair(public.decode(), secret.decode(), good.server)
    context = zmq.Context()
    try:
        refused = [dealer(context), dealer(context), dealer(context, bad)]
        refused[1].setsockopt(zmq.PLAIN_USERNAME, b"ann")
        refused[1].setsockopt(zmq.PLAIN_PASSWORD, good.secret.encode())
        for made in (*refused, let_in := dealer(context, good)):
            made.connect(f"tcp://127.0.0.1:{tcp.port + role}")
            # A socket that is refused before it sends has no peer, and would wait for one for ever.
            with contextlib.suppress(zmq.Again):
                made.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        assert let_in.poll(20_000)
        answer = msgspec.msgpack.decode(let_in.recv(), type=union)
        assert type(answer) in (Info, Attached, Status)
        assert [made.poll(150) for made in refused] == [0, 0, 0]
    finally:
        context.destroy(linger=0)  # waits for no socket, so that a failure is not a hang


def test_garbage_harms_no_client(tcp: Tcp) -> None:
    """Bytes that are no ZMTP, half a greeting, and bad frames behind a good key."""
    dice = random.Random(5)
    before = {actor.role: actor.pid for actor in tcp.engine.client.status().actors}
    with tcp.client() as client:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=400, seed=1))
        first = next(stream)
        for port in range(tcp.port, tcp.port + 3):
            for _ in range(40):
                _throw(port, dice)
        with zmq.Context() as context:
            made = [dealer(context, keys.read_pair(tcp.base / "ann.key")) for _ in range(3)]
            for role, one in enumerate(made):
                one.connect(f"tcp://127.0.0.1:{tcp.port + role}")
                for _ in range(300):
                    one.send(dice.randbytes(dice.randrange(200)))
                one.send_multipart([b"\x91" * 50, b"", dice.randbytes(30)])
            for one in made:
                one.setsockopt(zmq.LINGER, 2000)
                one.close()
        tokens = first.token_ids + [t for delta in stream for t in delta.token_ids]
    expected = tcp.engine.client.generate(PROMPT, SamplingParams(max_tokens=400, seed=1))
    assert tokens == expected.token_ids
    assert {a.role: a.pid for a in tcp.engine.client.status().actors} == before


def _throw(port: int, dice: random.Random) -> None:
    """Some bytes, at times behind a greeting that looks right."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + dice.choice([b"NULL", b"CURVE", b"PLAIN"])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as made:
        made.sendall(dice.choice([b"", greeting, greeting.ljust(64, b"\0"), b"GET / HTTP/1.1\r\n"])
                     + dice.randbytes(dice.randrange(1, 300)))


def test_ipc_works_beside_it(tcp: Tcp) -> None:
    assert len(tcp.engine.client.generate(PROMPT, PARAMS).token_ids) == 12


@pytest.mark.parametrize("role", [
    "detokenizer", *(pytest.param(rarer, marks=pytest.mark.slow)
                     for rarer in ("tokenizer", "scheduler"))])
def test_a_stream_over_tcp_outlives_an_actor(revived: Tcp, role: str) -> None:
    """The next incarnation has the same port, and asks for the same keys."""
    params = SamplingParams(max_tokens=1500, seed=2, ignore_eos=True)
    expected = revived.engine.client.generate(PROMPT, params).token_ids
    with revived.client() as client:
        stream = client.stream(PROMPT, params)
        tokens = next(stream).token_ids
        actors = {a.role: a for a in revived.engine.client.status().actors}
        os.kill(actors[role].pid, signal.SIGKILL)
        tokens = tokens + [t for delta in stream for t in delta.token_ids]
        assert tokens == expected
        assert client.generate(PROMPT, params).token_ids == expected
        now = {a.role: a for a in revived.engine.client.status().actors}
        assert now[role].epoch == actors[role].epoch + 1
    path = stranger(revived, f"stranger-{role}")
    with Client(revived.target, key=path) as client, pytest.raises(EngineUnavailable):
        client.generate(PROMPT, PARAMS)


def test_a_missing_engine_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_target, "PATIENCE", 0.3)
    key_dir(tmp_path, "ann")
    target = f"tcp://127.0.0.1:{free_ports()}"
    with (Client(target, key=tmp_path / "ann.key") as client,
          pytest.raises(EngineUnavailable, match=f"no engine answers at {target}")):
        client.generate(PROMPT, PARAMS)


def test_a_client_needs_a_key_and_an_address(tmp_path: Path) -> None:
    key_dir(tmp_path, "ann")
    with pytest.raises(BadConfig, match="needs a key"):
        Client("tcp://127.0.0.1:5000")
    with pytest.raises(BadConfig, match="is a server's key"):
        Client("tcp://127.0.0.1:5000", key=tmp_path / "keys" / keys.SERVER_KEY)
    with pytest.raises(BadConfig, match="cannot read"):
        Client("tcp://127.0.0.1:5000", key=tmp_path / "none.key")
    with pytest.raises(EngineUnavailable, match="must be tcp://HOST:PORT"):
        Client("tcp://nowhere", key=tmp_path / "ann.key")


def test_a_port_in_use_is_one_line() -> None:
    with short_dir() as base, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises((BadConfig, EngineFailed), match="cannot bind tcp://"):
            Engine(run_dir=str(base), listen=f"tcp://127.0.0.1:{port}",
                   keys_dir=str(key_dir(base)), **NULL)
