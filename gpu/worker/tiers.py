"""The tiers below the page pool, as a worker opens them: the host's memory and a disk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from actorium.actors.config.parsed_values import parse_disk_cache
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import resolve, takes_media
from actorium.actors.runtime.memory_limits import available_memory
from actorium.actors.runtime.security.private_paths import UnsafePath
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_types import RankPlace
from actorium.gpu.plan.tier_memory import staging_bytes
from actorium.gpu.step.disk_pages import DiskPages
from actorium.gpu.step.host_pages import HostPages
from actorium.gpu.step.page_staging import PageStaging
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.disk_opening import OpeningDisk
from actorium.gpu.worker.disk_threads import DiskThreads
from actorium.gpu.worker.page_identity import page_namespace

BUFFER_STEPS = 2
"""Steps of the largest size whose pages the host has room for on their way to a disk, where it
keeps none of its own accord."""
BUFFER_STATES = 4
"""And so many checkpoints."""


def check_tiers(config: Config, shape: ModelShape) -> None:
    """Raise `BadConfig` where pages cannot go below the pool, or not so many."""
    memory = config.memory
    flag = "host_cache" if memory.host_cache else "disk_cache"
    if not (memory.host_cache or memory.disk_cache):
        return
    for cannot, why in (
            (memory.host_cache > available_memory(), "is more than this machine's memory, or than "
             "a limit of it"),
            (not memory.prefix_cache, "needs the prefix cache"),
            (takes_media(config), "a model that takes images or videos is not supported")):
        if cannot:
            raise BadConfig(f"{flag}: {why}", f"memory.{flag}")


def open_tiers(runner: ModelRunner, config: Config, info: WorkerInfo, shape: ModelShape, epoch: int,
               place: RankPlace) -> DiskThreads | None:
    """Gives the runner its host slots, and a device that is not the host what copies to and from
    them; returns the disk's threads, not begun. Raises `BadConfig`."""
    asked, bound = config.memory.host_cache, parse_disk_cache(config.memory.disk_cache)
    if not asked and bound is None:
        return None
    kinds = _kinds(runner)
    pages = BUFFER_STEPS * -(-config.scheduler.max_num_batched_tokens // runner.tables.page_size)
    groups = len(runner.pools)
    host = HostPages(kinds, asked // place.size, () if asked else
                     [pages + 1] * groups + [BUFFER_STATES] * (len(kinds) - groups),
                     config.device.native_kernels)
    runner.host = host
    if runner.arrays.device.type == "cuda":
        runner.staging = PageStaging(host, staging_bytes(config, shape) // 2)
    if bound is None:
        return None
    if bound.bytes < 2 * host.width:
        raise BadConfig(f"disk_cache: {bound.bytes:,} bytes hold no two pages, which take "
                        f"{2 * host.width:,}", "memory.disk_cache")
    try:
        name = page_namespace(config, resolve(config.model.model), shape, info, place, host.parts,
                              host.width)
        disk = OpeningDisk(bound.directory, lambda: DiskPages(
            bound.directory, bound.bytes, name, host.crc32),
            config.memory.disk_timeout)
    except UnsafePath as error:
        raise BadConfig(f"disk_cache: {error}", "memory.disk_cache") from None
    except OSError as error:
        raise BadConfig(f"disk_cache: {bound.directory}: {error.strerror}",
                        "memory.disk_cache") from None
    return DiskThreads(disk, host, epoch, place.rank, config.memory.disk_timeout)


def tier_capacity(runner: ModelRunner, config: Config) -> dict[str, Any]:
    """Fields of `Ready`."""
    host, memory = runner.host, config.memory
    if host is None:
        return {}
    return {"host_pages": host.slots, "host_parts": host.parts,
            "disk": "" if not memory.disk_cache else "ahead" if memory.host_cache else "at once"}


def _kinds(runner: ModelRunner) -> list[list[Tensor]]:
    """What is kept: the pages of each group, those of the layer that drafts with the first, and
    checkpoints, whose first row is nobody's."""
    size = runner.tables.page_size
    kinds = [[own.unflatten(1, (-1, size)) for own in pool.stacks] for pool in runner.pools]
    if runner.draft_pool:
        kinds[0] += [own.unflatten(1, (-1, size)) for own in runner.draft_pool.stacks]
    states = runner.states
    if states is not None and states.checkpoints:
        kinds.append([part[:, states.live - 1:] for part in states.committed])
    return kinds
