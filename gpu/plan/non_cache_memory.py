"""Estimates of what a GPU, or a worker on a CPU, holds beside its caches, and of what is left for
them on a CPU. The worker reports what it measures under the same names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.tree import Config
from actorium.actors.runtime.memory_limits import MemoryLimit
from actorium.gpu.attention.capabilities import CARDS, DECODE, EXTEND, needs_of, unmet
from actorium.gpu.families.adapted_modules import adapter_bytes
from actorium.gpu.families.model_shape import CODE_SCALE_BYTES, DTYPE_BYTES, ModelShape
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.plan.graph_memory import Graphs, graphs_estimate
from actorium.gpu.plan.memory_plan import (
    Demand,
    MemoryPlan,
    as_served,
    demand_of,
    kv_dtype,
    state_bytes,
    token_bytes,
)
from actorium.gpu.plan.weight_bytes import table_bytes, weight_bytes, workspace_bytes

BLOCKS, COPIES = 256 << 20, 4
"""As in `kernels/reference/attention_blocks.py`."""
CHOICE, SCORE = 64 << 20, 32
"""As in `kernels/reference/token_choice.py`."""
SPLITS, SPLIT_ROWS = 64, 160 * 128
"""As in `kernels/triton/extend.py`: parts of each row, and rows of all programs of 160 SMs."""
FLOAT, INDEX = 4, 8
"""Bytes of an fp32, and of a place in a frame, an int64."""
STAGING_BYTES = 128 << 20
"""Most that is copied at once in each direction between a CUDA device and the host: 3 to 5 ms on
PCIe 5 or 4."""
WORKER_BYTES, ACTOR_BYTES = 256 << 20, 48 << 20
"""Of the process of a rank, with torch in it, and of each other one, without what is planned: as
seen on Linux with torch for CPUs."""
OTHERS, REPLICAS_OWN = 5, 3
"""Processes of an engine beside ranks, gateways and the media actor, its launcher among them; and
those of a replica, whose cluster has these as well."""


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
                       len(shape.groups), demand.drafts, demand.history)


def workspace_estimate(shape: ModelShape, demand: Demand, attention: int) -> int:
    """Bytes of the largest step's temporaries; attention: see `attention_bytes`. A draft model runs
    when the model has run."""
    step = largest_step(demand)
    most = max(workspace_bytes(own, *step) for own in (shape, shape.draft) if own is not None)
    return most + attention


def planned_bytes(plan: MemoryPlan, attention: int, graphs: Graphs = Graphs([], [])
                  ) -> dict[str, int]:
    """Bytes by name, of all that the worker of this plan allocates; attention: see
    `attention_bytes`; graphs: those it captures."""
    pages = sum(pool.bytes for pool in plan.pools)
    shape, demand = plan.shape, plan.demand
    found = {"weights": weight_bytes(shape),
            "tables": tables_estimate(shape, demand), "states": plan.used - pages, "pages": pages,
            "workspace": workspace_estimate(shape, demand, attention)}
    if demand.earlier_answers:
        found["earlier_answers"] = demand.earlier_answers
    if demand.adapters:
        found["adapters"] = adapter_bytes(shape, demand.adapters, demand.adapter_rank)
    if shape.vision is not None:
        found |= {"encoder_cache": encoder_cache_bytes(shape, demand),
                 "encoder_workspace": encoder_work_bytes(shape, demand)}
    return {**found, "graphs": graphs_estimate(shape, demand, graphs)} if any(graphs) else found


# --- Attention -----------------------------------------------------------------------------------

def torch_attends(config: Config, shape: ModelShape, device: str) -> bool:
    """Whether torch's attention serves prompts or decodes on cpu or cuda, if what else is asked for
    can be had there."""
    asked, own = asked_backends(config.device), config.device
    first = (own.kernels if own.kernels != "auto" else "triton" if device == "cuda" else
             "native" if own.native_kernels else "torch")
    needs = needs_of(shape, device, config.memory.kv_cache_dtype, config.memory.page_size)
    chosen = [(part, first if name == "auto" else name)
              for part, name in ((EXTEND, asked.extend), (DECODE, asked.decode))]
    return any(name == "torch" or name == "native" and unmet(CARDS[name].part(part), needs)
               for part, name in chosen)


def attention_bytes(shape: ModelShape, demand: Demand, device: str, by_torch: bool) -> int:
    """Bytes that attention of a step takes, at most, of one layer and of what a step keeps for all:
    what grows with the tokens before a chunk, or with those of all sequences. by_torch: see
    `torch_attends`."""
    row, latent = max(math.prod(own.kv_row) for own in shape.kinds), shape.latent
    kept, longest = kv_dtype(shape, demand), shape.max_model_len
    width = latent.row if latent else max(own.head_dim for own in shape.kinds)
    rows, chunk = demand.max_num_seqs * (demand.drafts + 1), min(demand.chunk, longest)
    if shape.bidirectional:  # of the step's tokens alone: gathered by prompts, and what comes of it
        return demand.chunk * (2 * shape.q_size + 2 * shape.kv_size) * shape.itemsize
    if shape.index is not None:
        # Each row of a step is a decode over what is chosen for it.
        rows = chunk = max(rows, chunk)
        return choice_bytes(shape, rows) + attention_bytes(
            replace(shape, index=None, max_model_len=shape.index.chosen),
            demand._replace(max_num_seqs=rows, chunk=rows, drafts=0, other_drafts=0),
            device, by_torch)
    if by_torch and (device == "cuda" or shape.attention_cap or shape.sinks
                     or shape.alibi):
        return max(BLOCKS, 2 * COPIES * FLOAT * rows * (row + shape.heads * (1 + width)))
    if device == "cuda":
        return min(SPLITS * chunk * shape.heads, SPLIT_ROWS) * FLOAT * (width + 1)
    if not by_torch:  # C's widens a sequence's pages in FP8
        return longest * row * shape.itemsize if kept.startswith("fp8") else 0
    codes = kept in CODE_SCALE_BYTES
    mask = FLOAT if codes else shape.itemsize
    read = longest * row * (DTYPE_BYTES[kept] + (2 * FLOAT if codes else shape.itemsize))
    spans = [min(longest, window + chunk) if window else longest for window, _ in shape.groups]
    # Masks, twice while they are made, and places of tokens, an i64 each, of all sequences.
    planned = sum(spans) * (2 * chunk + (2 + 4 * 8) * rows)
    return planned + max(spans, default=0) * max(chunk, rows) * mask + max(
        read, min(rows * read, BLOCKS))


def choice_bytes(shape: ModelShape, rows: int) -> int:
    """Of choosing the tokens that so many rows attend to: the scores of some rows, the products
    with some keys that they are made of, and these keys; and what is chosen, as it is joined."""
    assert shape.index is not None
    return 3 * max(CHOICE, SCORE * shape.max_model_len) + 3 * FLOAT * rows * shape.index.chosen


# --- Vision towers -------------------------------------------------------------------------------

def encoder_width(v: VisionShape) -> int:
    """Numbers of a row: the embedding, and what is added behind the decoder's first layers."""
    return v.out_hidden * (1 + len(v.deepstack))


