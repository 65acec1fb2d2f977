"""Opens the tiers below the page pool, the host's memory and a disk, and names the pages on the
disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from actorium import __version__
from actorium.actors.config.parsed_values import parse_disk_cache
from actorium.actors.config.tree import Config, MemoryConfig
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import resolve, takes_media
from actorium.actors.runtime.memory_limits import available_memory
from actorium.actors.runtime.security.private_paths import UnsafePath
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_group import RankPlace
from actorium.gpu.plan.non_cache_memory import staging_bytes
from actorium.gpu.step.disk_pages import DiskPages
from actorium.gpu.step.host_pages import HostPages, PageStaging
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.disk_threads import NAME_BYTES, DiskThreads, OpeningDisk

BUFFER_STEPS = 2
"""Steps of the largest size whose pages the host has room for on their way to a disk, where it
keeps none of its own accord."""
BUFFER_STATES = 4
"""And so many checkpoints."""
HEAD = 1 << 16
"""Bytes of each of a model's files that are read, from its begin and from its end."""
BESIDE = ("model", "revision", "download_dir", "served_model_name", "skip_tokenizer",
          "chat_template", "default_chat_template_kwargs", "generation_config",
          "override_generation_config")
"""Of the model's settings, those that no page depends on; its files stand for its name."""
PAGES = ("page_size", "kv_cache_dtype", "state_dtype")
"""Of the memory's, those that one does."""


def check_tiers(config: Config, shape: ModelShape) -> None:
    """Raise `BadConfig` where pages cannot go below the pool, or not so many."""
    memory = config.memory
    if not memory.tiers:
        return
    flag = memory.tiers[0]
    for cannot, why in (
            (memory.host_cache > available_memory(), "is more than this machine's memory, or than "
             "a limit of it"),
            (not memory.prefix_cache, "needs the prefix cache"),
            (shape.bidirectional, "nothing is kept of prompts whose tokens attend to both sides"),
            (takes_media(config), "a model that takes images or videos is not supported")):
        if cannot:
            raise BadConfig(f"{flag}: {why}", f"memory.{flag}")


class KeptTier(NamedTuple):
    """What stays on the host while the engine sleeps."""

    host: HostPages
    disk: DiskThreads | None


