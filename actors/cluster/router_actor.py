"""The router actor of a cluster: role "scheduler" of an engine with several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import msgspec

from actorium.actors.cluster.request_book import RequestBook
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.cluster.routing.assignments import Assignments
from actorium.actors.cluster.routing.prefix_index import PrefixIndex
from actorium.actors.cluster.routing.routing_policy import new_routing_policy
from actorium.actors.cluster.scaling.autoscale import AutoscaleAims, Autoscaler, LoadMeter
from actorium.actors.cluster.scaling.fleet import Fleet
from actorium.actors.config.cluster_settings import (
    MOST_REPLICAS,
    NODES_ROLE,
    RAY_ROLE,
    ROUTER_LEDGER,
    ROUTER_ROLE,
    ClusterConfig,
    replica_name,
)
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.ledger.committer import open_ledger
from actorium.actors.ledger.records import AdapterEntry, LedgerHistory
from actorium.actors.scheduler.adapter_file_reader import read_entries
from actorium.actors.scheduler.media_holds import new_media_holds
from actorium.actors.scheduler.recovery.recovery_log import in_this_boot


def build(context: Context) -> RouterCore:
    """The role's entry. With a ledger it goes on from there. Raises `BadConfig` and
    `EngineUnavailable` where that cannot be, `BadModel` at an adapter that cannot be read."""
    settings = context.config.adapters
    adapters = read_entries(settings) if settings.enable_lora else None
    ledger = open_ledger(_in_own_folder(context))
    if ledger is None:
        return router_core(context, None, adapters)
    if not ledger.same_boot:
        now, timeout = monotonic(), context.config.scheduler.request_timeout
        for entry in ledger.history.entries.values():
            entry.submit = in_this_boot(entry.submit, now, timeout)
    core = router_core(context, ledger.history, adapters)
    core.ledger = ledger
    return core


def _in_own_folder(context: Context) -> Context:
    replace, recovery = msgspec.structs.replace, context.config.recovery
    if recovery.ledger_dir is None:
        return context
    path = f"{recovery.ledger_dir}/{ROUTER_LEDGER}"
    return context._replace(
        config=replace(context.config, recovery=replace(recovery, ledger_dir=path)))


def router_core(context: Context, prior: LedgerHistory | None = None,
                adapters: Sequence[AdapterEntry] | None = None) -> RouterCore:
    """The core, without IO; prior: what the ledger has of an earlier one; None: there is none;
    adapters: those that all replicas are started with; None = they serve none."""
    config = context.config

    def role_of(index: int, node: str) -> str:
        path = f"../{replica_name(config.runtime.name, index)}/{ROUTER_ROLE}"
        return NODES_ROLE if node else path

    index = PrefixIndex()
    book = RequestBook(config.recovery.retain, prior, new_media_holds(context))
    policy = new_routing_policy(config.cluster.routing, context.entropy, index,
                                config.memory.page_size, config.scheduler.max_num_seqs)
    assignments = Assignments(role_of, book, policy, index, context.epoch)
    cluster, runtime = config.cluster, config.runtime
    fleet = Fleet(assignments, capacities(cluster), LoadMeter(book), Autoscaler(aims_of(config)),
                  runtime.start_timeout, runtime.drain_timeout, context.epoch)
    if cluster.ray_address:
        fleet.listeners.append(RAY_ROLE)
    return RouterCore(book, assignments, fleet, context.epoch, config.scheduler.max_num_queued_reqs,
                      adapters)


def aims_of(config: Config) -> AutoscaleAims:
    """Of the autoscaler."""
    c = config.cluster
    return AutoscaleAims(c.autoscale_queue, c.autoscale_ttft / 1000, c.upscale_delay,
                         c.downscale_delay, config.scheduler.max_num_seqs)


def capacities(settings: ClusterConfig) -> dict[str, int]:
    """How many replicas each node may have at the most; "" = the head."""
    if not settings.nodes:
        return {"": MOST_REPLICAS}
    nodes = {name: int(most) for name, most in settings.nodes.items()}
    return ({"": settings.replicas} if settings.replicas else {}) | nodes
