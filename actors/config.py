"""The one configuration tree. Frozen; every field documented; nothing else configures anything.

Values come from, in rising order: the defaults here, a TOML file, `ACTORIUM_*`, flags
(`actors/settings.py`). The launcher writes the resolved tree into the run directory and each actor
reads it from there.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from actorium.actors import endpoints
from actorium.actors.errors import BadConfig
from actorium.actors.messages import Tenant
from actorium.actors.speculation import parse_acceptance, parse_speculative


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights are read."""

    model: str = ""
    """Directory in HF format, or an id found in the HF cache layout; empty = the demo model."""
    served_model_name: str | None = None
    """Name shown to clients; default: the last part of `model`."""
    dtype: str = "auto"
    """auto (the checkpoint's) | float32 | bfloat16 | float16: weights and activations."""
    load_format: str = "auto"
    """auto | safetensors | dummy (random weights: config.json alone is needed)."""
    max_model_len: int | None = None
    """Longest sequence, prompt and completion together; default: the model's own limit."""
    skip_tokenizer: bool = False
    """Serve by token ids alone; no tokenizer files are needed."""
    chat_template: str | None = None
    """File with a jinja chat template to use instead of the model's."""
    seed: int = 0
    """Seed of dummy weights and of requests that name none."""


class MemoryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pages, and what they may take."""

    page_size: int = 16
    """Tokens a page, a power of two."""
    max_total_tokens: int | None = None
    """Cap of the page pool, in tokens; default: what the memory budget holds."""
    memory_fraction: float = 0.85
    """Share of the device's memory for weights, pages and workspace (on cuda)."""
    kv_cache_bytes: int = 1 << 30
    """Byte budget of the page pool on cpu."""
    kv_cache_dtype: str = "auto"
    """auto (as the weights) | float32 | bfloat16 | float16."""
    state_dtype: str = "float32"
    """float32 | bfloat16: recurrent states (GatedDeltaNet, Mamba-2)."""
    checkpoints: int | None = None
    """Copies of recurrent states kept for prefix reuse; default: as the memory plan shares out."""
    checkpoint_policy: str = "auto"
    """auto (end of the prompt, and where prompts branch) | end | chunks | none: where states are
    kept."""
    prefix_cache: bool = True
    """Keep the pages of ended sequences and share common prefixes; off = pages are free at once."""
    eviction_policy: str = "lru"
    """lru | lfu | priority: which cached prefix goes first when pages run out."""
    debug_memory: bool = False
    """Keep the owners of every page and slot, check every move of them, and audit all the books
    at every idle moment and every `audit_every` steps."""
    audit_every: int = 64
    """Steps between audits with debug_memory."""


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching and limits."""

    max_num_seqs: int = 256
    """Sequences that run at once = slots of the resident tables (the sink comes on top)."""
    max_num_batched_tokens: int = 2048
    """Tokens a step may compute: decodes first, the rest for extend chunks."""
    max_num_queued_reqs: int = 4096
    """Requests that may wait; more are refused with `queue_full`."""
    overlap: bool = True
    """Plan step N+1 while the worker runs step N; off = one plan at a time (same tokens)."""
    schedule_policy: str = "fcfs"
    """fcfs | lpm (longest cached prefix first) | priority (higher first, preempting lower) |
    fair (weighted fair sharing between tenants)."""
    tenant_weights: dict[str, float] = {}
    """Share of each tenant under the fair policy; 1 for those not named."""
    request_timeout: float = 3600.0
    """Deadline, in seconds, of a request that names none."""
    force_preempt_every: int = 0
    """Testing: preempt a running sequence every so many steps; 0 = never."""


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: the model's MTP layer drafts tokens, the next step verifies them."""

    speculative: str = "auto"
    """auto (mtp:2 where the checkpoint has MTP weights) | off | mtp:K (at most K drafts, as many as
    pay at the moment) | mtp:K,fixed (always K)."""
    force_acceptance: str = ""
    """Benchmarks with random weights: accept draft i with the i-th of these probabilities
    ("0.8,0.6"), whatever was sampled; empty = drafts are accepted where they equal the sample."""


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs."""

    device: str = "auto"
    """auto (cuda where there is one) | cpu | cuda."""
    threads: int = 0
    """CPU threads of the worker; 0 = all cores."""
    native_kernels: bool = True
    """On cpu, in bfloat16: use the C kernels (built at the first start, where there is a compiler);
    off = torch alone."""
    enforce_eager: bool = False
    """No graphs."""
    null_worker: bool = False
    """Testing: a worker without a model, whose tokens are a hash of (seed, position)."""


class RecoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What survives the death of an actor, and when one counts as hung."""

    restart: bool = False
    """Start a dead or hung actor again and go on with every request; off = the engine ends."""
    ledger: bool = True
    """Write down what was admitted and emitted before anyone is told (with `restart`)."""
    ledger_dir: str | None = None
    """Directory of the ledger; default: in the run directory, forgotten at a clean stop. With a
    directory of its own an engine resumes what was unfinished when it ended, however it ended."""
    retain: float = 60.0
    """Seconds for which a finished request is kept for clients that have lost their stream."""
    silence: float = 3.0
    """Seconds without a sign of life after which an actor is killed (60 while it loads)."""
    max_restarts: int = 5
    """Restarts of one actor within `restart_window`; one more ends the engine."""
    restart_window: float = 60.0
    """Seconds."""


class ProbeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health probes and metrics over HTTP, answered by the watchdog's process."""

    probe_port: int | None = None
    """TCP port of /readyz, /livez, /metrics, ...; 0 = a free one, shown by `ps`; default: none."""
    probe_host: str = "127.0.0.1"
    """Address to listen at. Probes ask for no key: open them to the machines that watch alone."""


class RuntimeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processes, sockets, heartbeats."""

    name: str = "default"
    """Name of the engine: `actorium ps`, `Client(name)`."""
    run_dir: str | None = None
    """Where run directories lie; default $XDG_RUNTIME_DIR/actorium, else /tmp/actorium-<uid>."""
    heartbeat: float = 0.25
    """Seconds between beats while something happens (at least 0.5 s while idle)."""
    start_timeout: float = 600.0
    """Seconds until the engine must be ready."""
    drain_timeout: float = 30.0
    """Seconds a stopping engine gives its running requests."""
    queue_messages: int = 10_000
    """ZMQ high-water mark of every socket, in messages."""
    log_level: str = "info"
    """debug | info | warning | error"""
    listen: str | None = None
    """tcp://HOST:PORT: also serve clients of other machines, at PORT and the next two, encrypted,
    and only those whose keys are let in (`actorium keys`); default: this machine's user alone."""
    keys_dir: str | None = None
    """Where keys lie; default $XDG_CONFIG_HOME/actorium/keys, else ~/.config/actorium/keys."""
    recorder_bytes: int = 16 << 20
    """Flight recorder: bytes on disk for the last messages of the scheduler; 0 = none."""
    crash_reports: bool = True
    """When an actor dies, put its logs, the recording and the configuration into one file, in
    `crashes` beside the run directories; the last five are kept."""
    record_prompts: bool = False
    """Let recordings hold prompts and completions; off = only which of them begin alike."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    device: DeviceConfig = DeviceConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    probes: ProbeConfig = ProbeConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def check(self) -> Config:
        """Return self; raise `BadConfig`, naming the field as `section.field`, on a bad value."""
        for where, ok, want in _rules(self):
            if not ok:
                section, field = where.split(".")
                value = getattr(getattr(self, section), field)
                raise BadConfig(f"{field}: {want}, got {value!r}", where)
        parse_speculative(self.speculation.speculative)
        parse_acceptance(self.speculation.force_acceptance)
        return self


Rule = tuple[str, bool, str]
"""(section.field, whether its value will do, what it must be)"""


def _rules(c: Config) -> list[Rule]:
    return [*_work_rules(c), *_process_rules(c)]


def _work_rules(c: Config) -> list[Rule]:
    """Of the model and what computes it."""
    m, mem, s, d = c.model, c.memory, c.scheduler, c.device
    dtypes = ("auto", "float32", "bfloat16", "float16")
    strange = [name for name in s.tenant_weights if not _is_tenant(name)]
    return [
        ("model.dtype", m.dtype in dtypes, f"must be one of {', '.join(dtypes)}"),
        ("model.load_format", m.load_format in ("auto", "safetensors", "dummy"),
         "must be auto, safetensors or dummy"),
        ("model.max_model_len", m.max_model_len is None or m.max_model_len >= 2,
         "must be at least 2"),
        ("model.seed", 0 <= m.seed < 2**63, "must be between 0 and 2**63-1"),
        ("memory.page_size", 1 <= mem.page_size <= 4096
         and mem.page_size & (mem.page_size - 1) == 0, "must be a power of two up to 4096"),
        ("memory.max_total_tokens", mem.max_total_tokens is None or mem.max_total_tokens >= 1,
         "must be at least 1"),
        ("memory.memory_fraction", 0.05 <= mem.memory_fraction <= 0.98,
         "must be between 0.05 and 0.98"),
        ("memory.kv_cache_bytes", mem.kv_cache_bytes >= 1 << 16, "must be at least 64 KiB"),
        ("memory.kv_cache_dtype", mem.kv_cache_dtype in dtypes,
         f"must be one of {', '.join(dtypes)}"),
        ("memory.state_dtype", mem.state_dtype in ("float32", "bfloat16"),
         "must be float32 or bfloat16"),
        ("memory.checkpoint_policy", mem.checkpoint_policy in ("auto", "end", "chunks", "none"),
         "must be auto, end, chunks or none"),
        ("memory.checkpoints", mem.checkpoints is None or mem.checkpoints >= 0,
         "must not be negative"),
        ("memory.eviction_policy", mem.eviction_policy in ("lru", "lfu", "priority"),
         "must be lru, lfu or priority"),
        ("memory.audit_every", mem.audit_every >= 1, "must be at least 1"),
        ("scheduler.schedule_policy", s.schedule_policy in ("fcfs", "lpm", "priority", "fair"),
         "must be fcfs, lpm, priority or fair"),
        ("scheduler.tenant_weights", not strange,
         f"{''.join(strange[:1])!r} is no tenant's name (at most 64 ASCII characters, no space)"),
        ("scheduler.tenant_weights", all(0 < w < math.inf for w in s.tenant_weights.values()),
         "every weight must be above 0 and finite"),
        ("scheduler.max_num_seqs", 1 <= s.max_num_seqs <= 32768, "must be between 1 and 32768"),
        ("scheduler.max_num_batched_tokens", 1 <= s.max_num_batched_tokens <= 1 << 20,
         "must be between 1 and 1048576"),
        ("scheduler.max_num_queued_reqs", s.max_num_queued_reqs >= 1, "must be at least 1"),
        ("scheduler.request_timeout", s.request_timeout > 0, "must be above 0 seconds"),
        ("scheduler.force_preempt_every", s.force_preempt_every >= 0, "must not be negative"),
        ("device.device", d.device in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda"),
        ("device.threads", 0 <= d.threads <= 1024, "must be between 0 and 1024"),
    ]


def _process_rules(c: Config) -> list[Rule]:
    """Of the engine's processes."""
    r, v, port = c.runtime, c.recovery, c.probes.probe_port
    listen = _wrong_listen(r.listen)
    name_ok = (0 < len(r.name) <= 40 and r.name[0].isalnum()
               and all(ch.isalnum() or ch in "-_." for ch in r.name))
    return [
        ("recovery.retain", v.retain >= 0, "must not be negative"),
        ("recovery.silence", v.silence >= 0.5, "must be at least 0.5 seconds"),
        ("recovery.max_restarts", v.max_restarts >= 0, "must not be negative"),
        ("recovery.restart_window", v.restart_window > 0, "must be above 0 seconds"),
        ("probes.probe_port", port is None or 0 <= port <= 65535, "must be between 0 and 65535"),
        ("probes.probe_host", bool(c.probes.probe_host), "must not be empty"),
        ("runtime.name", name_ok, "must be 1 to 40 letters, digits, '-', '_' or '.', "
         "a letter or digit first"),
        ("runtime.heartbeat", 0.01 <= r.heartbeat <= 60, "must be between 0.01 and 60 seconds"),
        ("runtime.start_timeout", r.start_timeout > 0, "must be above 0 seconds"),
        ("runtime.drain_timeout", r.drain_timeout >= 0, "must not be negative"),
        ("runtime.queue_messages", r.queue_messages >= 16, "must be at least 16"),
        ("runtime.log_level", r.log_level in ("debug", "info", "warning", "error"),
         "must be debug, info, warning or error"),
        ("runtime.listen", listen is None, listen or ""),
        ("runtime.recorder_bytes", r.recorder_bytes == 0 or r.recorder_bytes >= 1 << 16,
         "must be 0 (off) or at least 64 KiB"),
    ]


def _wrong_listen(listen: str | None) -> str | None:
    """What is wrong with the address; None if nothing."""
    try:
        if listen is not None:
            endpoints.parse(listen)
    except ValueError as error:
        return str(error)
    return None


def _is_tenant(name: str) -> bool:
    try:
        msgspec.convert(name, Tenant)
    except msgspec.ValidationError:
        return False
    return True


def dump(config: Config) -> bytes:
    """The tree as JSON, for the run directory."""
    return msgspec.json.encode(config)


def load(data: bytes) -> Config:
    """Inverse of `dump`. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=Config)
