"""The router actor of a cluster: role "scheduler" of an engine with several replicas."""

from __future__ import annotations

from actorium.actors.cluster.placing import new_placer
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.cluster_settings import ROUTER_ROLE, replica_name
from actorium.actors.core import Context


def build(context: Context) -> RouterCore:
    """The role's entry."""
    config = context.config
    roles = [f"../{replica_name(config.runtime.name, i)}/{ROUTER_ROLE}"
             for i in range(config.cluster.replicas)]
    return RouterCore(roles, new_placer(config.cluster.routing, context.entropy), context.epoch,
                      config.recovery.retain, config.scheduler.max_num_queued_reqs)
