"""`actorium doctor`: what this machine can serve with, in one screen; what is off, why, and the
command that changes it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import socket
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.health import READY_PHASES
from actorium.actors.launcher.preflight import has_driver
from actorium.actors.models import hub_download
from actorium.actors.models import model_dir as models
from actorium.actors.models.model_names import (
    WHEEL_MODELS,
    cached_model,
    cached_repositories,
    hub_cache,
    is_fetched,
    wheel_model_file,
)
from actorium.actors.models.obtain import is_whole, named
from actorium.actors.runtime.memory_limits import available_memory, groups, memory_limit
from actorium.actors.runtime.rundir import (
    LONGEST_SOCKET,
    MAX_IPC_PATH,
    SHARED_MEMORY,
    engine_dir,
    free_bytes,
)
from actorium.kernels.cpu.native_library import c_compiler, is_built
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.doctor_checks import BAD, Check, Gpu, Machine, Package, check_all, serves
from actorium.tools.cli.models_command import LocalModel, judge, machine_memory
from actorium.tools.cli.ps_command import SILENT, list_actors
from actorium.tools.cli.serve_command import PORT
from actorium.tools.output import aligned

ABOUT = """What this machine can serve with: Python, packages, GPU, processor, memory, limits, port,
downloaded models, running engines. Each line is ok, off (an engine can do without) or bad, with the
command that changes it. MODEL (or --model): whether it can be read and fits. Nothing is downloaded
or changed. Exit codes: 0 an engine can serve, 1 none can."""
DISTRIBUTION = "actorium-llm"
_REQUIREMENT = re.compile(r"([\w.-]+)([^;]*)(?:;.*extra == ['\"]([\w-]+)['\"])?")


class DoctorOptions(Struct, frozen=True, kw_only=True):
    """How to say it."""

    json: bool = False
    """Print an object instead of lines."""


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium doctor [MODEL]", argv, DoctorOptions, ABOUT)
    checks = check_all(read_machine(parsed.config))
    ok = serves(checks)
    if parsed.options.json:
        print(json.dumps({"serves": ok, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print("\n".join([*lines(checks), summary(checks, parsed.config.model.model)]))
    return 0 if ok else 1


def lines(checks: list[Check]) -> list[str]:
    """Name, state and text of each check, and below it, after an arrow, what to do."""
    rows = [(check.name, check.state, check.text) for check in checks]
    return [line for check, row in zip(checks, aligned(rows), strict=True)
            for line in [row, *[f"  -> {check.next}"] * bool(check.next)]]


def summary(checks: list[Check], model: str) -> str:
    if serves(checks):
        return f"next: actorium serve {model}".rstrip()
    bad = ", ".join(check.name for check in checks if check.state == BAD)
    return f"no engine can serve here: {bad}"


# --- reading the machine --------------------------------------------------------------------------

def read_machine(config: Config) -> Machine:
    """Everything that the checks need to know."""
    cpuinfo = _cpuinfo()
    torch = _torch()
    limit = memory_limit()
    own = config.model.download_dir
    cache = Path(own).expanduser() if own else hub_cache()
    host = config.gateway.host
    port = PORT if config.gateway.port is None else config.gateway.port
    missing, fault, text = _model(config, cache)
    return Machine(
        system=f"{platform.system()} {platform.machine()}", python=sys.version_info[:3],
        extras=extras(), **torch._asdict(), driver=has_driver(),
        processor=cpuinfo.get("model name", platform.processor() or platform.machine()),
        instructions=frozenset((cpuinfo.get("flags") or cpuinfo.get("Features", "")).split()),
        compiler=c_compiler(), built=is_built(),
        cpus=len(os.sched_getaffinity(0)), cpu_quota=cpu_quota(), threads=config.device.threads,
        free_memory=machine_memory(_on_cpu(config), None).bytes, memory=available_memory(),
        memory_limit=str(limit.file) if limit is not None else "",
        shared_memory=free_bytes(SHARED_MEMORY),
        open_files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        run_dir=str(engine_dir(config.runtime.name, config.runtime.run_dir)),
        run_dir_fault=run_dir_fault(engine_dir(config.runtime.name, config.runtime.run_dir)),
        host=host, port=port, port_fault=port_fault(host, port),
        cache=str(cache), cache_free=free_bytes(_existing(cache)),
        cached=len(cached_repositories(cache)), token=_has_token(), offline=hub_download.offline(),
        model=config.model.model, model_missing=missing, model_fault=fault, model_text=text,
        engines=_engines(config))


def extras() -> dict[str, list[Package]]:
    """The packages of each extra, those of the base install with the engine's."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    by_extra: dict[str, list[Package]] = {"engine": []}
    for requirement in required:
        matched = _REQUIREMENT.match(requirement)
        if matched is not None:
            name, wanted, extra = matched.groups()
            by_extra.setdefault(extra or "engine", []).append(_package(name, wanted.strip()))
    first = ("torch", "triton", "transformers")
    by_extra["engine"].sort(key=lambda package: package.name not in first)
    return by_extra