def open_tiers(runner: ModelRunner, config: Config, info: WorkerInfo, shape: ModelShape, epoch: int,
               place: RankPlace, kept: KeptTier | None = None) -> DiskThreads | None:
    """Gives the runner its host slots, or those that were kept, and a device that is not the host
    what copies to and from them; returns the disk's threads, not begun unless they were kept.
    Raises `BadConfig`."""
    asked, tiers = config.memory.host_cache, config.memory.tiers
    if not tiers:
        return None
    kinds = _kinds(runner)
    pages = BUFFER_STEPS * -(-config.scheduler.max_num_batched_tokens // runner.tables.page_size)
    groups = len(runner.pools)
    if kept is None:
        host = HostPages(kinds, asked // place.size, () if asked else
                         [pages + 1] * groups + [BUFFER_STATES] * (len(kinds) - groups),
                         config.device.native_kernels)
    else:
        host = kept.host
        host.attach(kinds)
    runner.host = host
    if runner.arrays.device.type == "cuda":
        runner.staging = PageStaging(host, staging_bytes(config, shape) // 2)
    if tiers[-1] == "host_cache" or kept is not None:
        return None if kept is None else kept.disk
    namespace = partial(page_namespace, config, resolve(config.model.model), shape, info, place,
                        host.parts, host.width)
    opened = _open_disk if config.memory.disk_cache else _open_remote
    return DiskThreads(opened(config.memory, namespace, host), host, epoch, place.rank,
                       config.memory.disk_timeout)


def _open_disk(memory: MemoryConfig, namespace: Callable[..., bytes], host: HostPages
               ) -> OpeningDisk:
    bound = parse_disk_cache(memory.disk_cache)
    assert bound is not None
    if bound.bytes < 2 * host.width:
        raise BadConfig(f"disk_cache: {bound.bytes:,} bytes hold no two pages, which take "
                        f"{2 * host.width:,}", "memory.disk_cache")
    try:
        name = namespace()
        return OpeningDisk(f"disk_cache: {bound.directory}", lambda: DiskPages(
            bound.directory, bound.bytes, name, host.crc32), memory.disk_timeout)
    except UnsafePath as error:
        raise BadConfig(f"disk_cache: {error}", "memory.disk_cache") from None
    except OSError as error:
        raise BadConfig(f"disk_cache: {bound.directory}: {error.strerror}",
                        "memory.disk_cache") from None


def _open_remote(memory: MemoryConfig, namespace: Callable[..., bytes], host: HostPages
                 ) -> OpeningDisk:
    try:
        from actorium.gpu.step.remote_pages import RemotePages
    except ImportError:
        raise BadConfig("remote_cache: the package redis is missing: pip install redis",
                        "memory.remote_cache") from None
    file = memory.remote_cache_password_file
    try:
        password = Path(file).expanduser().read_text().strip() if file else ""
    except OSError as error:
        raise BadConfig(f"remote_cache_password_file: {file}: {error.strerror}",
                        "memory.remote_cache_password_file") from None
    name = namespace(times=False)
    return OpeningDisk(f"remote_cache: {memory.remote_cache}", lambda: RemotePages(
        memory.remote_cache, password, name, memory.disk_timeout, host.crc32), memory.disk_timeout)


def tier_capacity(runner: ModelRunner, config: Config) -> dict[str, Any]:
    """Fields of `Ready`."""
    host, memory = runner.host, config.memory
    if host is None:
        return {}
    return {"host_pages": host.slots, "host_parts": host.parts,
            "disk": "" if memory.tiers[-1] == "host_cache" else
            "ahead" if memory.host_cache else "at once"}


def _kinds(runner: ModelRunner) -> list[list[Tensor]]:
    """What is kept: the pages of each group, those of what drafts with the first, and
    checkpoints, whose first row is unused."""
    size = runner.tables.page_size
    kinds = [[own.unflatten(1, (-1, size)) for own in pool.stacks] for pool in runner.pools]
    for pool in runner.draft_pools:
        kinds[0] += [own.unflatten(1, (-1, size)) for own in pool.stacks]
    states = runner.states
    if states is not None and states.checkpoints:
        kinds.append([part[:, states.live - 1:] for part in states.committed])
    return kinds


# --- Names of pages on the disk ------------------------------------------------------------------

def page_namespace(config: Config, path: Path, shape: object, info: WorkerInfo, place: RankPlace,
                   parts: list[int], width: int, times: bool = True) -> bytes:
    """16 bytes. path: the model's directory; shape: of the model; parts and width: as `HostPages`
    lays pages out; times: files that were changed at other times are others, which copies on other
    machines are as well. Raises `OSError`."""
    model = msgspec.structs.asdict(config.model)
    if config.model.load_format != "dummy":
        model.pop("seed")
    memory, device = msgspec.structs.asdict(config.memory), msgspec.structs.asdict(config.device)
    facts = ("pages 2", __version__, str(torch.__version__), str(shape),
             sorted((name, str(own)) for name, own in model.items() if name not in BESIDE),
             [(name, memory[name]) for name in PAGES],
             sorted((name, str(own)) for name, own in device.items()),
             config.speculation.speculative, info.device, info.kernels, info.attention,
             info.inexact, torch.backends.cpu.get_cpu_capability(), place.rank, place.size,
             parts, width)
    made = blake2b(msgspec.msgpack.encode(facts), digest_size=NAME_BYTES)
    for file in sorted(path.iterdir()):
        if file.is_file():
            made.update(_of_file(file, times))
    return made.digest()


def _of_file(file: Path, times: bool) -> bytes:
    """Of its name, size, time of change, begin and end."""
    found = file.stat()
    made = blake2b(f"{file.name} {found.st_size} {found.st_mtime_ns if times else ''}".encode())
    with file.open("rb") as own:
        made.update(own.read(HEAD))
        own.seek(max(0, found.st_size - HEAD))
        made.update(own.read(HEAD))
    return made.digest()
