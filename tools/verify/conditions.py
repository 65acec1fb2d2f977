"""Conditions under which a request is computed: a point in a product of axes, none of which may
change a token; and the engine configuration that a point needs. Pure.

Some axes are flags of an engine, which must be started anew for another value; the others are how
requests are sent. Each has a plain value, the field's default; `PLAIN` is the point of all of them,
and every other point is held against it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_slices import rank_faults


class Condition(Struct, frozen=True, kw_only=True):
    """A point. A field is an axis."""

    tokens_per_step: int = 0
    """Tokens a step may compute, so that prompts are cut into chunks; 0 = as the engine has it."""
    drafts: str = "off"
    """What makes drafts, and how many are verified in each step, as in `--speculative`."""
    ranks: int = 1
    """Tensor-parallel processes."""
    page_size: int = 0
    """Tokens a page; 0 = as the engine has it."""
    pool: str = "roomy"
    """tight: pages for a few requests, so that others are preempted and prefixes evicted."""
    preempt_every: int = 0
    """A running request is preempted every so many steps; 0 = never."""
    threads: int = 0
    """Threads of the worker; 0 = the engine's default."""
    overlap: bool = True
    """A step is planned while another runs."""
    graphs: bool = True
    """Steps are captured; off = launched operation by operation."""
    neighbours: int = 0
    """Other requests that are sent along."""
    order: str = "first"
    """Where among them it is sent: first | middle | last."""
    cache: str = "cold"
    """What the prefix cache has of its prompt: cold (nothing) | together (what the neighbours share
    with it) | warm (all, it was asked before) | shared (a beginning, from other prompts) | evicted
    (some: it was asked before, then long prompts came, and more come under way)."""
    choices: int = 1
    """Choices that are asked for, `n`; the first, and of greedy requests each, must be as the only
    one."""
    logprobs: bool = True
    """Are asked for."""
    reading: str = "whole"
    """whole (all at once) | stream (as it comes) | cut (given up on the way, taken up again) | http
    (a stream of the gateway's) | http-cut (one whose connection is lost, taken up again)."""
    worker: str = "lives"
    """killed: the process that computes dies under way."""
    neighbours_leave: bool = False
    """The others are aborted under way."""
    position_seed: int = 0
    """No axis, since no value of it is plain: what happens under way happens at places that are
    drawn by it."""


PLAIN = Condition()
AXES: tuple[str, ...] = tuple(axis for axis in Condition.__struct_fields__
                              if axis != "position_seed")
ENGINE_AXES = AXES[:AXES.index("neighbours")]
"""Axes that are flags of an engine."""
SENDING_AXES = tuple(axis for axis in AXES if axis not in ENGINE_AXES)
NEIGHBOURS = (1, 2, 4, 7, 15, 32, 63)
"""With the request itself, batches of 2, 3, 5, 8, 16, 33 and 64."""
VALUES: Mapping[str, tuple[Any, ...]] = {
    "tokens_per_step": (16, 37, 256),
    "drafts": ("mtp:1", "mtp:2", "mtp:3", "mtp:4", "ngram:3", "suffix:6", "grammar:4",
               "draft:3", "eagle3:3"),
    "ranks": (2,), "page_size": (4, 64),
    "pool": ("tight",), "preempt_every": (3, 7), "threads": (1,), "overlap": (False,),
    "graphs": (False,), "neighbours": NEIGHBOURS, "order": ("middle", "last"),
    "cache": ("together", "warm", "shared", "evicted"), "choices": (2, 4), "logprobs": (False,),
    "reading": ("stream", "cut", "http", "http-cut"), "worker": ("killed",),
    "neighbours_leave": (True,)}
"""Values of each axis beside the plain one."""


def differing(one: Condition, other: Condition = PLAIN) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if getattr(one, axis) != getattr(other, axis))


def with_plain(condition: Condition, axes: Sequence[str], plain: Condition = PLAIN) -> Condition:
    """The condition with these axes at their plain values."""
    return msgspec.structs.replace(condition, **{axis: getattr(plain, axis) for axis in axes})


def engine_part(condition: Condition, plain: Condition = PLAIN) -> Condition:
    """What the engine must be started for: all else is plain."""
    return with_plain(condition, (*SENDING_AXES, "position_seed"), plain)


