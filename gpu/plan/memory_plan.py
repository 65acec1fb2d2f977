"""`MemoryPlan`: every byte of the cache budget of one GPU, and the tokens it holds.

Pure: the same object is printed by `actorium plan` and allocated by the worker.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from actorium.actors.config.parsed_values import parse_speculative
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.plugins.entry_points import LOGITS_PROCESSORS, plugins_of
from actorium.gpu.families.draft_shape import kept_layers
from actorium.gpu.families.model_shape import CODE_SCALE_BYTES, DTYPE_BYTES, ModelShape
from actorium.gpu.plan.sizes import GroupPages, PageDemand, pool_pages

CHECKPOINT_SHARE = 64
"""By default checkpoints take at most one part in so many of the budget."""
FEWEST_CHECKPOINTS, FEWEST_SHARE = 2, 16
"""But there are so many, if they take no more than one part in so many."""
CHECKPOINT_TOKENS = 256
"""And there is at most one for so many tokens that the pages can hold."""


class Demand(NamedTuple):
    """What the caches of one GPU are to serve."""

    max_num_seqs: int
    """Sequences that run at once; slot 0, the padding sink, comes on top."""
    page_size: int = 16
    chunk: int = 2048
    """Tokens extended in one step at most, over all sequences (max_num_batched_tokens)."""
    drafts: int = 0
    """Draft tokens of the MTP layer that a step verifies; as served: of whatever drafts. 0 = no
    speculation."""
    kv_dtype: str = "auto"
    """Of the pages: a key of `DTYPE_BYTES`; auto = as the weights."""
    state_dtype: str = "float32"
    checkpoints: int | None = None
    """None = `default_checkpoints`."""
    max_total_tokens: int | None = None
    """Cap of the page pools."""
    auto: bool = False
    """`drafts` holds only where the model has an MTP layer."""
    encoder_cache: int = 0
    """Bytes of what a vision tower has made (media.encoder_cache_bytes)."""
    encoder_tokens: int = 0
    """Of the largest image or frame (media.max_encoder_tokens)."""
    adapters: int = 0
    """Adapters on the device at once (adapters.max_loras)."""
    adapter_rank: int = 0
    """Of their modules, at most (adapters.max_lora_rank)."""
    other_drafts: int = 0
    """Draft tokens of a step that something else than an MTP layer makes."""
    history: bool = False
    """The worker keeps each sequence's tokens: to make drafts of them, for logits processors."""
    earlier_answers: int = 0
    """Bytes of answers that have ended, of which drafts are made (suffix_global_bytes)."""


class Pool(NamedTuple):
    """Pages of one group of attention layers; page 0, the sink, is one of them."""

    name: str
    window: int
    layers: int
    pages: int
    page_bytes: int

    @property
    def bytes(self) -> int:
        """Of all pages and layers."""
        return self.pages * self.page_bytes


class StateBytes(NamedTuple):
    """What one row of the state pool takes, over all recurrent layers."""

    state: int
    columns: int
    """The last width - 1 inputs of the convolutions, in the weights' dtype."""
    window: int
    """Only a slot's row: what delayed commit keeps of the k drafts of a verify window, the inputs
    of convolution and gates in the weights' dtype."""

    @property
    def checkpoint(self) -> int:
        """A checkpoint is a committed state: it has no window."""
        return self.state + self.columns


