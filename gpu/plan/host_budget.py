"""The caches' budget of a worker on a CPU: what was asked for, or what a limit of memory leaves."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.runtime.memory_limits import MemoryLimit
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.attention_memory import attention_bytes, torch_attends
from actorium.gpu.plan.encoder_memory import encoder_cache_bytes, encoder_work_bytes
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.non_cache_memory import tables_estimate, workspace_estimate
from actorium.gpu.plan.weight_bytes import weight_bytes

WORKER_BYTES, ACTOR_BYTES = 256 << 20, 48 << 20
"""Of the process of a rank, with torch in it, and of each other one, without what is planned: as
seen on Linux with torch for CPUs."""
OTHERS, REPLICAS_OWN = 5, 3
"""Processes of an engine beside ranks, gateways and the media actor, its launcher among them; and
those of a replica, whose cluster has these as well."""


class HostBudget(NamedTuple):
    """A budget, and where it comes from."""

    bytes: int
    source: str
    """In words; the flag comes last."""
    limited: bool
    """It is less than was asked for."""


def host_budget(config: Config, part: ModelShape, demand: Demand, limit: MemoryLimit | None
                ) -> HostBudget:
    """Of one rank, which holds `part`; limit: of all processes of the engine together."""
    asked, ranks = config.memory.kv_cache_bytes, config.device.tensor_parallel_size
    if limit is None:
        return HostBudget(asked, "--kv-cache-bytes", False)
    cluster = config.cluster
    others = OTHERS + config.gateway.gateways + (part.vision is not None)
    beside = REPLICAS_OWN if cluster.replica_of else 0
    own = WORKER_BYTES + weight_bytes(part) + tables_estimate(part, demand) \
        + workspace_estimate(part, demand, attention_bytes(
            part, demand, "cpu", torch_attends(config, part, "cpu")))
    if part.vision is not None:
        own += encoder_cache_bytes(part, demand) + encoder_work_bytes(part, demand)
    left = (limit.bytes - others * ACTOR_BYTES) // cluster.replica_shares
    left = (left - beside * ACTOR_BYTES) // ranks - own
    if left >= asked:
        return HostBudget(asked, "--kv-cache-bytes", False)
    return HostBudget(left, f"what is left of {limit.text}, where weights, tables, workspace and "
                      f"processes have theirs, for --kv-cache-bytes {asked:,}", True)
