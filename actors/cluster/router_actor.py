"""The router actor of a cluster: role "scheduler" of an engine with several replicas."""

from __future__ import annotations

from actorium.actors.cluster.placements import Placements
from actorium.actors.cluster.placing import new_placer
from actorium.actors.cluster.prefix_index import PrefixIndex
from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.cluster_settings import ROUTER_ROLE, replica_name
from actorium.actors.core import Context


def build(context: Context) -> RouterCore:
    """The role's entry."""
    config = context.config
    roles = [f"../{replica_name(config.runtime.name, i)}/{ROUTER_ROLE}"
             for i in range(config.cluster.replicas)]
    index, book = PrefixIndex(), RequestBook(config.recovery.retain)
    placer = new_placer(config.cluster.routing, context.entropy, index, config.memory.page_size,
                        config.scheduler.max_num_seqs)
    return RouterCore(book, Placements(roles, book, placer, index, context.epoch), context.epoch,
                      config.scheduler.max_num_queued_reqs)