class PlanLine(NamedTuple):
    """A row of the byte table."""

    name: str
    bytes: int
    number: int
    each: int
    """bytes = number * each."""
    detail: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """One GPU's caches. `shape` is that GPU's part of the model."""

    shape: ModelShape
    demand: Demand
    budget: int
    checkpoints: int
    pools: tuple[Pool, ...]
    """The groups of `shape.groups`, then those of the MTP layers, of an EAGLE-3 head and of a draft
    model, which have the same pages as full attention: their tables are one."""

    @property
    def slots(self) -> int:
        """Rows of the resident tables: slot 0 is the padding sink. It has no state."""
        return self.demand.max_num_seqs + 1

    @cached_property
    def state(self) -> StateBytes:
        """Bytes of one row of the state pool."""
        return state_bytes(self.shape, self.demand)

    @property
    def state_rows(self) -> int:
        """Rows of the state pool: those of the sequences that run at once, slot s in row s - 1,
        then checkpoints 1, 2, ..."""
        return self.demand.max_num_seqs + self.checkpoints if self.shape.recurrent else 0

    @property
    def lead(self) -> Pool:
        """The pool that sees furthest: its pages bound the tokens."""
        return max(self.pools, key=lambda pool: pool.window or math.inf)

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes in the groups that see as far as the lead."""
        return sum(pool.page_bytes for pool in self.pools
                   if pool.window == self.lead.window) // self.demand.page_size

    # --- where the bytes go ----------------------------------------------------------------------

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        """The byte table; it sums up to `budget`, the last line being what is left over."""
        lines = [*self._state_lines(), *self._page_lines()]
        left = self.budget - sum(line.bytes for line in lines)
        return (*lines, PlanLine("unused", left, 1, left, "" if left < self._page_of_each else
                             f"{self.limited_by} needs no more"))

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return self.budget - self.lines[-1].bytes

    @property
    def _page_of_each(self) -> int:
        return sum(pool.page_bytes for pool in self.pools)

    def _state_lines(self) -> list[PlanLine]:
        recurrence = self.shape.recurrence
        if recurrence is None:
            return []
        count, s = self.demand.max_num_seqs, self.state
        heads, rows, columns = recurrence.state.state
        kept, channels = recurrence.state.columns
        dims = (f"{len(self.shape.recurrent)} layers x {heads} x {rows} x {columns} "
                f"{self.demand.state_dtype}")
        lines = [PlanLine("convolution columns", count * s.columns, count, s.columns,
                          f"{channels} channels x {kept} {self.shape.dtype}")]
        if s.state:
            lines.insert(0, PlanLine("states", count * s.state, count, s.state,
                                     f"{recurrence.kind}: {dims}"))
        if s.window:
            lines.append(PlanLine("speculation windows", count * s.window, count, s.window,
                              f"inputs of {self.demand.drafts} drafts not yet committed"))
        if self.checkpoints:
            lines.append(PlanLine("checkpoints", self.checkpoints * s.checkpoint, self.checkpoints,
                              s.checkpoint, "states kept for prefix reuse"))
        return lines

    def _page_lines(self) -> list[PlanLine]:
        dtype = kv_dtype(self.shape, self.demand)
        lines = [PlanLine(f"pages, {pool.name}", (pool.pages - 1) * pool.page_bytes, pool.pages - 1,
                      pool.page_bytes, f"{pool.layers} layer{'s' * (pool.layers > 1)}, "
                      f"{pool.page_bytes // self.demand.page_size:,} bytes a token in {dtype}")
                 for pool in self.pools]
        return [*lines, PlanLine("page 0, the padding sink", self._page_of_each, 1,
                                 self._page_of_each, "one of each pool")]

    # --- tokens ----------------------------------------------------------------------------------

    @property
    def page_tokens(self) -> int:
        """Tokens that the lead pool's pages hold when all of them are full."""
        return (self.lead.pages - 1) * self.demand.page_size

    @property
    def token_capacity(self) -> int:
        """Tokens that `max_num_seqs` sequences can hold at once, however long each of them is; 0
        when there is not even a page for each.

        n sequences of T tokens in all take at most floor((T + n (p - 1)) / p) pages of p tokens:
        each may end just behind a page's start. So the largest T that always fits P pages is P p -
        (n - 1)(p - 1), and never more than n times max_model_len.
        """
        n, p = self.demand.max_num_seqs, self.demand.page_size
        most = n * self.shape.max_model_len
        window, pages = self.lead.window, self.lead.pages - 1
        if window and pages >= page_demand(self.shape, self.demand).for_all(window):
            return most
        return min(self.page_tokens - (n - 1) * (p - 1), most) if pages >= n else 0

    @property
    def one_sequence(self) -> int:
        """Tokens a sequence alone can have."""
        if self.lead.window:
            return self.shape.max_model_len
        return min(self.page_tokens, self.shape.max_model_len)

    @property
    def full_length(self) -> int:
        """Sequences of max_model_len tokens that can be held at once, `max_num_seqs` at most."""
        size = page_demand(self.shape, self.demand)
        return bisect_left(range(1, self.demand.max_num_seqs + 1), True, key=lambda n: any(
            size._replace(sequences=n).for_all(pool.window) >= pool.pages for pool in self.pools))

    @property
    def arithmetic_limit(self) -> int:
        """Tokens, if neither sink nor whole pages took anything: budget less the states
        of `max_num_seqs` sequences and the checkpoints, divided by a token's bytes."""
        narrow = sum(pool.bytes for pool in self.pools if pool.window != self.lead.window)
        states = self.demand.max_num_seqs * sum(self.state)
        states += self.checkpoints * self.state.checkpoint
        if not self.token_bytes:
            return self.demand.max_num_seqs * self.shape.max_model_len
        return max(0, self.budget - states - narrow) // self.token_bytes

    @property
    def limited_by(self) -> str:
        """memory, max_total_tokens, or max_model_len: what keeps the pools from being larger."""
        d, total = self.demand, self.demand.max_total_tokens
        if (self.lead.pages - 1 >= page_demand(self.shape, d).for_all(self.lead.window)
                or self.token_capacity == d.max_num_seqs * self.shape.max_model_len):
            return "max_model_len"
        if total is not None and self.lead.pages - 1 >= total // d.page_size:
            return "max_total_tokens"
        return "memory"


