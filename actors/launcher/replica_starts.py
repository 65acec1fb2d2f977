"""The launcher's end of a cluster's replicas: each is a launcher of its own, and when one dies the
router hears of it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from actorium.actors.config.cluster_settings import (
    REPLICA,
    ROUTER_ROLE,
    most_here,
    replica_index,
)
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.children import start
from actorium.actors.launcher.launcher_observer import LauncherObserver, StartedProcess
from actorium.actors.messages import Exited
from actorium.actors.models.media_models import takes_media
from actorium.actors.runtime.process import python

PROCESS = "actorium.actors.cluster.replica_process"
LINGER_MS = 200


class ReplicaStarts(LauncherObserver):
    """Starts replicas, and reports their deaths."""

    def before_start(self, config: Config) -> None:
        """Raises `BadConfig` for what replicas cannot do."""
        if config.cluster.nodes and takes_media(config):
            raise BadConfig("nodes: the model takes images, which lie in the memory of the head, "
                            "where replicas of other machines cannot read them: serve it on one "
                            "machine, with --replicas N, or leave out the tower with "
                            "--language-model-only", "cluster.nodes")
        if config.cluster.max_replicas and config.device.device != "cpu":
            from actorium.actors.cluster.replica_devices import VISIBLE_DEVICES, visible_devices

            try:
                visible_devices(most_here(config.cluster) - 1, config.device.tensor_parallel_size,
                                os.environ.get(VISIBLE_DEVICES))
            except BadConfig as error:
                raise BadConfig(f"max_{error}", "cluster.max_replicas") from None

    def fork(self, words: Sequence[str]) -> StartedProcess | None:
        return start(python(PROCESS, *words)) if words[-1].startswith(REPLICA) else None

    def on_crash(self, config: Config, run_dir: Path, exited: Exited, error: str,
                 say: Callable[[str], None]) -> None:
        index = replica_index(exited.role)
        if index is None:
            return
        import zmq

        from actorium.actors.cluster.cluster_messages import ReplicaGone
        from actorium.actors.runtime.mailbox import Outbox
        from actorium.actors.runtime.rundir import address

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        box = Outbox(context, address(run_dir, f"{ROUTER_ROLE}.inbox"), hwm=16)
        box.socket.setsockopt(zmq.LINGER, LINGER_MS)
        box.send(ReplicaGone(index, exited.epoch))
        box.close()
        context.term()
