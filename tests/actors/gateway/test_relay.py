"""The relay, in this process: what callers do to it, and what gateways get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from helpers_certificates import Authority
from helpers_runtime import short_dir

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.gateway import relay as module
from actorium.actors.gateway.relay import RelayCore, build
from actorium.actors.runtime.http import listening
from actorium.actors.runtime.http.listening import Origin


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    for name in ("server", "second", "caller"):
        authority.sign(name)
    return authority


class Running:
    """A relay, and the socket of the only gateway behind it."""

    def __init__(self, core: RelayCore, run_dir: Path, calls: socket.socket,
                 authority: Authority) -> None:
        self.core, self.run_dir, self._calls, self._authority = core, run_dir, calls, authority
        self.address = listening.read_address(run_dir / "gateway.json")

    def take(self) -> tuple[socket.socket, Origin]:
        """Returns a connection that was handed over, as a gateway gets it."""
        self._calls.settimeout(10)
        sock, origin = listening.accept(self._calls)
        listening.accepted(self._calls)
        assert origin is not None
        sock.settimeout(20)
        return sock, origin

    def connect(self) -> socket.socket:
        """Connects to the port, without TLS."""
        assert self.address is not None
        return socket.create_connection((self.address.host, self.address.port), 20)

    def call(self, certificate: str = "") -> ssl.SSLSocket:
        """Connects by TLS; certificate: the caller's own."""
        context = ssl.create_default_context(cafile=self._authority.file)
        if certificate:
            folder = self._authority.folder
            context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
        return context.wrap_socket(self.connect(), server_hostname="localhost")

    def pair(self) -> tuple[ssl.SSLSocket, socket.socket]:
        """Returns both ends of a connection through the relay."""
        caller = self.call()
        return caller, self.take()[0]


def run(authority: Authority, scenario: Callable[[Running], object], **settings: Any) -> None:
    """Runs a scenario, in a thread, beside a relay with TLS (or with these settings)."""
    folder = authority.folder
    files = {"port": 0, "ssl_certfile": str(folder / "server.pem"),
             "ssl_keyfile": str(folder / "server.key")}
    with short_dir() as run_dir, contextlib.closing(
            listening.listen_for_calls(run_dir, "gateway-0")) as calls:
        if "uds" in settings:
            settings["uds"], files = str(run_dir / settings["uds"]), {}
        config = Config(gateway=GatewayConfig(**files | settings))
        core = build(Context(config, run_dir, "relay", 1, 0))

        async def main() -> None:
            loop = asyncio.get_running_loop()
            core.on_start(lambda call: loop.call_soon(call))
            try:
                async with asyncio.timeout(60):
                    await asyncio.to_thread(scenario, Running(core, run_dir, calls, authority))
            finally:
                core.drain(0.0)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())


