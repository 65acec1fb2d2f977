"""What a terminal is told of an engine that has become ready: what it holds and how it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.models.model_dir import is_jinja
from actorium.actors.runtime.worker_info import WorkerInfo, read_info

WORKER = "worker-0"
ASK_SECONDS = 5.0
TEMPLATE_CHARS = 60
NEUTRAL = "temperature 1, nothing cut off"


def lines(config: Config, worker: WorkerInfo | None, info: dict[str, Any] | None) -> list[str]:
    """The block, a line a subject. worker: None for an engine without a model. info: what the
    tokenizer says of the model; None = it did not answer."""
    rows = _worker_rows(worker) if worker is not None else []
    if info is not None:
        rows += _chat_rows(config, info)
        rows.append(("sampling", _sampling(config, info.get("generation_defaults", {}),
                                           info.get("limits", {}).get("max_new_tokens"))))
    return [f"{name:<12} {text}" for name, text in rows]


def look_up(run_dir: Path) -> tuple[WorkerInfo | None, dict[str, Any] | None]:
    """What there is to be told of a ready engine."""
    from actorium.actors.client.client import Client

    try:
        with Client(run_dir) as client:
            info = client.server_info(timeout=ASK_SECONDS)
    except ActoriumError:
        info = None
    return read_info(run_dir, WORKER), info


def _worker_rows(w: WorkerInfo) -> list[tuple[str, str]]:
    rows = [("weights", f"{_mib(w.weights_bytes)} on {w.device}, {w.dtype}")]
    cache = f"{w.kv_tokens:,} tokens ({_mib(w.kv_bytes)}, {w.kv_dtype}), "
    if w.full_length:
        cache += f"{w.full_length:,} full-length requests at once ({w.max_model_len:,} tokens each)"
    else:
        cache += (f"not one of {w.max_model_len:,} tokens, the longest that the model allows: "
                  "--max-model-len, or more memory")
    rows.append(("KV cache", cache))
    if w.state_bytes:
        rows.append(("states", f"{_mib(w.state_bytes)} for {w.max_num_seqs} requests at once and "
                     f"{w.checkpoints} checkpoints for reuse of prefixes"))
    rows.append(("graphs", w.graphs or f"none: {w.no_graphs or 'none were asked for'}"))
    rows.append(("kernels", f"{w.kernels}; attention: {w.attention}"))
    if w.drafts:
        rows.append(("drafts", f"up to {w.drafts} a step, by the model's MTP layer"))
    return rows


def _chat_rows(config: Config, info: dict[str, Any]) -> list[tuple[str, str]]:
    from actorium.actors.gateway.parsers.parsing import detect_reasoning_parser, detect_tool_parser

    template = info.get("chat_template")
    if template is None:
        why = "" if info.get("has_tokenizer") else " (the engine runs without a tokenizer)"
        return [("chat", f"no template{why}")]
    given, gateway = config.model.chat_template, config.gateway
    if given and not is_jinja(given):
        shown = f"the template in {given}"
    else:
        whose = "the template given" if given else "the model's template"
        text = " ".join(template.split())
        shown = f"{whose}: {text[:TEMPLATE_CHARS]}{'...' * (len(text) > TEMPLATE_CHARS)}"
    tools, reasoning = gateway.tool_call_parser, gateway.reasoning_parser
    tools = detect_tool_parser(template) if tools == "auto" else tools
    reasoning = detect_reasoning_parser(template) if reasoning == "auto" else reasoning
    if config.model.default_chat_template_kwargs:
        shown += f"; {_kwargs(config.model.default_chat_template_kwargs, template)}"
    return [("chat", shown), ("parsers", f"tool calls: {tools}; reasoning: {reasoning}")]


def _kwargs(kwargs: dict[str, Any], template: str) -> str:
    """What the template learns unless a request says otherwise, and what it never asks for."""
    told = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
    strange = [name for name in kwargs if name not in template]
    return told + (f" (the template does not name {', '.join(strange)})" if strange else "")


def _sampling(config: Config, defaults: dict[str, Any], most: int | None) -> str:
    """The defaults of requests, where they come from, and how to choose others. most: tokens of a
    completion that no request may exceed."""
    m = config.model
    told = ", ".join(f"{name} {value}" for name, value in defaults.items()
                     if most is None or name != "max_tokens") or NEUTRAL
    if most is not None:
        told += f", at most {most} new tokens"
    source = {"auto": "the model's generation_config.json", "vllm": "--generation-config vllm"}
    where = source.get(m.generation_config, m.generation_config)
    if m.override_generation_config:
        where += " and --override-generation-config"
    elif m.generation_config == "auto" and not defaults:
        where = "the model has no others"
    hints = ["--generation-config vllm"] * (m.generation_config == "auto" and bool(defaults))
    hints += ["--override-generation-config JSON"] * (not m.override_generation_config)
    return f"{told} ({where})" + (f"; others: {', '.join(hints)}" if hints else "")


def _mib(count: int) -> str:
    if count >= 10 << 30:
        return f"{count / 2**30:,.1f} GiB"
    return f"{count / 2**20:,.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:.1f} MiB"