def demand_of(config: Config) -> Demand:
    """What an engine with this configuration asks of its worker."""
    memory, scheduler, lora = config.memory, config.scheduler, config.adapters
    reuse = memory.prefix_cache and memory.checkpoint_policy != "none"
    speculation = parse_speculative(config.speculation.speculative)
    return Demand(scheduler.max_num_seqs, memory.page_size, scheduler.max_num_batched_tokens,
                  speculation.methods.get("mtp", 0), memory.kv_cache_dtype, memory.state_dtype,
                  memory.checkpoints if reuse else 0, memory.max_total_tokens, speculation.auto,
                  config.media.encoder_cache_bytes, config.media.max_encoder_tokens,
                  lora.max_loras if lora.enable_lora else 0, lora.max_lora_rank,
                  max((k for name, k in speculation.methods.items() if name != "mtp"), default=0),
                  speculation.by_text or "draft" in speculation.methods
                  or bool(plugins_of(config.runtime.plugins, LOGITS_PROCESSORS)),
                  config.speculation.suffix_global_bytes)


def make_plan(shape: ModelShape, demand: Demand, budget: int, name: str = "memory") -> MemoryPlan:
    """The plan for `budget` bytes on a GPU that holds `shape` (see `ModelShape.split`).

    Raises `BadConfig` with what is missing when the budget, which errors call `name`, does not
    hold the states and the fewest pages.
    """
    shape, demand = as_served(shape, demand)
    state, groups = state_bytes(shape, demand), _groups(shape, demand)
    chosen = _checkpoints(shape, demand, budget)
    live = demand.max_num_seqs * sum(state)
    kept = chosen * state.checkpoint
    _check(shape, demand, budget, name, live + kept, kept, groups)
    pages = pool_pages([GroupPages(pool.window, pool.page_bytes) for pool in groups],
                       page_demand(shape, demand), budget - live - kept, demand.max_total_tokens)
    pools = tuple(pool._replace(pages=own) for pool, own in zip(groups, pages, strict=True))
    plan = MemoryPlan(shape, demand, budget, chosen, pools)
    return plan if demand.checkpoints is not None else _filled(plan)


def _checkpoints(shape: ModelShape, demand: Demand, budget: int) -> int:
    if shape.recurrence is None:
        return 0
    if demand.checkpoints is not None:
        return demand.checkpoints
    return default_checkpoints(state_bytes(shape, demand), token_bytes(shape, demand), budget)


def _filled(plan: MemoryPlan) -> MemoryPlan:
    """With checkpoints in what the pages have left over, as many as pages can have a use for."""
    if not plan.state.checkpoint:
        return plan
    spare = (plan.budget - plan.used) // plan.state.checkpoint
    useful = plan.page_tokens // CHECKPOINT_TOKENS
    return replace(plan, checkpoints=max(plan.checkpoints, min(plan.checkpoints + spare, useful)))