def _package(name: str, wanted: str) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Package(name, wanted, None)
    try:
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:  # it comes with the engine's packages
        return Package(name, wanted, version)
    return Package(name, wanted, version, SpecifierSet(wanted).contains(version, prereleases=True))


class _Torch(NamedTuple):
    torch: str = ""
    torch_fault: str = ""
    torch_cuda: str | None = None
    gpus: list[Gpu] = []
    triton_fault: str = ""


def _torch() -> _Torch:
    if find_spec("torch") is None:
        return _Torch()
    try:
        import torch

        from actorium.kernels.backends import triton_fault
    except (ImportError, OSError) as error:  # a library that it needs is not there
        return _Torch(torch_fault=str(error).splitlines()[0])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.cuda.get_device_properties(number) for number in range(count)]
    return _Torch(
        torch.__version__, "", torch.version.cuda,
        [Gpu(card.name, card.total_memory, (card.major, card.minor)) for card in cards],
        triton_fault(torch.device("cuda" if count else "cpu")))


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        return {name.strip(): value.strip() for name, _, value in
                (line.partition(":") for line in first.splitlines())}
    return {}


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """CPUs' worth of time that the tightest of the process's control groups allows; None = no
    limit, or version 1 of the kernel's interface."""
    quotas = []
    for kind, directory in groups(proc):
        if kind == "cgroup2":
            with contextlib.suppress(OSError, ValueError):  # "max 100000", or no such file
                quota, period = (directory / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def run_dir_fault(directory: Path) -> str:
    """Why sockets cannot be made in a run directory; empty if they can."""
    if len(str(directory.absolute() / LONGEST_SOCKET).encode()) > MAX_IPC_PATH:
        return f"{directory}: paths of its sockets exceed {MAX_IPC_PATH} bytes"
    parent = _existing(directory)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return f"{directory}: {parent} cannot be written"
    return "" if free_bytes(parent) else f"{directory}: no space is left"


def port_fault(host: str, port: int) -> str:
    """Why nothing can listen there now; empty if something can."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, number) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next((one for one in (path.absolute(), *path.absolute().parents) if one.exists()),
                Path("/"))


def _limit(count: int) -> int:
    return 1 << 20 if count == resource.RLIM_INFINITY else count


def _on_cpu(config: Config) -> Config:
    return msgspec.structs.replace(
        config, device=msgspec.structs.replace(config.device, device="cpu"))


def _has_token() -> bool:
    if find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import get_token

    return get_token() is not None


def _model(config: Config, cache: Path) -> tuple[bool, str, str]:
    """(it is a name whose files are not here, why it cannot be served, what it is)."""
    try:
        name = named(config)
        path: Path | None = None
        if name is not None and name.repo in WHEEL_MODELS:
            path = wheel_model_file(name.repo) if is_fetched(name.repo) else None
        elif name is not None:
            path = cached_model(name, cache)
        if name is not None and (path is None or not is_whole(path)):
            return True, "", ""
        folder = models.resolve(str(path) if path is not None else config.model.model)
        count = models.checkpoint_bytes(folder) or 0
        local = LocalModel(config.model.model or "the demo model", str(folder), "", count)
        judge(local, config, machine_memory(config, None))
    except (BadModel, BadConfig) as error:
        return False, error.message, ""
    if local.note:
        return False, local.note, ""
    tokens = f", and its caches hold {local.kv_tokens:,} tokens" if local.kv_tokens else ""
    return False, "", f"{local.name} fits{tokens}"


def _engines(config: Config) -> dict[str, str]:
    """Name -> "ready", with where it answers HTTP; or what it still does."""
    states: dict[str, list[dict[str, Any]]] = {}
    for row in list_actors(config):
        states.setdefault(row["name"], []).append(row)
    return {name: _state(rows) for name, rows in states.items()}


def _state(rows: list[dict[str, Any]]) -> str:
    busy = [row for row in rows if row["phase"] not in READY_PHASES]
    if busy:
        phase = busy[0]["phase"]
        return SILENT if phase == SILENT else f"{busy[0]['role']} is {phase}"
    return next((f"ready, {row['detail']}" for row in rows
                 if row["detail"].startswith("HTTP at ")), "ready")
