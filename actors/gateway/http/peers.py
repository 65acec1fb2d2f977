"""Aborts requests of any gateway of an engine: each gateway listens on a socket of its own in the
run directory, and the one that gets an abort request forwards it to the others.

Only the user can access the directory. A gateway's socket has the name of its role, so the one that
takes its place replaces it. Nobody removes another's: where nobody answers, somebody may be about
to listen.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from actorium.actors.runtime.rundir import PEER

LOG = logging.getLogger("actorium.gateway")
SECONDS = 2.0
"""How long another gateway may take to answer."""
MAX_ORDER = 1 << 16


class AbortOrder(Struct):
    """Asks to abort the requests of a name."""

    name: str
    """"" = all."""
    tenant: str | None
    """None = anybody's."""


_decode = msgspec.json.Decoder(AbortOrder).decode
_decode_names = msgspec.json.Decoder(list[str]).decode


class Peers:
    """One gateway's connection to the others."""

    def __init__(self, run_dir: Path, role: str,
                 abort: Callable[[str, str | None], Awaitable[list[str]]]) -> None:
        """role: this gateway's; abort: aborts requests of it, and returns their names."""
        self._run_dir, self._abort = run_dir, abort
        self._own = run_dir / f"{role}{PEER}"
        self._server: asyncio.Server | None = None
        self._file: os.stat_result | None = None
        """The socket's file."""

    async def listen(self) -> None:
        """Starts to serve the orders of others. Raises `OSError`."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._own),
                                                       limit=MAX_ORDER)
        self._file = os.lstat(self._own)

    def close(self) -> None:
        if self._server is not None and self._file is not None:
            self._server.close()
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self._own), self._file):
                    self._own.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                order = _decode(await reader.readline())
                ended = await self._abort(order.name, order.tenant)
                writer.write(msgspec.json.encode(ended) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            LOG.warning("an order of another gateway was not understood: %s", error)
        finally:
            writer.close()

    async def abort(self, name: str, tenant: str | None) -> list[str]:
        """Aborts requests of the other gateways. Returns their names."""
        order = msgspec.json.encode(AbortOrder(name, tenant)) + b"\n"
        others = [path for path in self._run_dir.glob(f"*{PEER}") if path != self._own]
        found = await asyncio.gather(*(_ask(path, order) for path in others))
        return [label for labels in found for label in labels]


async def _ask(path: Path, order: bytes) -> list[str]:
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(order)
                return _decode_names(await reader.read())
            finally:
                writer.close()
    except ConnectionRefusedError:
        pass  # its gateway has died, or has only just begun: then it has no requests
    except (OSError, TimeoutError, ValueError) as error:
        LOG.warning("a gateway did not answer an order: %s: %s", path.name, error)
    return []
