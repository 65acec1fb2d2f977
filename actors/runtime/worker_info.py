"""A worker's device, memory and kernels, written into the run directory for the start report."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

LOG = logging.getLogger("actorium.worker")


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """Written when the worker is ready."""

    device: str
    """cpu, or cuda and the device's name."""
    dtype: str
    """Of weights and activations."""
    weights_bytes: int
    weight_formats: dict[str, int] = {}
    """Bytes of weights by how they are held, as the memory plan counts them."""
    kv_dtype: str
    kv_bytes: int
    """Of all pages."""
    kv_tokens: int
    """Tokens when every page is full."""
    max_model_len: int
    full_length: int
    """Requests of `max_model_len` tokens that can be held at once, `max_num_seqs` at most."""
    max_num_seqs: int
    state_bytes: int = 0
    """Recurrent states, checkpoints included."""
    checkpoints: int = 0
    level: int = 2
    """Of optimisation."""
    passes: str = "all"
    """The setting."""
    graphs: str = ""
    """Sizes of what is captured; empty = nothing is."""
    capture_seconds: float = 0.0
    """What it took to capture at the start."""
    no_graphs: str = ""
    """Why not."""
    kernels: str = ""
    """Of products, norms and the like."""
    attention: str = ""
    exact: str = ""
    """What came of `--exact`, in words."""
    inexact: str = ""
    """What depends on more than a token and its prefix, as on the batch; empty = nothing."""
    drafts: int = 0
    """Most a step."""


def _file(run_dir: Path, role: str) -> Path:
    return run_dir / f"{role}.json"


def write_info(run_dir: Path, role: str, info: WorkerInfo) -> None:
    """Write it atomically. A full disk is logged and otherwise ignored."""
    file = _file(run_dir, role)
    temporary = file.with_name(f"{file.name}.{role}.log")
    try:
        temporary.write_bytes(msgspec.json.encode(info))
        os.replace(temporary, file)
    except OSError as error:
        LOG.warning("%s is not written: %s", file.name, error.strerror)


def read_info(run_dir: Path, role: str) -> WorkerInfo | None:
    """What the worker wrote; None = nothing."""
    try:
        return msgspec.json.decode(_file(run_dir, role).read_bytes(), type=WorkerInfo)
    except (OSError, msgspec.MsgspecError):
        return None