def as_served(shape: ModelShape, demand: Demand) -> tuple[ModelShape, Demand]:
    """Without the MTP layers where nothing is drafted, and without drafts where there are none.
    Raises `BadConfig` if drafts are asked for that nothing can make."""
    if demand.drafts and not shape.mtp_layers and not demand.auto:
        raise BadConfig(f"--speculative: {shape.architecture}: the config tells of no MTP layer",
                        "speculation.speculative")
    if not demand.other_drafts:
        shape = replace(shape, draft=None, eagle=None)
    if demand.drafts and shape.mtp_layers:
        return shape, demand._replace(drafts=max(demand.drafts, demand.other_drafts))
    return (replace(shape, mtp_layers=0),
            demand._replace(drafts=demand.other_drafts, auto=True))


def default_checkpoints(state: StateBytes, token: int, budget: int) -> int:
    """Checkpoints when nobody says how many: what 1/64 of the budget holds, or two in 1/16, and at
    most one for 256 tokens that the pages can hold, since shorter prompts are cheap to compute.

    A hybrid model can reuse a prefix only where a checkpoint of its state lies, so none would mean
    no reuse at all. But each one takes the place of tokens for good (Qwen3.5-27B, fp32: 2,224 of
    them), and what it saves depends on how many prefixes are shared, which only the user knows.
    Measured (`checkpoint_reuse.py`): the first ones, which hold what everybody shares, save most.
    The default buys these and keeps about 98 % of the tokens; the plan reports what more would cost
    and save, and `make_plan` adds those that cost nothing.
    """
    if not state.checkpoint:
        return 0
    share = budget // CHECKPOINT_SHARE // state.checkpoint
    fewest = min(FEWEST_CHECKPOINTS, budget // FEWEST_SHARE // state.checkpoint)
    return min(max(share, fewest), budget // (token * CHECKPOINT_TOKENS))


def page_demand(shape: ModelShape, demand: Demand) -> PageDemand:
    """What the pages are to hold."""
    return PageDemand(demand.page_size, demand.max_num_seqs, shape.max_model_len, demand.chunk)


def state_bytes(shape: ModelShape, demand: Demand) -> StateBytes:
    """Bytes of one row of the state pool; all 0 without recurrent layers."""
    own, layers = shape.state, len(shape.recurrent)
    if own is None:
        return StateBytes(0, 0, 0)
    return StateBytes(layers * math.prod(own.state) * DTYPE_BYTES[demand.state_dtype],
                      layers * math.prod(own.columns) * shape.itemsize,
                      layers * demand.drafts * own.inputs * shape.itemsize)


def token_bytes(shape: ModelShape, demand: Demand) -> int:
    """Bytes of a token's keys and values over all attention layers and those of what drafts."""
    groups = sum(_layers_bytes(shape, demand, layers) for _, layers in shape.groups)
    return (groups + _layers_bytes(shape, demand, _mtp_layers(shape))
            + (_layer_bytes(shape.eagle.layer, demand) if shape.eagle else 0)
            + (_draft_model_bytes(shape.draft, demand) if shape.draft else 0))


def _draft_model_bytes(draft: ModelShape, demand: Demand) -> int:
    """Of a token in a draft model, all of whose layers see the pages of full attention."""
    return _layers_bytes(draft, demand, kept_layers(draft))


def _layers_bytes(shape: ModelShape, demand: Demand, layers: Sequence[int]) -> int:
    """Of a token in these layers, which have the same heads, with the keys of their indexers."""
    if not layers:
        return 0
    index = shape.index.dim * shape.itemsize if shape.index else 0
    return (len(layers) * _layer_bytes(shape.of_layer(layers[0]), demand)
            + len(shape.index_layers(layers)) * index)


def _mtp_layers(shape: ModelShape) -> range:
    return range(shape.layers, shape.layers + shape.mtp_layers)


def _layer_bytes(shape: ModelShape, demand: Demand) -> int:
    """Of a token in one layer, with the scales of its heads."""
    (parts, width), dtype = shape.kv_row, kv_dtype(shape, demand)
    return parts * (width * DTYPE_BYTES[dtype] + CODE_SCALE_BYTES.get(dtype, 0))


def kv_dtype(shape: ModelShape, demand: Demand) -> str:
    """Of the pages: a key of `DTYPE_BYTES`."""
    return shape.dtype if demand.kv_dtype == "auto" else demand.kv_dtype


def _groups(shape: ModelShape, demand: Demand) -> list[Pool]:
    """The pools, still without pages."""
    def page(layers: Sequence[int]) -> int:
        return _layers_bytes(shape, demand, layers) * demand.page_size

    pools = [Pool(f"window {window:,}" if window else "full attention", window, len(layers), 0,
                  page(layers)) for window, layers in shape.groups]
    if shape.mtp_layers:
        pools.append(Pool("MTP layer", 0, shape.mtp_layers, 0, page(_mtp_layers(shape))))
    if shape.eagle:
        pools.append(Pool("EAGLE-3 head", 0, 1, 0,
                          _layer_bytes(shape.eagle.layer, demand) * demand.page_size))
    if shape.draft is not None:
        pools.append(Pool("draft model", 0, len(kept_layers(shape.draft)), 0,
                          _draft_model_bytes(shape.draft, demand) * demand.page_size))
    return pools


def _check(shape: ModelShape, demand: Demand, budget: int, name: str, fixed: int, checkpoints: int,
           groups: Sequence[Pool]) -> None:
    """Raise `BadConfig` when not even the least number of pages fits beside the states."""
    size = page_demand(shape, demand)
    lead = max(groups, key=lambda pool: pool.window or math.inf)
    least = size.for_one(lead.window) if lead.window else 1
    pages = sum((1 + min(least, size.for_all(pool.window))) * pool.page_bytes for pool in groups)
    if budget >= fixed + pages:
        return
    parts = [f"{pages:,} for the fewest pages"]
    if fixed:
        parts = [f"{fixed - checkpoints:,} for the states of {demand.max_num_seqs} sequences",
                 *([f"{checkpoints:,} for checkpoints"] if checkpoints else []), *parts]
    raise BadConfig(f"{name}: {max(budget, 0):,} bytes are {fixed + pages - budget:,} too few: "
                    f"{', '.join(parts)}; a smaller --max-num-seqs needs less, "
                    "--quantization int4 leaves more (`actorium plan`)", name)


# --- what a change would do ----------------------------------------------------------------------

class Change(NamedTuple):
    """Another plan beside this one."""

    name: str
    token_capacity: int | None
    """None = does not fit."""
    one_sequence: int | None


def changes(plan: MemoryPlan) -> list[Change]:
    """What one more request, one more checkpoint and other dtypes would make of the capacity."""
    d = plan.demand._replace(checkpoints=plan.checkpoints)
    wanted = [("one more request", d._replace(max_num_seqs=d.max_num_seqs + 1))]
    if plan.shape.recurrence is not None:
        wanted.append(("one more checkpoint", d._replace(checkpoints=plan.checkpoints + 1)))
        if plan.checkpoints:
            wanted.append(("no checkpoints", d._replace(checkpoints=0)))
        other = "float32" if d.state_dtype == "bfloat16" else "bfloat16"
        wanted.append((f"{other} states", d._replace(state_dtype=other)))
    if d.drafts:
        wanted.append(("no speculation", d._replace(drafts=0, other_drafts=0)))
    for name, dtype in (("fp8 pages", "fp8_e4m3"), ("int8 pages", "int8")):
        narrow = d._replace(kv_dtype=dtype)
        if _layer_bytes(plan.shape, d) > _layer_bytes(plan.shape, narrow):
            wanted.append((name, narrow))
    return [_change(plan, name, demand) for name, demand in wanted]


def _change(plan: MemoryPlan, name: str, demand: Demand) -> Change:
    try:
        other = make_plan(plan.shape, demand, plan.budget)
    except BadConfig:
        return Change(name, None, None)
    return Change(name, other.token_capacity, other.one_sequence)
