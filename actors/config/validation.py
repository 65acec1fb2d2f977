"""Validation of the configuration tree: what each value must be."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable

import msgspec

from actorium.actors.config.adapter_settings import adapter_rules
from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.call_format_names import TOOL_PARSERS
from actorium.actors.config.cluster_settings import cluster_rules, clustered
from actorium.actors.config.graph_settings import LEVELS, MOST_TOKENS, batch_setting, token_setting
from actorium.actors.config.kv_event_settings import kv_event_rules
from actorium.actors.config.media_settings import media_rules
from actorium.actors.config.models_settings import models_rules, serves_models
from actorium.actors.config.parsed_values import (
    disk_cache_fault,
    hashed,
    parse_acceptance,
    parse_passes,
    parse_speculative,
)
from actorium.actors.config.reasoning_formats import ALIASES, NAMES
from actorium.actors.config.tree import (
    MADE_BITS,
    SECRETS,
    STORED,
    Config,
    DeviceConfig,
    GatewayConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.errors import BadConfig
from actorium.actors.messages import RESERVED_TEMPLATE_ARGS, Tenant
from actorium.actors.models.model_dir import MAX_NEW_TOKENS, SAMPLING_DEFAULTS
from actorium.actors.params import MAX_N, SamplingParams
from actorium.actors.plugins.entry_points import REASONING_PARSERS, has_plugin
from actorium.actors.plugins.entry_points import TOOL_PARSERS as TOOL_PARSER_GROUP
from actorium.actors.runtime.http.allowed_hosts import names
from actorium.actors.runtime.security import endpoints

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
POOLING_TYPES = ("LAST", "MEAN", "CLS")
OF_POOLER = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "activation",
             "softmax")
MODEL_IMPLS = ("auto", "actorium", "transformers")
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2", "int8")
TRACE_PROTOCOLS = ("grpc", "http/protobuf")
_ENDPOINT = re.compile(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?(/[^\s?#]*)?")
_PACKAGE = re.compile(r" *[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])? *")
OF_TLS = ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers",
          "ssl_refresh")
"""Fields that say how TLS is spoken, where it is."""
KEY = ("must be printable, not empty, and without spaces around it: callers could not send it, and "
       "none at all is not to open the doors")
REMOTE = re.compile(r"rediss?://[^@/\s]+(/\d*)?(\?[^@\s]*)?")
Rule = tuple[str, bool, str]
"""(section.field, whether its value is valid, what it must be)"""


def validate(config: Config) -> Config:
    """Returns the configuration. Raises `BadConfig` naming the first wrong `section.field`."""
    for where, ok, want in (*_model_rules(config.model), *_memory_rules(config.memory),
                            *_scheduler_rules(config.scheduler), *_device_rules(config.device),
                            *_speculation_rules(config.speculation),
                            *_process_rules(config), *media_rules(config.media),
                            *adapter_rules(config.adapters),
                            *kv_event_rules(config.kv_events, config.memory.prefix_cache),
                            *cluster_rules(config.cluster),
                            *models_rules(config.models, config.model.model),
                            *_several_models_rules(config)):
        if not ok:
            section, field = where.split(".")
            value = getattr(getattr(config, section), field)
            # A refused URL of a server may have a password in it.
            hidden = (section, field) in SECRETS or field == "remote_cache"
            got = "" if hidden else f", got {value!r}"
            raise BadConfig(f"{field}: {want}{got}", where)
    _check_speculation(config.speculation)
    parse_passes(config.device.passes)
    asked_backends(config.device)
    parse_acceptance(config.speculation.force_acceptance)
    batch_setting(config.device)
    token_setting(config.device)
    return config


def _check_speculation(own: SpeculationConfig) -> None:
    asked = parse_speculative(own.speculative)
    by_model = [name for name in ("draft", "eagle3") if name in asked.methods]
    if by_model and not own.speculative_model:
        raise BadConfig(f"speculative: {by_model[0]} needs a model that drafts: name it by "
                        "speculative_model", "speculation.speculative")
    if own.speculative_model and asked.methods and not (by_model or asked.auto):
        raise BadConfig(f"speculative_model: it drafts by draft or eagle3, and speculative is "
                        f"{own.speculative!r}", "speculation.speculative_model")


def _model_rules(m: ModelConfig) -> list[Rule]:
    wrong_default = _wrong_default(m.override_generation_config)
    wrong_kwarg = _wrong_kwarg(m.default_chat_template_kwargs)
    made = m.quantization in MADE_BITS
    wrong_pooler = _wrong_pooler(m.pooler_config)
    return [
        ("model.runner", m.runner in RUNNERS, f"must be one of {', '.join(RUNNERS)}"),
        ("model.weights_dir", m.weights_dir is None or os.path.isdir(m.weights_dir),
         "must be a folder that is there"),
        ("model.convert", m.convert in CONVERSIONS, f"must be one of {', '.join(CONVERSIONS)}"),
        ("model.enable_return_hidden_states",
         not m.enable_return_hidden_states or m.runner != "generate",
         "goes with runner auto or pooling"),
        ("model.convert", m.runner != "generate" or m.convert in ("auto", "none"),
         "goes with runner pooling"),
        ("model.pooler_config", wrong_pooler is None, wrong_pooler or ""),
        ("model.dtype", m.dtype in DTYPES, f"must be one of {', '.join(DTYPES)}"),
        ("model.quantization", m.quantization in ("auto", "none", "fp8", *MADE_BITS, *STORED),
         f"must be auto, none, fp8, int8, int4, {', '.join(STORED[:-1])} or {STORED[-1]}"),
        ("model.quantization_group", m.quantization_group in (None, 32, 64, 128)
         or m.quantization_group == 0 and m.quantization == "int8",
         "must be 32, 64 or 128 (or 0 in int8)"),
        ("model.quantization_group", m.quantization_group is None or made,
         "goes with quantization int8 or int4"),
        ("model.quantization_head", m.quantization_head in ("auto", "none", *MADE_BITS),
         "must be auto, none, int8 or int4"),
        ("model.quantization_head", m.quantization_head == "auto" or made,
         "goes with quantization int8 or int4"),
        ("model.load_format", m.load_format in ("auto", "safetensors", "dummy"),
         "must be auto, safetensors or dummy"),
        ("model.model_impl", m.model_impl in MODEL_IMPLS,
         f"must be {', '.join(MODEL_IMPLS[:-1])} or {MODEL_IMPLS[-1]}"),
        ("model.max_model_len", m.max_model_len is None or m.max_model_len >= 2,
         "must be at least 2"),
        ("model.served_model_name", len(set(m.served_model_name)) == len(m.served_model_name)
         and all(0 < len(name) <= 256 for name in m.served_model_name),
         "must be different names of 1 to 256 characters"),
        ("model.default_chat_template_kwargs", wrong_kwarg is None, wrong_kwarg or ""),
        ("model.override_generation_config", wrong_default is None, wrong_default or ""),
        ("model.seed", 0 <= m.seed < 2**63, "must be between 0 and 2**63-1"),
    ]


def _memory_rules(mem: MemoryConfig) -> list[Rule]:
    return [
        ("memory.page_size", 1 <= mem.page_size <= 4096
         and mem.page_size & (mem.page_size - 1) == 0, "must be a power of two up to 4096"),
        ("memory.max_total_tokens", mem.max_total_tokens is None or mem.max_total_tokens >= 1,
         "must be at least 1"),
        ("memory.memory_fraction", 0.05 <= mem.memory_fraction <= 0.98,
         "must be between 0.05 and 0.98"),
        ("memory.kv_cache_bytes", mem.kv_cache_bytes >= 1 << 16, "must be at least 64 KiB"),
        ("memory.host_cache", mem.host_cache >= 0, "must not be negative"),
        ("memory.disk_cache", not (fault := disk_cache_fault(mem.disk_cache)), fault),
        ("memory.remote_cache", not mem.remote_cache
         or REMOTE.fullmatch(mem.remote_cache) is not None, "must be redis://HOST:PORT/DB, or "
         "rediss://, without a password (remote_cache_password_file)"),
        ("memory.remote_cache", not (mem.remote_cache and mem.disk_cache),
         "cannot be combined with disk_cache"),
        ("memory.remote_cache_password_file",
         bool(mem.remote_cache) or not mem.remote_cache_password_file, "goes with remote_cache"),
        ("memory.disk_timeout", 0 < mem.disk_timeout < math.inf, "must be above 0 and finite"),
        ("memory.kv_cache_dtype", mem.kv_cache_dtype in KV_DTYPES,
         f"must be one of {', '.join(KV_DTYPES)}"),
        ("memory.state_dtype", mem.state_dtype in ("float32", "bfloat16"),
         "must be float32 or bfloat16"),
        ("memory.checkpoint_policy", mem.checkpoint_policy in ("auto", "end", "chunks", "none"),
         "must be auto, end, chunks or none"),
        ("memory.checkpoints", mem.checkpoints is None or mem.checkpoints >= 0,
         "must not be negative"),
        ("memory.eviction_policy", mem.eviction_policy in ("lru", "lfu", "priority"),
         "must be lru, lfu or priority"),
        ("memory.audit_every", mem.audit_every >= 1, "must be at least 1"),
    ]


def _scheduler_rules(s: SchedulerConfig) -> list[Rule]:
    strange = [name for name in s.tenant_weights if not _is_tenant(name)]
    return [
        ("scheduler.schedule_policy", s.schedule_policy in ("fcfs", "lpm", "priority", "fair"),
         "must be fcfs, lpm, priority or fair"),
        ("scheduler.tenant_weights", not strange,
         f"{''.join(strange[:1])!r} is no tenant's name (at most 64 ASCII characters, no space)"),
        ("scheduler.tenant_weights", all(0 < w < math.inf for w in s.tenant_weights.values()),
         "every weight must be above 0 and finite"),
        ("scheduler.max_num_seqs", 1 <= s.max_num_seqs <= 32768, "must be between 1 and 32768"),
        ("scheduler.max_num_batched_tokens", 1 <= s.max_num_batched_tokens <= 1 << 20,
         "must be between 1 and 1048576"),
        ("scheduler.target_itl", s.target_itl is None or 0 <= s.target_itl < math.inf,
         "must be milliseconds, 0 = off"),
        ("scheduler.max_num_queued_reqs", s.max_num_queued_reqs >= 1, "must be at least 1"),
        ("scheduler.background_seqs", 0 <= s.background_seqs <= 1 << 16,
         "must be between 0 and 65536"),
        ("scheduler.max_n", 1 <= s.max_n <= MAX_N, f"must be between 1 and {MAX_N}"),
        ("scheduler.request_timeout", s.request_timeout > 0, "must be above 0 seconds"),
        ("scheduler.sleep_after", 0 <= s.sleep_after < math.inf, "must not be negative"),
        ("scheduler.sleep_level", s.sleep_level in (1, 2), "must be 1 or 2"),
        ("scheduler.force_preempt_every", s.force_preempt_every >= 0, "must not be negative"),
    ]


def _device_rules(d: DeviceConfig) -> list[Rule]:
    return [
        ("device.device", d.device in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda"),
        ("device.kernels", d.kernels in ("auto", "torch", "triton"),
         "must be auto, torch or triton"),
        ("device.exact", d.exact in ("auto", "on", "off"), "must be auto, on or off"),
        ("device.exact_costs", re.fullmatch(r"(\d+(\.\d+)?(,|$))*", d.exact_costs) is not None,
         "must be percents with commas between"),
        ("device.exact_ranks", d.exact_ranks in (1, 2, 4, 8, 16), "must be 1, 2, 4, 8 or 16"),
        ("device.exact_ranks", d.exact_ranks == 1 or d.exact == "on",
         "means something with --exact on alone"),
        ("device.exact_ranks",
         d.exact_ranks == 1 or d.exact_ranks % max(1, d.tensor_parallel_size) == 0,
         f"must be a multiple of --tensor-parallel-size, which is {d.tensor_parallel_size}"),
        ("device.tensor_parallel_size", 1 <= d.tensor_parallel_size <= 1024,
         "must be between 1 and 1024"),
        ("device.optimization_level", d.optimization_level in LEVELS, "must be 0, 1, 2 or 3"),
        ("device.graph_max_batch_size", d.graph_max_batch_size is None
         or 0 <= d.graph_max_batch_size <= 32768, "must be between 0 and 32768"),
        ("device.graph_max_tokens", d.graph_max_tokens is None
         or 0 <= d.graph_max_tokens <= MOST_TOKENS, f"must be between 0 and {MOST_TOKENS}"),
        ("device.threads", 0 <= d.threads <= 1024, "must be between 0 and 1024"),
    ]


def _speculation_rules(s: SpeculationConfig) -> list[Rule]:
    return [
        ("speculation.prompt_lookup_max", 1 <= s.prompt_lookup_max <= 64,
         "must be between 1 and 64"),
        ("speculation.prompt_lookup_min", 1 <= s.prompt_lookup_min <= s.prompt_lookup_max,
         f"must be between 1 and --prompt-lookup-max, which is {s.prompt_lookup_max}"),
        ("speculation.suffix_decoding_max_tree_depth",
         2 <= s.suffix_decoding_max_tree_depth <= 256, "must be between 2 and 256"),
        ("speculation.suffix_decoding_max_spec_factor",
         0 < s.suffix_decoding_max_spec_factor <= 16, "must be above 0, up to 16"),
        ("speculation.suffix_decoding_min_token_prob",
         0 <= s.suffix_decoding_min_token_prob <= 1, "must be between 0 and 1"),
        ("speculation.suffix_global_bytes", s.suffix_global_bytes == 0
         or 1 << 20 <= s.suffix_global_bytes <= 32 << 30,
         "must be 0 (off) or between 1 MiB and 32 GiB"),
        ("speculation.suffix_global_bytes", s.suffix_global_bytes == 0
         or "suffix" in parse_speculative(s.speculative).methods,
         f"needs the method suffix, which --speculative {s.speculative} does not name"),
    ]


def _process_rules(c: Config) -> list[Rule]:
    """Rules for the engine's processes."""
    r, v, port = c.runtime, c.recovery, c.probes.probe_port
    listen = _wrong_listen(r.listen)
    name_ok = (0 < len(r.name) <= 40 and r.name[0].isalnum()
               and all(ch.isalnum() or ch in "-_." for ch in r.name))
    return [
        ("recovery.fork_server", v.fork_server in ("auto", "on", "off"), "must be auto, on or off"),
        ("recovery.retain", v.retain >= 0, "must not be negative"),
        ("recovery.silence", v.silence >= 0.5, "must be at least 0.5 seconds"),
        ("recovery.max_restarts", v.max_restarts >= 0, "must not be negative"),
        ("recovery.restart_window", v.restart_window > 0, "must be above 0 seconds"),
        ("recovery.request_budget", v.request_budget >= 1, "must be at least 1 second"),
        ("probes.probe_port", port is None or 0 <= port <= 65535, "must be between 0 and 65535"),
        ("probes.probe_host", bool(c.probes.probe_host), "must not be empty"),
        *_gateway_rules(c.gateway, r.plugins),
        ("runtime.name", name_ok, "must be 1 to 40 letters, digits, '-', '_' or '.', "
         "a letter or digit first"),
        ("runtime.heartbeat", 0.01 <= r.heartbeat <= 60, "must be between 0.01 and 60 seconds"),
        ("runtime.start_timeout", r.start_timeout > 0, "must be above 0 seconds"),
        ("runtime.drain_timeout", r.drain_timeout >= 0, "must not be negative"),
        ("runtime.queue_messages", r.queue_messages >= 16, "must be at least 16"),
        ("runtime.log_level", r.log_level in ("debug", "info", "warning", "error"),
         "must be debug, info, warning or error"),
        ("runtime.log_format", r.log_format in ("text", "json"), "must be text or json"),
        ("runtime.log_interval", r.log_interval == 0 or 0.1 <= r.log_interval <= 86400,
         "must be 0 (off) or between 0.1 and 86400 seconds"),
        ("runtime.listen", listen is None, listen or ""),
        ("runtime.otlp_traces_endpoint", r.otlp_traces_endpoint is None
         or _ENDPOINT.fullmatch(r.otlp_traces_endpoint) is not None,
         "must be HOST:PORT, http://HOST:PORT or https://HOST:PORT"),
        ("runtime.otlp_traces_protocol", r.otlp_traces_protocol in TRACE_PROTOCOLS,
         f"must be {' or '.join(TRACE_PROTOCOLS)}"),
        ("runtime.otlp_service_name", 0 < len(r.otlp_service_name) <= 256
         and r.otlp_service_name.isprintable(), "must be 1 to 256 printable characters"),
        ("runtime.plugins", all(map(_PACKAGE.fullmatch, r.plugins.split(","))),
         "must be all, none or names of packages with commas between"),
        ("runtime.recorder_bytes", r.recorder_bytes == 0 or r.recorder_bytes >= 1 << 16,
         "must be 0 (off) or at least 64 KiB"),
    ]


