"""Peers that are slow, silent, many or deaf."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack
from typing import Any

import pytest
from helpers_network import (
    BODY,
    CHUNKED,
    COMPLETION,
    FAIR,
    HOST,
    LONG,
    MAX_PEERS,
    SEND,
    VERSION,
    ask,
    completion,
    crowd,
    descriptors,
    eventually,
    open_to,
    pid_of,
    resident,
    unharmed,
)
from helpers_served import Served

from actorium.actors.watchdog import probe_server as probes

# --- peers that are slow, silent, many ------------------------------------------------------------

BEGINNINGS = {"silent": b"", "line": b"GET /vers", "head": VERSION + b"X: y",
              "body": COMPLETION + b"Content-Length: 100\r\n\r\n{",
              "chunk": COMPLETION + CHUNKED + b"f\r\n{",
              "empty lines": VERSION + b"\r\n", "unread": VERSION + b"\r\n" + COMPLETION.replace(
                  b"/v1/completions", b"/nowhere") + b"Content-Length: 1000000\r\n\r\n"}


@pytest.mark.mended("a connection that trickled empty lines, or a body that nobody read, after an "
                    "answer was kept for ever: uvicorn's time for idle ones ends with a byte")
def test_who_never_finishes_is_cut_off(served: Served, tried: Any, amount: Any) -> None:
    """A byte now and then changes nothing."""
    count = amount(5, 150)
    tried(count * len(BEGINNINGS))
    told = dict.fromkeys(BEGINNINGS, b"")
    with unharmed(served), ExitStack() as stack:
        peers = {sock: kind for kind, first in BEGINNINGS.items()
                 for sock in stack.enter_context(crowd(served, count, first))}
        until = time.monotonic() + FAIR
        while peers:
            assert time.monotonic() < until, set(peers.values())
            for sock, kind in list(peers.items()):
                sock.setblocking(False)
                try:
                    if kind != "silent":
                        sock.send(b"\r\n" if kind == "empty lines" else b" ")
                    part = sock.recv(4096)
                    told[kind] += part
                    if not part or (kind in ("body", "chunk") and b" 408 " in part):
                        del peers[sock]  # after a body that was late it may be of use again
                except BlockingIOError:
                    pass
                except OSError:
                    del peers[sock]
            time.sleep(0.1)
    for kind in ("line", "head", "body", "chunk"):
        assert told[kind].count(b" 408 ") == count, kind


@pytest.mark.mended("connections that said nothing filled the limit, and new callers were refused")
def test_more_idle_connections_than_there_may_be(served: Served, tried: Any, amount: Any) -> None:
    """2,000 are held; past the limit those that are idle longest make room."""
    for count in (amount(MAX_PEERS + 100, 2000), *((MAX_PEERS + 1000,) if amount(0, 1) else ())):
        tried(count)
        gateway = pid_of(served)
        with unharmed(served), crowd(served, count):
            for _ in range(20):
                assert ask(served, "/v1/completions", BODY).status == 200
            assert descriptors(gateway) < MAX_PEERS + 200
            eventually(lambda gateway=gateway: descriptors(gateway) < 150)  # idle ones are closed


@pytest.mark.mended("512 silent connections to the probes' port, and every probe answered 503")
def test_probes_answer_beside_a_silent_crowd(served: Served, probe_port: int, tried: Any) -> None:
    tried(probes.MAX_CONNECTIONS + 50)
    with unharmed(served), crowd(served, probes.MAX_CONNECTIONS + 50, port=probe_port):
        for path in ("/livez", "/metrics"):
            assert ask(served, path, port=probe_port).status == 200
            assert ask(served, path).status == 200  # over the unix socket, in the same server


# --- readers --------------------------------------------------------------------------------------

@pytest.mark.mended("who did not read its answers was kept for ever, answers and all")
def test_who_does_not_read_is_cut_off(served: Served, tried: Any, amount: Any) -> None:
    """Half of them read a byte now and then."""
    tried(count := amount(6, 80))
    asked = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
    with unharmed(served), ExitStack() as stack:
        socks = [stack.enter_context(open_to(served, receive=4096)) for _ in range(count)]
        slow = set(socks[::2])
        for sock in socks:
            sock.sendall(asked * 400)

        def ended(sock: socket.socket) -> bool:
            try:
                return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) or (
                    sock in slow and sock.recv(1) == b"")
            except OSError:
                return True

        time.sleep(SEND / 2)
        assert not any(ended(sock) for sock in socks)
        until = time.monotonic() + FAIR
        while socks := [sock for sock in socks if not ended(sock)]:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_streams_that_nobody_reads_stay_small(served: Served, tried: Any, amount: Any) -> None:
    tried(count := amount(4, 24))
    gateway = pid_of(served)
    with unharmed(served):
        memory = resident(gateway)
        socks = [open_to(served, receive=4096) for _ in range(count)]
        for sock in socks:
            sock.sendall(completion(LONG | {"stream": True, "n": 4}))
        for _ in range(10):
            time.sleep(0.1)
            assert resident(gateway) - memory < 24 << 20
        for sock in socks:  # a reset, with what was not read
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
