"""The way between a node and its head, that can be cut: a tcp forwarder in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading

PIECE = 1 << 16
LOOK = 0.02
"""Seconds between two looks whether it is whole again."""


class Wire:
    """Listens on a port of this machine and forwards to another. While it is `cut`, nothing gets
    through in either direction and nobody is told, as where a network is parted; what was sent
    meanwhile comes afterwards, late, as tcp sends it again. Close it."""

    def __init__(self, to: int) -> None:
        """to: the port that it leads to."""
        self.cut = False
        self.port = 0
        """Where it begins."""
        self._to = to
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen(listens)),
                                        daemon=True)
        self._thread.start()
        listens.wait()

    async def _listen(self, listens: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        listens.set()
        await self._over.wait()
        server.close()  # connections end with the loop

    async def _accept(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        await self._whole()
        try:
            far, to_far = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            to_near.close()
            return
        await asyncio.gather(self._carry(near, to_far), self._carry(far, to_near))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                await self._whole()
                writer.write(data)
                await writer.drain()
        await self._whole()
        writer.close()

    async def _whole(self) -> None:
        while self.cut:
            await asyncio.sleep(LOOK)

    def close(self) -> None:
        self.cut = False
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
