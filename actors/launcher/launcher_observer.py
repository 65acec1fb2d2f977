"""Where features join the launcher: hooks that do nothing (`launcher/observers.py` has those that
do)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from actorium.actors.config.tree import Config
from actorium.actors.messages import Exited


class StartedProcess(Protocol):
    """A child of the launcher that leads a process group; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Reap it: its exit code, or minus the number of a signal."""


class LauncherObserver:
    """The base of features around the launcher."""

    def before_start(self, config: Config) -> None:
        """Nothing has been started. May raise an `ActoriumError`, which the engine then fails of.
        """

    def on_up(self, config: Config, run_dir: Path, roles: Mapping[str, str]) -> None:
        """The engine is ready for the first time. roles: role -> "module:function"."""

    def fork(self, words: Sequence[str]) -> StartedProcess | None:
        """Start an actor in a faster way than by a new interpreter; None if there is none. words:
        those of `runtime.main`."""
        return None

    def on_crash(self, config: Config, run_dir: Path, exited: Exited, error: str,
                 say: Callable[[str], None]) -> None:
        """An actor has died unexpectedly. error: what it reported; say: prints a line."""

    def before_kill(self, run_dir: Path, role: str, reason: str) -> None:
        """An actor is about to be killed on the watchdog's order."""

    def after_end(self) -> None:
        """All actors are gone."""

    def after_clean_end(self, config: Config) -> None:
        """All actors are gone, and the engine ends with exit code 0."""
