"""Which steps a worker captures as graphs, whole or in segments, and what these take, estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actorium.actors.config.graph_settings import (
    FEW_TOKENS,
    TOKEN_LADDER,
    batch_setting,
    token_setting,
)
from actorium.actors.config.parsed_values import parse_speculative
from actorium.actors.config.tree import Config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.plan.weight_bytes import workspace_bytes

MAX_ROWS = 512
"""Sequences of the largest graph, unless others are asked for: a step of more of them takes so long
that its launches are hidden behind it."""
GRAPH_BYTES = 3 << 20
"""What the driver keeps of one graph: some hundred bytes for each of the launches of a layer, over
all layers and stages. An estimate: the worker measures it. As much of the segments of a step."""
PROGRAM_ROWS = 64
"""Of the largest decode step that is captured on a CPU: what that saves is a millisecond or two,
and steps of more rows take a hundred."""
LAYER_CALLS, CALL_BYTES = 20, 176
"""Kernels of a layer at most, but for those below, and what is kept of a call."""
ADAPTED_CALLS = 8
"""More of a layer's, where products have adapters."""
MORE_CALLS = {"experts": 16, "recurrence": 16, "latent": 32, "altup": 48}
"""Of a layer of shapes that have these."""


class GraphShape(NamedTuple):
    """What a graph is for."""

    rows: int
    """Sequences, those of the sink included."""
    q_len: int
    """Rows of each: its last token and the drafts behind it."""
    adapted: bool = False
    """Whether rows have adapters."""


def batch_sizes(max_num_seqs: int, asked: Sequence[int] = (), most: int | None = None
                ) -> list[int]:
    """Sequences of each graph, rising; asked: others than these; most: sequences of the largest.

    Matrix products take tiles of at least 8 rows on CUDA and cost the same up to 16. From 16 on
    each size is at most half as much more: padding reads one token's keys and no weights of its
    own, and twice as many graphs would take twice the time and hardly save a percent.
    """
    if asked:
        return sorted({size for size in asked if size <= max_num_seqs})
    most = min(max_num_seqs, MAX_ROWS if most is None else most)
    sizes = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256,
             *range(320, most + 1, 64)}
    return sorted({size for size in sizes if size < most} | {most})


class Graphs(NamedTuple):
    """All that a worker captures, the largest first."""

    decodes: list[GraphShape]
    tokens: list[int]
    """Of steps in segments."""
    rows: int = 0
    """On a CPU: of the largest decode step that is captured; each when the first such comes."""
    programs: Sequence[GraphShape] = ()
    """On a CPU: those that were captured at the start, where sizes were asked for."""
    prevented: str = ""
    """On a CPU: what keeps decode steps from being captured."""

    @property
    def summary(self) -> str:
        """How many, for people."""
        parts = [f"{len(self.decodes)} of decodes"] * bool(self.decodes)
        parts += [f"segments for {len(self.tokens)} sizes of other steps"] * bool(self.tokens)
        return " and ".join(parts)


def planned_graphs(config: Config, drafts: int, why: EagerReasons) -> Graphs:
    """The graphs of an engine with this configuration. drafts: the most that are made."""
    return Graphs(graph_shapes(config, drafts, why.decodes), segment_sizes(config, why.segments))


def segment_sizes(config: Config, why: str = "") -> list[int]:
    """Tokens that segments are captured for, falling; why: see `EagerReasons`."""
    found = token_setting(config.device)
    if why or found.word == "off":
        return []
    budget = config.scheduler.max_num_batched_tokens  # decodes and their drafts are within it
    if found.sizes:
        return sorted({size for size in found.sizes if size <= budget}, reverse=True)
    sizes = {"auto": FEW_TOKENS, "all": TOKEN_LADDER}[found.word]
    most = min(sizes[-1], budget, config.device.graph_max_tokens or budget)
    return sorted({size for size in sizes if size < most} | {most}, reverse=True)


def sizes_beyond_a_step(config: Config) -> list[int]:
    """The token counts that were asked for by number, of which no step has so many, rising."""
    most = config.scheduler.max_num_batched_tokens
    return [size for size in token_setting(config.device).sizes if size > most]


def verify_lengths(config: Config, drafts: int) -> list[int]:
    """Values of `q_len`, falling, of decodes where at most so many drafts are made: all of them,
    unless the number is fixed."""
    if not drafts:
        return [1]
    fixed = parse_speculative(config.speculation.speculative).fixed
    return [drafts + 1] if fixed else list(range(drafts + 1, 0, -1))


def graph_shapes(config: Config, drafts: int, why: str = "") -> list[GraphShape]:
    """The graphs of an engine with this configuration, the largest first: what it needs serves all
    others. drafts: the most that are made; why: see `EagerReasons`."""
    found = batch_setting(config.device)
    if why or found.word == "off":
        return []
    sizes = batch_sizes(config.scheduler.max_num_seqs, found.sizes,
                        config.device.graph_max_batch_size)
    kinds = (True, False) if config.adapters.enable_lora else (False,)
    return [GraphShape(rows, q_len, adapted) for rows in reversed(sizes)
            for q_len in verify_lengths(config, drafts) for adapted in kinds]


