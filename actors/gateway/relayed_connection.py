"""One caller's connection at the relay, and the one to the gateway that serves it: bytes in both
directions. At most one piece waits in each, and while it does no more is read."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from contextlib import suppress
from typing import Protocol

from actorium.actors.runtime.http.listening import Origin

PIECE = 1 << 16
"""Bytes that are read at once."""
PIECES = 8
"""Pieces of one direction that are moved before other connections have their turn."""
MOST_DISCARDED = 256 << 20
"""Bytes that are read of a caller whose connection the gateway has ended: most of a body that is
too long, since many read nothing before all is sent."""
ROOM = 1 << 18
"""Bytes that wait in the kernel on the way from a gateway."""
CONNECT_SECONDS, TRIES = 1.0, 3
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel, too, drops what it holds."""
_NO_TLS = b"This port speaks HTTPS: ask for https:// in the place of http://.\n"
_PLAIN = (b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
          b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_NO_TLS), _NO_TLS))


class Relay(Protocol):
    """What a connection uses of the relay."""

    loop: asyncio.AbstractEventLoop
    deadlines: dict[RelayedConnection, float]
    draining: bool

    def hand_over(self, connection: RelayedConnection) -> None: ...
    def expect(self, connection: RelayedConnection) -> None: ...
    def forget(self, connection: RelayedConnection, refused: bool) -> None: ...


class Flow:
    """One direction."""

    __slots__ = ("blocked", "drained", "source", "source_ended", "target", "waiting")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting = b""
        """What was read, and is not written yet."""
        self.blocked = False
        """It waits for the target, and the source is not read."""
        self.drained = False
        """The source had no more at the last look."""
        self.source_ended = False
        """The source sends no more."""


