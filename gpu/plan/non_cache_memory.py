"""What a GPU holds beside its caches, estimated; the worker tells what it measures by these names.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.encoder_memory import encoder_cache_bytes, encoder_work_bytes
from actorium.gpu.plan.graph_memory import Graphs, graphs_estimate
from actorium.gpu.plan.memory_plan import Demand, MemoryPlan
from actorium.gpu.plan.weight_bytes import table_bytes, weight_bytes, workspace_bytes


class StepSize(NamedTuple):
    """The size of a step."""

    tokens: int
    """Computed in it."""
    rows: int
    """Sampled in it."""


def largest_step(demand: Demand) -> StepSize:
    """The most that one step computes and samples."""
    rows = demand.max_num_seqs * (demand.drafts + 1)
    return StepSize(max(demand.chunk, rows), rows)


def tables_estimate(shape: ModelShape, demand: Demand) -> int:
    """Bytes of the resident tables."""
    return table_bytes(demand.max_num_seqs + 1, shape.max_model_len, demand.page_size,
                       len(shape.groups), demand.drafts)


def workspace_estimate(shape: ModelShape, demand: Demand, attention: int) -> int:
    """Bytes of the largest step's temporaries; attention: see `attention_bytes`."""
    return workspace_bytes(shape, *largest_step(demand)) + attention


def planned_bytes(plan: MemoryPlan, attention: int, graphs: Graphs = Graphs([], [])
                  ) -> dict[str, int]:
    """Bytes by name, of all that the worker of this plan allocates; attention: see
    `attention_bytes`; graphs: those it captures."""
    pages = sum(pool.bytes for pool in plan.pools)
    shape, demand = plan.shape, plan.demand
    told = {"weights": weight_bytes(shape),
            "tables": tables_estimate(shape, demand), "states": plan.used - pages, "pages": pages,
            "workspace": workspace_estimate(shape, demand, attention)}
    if shape.vision is not None:
        told |= {"encoder_cache": encoder_cache_bytes(shape, demand),
                 "encoder_workspace": encoder_work_bytes(shape, demand)}
    return {**told, "graphs": graphs_estimate(shape, demand, graphs)} if any(graphs) else told