@pytest.fixture(autouse=True)
def hang_ups() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def received(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(1 << 16)):
        data += part
    return data


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_bytes_pass_both_ways_with_the_caller_s_address(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        caller = relay.call()
        gateway, origin = relay.take()
        assert origin == Origin(caller.getsockname()[:2], caller.getpeername()[:2], "https",
                                origin.number)
        assert relay.address is not None and relay.address.url.startswith("https://127.0.0.1:")
        assert caller.selected_alpn_protocol() is None
        big = os.urandom(3_000_000)
        for source, target in ((caller, gateway), (gateway, caller)):
            thread = threading.Thread(target=source.sendall, args=(big,))
            thread.start()
            assert received(target, len(big)) == big
            thread.join()
        gateway.close()
        assert caller.recv(1) == b""
        caller.close()
        until(lambda: not relay.core.open)

    run(authority, scenario)


def test_a_caller_who_has_said_all_is_answered(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        caller.sendall(b"all")
        caller.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            caller.unwrap()  # a close_notify of its own, without waiting for the other one
        caller.settimeout(20)
        assert received(gateway, 100) == b"all"
        gateway.sendall(b"answer")
        assert received(caller, 6) == b"answer"
        gateway.close()
        with pytest.raises(ssl.SSLZeroReturnError):  # the end, and no cut
            caller.recv(1)

    run(authority, scenario)


def test_a_refusal_is_read_while_the_caller_still_sends(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        sent = threading.Thread(target=caller.sendall, args=(b"x" * 8_000_000,))
        sent.start()
        assert gateway.recv(1000)
        gateway.sendall(b"413")
        gateway.shutdown(socket.SHUT_WR)
        sent.join()  # it is read to no purpose, like a gateway would
        assert received(caller, 100) == b"413"
        caller.close()
        until(lambda: not relay.core.open)

    run(authority, scenario)


def test_the_end_of_either_side_is_the_other_s(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        caller.close()  # a reset
        with contextlib.suppress(ConnectionResetError):
            assert gateway.recv(1) == b""
        gateway.close()
        until(lambda: not relay.core.open)

        caller, gateway = relay.pair()
        gateway.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gateway.close()
        with contextlib.suppress(OSError):
            assert caller.recv(1) == b""
        until(lambda: not relay.core.open)

    run(authority, scenario)


def test_a_caller_who_leaves_nothing_behind_the_end_is_cut_off(
        authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVING_SECONDS", 0.2)
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.05)

    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        gateway.close()
        until(lambda: not relay.core.open)
        caller.close()

    run(authority, scenario)


def test_who_reads_nothing_is_waited_for_and_then_cut_off(
        authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.05)

    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        gateway.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 1 << 30:
                sent += gateway.send(b"x" * 65536)
        assert sent < 64 << 20  # the gateway feels that nobody reads
        other, its_gateway = relay.pair()
        its_gateway.sendall(b"others do not wait")
        assert received(other, 18) == b"others do not wait"
        until(lambda: len(relay.core.open) == 1)
        gateway.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert gateway.recv(1) == b""
        caller.close()

    run(authority, scenario, send_timeout=1.0)


def test_handshakes_that_never_end_keep_nobody_out(authority: Authority,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HANDSHAKES", 50)
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 2.0)
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.05)

    def scenario(relay: Running) -> None:
        idle = [relay.connect() for _ in range(200)]
        until(lambda: len(relay.core.handshakes) == 50)
        caller, gateway = relay.pair()
        caller.sendall(b"in")
        assert gateway.recv(10) == b"in"
        assert idle[0].recv(1) == b""  # the oldest gave way
        until(lambda: not relay.core.handshakes)
        with contextlib.suppress(ConnectionResetError):
            assert idle[-1].recv(1) == b""
        gateway.sendall(b"still there")
        assert caller.recv(100) == b"still there"
        assert relay.core.health().gauges["open_connections"] == 1
        for sock in idle:
            sock.close()

    run(authority, scenario)


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
                                          b"POST /v1/x HTTP/1.1\r\n" + b"x" * 3000])
def test_a_request_without_tls_is_answered_in_plain_words(authority: Authority,
                                                          request_line: bytes) -> None:
    def scenario(relay: Running) -> None:
        with relay.connect() as sock:
            sock.sendall(request_line)
            answer = received(sock, 1000)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"https://" in answer
        until(lambda: relay.core.health().gauges["refused_handshakes"] == 1)

    run(authority, scenario)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, b"SSH-2.0-x\r\n", b""])
def test_what_is_no_tls_is_dropped(authority: Authority, junk: bytes) -> None:
    def scenario(relay: Running) -> None:
        with relay.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            received(sock, 1000)
        until(lambda: not relay.core.handshakes)
        caller, gateway = relay.pair()
        caller.sendall(b"in")
        assert gateway.recv(10) == b"in"

    run(authority, scenario)