def described(condition: Condition, plain: Condition = PLAIN) -> str:
    """Describes in words what is not plain."""
    axes = differing(condition, plain)
    return ", ".join(f"{axis}={getattr(condition, axis)}" for axis in axes) or "plain"


BY_MODEL = frozenset({"draft", "eagle3"})
"""Methods of which `speculative_model` names what drafts; others are refused beside it."""


def methods_of(shape: ModelShape, config: Config) -> set[str]:
    """What can make drafts: the model's own layer, texts and grammars, and what `speculative_model`
    names, of which an engine finds out when it starts."""
    return ({"ngram", "suffix", "grammar"} | ({"mtp"} if shape.mtp_layers else set())
            | (BY_MODEL if config.speculation.speculative_model else set()))


def made_by(values: Sequence[str], methods: Collection[str]) -> tuple[str, ...]:
    """Returns those values of `drafts` that these methods can make."""
    return tuple(value for value in values if value.partition(":")[0] in methods)


FLAGS = {"tokens_per_step": "max_num_batched_tokens", "drafts": "speculative",
         "ranks": "tensor_parallel_size", "page_size": "page_size", "pool": "max_total_tokens",
         "preempt_every": "force_preempt_every", "threads": "threads", "overlap": "overlap",
         "graphs": "enforce_eager"}
"""Axis -> the setting that it is. Those that a command line sets itself stay as they are there."""


def varied(config: Config, condition: Condition, tight: int, http: bool = False) -> Config:
    """The configuration of an engine for a condition. tight: tokens of a small pool. http: it has a
    gateway, at any port that is free and without keys."""
    put = msgspec.structs.replace
    scheduler, memory, device = config.scheduler, config.memory, config.device
    speculation = config.speculation
    for axis in differing(condition):
        value = getattr(condition, axis)
        if axis in ("tokens_per_step", "preempt_every", "overlap"):
            scheduler = put(scheduler, **{FLAGS[axis]: value})
        elif axis in ("ranks", "threads"):
            device = put(device, **{FLAGS[axis]: value})
        elif axis == "graphs":
            device = put(device, enforce_eager=True)
        elif axis == "page_size":
            memory = put(memory, page_size=value)
        elif axis == "pool":
            memory = put(memory, max_total_tokens=tight)
        elif axis == "drafts":
            model = speculation.speculative_model if made_by([value], BY_MODEL) else ""
            speculation = put(speculation, speculative=f"{value},fixed", speculative_model=model)
    # Deaths are part of the run, and so is the way of each engine's own name.
    recovery = put(config.recovery, max_restarts=100_000)
    runtime = put(config.runtime, name=RuntimeConfig().name, crash_reports=False)
    gateway = put(config.gateway, port=0 if http else None, host="127.0.0.1", gateways=1,
                  api_key=None, api_keys_file=None, access_log=False)
    return put(config, gateway=gateway, scheduler=scheduler, memory=memory, device=device,
               recovery=recovery, speculation=speculation, runtime=runtime)


def over_ranks(config: Config, shape: ModelShape, written: Mapping[str, str],
               most: int = 2) -> tuple[Config, str]:
    """(with `--exact on` that of engines whose bits do not depend on the number of ranks, up to
    `most`; why it is held where they do). written: settings that stay as they are."""
    if shape.by_transformers:
        return config, "transformers' classes are not split over ranks"
    device = config.device
    if device.exact != "on" or FLAGS["ranks"] in written:
        return config, ""
    if "exact_ranks" not in written:
        if found := rank_faults(shape, most):
            return config, f"with --exact on the number of ranks is held: {'; '.join(found)}"
        device = msgspec.structs.replace(device, exact_ranks=most)
    elif device.exact_ranks == 1:
        return config, "with --exact-ranks 1 the number of ranks is held"
    return msgspec.structs.replace(config, device=device), ""


def plain_config(config: Config, written: Mapping[str, str]) -> Config:
    """Returns the plain engine's configuration: without drafts and with fast restarts, unless the
    command line says otherwise."""
    recovery, speculation = config.recovery, config.speculation
    if "fork_server" not in written:
        recovery = msgspec.structs.replace(recovery, fork_server="on")
    if "speculative" not in written:
        speculation = msgspec.structs.replace(speculation, speculative="off")
    return msgspec.structs.replace(config, recovery=recovery, speculation=speculation)