def _several_models_rules(c: Config) -> list[Rule]:
    """Rules for what a server of several models has not."""
    if not serves_models(c.models):
        return []
    return [("cluster.replicas", not clustered(c.cluster),
             "a server of several models has no replicas: serve such a model by itself"),
            ("runtime.listen", c.runtime.listen is None,
             "clients of other machines speak to one engine: serve such a model by itself")]


def _is_key(key: str | None) -> bool:
    return key is None or (key != "" and key.isprintable() and key == key.strip())


def _gateway_rules(g: GatewayConfig, plugins: str) -> list[Rule]:
    hosts = _wrong_hosts(g.allowed_hosts)
    return [
        ("gateway.port", g.port is None or 0 <= g.port <= 65535, "must be between 0 and 65535"),
        ("gateway.port", g.port != 0 or g.gateways == 1, "must not be 0 with several gateways"),
        ("gateway.api_key", _is_key(g.api_key), KEY),
        ("gateway.admin_key", _is_key(g.admin_key), KEY),
        ("gateway.admin_key", g.admin_key is None or g.api_key is None
         or hashed(g.admin_key) != hashed(g.api_key),
         "must be another key than api_key"),
        ("gateway.host", bool(g.host), "must not be empty"),
        ("gateway.uds", g.uds != "", "must not be empty"),
        *((f"gateway.{name}", g.ssl_certfile is not None or not getattr(g, name),
           "goes with ssl_certfile") for name in OF_TLS),
        ("gateway.ssl_cert_reqs", g.ssl_cert_reqs in (0, 1, 2), "must be 0, 1 or 2"),
        ("gateway.ssl_cert_reqs", g.ssl_cert_reqs == 0 or g.ssl_ca_certs is not None,
         "needs ssl_ca_certs, the CA that signs callers' certificates"),
        ("gateway.ssl_ca_certs", g.ssl_ca_certs is None or g.ssl_cert_reqs != 0,
         "needs ssl_cert_reqs 1 or 2, without which callers' certificates are not verified"),
        ("gateway.gateways", 1 <= g.gateways <= 64, "must be between 1 and 64"),
        ("gateway.tool_call_parser", g.tool_call_parser in TOOL_PARSERS
         or has_plugin(plugins, TOOL_PARSER_GROUP, g.tool_call_parser),
         f"must be one of {', '.join(TOOL_PARSERS)}"),
        ("gateway.reasoning_parser", g.reasoning_parser in (*NAMES, *ALIASES)
         or has_plugin(plugins, REASONING_PARSERS, g.reasoning_parser),
         f"must be one of {', '.join(NAMES)}"),
        ("gateway.max_body_bytes",
         g.max_body_bytes is None or 1 << 10 <= g.max_body_bytes <= 64 << 20,
         "must be between 1 KiB and 64 MiB"),
        ("gateway.max_connections", g.max_connections >= 1, "must be at least 1"),
        ("gateway.body_timeout", g.body_timeout > 0, "must be above 0 seconds"),
        ("gateway.send_timeout", g.send_timeout > 0, "must be above 0 seconds"),
        ("gateway.allowed_hosts", hosts is None, hosts or ""),
        ("gateway.responses_max_bytes", 0 <= g.responses_max_bytes <= 1 << 40,
         "must be between 0 and 1 TiB"),
        ("gateway.responses_max", 1 <= g.responses_max <= 10_000_000,
         "must be between 1 and 10000000"),
        ("gateway.files_max_bytes", 1 << 20 <= g.files_max_bytes <= 1 << 50,
         "must be between 1 MiB and 1 PiB"),
        ("gateway.files_expire_after", 3600 <= g.files_expire_after <= 1e9,
         "must be at least 3600 seconds"),
        ("gateway.resume_grace", 0 <= g.resume_grace <= 3600, "must be between 0 and 3600 seconds"),
        ("gateway.recovery_patience", 0 <= g.recovery_patience <= 3600,
         "must be between 0 and 3600 seconds"),
    ]


