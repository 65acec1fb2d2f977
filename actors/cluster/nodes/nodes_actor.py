"""The actor of a cluster's head that its nodes join: role "nodes"."""

from __future__ import annotations

import msgspec

from actorium.actors.cluster.nodes.nodes_core import NodesCore
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import on_ray
from actorium.actors.config.tree import Config, GatewayConfig, without_secrets
from actorium.actors.core import Context
from actorium.actors.watchdog.restart_policy import Restarts


def build(context: Context) -> NodesCore:
    """The role's entry."""
    config = context.config
    cluster, recovery = config.cluster, config.recovery
    born = (context.run_dir / "config.json").stat().st_mtime_ns
    return NodesCore(
        cluster.nodes, f"{config.runtime.name}-{born:x}", configs.dump(for_nodes(config)),
        context.epoch, cluster.node_timeout, config.runtime.start_timeout,
        Restarts(recovery.max_restarts, recovery.restart_window, context.entropy),
        cluster.replicas > 0,
        frozenset(filter(on_ray, cluster.nodes)) if cluster.ray_address else frozenset())


def for_nodes(config: Config) -> Config:
    """What nodes are told of the configuration: nothing of the head's keys, doors and folders."""
    replace = msgspec.structs.replace
    runtime = replace(config.runtime, run_dir=None, listen=None, keys_dir=None, trace_dir=None)
    cluster = replace(config.cluster, replicas=1, nodes={}, cluster_listen=None, cluster_keys=None,
                      min_replicas=1, max_replicas=0,
                      ray_address=None, ray_replicas=0, ray_cpus=0.0)
    return without_secrets(replace(config, runtime=runtime, cluster=cluster,
                                   gateway=GatewayConfig(port=None)))
