"""What stands around the launcher in an engine: checks before the start, crash reports, marks in
the journals of hung actors, the fork server, a cluster's replicas, and the end of a ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from actorium.actors.config.cluster_settings import ROUTER_LEDGER, clustered
from actorium.actors.config.tree import Config
from actorium.actors.health import HUNG
from actorium.actors.launcher.forked_starts import ForkedStarts
from actorium.actors.launcher.launcher_observer import LauncherObserver
from actorium.actors.launcher.preflight import check_keys, check_machine, check_packages
from actorium.actors.launcher.replica_starts import ReplicaStarts
from actorium.actors.messages import Exited


def launcher_observers() -> Sequence[LauncherObserver]:
    """All of them. What they need is loaded when they have something to do."""
    return (Preflight(), CrashReports(), HungMarks(), ForkedStarts(), ReplicaStarts(),
            ToldLedger())


class Preflight(LauncherObserver):
    """Refuses what cannot run on this machine."""

    def before_start(self, config: Config) -> None:
        check_packages(config)
        check_machine(config)
        check_keys(config)


class CrashReports(LauncherObserver):
    """Writes a report on each crash, if `runtime.crash_reports`."""

    def on_crash(self, config: Config, run_dir: Path, exited: Exited, error: str,
                 say: Callable[[str], None]) -> None:
        from actorium.actors.launcher import crash_reports

        if config.runtime.crash_reports:
            crash_reports.report(run_dir, exited, error, lambda path: say(f"crash report: {path}"))


class HungMarks(LauncherObserver):
    """Marks the journal of an actor that is killed as hung: the request in progress is to blame."""

    def before_kill(self, run_dir: Path, role: str, reason: str) -> None:
        if reason.startswith(HUNG):
            from actorium.actors.runtime.inflight_journal import mark_hung

            mark_hung(run_dir, role)


class ToldLedger(LauncherObserver):
    """Removes a ledger of which all was told. One in the run directory goes with that."""

    def after_clean_end(self, config: Config) -> None:
        own = config.recovery.ledger_dir
        if own is not None:
            from actorium.actors.ledger.segments import remove_told

            directory = Path(own).expanduser()
            remove_told(directory / ROUTER_LEDGER if clustered(config.cluster) else directory)
