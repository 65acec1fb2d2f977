"""What can be refused before anything is started: what the machine and the disk do not have.

Nothing heavy is loaded for it; what a look cannot tell, the actors find out.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import is_jinja

NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-ctrl-gpu", "/dev/nvmap", "/dev/dxg",
         "/dev/kfd")
"""Drivers' device files: NVIDIA's, its boards', WSL's and AMD's."""


def check_machine(config: Config) -> None:
    """Raise `BadConfig` if CUDA is asked for where there is no trace of a driver, a chat template
    that is neither a file nor jinja, or generation defaults of a folder without any."""
    if config.device.device == "cuda" and not (config.device.null_worker or _has_driver()):
        raise BadConfig("device: cuda was asked for, but this machine has no CUDA device",
                        "device.device")
    source = config.model.generation_config
    if source not in ("auto", "vllm"):
        file = Path(source).expanduser() / "generation_config.json"
        if not file.is_file():
            raise BadConfig(f"generation_config: must be auto, vllm or a folder with a "
                            f"generation_config.json, got {source!r}", "model.generation_config")
    template = config.model.chat_template
    if template and not is_jinja(template) and not Path(template).expanduser().is_file():
        raise BadConfig(f"chat_template: no such file: {template!r}", "model.chat_template")


def _has_driver() -> bool:
    if any(Path(node).exists() for node in NODES):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