def _wrong_listen(listen: str | None) -> str | None:
    """Returns what is wrong with the address; None if nothing."""
    try:
        if listen is not None:
            endpoints.parse(listen)
    except ValueError as error:
        return str(error)
    return None


def _wrong_hosts(setting: str | None) -> str | None:
    """Returns what is wrong with allowed names; None if nothing."""
    try:
        if setting is not None:
            names(setting)
    except ValueError as error:
        return str(error)
    return None


def _wrong_default(defaults: dict[str, float]) -> str | None:
    """Returns what is wrong with sampling defaults; None if nothing."""
    for name, value in defaults.items():
        if name == MAX_NEW_TOKENS:
            if not (1 <= value < 2**31 and float(value).is_integer()):
                return f"{name}: must be a whole number between 1 and {2**31 - 1}, got {value:g}"
            continue
        if name not in SAMPLING_DEFAULTS:
            return f"{name} is none of {', '.join((*SAMPLING_DEFAULTS, MAX_NEW_TOKENS))}"
        try:
            number = int(value) if float(value).is_integer() else value
            msgspec.convert({name: number}, SamplingParams).check()
        except (msgspec.ValidationError, ValueError) as error:
            return str(error)
    return None


def _wrong_pooler(given: dict[str, object]) -> str | None:
    """Returns what is wrong with a pooler config; None if nothing."""
    for name, value in given.items():
        if name not in OF_POOLER:
            return f"{name} is none of {', '.join(OF_POOLER)}"
        if name.endswith("pooling_type"):
            if value not in POOLING_TYPES:
                return f"{name}: must be one of {', '.join(POOLING_TYPES)}"
        elif not isinstance(value, bool):
            return f"{name}: must be true or false"
    return None


def _wrong_kwarg(kwargs: Iterable[str]) -> str | None:
    """Returns what is wrong with the names of a chat template's variables; None if nothing."""
    for name in kwargs:
        if name == "add_generation_prompt":
            return f"{name} is for each request to say"
        if name in RESERVED_TEMPLATE_ARGS or name.startswith("_") or not name.isidentifier():
            return f"{name!r} may not be set"
    return None


def _is_tenant(name: str) -> bool:
    try:
        msgspec.convert(name, Tenant)
    except msgspec.ValidationError:
        return False
    return True


