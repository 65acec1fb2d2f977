"""What a page's bits depend on beside its tokens, as a name: pages of one name may be exchanged.

Whatever might matter is in it, so that a page is rather computed again than taken from an engine
that rounds in another way.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from actorium import __version__
from actorium.actors.config.tree import Config
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.parallel.rank_types import RankPlace

NAME_BYTES = 16
HEAD = 1 << 16
"""Bytes of each of a model's files that are read, from its begin and from its end."""
BESIDE = ("model", "revision", "download_dir", "served_model_name", "skip_tokenizer",
          "chat_template", "default_chat_template_kwargs", "generation_config",
          "override_generation_config")
"""Of the model's settings, those that no page depends on; its files stand for its name."""
PAGES = ("page_size", "kv_cache_dtype", "state_dtype")
"""Of the memory's, those that one does."""


def page_namespace(config: Config, path: Path, shape: object, info: WorkerInfo, place: RankPlace,
                   parts: list[int], width: int) -> bytes:
    """16 bytes. path: the model's directory; shape: of the model; parts and width: as `HostPages`
    lays pages out. Raises `OSError`."""
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
            made.update(_of_file(file))
    return made.digest()


def _of_file(file: Path) -> bytes:
    """Of its name, size, time of change, begin and end."""
    found = file.stat()
    made = blake2b(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    with file.open("rb") as own:
        made.update(own.read(HEAD))
        own.seek(max(0, found.st_size - HEAD))
        made.update(own.read(HEAD))
    return made.digest()
