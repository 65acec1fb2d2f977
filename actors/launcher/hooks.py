"""The launcher's hooks: what an engine does before its start, when up, at a crash and at its end.

Checks of the machine, crash reports, marks in the journals of hung actors, the fork server, a
cluster's replicas, and the end of a ledger. What they need is loaded when they have something to
do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from actorium.actors.config.cluster_settings import (
    REPLICA,
    ROUTER_LEDGER,
    ROUTER_ROLE,
    VISIBLE_DEVICES,
    clustered,
    most_here,
    replica_index,
    visible_devices,
)
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.health import HUNG
from actorium.actors.launcher.children import ForkStart, StartedProcess, start
from actorium.actors.launcher.forked_starts import ForkedStarts
from actorium.actors.launcher.preflight import check_keys, check_machine, check_packages
from actorium.actors.messages import Exited
from actorium.actors.models.media_models import takes_media
from actorium.actors.runtime.process import python

REPLICA_PROCESS = "actorium.actors.cluster.replica_process"
SEND_MS = 200
"""Milliseconds that a report to the router has to leave."""

OnUp: TypeAlias = Callable[[Config, Path, Mapping[str, str]], None]
OnCrash: TypeAlias = Callable[[Config, Path, Exited, str, Callable[[str], None]], None]


class LauncherHooks(NamedTuple):
    """Functions that the launcher calls, in this order; none by default."""

    before_start: Sequence[Callable[[Config], None]] = ()
    """Nothing has been started. May raise an `ActoriumError`, which the engine then fails of."""
    fork: Sequence[ForkStart] = ()
    on_up: Sequence[OnUp] = ()
    """(config, run directory, role -> "module:function"): the engine is ready for the first time.
    """
    on_crash: Sequence[OnCrash] = ()
    """(config, run directory, exit, the error that was reported, what prints a line): an actor has
    died unexpectedly."""
    before_kill: Sequence[Callable[[Path, str, str], None]] = ()
    """(run directory, role, reason): an actor is about to be killed on the watchdog's order."""
    after_end: Sequence[Callable[[], None]] = ()
    """All actors are gone."""
    after_clean_end: Sequence[Callable[[Config], None]] = ()
    """All actors are gone, and the engine ends with exit code 0."""


def launcher_hooks() -> LauncherHooks:
    """Those of an engine."""
    forked = ForkedStarts()
    return LauncherHooks(
        before_start=(check_packages, check_machine, check_keys, check_replicas),
        fork=(forked.fork, start_replica), on_up=(forked.on_up,),
        on_crash=(write_crash_report, report_dead_replica), before_kill=(mark_journal,),
        after_end=(forked.after_end,), after_clean_end=(remove_finished_ledger,))


def write_crash_report(config: Config, run_dir: Path, exited: Exited, error: str,
                       say: Callable[[str], None]) -> None:
    """Writes a report on each crash, if `runtime.crash_reports`."""
    from actorium.actors.launcher import crash_reports

    if config.runtime.crash_reports:
        crash_reports.report(run_dir, exited, error, lambda path: say(f"crash report: {path}"))


def mark_journal(run_dir: Path, role: str, reason: str) -> None:
    """Marks the journal of an actor that is killed as hung: the request in progress is to blame."""
    if reason.startswith(HUNG):
        from actorium.actors.runtime.inflight_journal import mark_hung

        mark_hung(run_dir, role)


def remove_finished_ledger(config: Config) -> None:
    """Removes a ledger all of whose requests are answered. One in the run directory goes with that.
    """
    ledger_dir = config.recovery.ledger_dir
    if ledger_dir is not None:
        from actorium.actors.ledger.segments import remove_finished

        directory = Path(ledger_dir).expanduser()
        remove_finished(directory / ROUTER_LEDGER if clustered(config.cluster) else directory)


# --- a cluster's replicas: each is a launcher of its own ---

def check_replicas(config: Config) -> None:
    """Raises `BadConfig` for what replicas cannot do."""
    if config.cluster.nodes and takes_media(config):
        raise BadConfig("nodes: the model takes images, which lie in the memory of the head, "
                        "where replicas of other machines cannot read them: serve it on one "
                        "machine, with --replicas N, or leave out the tower with "
                        "--language-model-only", "cluster.nodes")
    if config.cluster.max_replicas and config.device.device != "cpu":
        try:
            visible_devices(most_here(config.cluster) - 1, config.device.tensor_parallel_size,
                            os.environ.get(VISIBLE_DEVICES))
        except BadConfig as error:
            raise BadConfig(f"max_{error}", "cluster.max_replicas") from None


def start_replica(words: Sequence[str]) -> StartedProcess | None:
    """The process of a replica; None of any other role."""
    return start(python(REPLICA_PROCESS, *words)) if words[-1].startswith(REPLICA) else None


def report_dead_replica(config: Config, run_dir: Path, exited: Exited, error: str,
                        say: Callable[[str], None]) -> None:
    """Has the router know of a replica's death at once."""
    index = replica_index(exited.role)
    if index is None:
        return
    import zmq

    from actorium.actors.cluster.cluster_messages import ReplicaGone
    from actorium.actors.runtime.mailbox import Outbox
    from actorium.actors.runtime.rundir import address

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    box = Outbox(context, address(run_dir, f"{ROUTER_ROLE}.inbox"), hwm=16)
    box.socket.setsockopt(zmq.LINGER, SEND_MS)
    box.send(ReplicaGone(index, exited.epoch))
    box.close()
    context.term()