def encoder_rows(shape: ModelShape, demand: Demand) -> int:
    """Rows that are kept, each of which is a placeholder's."""
    if shape.vision is None:
        return 0
    return demand.encoder_cache // (encoder_width(shape.vision) * shape.itemsize)


def encoder_cache_bytes(shape: ModelShape, demand: Demand) -> int:
    """Of these, to the byte."""
    v = shape.vision
    return encoder_rows(shape, demand) * encoder_width(v) * shape.itemsize if v else 0


def encoder_work_bytes(shape: ModelShape, demand: Demand) -> int:
    """An estimate of the tower's temporaries, of the largest image or frame allowed, and of another
    one that waits half way; and of the rows that a step takes, twice: as they are gathered and as
    they are joined. Not counted: the blocks of torch's attention on a CPU, 0.6 MB a thread."""
    v = shape.vision
    if v is None:
        return 0
    tokens = min(demand.encoder_tokens, shape.max_model_len)
    patches, size = tokens * v.merge**2, shape.itemsize
    rows = encoder_width(v) * size
    kept = v.hidden * size + 2 * v.head_dim * FLOAT + 2 * INDEX
    entering = v.pixels * (FLOAT + size) + (v.positions > 0) * v.hidden * (4 * FLOAT + INDEX)
    attention = v.hidden * (9 * size + 3 * FLOAT)
    mlp = v.hidden * 2 * size + v.intermediate * (4 if v.gated else 2) * size
    return (patches * (2 * kept + max(entering, attention, mlp)) + tokens * 2 * rows
            + 2 * demand.chunk * rows)


# --- Pages on their way to the host --------------------------------------------------------------

def staging_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes that pages pass through on their way between a CUDA device and the host. Of both
    directions: each has as many pages as the largest step writes, of every group of
    layers, if they fit; at least one of them, or a checkpoint. 0 where nothing goes to the host."""
    if not config.memory.tiers:
        return 0
    shape, demand = as_served(shape, demand_of(config))
    page = token_bytes(shape, demand) * demand.page_size
    return 2 * max(page, state_bytes(shape, demand).checkpoint,
                   min(STAGING_BYTES, page * -(-demand.chunk // demand.page_size)))


# --- The caches of a worker on a CPU -------------------------------------------------------------

class HostBudget(NamedTuple):
    """A budget, and where it comes from."""

    bytes: int
    source: str
    """In words; the flag comes last."""
    limited: bool
    """It is less than was asked for."""


def host_budget(config: Config, part: ModelShape, demand: Demand, limit: MemoryLimit | None
                ) -> HostBudget:
    """The budget for the caches of a CPU worker: what was asked for, or what a limit of memory
    leaves. Of one rank, which holds `part`; limit: of all processes of the engine together."""
    asked, ranks = config.memory.kv_cache_bytes, config.device.tensor_parallel_size
    if limit is None:
        return HostBudget(asked, "--kv-cache-bytes", False)
    cluster = config.cluster
    others = OTHERS + config.gateway.gateways + (part.vision is not None)
    beside = REPLICAS_OWN if cluster.replica_of else 0
    own = WORKER_BYTES + weight_bytes(part) + tables_estimate(part, demand) \
        + workspace_estimate(part, demand, attention_bytes(
            part, demand, "cpu", torch_attends(config, part, "cpu")))
    own += adapter_bytes(part, demand.adapters, demand.adapter_rank) + demand.earlier_answers
    if part.vision is not None:
        own += encoder_cache_bytes(part, demand) + encoder_work_bytes(part, demand)
    left = (limit.bytes - others * ACTOR_BYTES) // cluster.replica_shares
    left = (left - beside * ACTOR_BYTES) // ranks - own
    if left >= asked:
        return HostBudget(asked, "--kv-cache-bytes", False)
    return HostBudget(left, f"what is left of {limit.text}, where weights, tables, workspace and "
                      f"processes have theirs, for --kv-cache-bytes {asked:,}", True)
