"""Fetching models for clients, by their names, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from actorium.actors.config.tree import ModelConfig
from actorium.actors.errors import ActoriumError
from actorium.actors.model_manager.manager_messages import PullProgress
from actorium.actors.models.model_names import hub_cache, parse_name
from actorium.actors.models.obtain import obtain
from actorium.actors.runtime.rundir import write_private
from actorium.actors.runtime.security import private_paths

FILE = "pulled.json"
"""In the server's run directory: the names of models that were fetched for clients."""
REPORT_SECONDS = 0.5


class ModelPulls:
    """Fetches models, and remembers their names as long as the server runs."""

    def __init__(self, run_dir: Path, settings: ModelConfig) -> None:
        self.names: list[str] = []
        self._file, self._settings = run_dir / FILE, settings
        self._lock = asyncio.Lock()
        with contextlib.suppress(OSError, private_paths.UnsafePath, msgspec.MsgspecError):
            self.names = msgspec.json.decode(private_paths.read_file(self._file), type=list[str])

    async def fetch(self, rid: str, text: str, send: Callable[[PullProgress], None]) -> None:
        """Fetches the model of a name. send: called on the loop's thread, the last time with
        `done`."""
        loop = asyncio.get_running_loop()
        sent_at = 0.0

        def say(line: str) -> None:
            loop.call_soon_threadsafe(send, PullProgress(rid, line[:4096]))

        def report(completed: int, total: int) -> None:
            nonlocal sent_at
            if (now := time.monotonic()) - sent_at >= REPORT_SECONDS:
                sent_at = now
                loop.call_soon_threadsafe(send, PullProgress(
                    rid, f"fetching {text}"[:4096], max(0, completed), total))

        async with self._lock:
            why = await asyncio.to_thread(self._obtain, text, say, report)
        if why:
            send(PullProgress(rid, "failed", done=True, error=why[:4096]))
            return
        if text not in self.names:
            self.names.append(text)
            write_private(self._file, msgspec.json.encode(self.names))
        send(PullProgress(rid, "success", done=True))

    def _obtain(self, text: str, say: Callable[[str], None], report: Callable[[int, int], None]
                ) -> str:
        """Returns why it cannot be fetched; empty = it is there."""
        name = parse_name(text)
        if name is None or Path(text).expanduser().exists():
            return f"model: {text[:200]!r} is not the name of a model, as ORG/NAME"
        folder = self._settings.download_dir
        try:
            obtain(name, Path(folder).expanduser() if folder else hub_cache(),
                   weights=self._settings.load_format != "dummy",
                   tokenizer=not self._settings.skip_tokenizer, say=say, terminal=False,
                   report=report)
        except ActoriumError as error:
            return error.message
        except OSError as error:
            return f"model: {text[:200]!r} cannot be written: {error.strerror}"
        return ""