def test_callers_must_show_a_certificate_where_one_is_required(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        caller = relay.call()  # TLS 1.3 says so with the first answer
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            caller.recv(1)
        caller = relay.call("caller")
        gateway, _ = relay.take()
        gateway.sendall(b"welcome")
        assert caller.recv(100) == b"welcome"

    run(authority, scenario, ssl_ca_certs=str(authority.file), ssl_cert_reqs=2)


def subject(caller: ssl.SSLSocket) -> str:
    certificate: Any = caller.getpeercert()
    return str(certificate["subject"][0][0][1])


@pytest.mark.parametrize("by", ["signal", "refresh"])
def test_a_new_certificate_is_for_new_connections(authority: Authority, tmp_path: Path, by: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.05)
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"

    def install(name: str) -> None:
        for source, target in ((".key", key), (".pem", certificate)):
            new = tmp_path / "new"
            new.write_bytes((authority.folder / f"{name}{source}").read_bytes())
            os.replace(new, target)
        if by == "signal":
            os.kill(os.getpid(), signal.SIGHUP)

    def sees(relay: Running) -> str:
        with relay.call() as caller:
            relay.take()[0].close()
            return subject(caller)

    def scenario(relay: Running) -> None:
        caller, gateway = relay.pair()
        assert subject(caller) == "server"
        install("second")
        until(lambda: sees(relay) == "second")
        certificate.write_text("broken")
        if by == "signal":
            os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.3)
        assert sees(relay) == "second"
        gateway.sendall(b"still there")
        assert caller.recv(100) == b"still there"

    for suffix, target in ((".key", key), (".pem", certificate)):
        target.write_bytes((authority.folder / f"server{suffix}").read_bytes())
    run(authority, scenario, ssl_certfile=str(certificate), ssl_keyfile=str(key),
        ssl_refresh=by == "refresh")


def test_callers_wait_for_a_gateway(authority: Authority) -> None:
    """More of them than its socket has room for, and some that do not wait so long."""
    def scenario(relay: Running) -> None:
        callers = [relay.call() for _ in range(40)]
        for caller in callers[30:]:
            caller.close()
        for caller in callers[:30]:
            caller.sendall(b"one")
        taken = [relay.take()[0] for _ in range(40)]
        heard = sorted(sock.recv(3) for sock in taken)
        assert heard == [b""] * 10 + [b"one"] * 30

    run(authority, scenario)


# --- unix sockets ---

def test_http_over_a_unix_socket_has_no_tls_and_no_address(authority: Authority) -> None:
    def scenario(relay: Running) -> None:
        path = relay.run_dir / "http"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            gateway, origin = relay.take()
            assert origin == Origin(None, (str(path), None), "http", origin.number)
            caller.sendall(b"question")
            assert gateway.recv(100) == b"question"
            gateway.sendall(b"answer")
            assert caller.recv(100) == b"answer"
            gateway.shutdown(socket.SHUT_WR)
            assert caller.recv(1) == b""
        assert relay.address is None

    run(authority, scenario, uds="http")


def test_the_unix_socket_goes_with_the_relay(authority: Authority) -> None:
    paths: list[Path] = []
    run(authority, lambda relay: paths.append(relay.run_dir / "http"), uds="http")
    assert not paths[0].exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o007, 0o770), (0o077, 0o700)])
def test_who_may_connect_is_what_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with listening.listen_public(tmp_path / "s", umask, 1):
            assert (tmp_path / "s").stat().st_mode & 0o777 == mode
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_a_socket_that_nobody_listens_at_is_replaced(tmp_path: Path) -> None:
    listening.listen_public(tmp_path / "s", 0o077, 1).close()
    with listening.listen_public(tmp_path / "s", 0o077, 1), \
            socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "s"))


@pytest.mark.parametrize("there", ["file", "folder", "link", "listener", "datagrams"])
def test_nothing_else_is(tmp_path: Path, there: str) -> None:
    path = tmp_path / "s"
    with contextlib.ExitStack() as stack:
        if there == "file":
            path.write_text("precious")
        elif there == "folder":
            path.mkdir()
        elif there == "link":
            listening.listen_public(tmp_path / "real", 0o077, 1).close()
            path.symlink_to(tmp_path / "real")
        elif there == "listener":
            stack.enter_context(listening.listen_unix(path, 1))
        else:
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(str(path))
        before = path.lstat()
        with short_dir() as run_dir, pytest.raises(BadConfig, match="^uds: cannot listen at .*s: "):
            build(Context(Config(gateway=GatewayConfig(uds=str(path))), run_dir, "relay", 1, 0))
        assert os.path.samestat(path.lstat(), before)


@pytest.mark.parametrize("path", ["/no/such/folder/s", "/tmp/" + "x" * 120])
def test_a_path_that_cannot_be_is_named(path: str) -> None:
    with short_dir() as run_dir, pytest.raises(BadConfig, match="^uds: cannot listen at /"):
        build(Context(Config(gateway=GatewayConfig(uds=path)), run_dir, "relay", 1, 0))