class RelayedConnection:
    """A caller's connection."""

    __slots__ = ("_caller", "_discarded", "_gateway", "_relay", "_theirs", "closed", "down",
                 "leaving", "origin", "up")

    def __init__(self, relay: Relay, caller: socket.socket, origin: Origin) -> None:
        self._relay, self._caller, self.origin = relay, caller, origin
        self._gateway: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._discarded = 0
        self.leaving = self.closed = False
        """The caller gets no more; and both connections have ended."""

    # --- the beginning ---

    def shake_hands(self) -> None:
        """Does what can be done of the handshake now."""
        loop, caller = self._relay.loop, self._caller
        assert isinstance(caller, ssl.SSLSocket)
        try:
            caller.do_handshake()
        except ssl.SSLWantReadError:
            loop.remove_writer(caller.fileno())
            loop.add_reader(caller.fileno(), self.shake_hands)
        except ssl.SSLWantWriteError:
            loop.remove_reader(caller.fileno())
            loop.add_writer(caller.fileno(), self.shake_hands)
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                self._refuse_plain(caller)
            self.close(refused=True)
        else:
            loop.remove_reader(caller.fileno())
            loop.remove_writer(caller.fileno())
            self._relay.hand_over(self)

    @staticmethod
    def _refuse_plain(caller: ssl.SSLSocket) -> None:
        """Answers a request that came without TLS."""
        with suppress(OSError):
            socket.socket.recv(caller, PIECE)  # closing with bytes unread would discard the answer
            socket.socket.send(caller, _PLAIN)

    def connect(self) -> socket.socket:
        """Makes the connection to a gateway, and returns its end. Raises `OSError`."""
        if self._theirs is None:
            self._gateway, self._theirs = tcp_pair()
        return self._theirs

    def relay_bytes(self) -> None:
        """A gateway has the other end: moves bytes from now on."""
        assert self._gateway is not None
        loop, caller, gateway = self._relay.loop, self._caller, self._gateway
        self.up, self.down = Flow(caller, gateway), Flow(gateway, caller)
        loop.add_reader(caller.fileno(), self._move, self.up)
        loop.add_reader(gateway.fileno(), self._move, self.down)
        self._move(self.up)  # what has come with the handshake

    # --- bytes ---

    def _move(self, flow: Flow) -> None:
        """Moves what there is, as long as the target takes it."""
        if self.closed:
            return
        try:
            for _ in range(PIECES):
                if flow.waiting:
                    flow.waiting = flow.waiting[flow.target.send(flow.waiting):]
                    if flow.blocked:
                        self._on_progress(flow)
                    if flow.waiting:
                        continue
                    if flow.drained:
                        return
                if flow.source_ended:
                    self._end(flow)
                    return
                try:
                    flow.waiting = flow.source.recv(PIECE)
                except WOULD_BLOCK:
                    flow.drained = True
                    return
                flow.source_ended = not flow.waiting
                flow.drained = flow.waiting != b"" and self._has_no_more(flow)
        except WOULD_BLOCK:
            self._wait_for_target(flow)
        except (OSError, ValueError):
            self.close()
        else:
            self._relay.loop.call_soon(self._move, flow)

    @staticmethod
    def _has_no_more(flow: Flow) -> bool:
        """Whether the source will be readable again if there is more: what TLS has decrypted makes
        it not."""
        if isinstance(flow.source, ssl.SSLSocket):
            return not flow.source.pending()
        return len(flow.waiting) < PIECE

    def _wait_for_target(self, flow: Flow) -> None:
        if not flow.blocked:
            flow.blocked = True
            self._relay.loop.remove_reader(flow.source.fileno())
            self._relay.loop.add_writer(flow.target.fileno(), self._move, flow)
            if flow is self.down:
                self._relay.expect(self)

    def _on_progress(self, flow: Flow) -> None:
        """The target has taken something that waited."""
        if flow.waiting:
            if flow is self.down:
                self._relay.expect(self)
            return
        flow.blocked = False
        self._relay.loop.remove_writer(flow.target.fileno())
        if flow is self.down:
            self._relay.deadlines.pop(self, None)
        if not flow.source_ended:
            self._relay.loop.add_reader(flow.source.fileno(), self._move, flow)

    # --- the end ---

    def _end(self, flow: Flow) -> None:
        """The source has ended, and the target has everything."""
        self._relay.loop.remove_reader(flow.source.fileno())
        if flow is self.up:
            with suppress(OSError):
                flow.target.shutdown(socket.SHUT_WR)
        else:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """The gateway has ended the connection: ends the caller's, and reads what he still sends to
        no purpose, as closing with bytes unread would discard what he has not read."""
        loop, caller, gateway = self._relay.loop, self._caller, self._gateway
        assert gateway is not None
        self.leaving = True
        if isinstance(caller, ssl.SSLSocket):
            try:
                caller.unwrap()
            except ssl.SSLWantWriteError:
                loop.add_writer(caller.fileno(), self._say_goodbye)
                self._relay.expect(self)
                return
            except (OSError, ValueError):
                pass  # he has sent more: what matters is that ours is sent
        for sock in (caller, gateway):
            loop.remove_reader(sock.fileno())
            loop.remove_writer(sock.fileno())
        gateway.close()
        with suppress(OSError):  # not of `SSLSocket`, which would forget what it is
            socket.socket.shutdown(caller, socket.SHUT_WR)
        if self.up.source_ended or self._relay.draining:
            self.close()
            return
        loop.add_reader(caller.fileno(), self._discard)
        self._relay.expect(self)

    def _discard(self) -> None:
        try:
            data = socket.socket.recv(self._caller, PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._discarded += len(data)
        if not data or self._discarded > MOST_DISCARDED:
            self.close()
        else:
            self._relay.expect(self)

    def close(self, reset: bool = False, refused: bool = False) -> None:
        """Ends both connections. reset: what the caller has not read is dropped; refused: in the
        handshake."""
        if self.closed:
            return
        self.closed = True
        for sock in (self._caller, self._gateway):
            if sock is not None and sock.fileno() >= 0:
                self._relay.loop.remove_reader(sock.fileno())
                self._relay.loop.remove_writer(sock.fileno())
        if reset:
            with suppress(OSError):
                self._caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for sock in (self._caller, self._gateway, self._theirs):
            if sock is not None:
                with suppress(OSError):
                    sock.close()
        self._relay.forget(self, refused)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a TCP connection within this machine. Raises `OSError`."""
    for _ in range(TRIES):
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            listener.settimeout(CONNECT_SECONDS)
            ours = socket.socket()
            try:
                ours.settimeout(CONNECT_SECONDS)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
                ours.connect(listener.getsockname())
                theirs, address = listener.accept()
                if address == ours.getsockname():  # else somebody else was faster
                    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    ours.setblocking(False)
                    return ours, theirs
                theirs.close()
            except BaseException:
                ours.close()
                raise
            ours.close()
    raise OSError("others connect to the sockets of this process")
