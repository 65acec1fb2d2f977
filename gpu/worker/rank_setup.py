"""A rank's beginning: its device, and the group of those that share the model with it."""

from __future__ import annotations

from actorium.actors.core import Context
from actorium.actors.runtime.roles import rank_of
from actorium.actors.runtime.rundir import GROUP, remove_group
from actorium.gpu.parallel.rank_group import RankGroup, RankPlace, open_group
from actorium.gpu.parallel.step_gate import StepGate
from actorium.gpu.worker.device import pick_device


def join_ranks(ctx: Context) -> tuple[RankGroup, StepGate]:
    """The group of this worker's ranks, all of which call this, and the gate before its steps; of
    a rank alone where it shares the model with nobody. Both wait as long as the engine may take to
    start, until they are told otherwise (`timeout_s`).

    Raises `BadConfig` where there is no device for the rank, and `GroupTimeout`.
    """
    size, patience = ctx.config.device.tensor_parallel_size, ctx.config.runtime.start_timeout
    place = RankPlace(rank_of(ctx.role), size)
    device = pick_device(ctx.config.device, place)
    path = ctx.run_dir / f"{GROUP}{ctx.epoch}"
    if size > 1:
        path.mkdir(mode=0o700, exist_ok=True)
        if place.rank == 0:  # the ranks of older groups are gone
            for old in ctx.run_dir.glob(f"{GROUP}*"):
                if old != path:
                    remove_group(old)
    gate = StepGate(place, path, patience)
    return open_group(place, path, patience, device, patience), gate