PARTS = 128 << 20
"""Of `kernels.triton.work`."""
PROGRAMS = 320
"""Chunks of a sequence times its key heads: two for each SM, of which there are 160 at most."""
LATENT_ROWS = 64 * PROGRAMS
"""Of all chunks of a step over latents: see `kernels.triton.latent`."""


class EagerReasons(NamedTuple):
    """Why steps are not captured; empty where they are."""

    decodes: str = ""
    segments: str = ""


NOTHING_DECODED = "nothing is decoded"
"""Why there are none of a bidirectional model."""
BY_TRANSFORMERS = "the model's class is transformers', which is run operation by operation"
"""Why steps of some models are never captured."""


def why_eager(by_host: bool, decodes: bool) -> EagerReasons:
    """Of a model; by_host: the host groups the rows of its experts; decodes: whether
    those of its attention backend can be captured."""
    if by_host:
        return EagerReasons(*["experts are grouped by the host"] * 2)
    return EagerReasons("" if decodes else "attention is told the longest sequence")


def graphs_estimate(shape: ModelShape, demand: Demand, graphs: Graphs) -> int:
    """Bytes of graphs: temporaries of the largest, which all of them share, with page tables at
    full width; what segments take in; and what the driver keeps of each."""
    taken = GRAPH_BYTES * (len(graphs.decodes) + len(graphs.tokens))
    rows = max((own.rows * own.q_len for own in graphs.decodes), default=0)
    width = page_table_width(shape.max_model_len, demand.page_size)
    tables = 4 * rows * width * len(shape.groups)
    most = max(graphs.tokens, default=0)
    return taken + tables + parts_estimate(shape, rows) + segment_input_bytes(shape, most) + max(
        workspace_bytes(shape, rows, rows), workspace_bytes(shape, most, 0))


def segment_input_bytes(shape: ModelShape, most: int) -> int:
    """Bytes of what segments of up to so many tokens take in: tokens, positions and a number a
    group of each token, and what each kind of middle gives."""
    latent, attends = shape.latent, len(shape.attention_layers)
    beside = shape.q_size if attends + len(shape.recurrent) > shape.layers else 0
    middles = set()
    if attends and not beside:
        middles |= {own.q_size if latent is None else own.heads * latent.row
                    for own in shape.kinds}
    if shape.recurrence is not None:
        middles.add(shape.recurrence.inner + beside)
    return most * (8 * (2 + len(shape.groups)) + sum(middles) * shape.itemsize)


def parts_estimate(shape: ModelShape, rows: int) -> int:
    """Bytes of what decode attention leaves for its merge, for so many rows of sequences of any
    length; see `kernels.triton.work`, whose room this bounds from above."""
    if shape.latent is not None:
        return min(PARTS, LATENT_ROWS * 4 * (shape.latent.rank + 1))
    each = PROGRAMS * 4 * max(-(-own.heads // own.kv_heads) * (own.head_dim + 1)
                              for own in shape.kinds)
    return len(shape.groups) * min(PARTS, rows * each)


ADAPTED_MODULES = 8
"""Most that one product has side by side."""


class ProgramSizes(NamedTuple):
    """Of decode steps captured on a CPU: see `graphs.decode_programs`."""

    rows: int
    """Of the largest step."""
    width: int
    """Entries of a page table."""
    temporaries: int
    """Bytes for what the layers of a step write."""
    kept: int
    """Bytes for what a step brings, and for what is captured."""

    @property
    def bytes(self) -> int:
        """Of all that is allocated."""
        return self.temporaries + self.kept


def program_shapes(config: Config, drafts: int) -> list[GraphShape]:
    """The decode steps to be captured at the start on a CPU, the largest first: those of the sizes
    that were asked for, if some were."""
    sizes = batch_setting(config.device).sizes
    return graph_shapes(config, drafts) if sizes else []


def program_rows(config: Config, drafts: int) -> int:
    """Rows of the largest decode step to be captured on a CPU; 0 = none is."""
    found, most = batch_setting(config.device), config.device.graph_max_batch_size
    slots, window = config.scheduler.max_num_seqs, drafts + 1
    if found.word == "off":
        return 0
    if found.sizes:
        return max((own.rows * own.q_len for own in program_shapes(config, drafts)), default=0)
    return min(PROGRAM_ROWS, slots * window) if most is None else min(most, slots) * window


def program_sizes(shape: ModelShape, demand: Demand, rows: int) -> ProgramSizes:
    """What the worker allocates for steps of so many rows."""
    width = page_table_width(shape.max_model_len, demand.page_size)
    width += -(-demand.drafts // demand.page_size)
    brought = (shape.stream_width + 2 * shape.rope_columns + shape.token_width) * shape.itemsize \
        + len(shape.groups) * (8 + 4 * width) + 4 + 16
    programs = sum(rows // (q_len + 1) for q_len in range(demand.drafts + 1))
    each = LAYER_CALLS + sum(more for name, more in MORE_CALLS.items()
                             if getattr(shape, name) is not None)
    room = 2 * workspace_bytes(shape, rows, 0) + (1 << 16)
    if demand.adapters:  # programs of steps with adapters beside the others
        each += each + ADAPTED_CALLS
        brought += 4 + 3 * 4
        room += ADAPTED_MODULES * rows * demand.adapter_rank * 4
    calls = programs * shape.layers * each * CALL_BYTES
    return ProgramSizes(rows, width, room, rows * brought + calls + (1 << 16))
