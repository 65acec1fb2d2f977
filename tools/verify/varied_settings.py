"""From a condition to the configuration of the engine that it needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_slices import rank_faults
from actorium.tools.verify.conditions import Condition, differing

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
            speculation = put(speculation, speculative=f"mtp:{value},fixed")
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
    """That of the plain engine: without drafts, and with quick ways back from deaths, unless the
    command line says else."""
    recovery, speculation = config.recovery, config.speculation
    if "fork_server" not in written:
        recovery = msgspec.structs.replace(recovery, fork_server="on")
    if "speculative" not in written:
        speculation = msgspec.structs.replace(speculation, speculative="off")
    return msgspec.structs.replace(config, recovery=recovery, speculation=speculation)
