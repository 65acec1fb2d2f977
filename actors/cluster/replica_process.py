"""The process of a replica: the launcher of an engine without tokenizer, detokenizer and gateway,
which is a child of the cluster's launcher.

    python -m actorium.actors.cluster.replica_process ROLE RUN_DIR EPOCH PARENT_PID ... BUILT

All that an engine does about deaths of its actors the replica does by itself. To the cluster it is
one process, with heartbeats like an actor's, and it is started again like an actor.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import (
    VISIBLE_DEVICES,
    ClusterConfig,
    most_local_replicas,
    node_index_of,
    replica_index,
    replica_name,
    visible_devices,
)
from actorium.actors.config.tree import Config
from actorium.actors.core import Context, Health
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.messages import Fatal
from actorium.actors.runtime.heartbeat import Heartbeats
from actorium.actors.runtime.mailbox import Outbox
from actorium.actors.runtime.process import EXIT_BAD_CONFIG, die_with_parent, raise_file_limit
from actorium.actors.runtime.roles import LAUNCHER, WATCHDOG, roles_of, worker_roles
from actorium.actors.runtime.rundir import address
from actorium.actors.runtime.security import private_paths


def replica_config(config: Config, index: int, life: int, processors: int) -> Config:
    """The configuration of a replica. config: the cluster's; life: how often it was started;
    processors: of this machine."""
    replace = msgspec.structs.replace
    name, recovery, device = config.runtime.name, config.recovery, config.device
    memory = config.memory
    threads = (device.threads or processors) // config.cluster.replicas
    shares = most_local_replicas(config.cluster)
    ledger = recovery.ledger_dir
    return replace(
        config,
        cluster=ClusterConfig(replica_of=f"{name}:{index}:{life}",
                              replica_shares=max(shares, config.cluster.replica_shares)),
        device=replace(device, threads=max(1, threads)),
        memory=replace(memory, host_cache=memory.host_cache // shares),
        recovery=replace(recovery, ledger_dir=ledger and f"{ledger}/replica-{index}"),
        gateway=replace(config.gateway, port=None, uds=None),
        probes=replace(config.probes, probe_port=None),
        runtime=replace(config.runtime, name=replica_name(name, index), listen=None,
                        recorder_bytes=0, log_stderr=False, log_interval=0.0))


def replica_roles(config: Config, built: str) -> dict[str, str]:
    """What builds the actors of a replica. built: what stands for it among its cluster's roles."""
    worker = built.partition(";")[2]
    return roles_of(config) | (dict.fromkeys(worker_roles(config), worker) if worker else {})


def main(argv: list[str]) -> int:
    """Run a replica to its end; returns its exit code, a launcher's."""
    role, run_dir, epoch, parent = argv[0], Path(argv[1]), int(argv[2]), int(argv[3])
    die_with_parent(parent)
    os.umask(0o077)
    raise_file_limit()
    cluster = configs.load(private_paths.read_file(run_dir / "config.json"))
    index = replica_index(role)
    assert index is not None
    config = replica_config(cluster, index, epoch, len(os.sched_getaffinity(0)))
    ctx = Context(cluster, run_dir, role, epoch, 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    if cluster.device.device != "cpu":
        try:
            os.environ[VISIBLE_DEVICES] = visible_devices(
                node_index_of(argv[-1], index), cluster.device.tensor_parallel_size,
                os.environ.get(VISIBLE_DEVICES))
        except BadConfig as error:
            _report(ctx, context, error.code, error.message)
            context.term()
            return EXIT_BAD_CONFIG
    # Its run directory lies beside the cluster's, wherever that is.
    runtime = msgspec.structs.replace(config.runtime, run_dir=str(run_dir.parent))
    config = msgspec.structs.replace(config, runtime=runtime)
    # Without restarts nothing reports that all actors are ready: requests wait at the router.
    phase = "loading" if config.recovery.restart else "ready"
    beats = Heartbeats(ctx, context, Health(phase, 0, config.runtime.start_timeout), lambda: None)
    launcher = Launcher(config, replica_roles(config, argv[-1]),
                        ready=lambda: beats.update(Health("ready", 0, 0.0)))
    beats.start()
    code = launcher.run()
    beats.stop()
    if launcher.failure is not None:
        _report(ctx, context, launcher.failure.code, launcher.failure.message)
    context.term()
    if launcher.actor_killed:  # that was not the replica's own doing, either
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def _report(ctx: Context, context: zmq.Context[zmq.Socket[bytes]], code: str, message: str) -> None:
    """Tell the cluster why the replica has ended."""
    for role in (LAUNCHER, WATCHDOG):
        box = Outbox(context, address(ctx.run_dir, f"{role}.inbox"), hwm=16)
        box.send(Fatal(ctx.role, os.getpid(), ctx.epoch, message, code=code))
        box.close()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
