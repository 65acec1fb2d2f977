"""Checks before anything is started: packages, devices, files and keys that are missing.

Nothing heavy is imported for them; the actors find out the rest.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

from msgspec import structs

from actorium.actors.config.call_format_names import TOOL_PARSERS
from actorium.actors.config.cluster_settings import (
    VISIBLE_DEVICES,
    most_local_replicas,
    visible_devices,
)
from actorium.actors.config.reasoning_formats import ALIASES, NAMES
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import is_jinja, takes_media
from actorium.actors.plugins.entry_points import (
    MODELS,
    chosen_packages,
    load_group,
    narrowed,
    refuse_faults,
)
from actorium.actors.runtime.roles import serves_http
from actorium.actors.tracing.tracer_actor import check_exporter

NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-ctrl-gpu", "/dev/nvmap", "/dev/dxg",
         "/dev/kfd")
"""Drivers' device files: NVIDIA's, its boards', WSL's and AMD's."""
MOST_RANKS = 16
"""`gpu.parallel.rank_group.MAX_RANKS`, which needs torch."""


def check_all(config: Config) -> None:
    """Raises `BadConfig` for the first fault that one of these checks finds."""
    for check in (check_packages, check_machine, check_http, check_keys, check_replicas,
                  check_plugins):
        check(config)


def check_machine(config: Config) -> None:
    """Raise `BadConfig` if CUDA is asked for where there is no trace of a driver, more ranks than a
    group has, a chat template that is neither a file nor jinja, or generation defaults of a folder
    without any."""
    if (ranks := config.device.tensor_parallel_size) > MOST_RANKS:
        raise BadConfig(f"tensor_parallel_size: must be at most {MOST_RANKS}, got {ranks}",
                        "device.tensor_parallel_size")
    runs_locally = config.cluster.replicas > 0  # else a head whose replicas are all at nodes
    if runs_locally and config.device.device == "cuda" and not (
            config.device.null_worker or has_driver()):
        raise BadConfig("device: cuda was asked for, but this machine has no CUDA device "
                        "(`actorium doctor` says what it has)",
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


def check_packages(config: Config) -> None:
    """Raise `BadConfig` if the engine lacks packages: the base install is the client alone."""
    needed = ["uvloop", "numpy"]
    if not config.model.skip_tokenizer:
        needed += ["tokenizers", "jinja2"]
    if not config.device.null_worker:
        needed += ["torch", "safetensors"]
    serves = serves_http(config.gateway)
    if config.probes.probe_port is not None or serves:
        needed += ["uvicorn", "httptools", "prometheus_client"]
    if serves:
        needed += ["starlette"]
    if missing := [name for name in needed if find_spec(name) is None]:
        raise BadConfig(f"an engine needs {', '.join(missing)}; from a checkout: "
                        "pip install -e '.[engine]'")
    check_exporter(config.runtime)
    if config.cluster.ray_address and find_spec("ray") is None:
        raise BadConfig("ray_address: Ray is not installed; from a checkout: "
                        "pip install -e '.[cluster]'",
                        "cluster.ray_address")


def check_http(config: Config) -> None:
    """Raises `BadConfig` if there is a certificate, and no port."""
    if config.gateway.ssl_certfile is not None and config.gateway.port is None:
        raise BadConfig("ssl_certfile: there is no port that could speak HTTPS; give it one with "
                        "--port", "gateway.ssl_certfile")


def check_keys(config: Config) -> None:
    """Raise `BadConfig` if the engine is to listen on tcp and has no usable server key."""
    if config.runtime.listen is not None:
        from actorium.actors.runtime.security import curve_keys

        curve_keys.read_server(curve_keys.directory(config.runtime.keys_dir))


def check_replicas(config: Config) -> None:
    """Raises `BadConfig` for what replicas cannot do."""
    if config.cluster.nodes and takes_media(config):
        raise BadConfig("nodes: the model takes images, which lie in the memory of the head, "
                        "where replicas of other machines cannot read them: serve it on one "
                        "machine, with --replicas N, or leave out the tower with "
                        "--language-model-only", "cluster.nodes")
    if config.cluster.max_replicas and config.device.device != "cpu":
        try:
            visible_devices(most_local_replicas(config.cluster) - 1,
                            config.device.tensor_parallel_size, os.environ.get(VISIBLE_DEVICES))
        except BadConfig as error:
            raise BadConfig(f"max_{error}", "cluster.max_replicas") from None


def check_plugins(config: Config) -> None:
    """Raises `BadConfig` if a plug-in that a flag names cannot be used. Only these are imported."""
    plugins, gateway = config.runtime.plugins, config.gateway
    named = chosen_packages(plugins) or ()
    narrowed(plugins)
    calls, thoughts = gateway.tool_call_parser, gateway.reasoning_parser
    if not named and calls in TOOL_PARSERS and thoughts in (*NAMES, *ALIASES):
        return
    from actorium.actors.plugins import parser_plugins
    from actorium.actors.plugins.logits_processors import load_processors

    refuse_faults(parser_plugins.load_call_formats(plugins), named, calls,
                  "gateway.tool_call_parser")
    refuse_faults(parser_plugins.load_reasoning_formats(plugins), named, thoughts,
                  "gateway.reasoning_parser")
    refuse_faults(load_processors(plugins), named)
    # What a family must be is for the worker to check, which serves it.
    refuse_faults(load_group(plugins, MODELS, lambda _: "") if named else [], named)


def with_installed_plugins(config: Config) -> Config:
    """Returns the configuration of actors: with the packages that have plug-ins now by name."""
    runtime = structs.replace(config.runtime, plugins=narrowed(config.runtime.plugins))
    return structs.replace(config, runtime=runtime)


def has_driver() -> bool:
    """Whether there is any trace of a GPU's driver."""
    if any(Path(node).exists() for node in NODES):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
