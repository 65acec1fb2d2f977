"""The configuration tree: frozen, every field documented; nothing else configures anything.

Values come from, in rising order: the defaults here, a TOML file, `ACTORIUM_*`, flags
(`actors/config/sources.py`). The launcher writes the resolved tree into the run directory and each
actor reads it from there. What values may be is in `actors/config/validation.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.cluster_settings import ClusterConfig
from actorium.actors.config.kv_event_settings import KVEventConfig
from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.config.models_settings import ModelsConfig
from actorium.actors.config.parsed_values import hashed

MADE_BITS = {"int8": 8, "int4": 4}
"""Values of `quantization` for which weights are made when they are read, and their bits."""

STORED = ("awq", "gptq", "bitsandbytes", "compressed-tensors", "modelopt", "mxfp4", "torchao",
          "hqq", "auto-round", "gguf")
"""Values of `quantization` that say how a checkpoint must be stored; else they are `auto`."""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights are read."""

    model: str = ""
    """Directory in HF format; or a name: ORG/NAME of the Hugging Face hub, which is fetched if the
    HF cache has none, with @REVISION or :QUANTISATION (of a GGUF file), or smollm2; empty = the
    demo model."""
    revision: str | None = None
    """Branch, tag or commit of a model that is named; default: main."""
    download_dir: str | None = None
    """Where models are looked for and fetched to by name, laid out as the HF cache; default:
    $HF_HUB_CACHE, or ~/.cache/huggingface/hub."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may ask for, the first of which answers show; default: `model` where that
    is a name, the last part of a path."""
    dtype: str = "auto"
    """auto (the checkpoint's) | float32 | bfloat16 | float16: weights and activations."""
    quantization: str = "auto"
    """Weights of projections: auto (as the checkpoint has them; what it has in fp8 is dequantised
    where the device has no products in fp8) | none (in `dtype`, whatever the checkpoint has) | fp8
    (in e4m3, with a scale for each row, made when a checkpoint in float32, bfloat16 or float16 is
    read; each token is scaled on the way; on cuda below 8.9 weights alone are in fp8) | int8 | int4
    (made likewise, of one in fp8 too) | awq | gptq | bitsandbytes | compressed-tensors | modelopt |
    mxfp4 | torchao | hqq | auto-round | gguf (as auto, of a checkpoint that is stored so: another
    is refused). Embeddings, norms, routers and small gates stay in `dtype`; so does the head but in
    int8 and int4, where it is in int8."""
    quantization_group: int | None = None
    """Columns that share a scale in int8 and int4: 32, 64 or 128, or 0 (int8 alone) for all of a
    row. Default: 32."""
    quantization_head: str = "auto"
    """The head in int8 and int4: auto (int8) | none (in `dtype`) | int8 | int4."""
    load_format: str = "auto"
    """auto | safetensors | dummy (random weights: config.json alone is needed)."""
    model_impl: str = "auto"
    """Whose code runs the model: auto (ours where the config's class is one of ours, else that of
    transformers) | actorium | transformers (its class, over our pages: slower, without passes and
    graphs). docs/models.md says what of an engine goes with it."""
    runner: str = "auto"
    """auto (completions and vectors of a decoder that generates; of a checkpoint for vectors or
    scores those alone) | generate (completions alone) | pooling (no completions: the head over the
    vocabulary takes no memory). docs/pooling.md"""
    convert: str = "auto"
    """What a checkpoint is served for where it pools: auto | none (as it is made) | embed |
    classify (refused where it has no weights for that)."""
    pooler_config: dict[str, Any] = {}
    """How prompts are pooled, in place of what the checkpoint says: `pooling_type` (LAST, MEAN or
    CLS), `normalize`, `use_activation`; as vLLM's JSON."""
    enable_return_hidden_states: bool = False
    """Let requests ask for hidden states (docs/pooling.md). Whoever may send requests then reads
    what the layers compute."""
    enable_prompt_embeds: bool = False
    """Let text completions bring their prompts as embeddings (docs/openai.md)."""
    max_model_len: int | None = None
    """Longest sequence, prompt and completion together; default: the model's own limit."""
    strict_max_tokens: bool = False
    """Refuse requests whose `max_tokens` goes beyond the context that their prompt leaves; off = it
    is cut to that, as many clients always ask for the most that some other model gives."""
    language_model_only: bool = False
    """Of a checkpoint of text and images, leave out the tower for images: its weights take no
    memory."""
    skip_tokenizer: bool = False
    """Serve by token ids alone; no tokenizer files are needed."""
    chat_template: str | None = None
    """Jinja chat template to use instead of the model's: a file, or the template itself."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template for requests whose own chat_template_kwargs do not name them
    (`{"enable_thinking": false}`)."""
    generation_config: str = "auto"
    """Sampling defaults of requests: auto (the model's generation_config.json) | vllm (none:
    temperature 1 and nothing cut off) | a folder with a generation_config.json."""
    override_generation_config: dict[str, float] = {}
    """Sampling defaults that win over those: temperature, top_k, top_p, min_p,
    repetition_penalty; and max_new_tokens: the longest completion, whatever a request names."""
    weights_dir: str | None = None
    """Folder below which checkpoints lie that callers over HTTP may change the weights to, while
    the model serves; default: none. docs/weights-update.md"""
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
    """Of the pages: auto (as the weights) | float32 | bfloat16 | float16 | fp8_e4m3 (also fp8: half
    the bytes of bfloat16; keys and values are divided by the checkpoint's k_scale and v_scale, one
    a layer or one a key head, or by 1 where it has none; on cuda from capability 8.9) | fp8_e5m2
    (of any capability, but coarser) | int8 (a scale for each token and head, made as it is written:
    half the bytes and those of the scales, closest to bfloat16)."""
    state_dtype: str = "float32"
    """float32 | bfloat16: recurrent states (GatedDeltaNet, Mamba-2)."""
    checkpoints: int | None = None
    """Copies of recurrent states kept for prefix reuse; default: as the memory plan shares out."""
    checkpoint_policy: str = "auto"
    """auto (end of the prompt, and where prompts branch) | end | chunks | none: where states are
    kept."""
    prefix_cache: bool = True
    """Keep the pages of ended sequences and share common prefixes; off = pages are free at once."""
    host_cache: int = 0
    """Bytes of the host's memory for pages that the pool has no room for; 0 = none. Ranks and
    replicas share them out. Not for models that take images."""
    disk_cache: str = ""
    """DIR:64GiB, a directory and the most that may lie in it: for pages that the host's memory has
    no room for, or without host_cache for all that the pool has none for. They are found again
    after a restart, by all engines that serve the same model in the same way."""
    remote_cache: str = ""
    """redis://HOST:6379/0 (rediss:// with TLS): a Redis or Valkey server in place of `disk_cache`,
    which engines on many machines may share. Its owner reads and writes all pages."""
    remote_cache_password_file: str = ""
    """File with its PASSWORD, or USER:PASSWORD."""
    disk_timeout: float = 2.0
    """Seconds within which `disk_cache` or `remote_cache` must say what it has, and give it; what
    has not come by then is computed, and the disk or server left alone for half a minute."""
    eviction_policy: str = "lru"
    """lru | lfu | priority: which cached prefix goes first when pages run out."""
    debug_memory: bool = False
    """Keep the owners of every page and slot, check every move of them, and audit all the books
    at every idle moment and every `audit_every` steps."""
    audit_every: int = 64
    """Steps between audits with debug_memory."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The settings that are on of those that keep pages below the pool."""
        return tuple(name for name in ("host_cache", "disk_cache", "remote_cache")
                     if getattr(self, name))


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching and limits."""

    max_num_seqs: int = 256
    """Sequences that run at once = slots of the resident tables (the sink comes on top)."""
    max_num_batched_tokens: int = 2048
    """Tokens a step may compute: decodes first, the rest for extend chunks."""
    target_itl: float | None = None
    """Milliseconds between two tokens of a running stream: prompts' chunks beside decodes are cut
    to what a step's measured time leaves of it, and wait longer for their own first token; they get
    a fifth of the time at least. 0 = off. Default: on cpu three times a step without prompts, at
    least 75 (where most requests wait for their first token eight times, 150); on cuda, and for
    `generate`, `eval` and `bench offline`, off."""
    max_num_queued_reqs: int = 4096
    """Requests that may wait; more are refused with `queue_full`. As many as may run and wait, of
    256 MiB at most, may be on their way through the tokenizer."""
    max_n: int = 128
    """Choices (`n`) that one request may ask for; they share slots and pages with all others."""
    overlap: bool = True
    """Plan step N+1 while the worker runs step N; off = one plan at a time (same tokens)."""
    schedule_policy: str = "fcfs"
    """fcfs | lpm (longest cached prefix first) | priority (higher first, preempting lower) |
    fair (weighted fair sharing between tenants)."""
    background_seqs: int = 2
    """Sequences of batches that run beside others, which they slow down; where nothing else runs or
    waits as many run as fit."""
    tenant_weights: dict[str, float] = {}
    """Share of each tenant under the fair policy; 1 for those not named."""
    request_timeout: float = 3600.0
    """Deadline, in seconds, of a request that names none."""
    sleep_after: float = 0.0
    """Seconds without a request after which the engine sleeps by itself, until the next one comes;
    0 = never."""
    sleep_level: int = 1
    """How deep it sleeps then: 1 (the worker's process stays, without weights and pages) | 2 (it
    ends)."""
    force_preempt_every: int = 0
    """Testing: preempt a running sequence every so many steps; 0 = never."""


class SpeculationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: something cheap drafts tokens, the model's next step verifies them."""

    speculative: str = "auto"
    """auto (mtp:2 where the checkpoint has MTP weights, and what speculative_model is) | off |
    METHOD:K (at most K drafts, as many as pay at the moment) | METHOD:K,fixed (always K) |
    METHOD:K+METHOD:K (what pays best at the moment; the first may be auto). METHOD: mtp (the
    model's own layer) | eagle3 (a head, see speculative_model) | draft (a smaller model, see
    speculative_model) | ngram (what followed the last tokens before) | suffix (the same, by vote of
    all the longest matches) | grammar (what a request's grammar leaves no choice about)."""
    speculative_model: str = ""
    """The smaller model of the method draft: a directory, a .gguf file or a name, as `model`; or
    the directory of the head of eagle3."""
    prompt_lookup_max: int = 5
    """ngram: the most last tokens that are looked for in the sequence so far."""
    prompt_lookup_min: int = 2
    """ngram: the fewest; with no match of so many nothing is drafted."""
    suffix_decoding_max_tree_depth: int = 24
    """suffix: the most last tokens that are looked for."""
    suffix_decoding_max_spec_factor: float = 1.0
    """suffix: drafts for each token of the match, at most."""
    suffix_decoding_min_token_prob: float = 0.1
    """suffix: the share of the longest matches that must still agree on a draft."""
    suffix_global_bytes: int = 0
    """suffix: drafts also from answers that have ended, of the same tenant, cache salt and adapter;
    so many bytes of them are kept by each rank of the worker, on cpu. 0 = off."""
    force_acceptance: str = ""
    """Benchmarks with random weights: accept draft i with the i-th of these probabilities
    ("0.8,0.6"), whatever was sampled; empty = drafts are accepted where they equal the sample."""


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the model runs."""

    device: str = "auto"
    """auto (cuda where there is one) | cpu | cuda."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer: processes with a GPU each (on a CPU, with their share of the
    threads)."""
    threads: int = 0
    """CPU threads of the worker, all ranks together; 0 = all cores."""
    native_kernels: bool = True
    """On cpu, in bfloat16: use the C kernels (built at the first start, where there is a compiler);
    off = torch alone."""
    kernels: str = "auto"
    """Of the model and of the sampler: auto (triton on cuda, else those for the cpu) | torch (on a
    cpu the sampler's are numpy's) | triton (on a cpu in Triton's interpreter, for tests:
    TRITON_INTERPRET=1)."""
    attention_backend: str = "auto"
    """auto (as `kernels` and the device have it; the log says which, and why) | torch | native (C,
    on a cpu) | triton | sage (queries and keys in 8 bits), or another engine's name of one of them:
    what attends over the pages. `actorium backends` lists them, and what they lack."""
    prefill_attention_backend: str = ""
    """The same for prompts alone; default: as attention_backend."""
    decode_attention_backend: str = ""
    """The same for decodes, and for the drafts that they verify; default: as attention_backend."""
    exact: str = "auto"
    """Whether a token has the same bits alone and in any batch, in chunks of any size, decoded,
    verified as a draft or computed again: auto (on a cpu, where it costs less than 3 % of any step,
    as measured at the first start; the start says so) | on (whatever it costs, or the start is
    refused) | off (the fastest). docs/exactness.md"""
    exact_costs: str = ""
    """Testing: percent that exactness costs, instead of measuring: as the first worker of an engine
    finds, the second, ... ("2,9")."""
    exact_ranks: int = 1
    """With --exact on, in bfloat16 on a cpu: engines of 1, 2, 4 ... up to so many ranks (a power of
    two) give the same bits, each summing in as many parts as this; 1 = each number of ranks has
    bits of its own. docs/exactness.md"""
    passes: str = "auto"
    """Which operations of a layer are joined: auto (all, less those that were measured to lose on
    this machine), all, none, or names of passes, each taken away by a - before it
    (auto,-norm_quant); docs/passes.md says what each does."""
    dump_passes: str | None = None
    """Directory for the layers' graphs before and after each pass, as Python to read."""
    optimization_level: int = 3
    """0 (every operation by itself: no passes, no graphs) | 1 (passes) | 2 (and graphs, on a cpu
    programs) | 3 (and of the passes those that are measured to pay). What is set by itself
    (`passes`, `enforce_eager`, `graph_...`) wins over the level."""
    enforce_eager: bool = False
    """No graphs: every step is launched operation by operation."""
    graph_batch_sizes: str = "auto"
    """Sequences of the decode steps that are captured, as 1,2,4,8; off = none. On cuda: auto = from
    1 to max_num_seqs, 512 at most, and a batch is padded up to the next one. On a cpu: auto = all
    up to 64 rows, each when the first such step comes; numbers are captured at the start, and serve
    batches of just that size."""
    graph_max_batch_size: int | None = None
    """The most sequences of a step that is captured; 0 = none."""
    graph_token_counts: str = "auto"
    """On cuda: tokens of the steps with prompts that are run as graphs with attention between them,
    as 16,64,256; auto = 17 sizes from 16 to 512; all = 58 sizes from 4 to 8192; off = none. None
    is larger than max_num_batched_tokens. A step is padded up to the next one."""
    graph_max_tokens: int | None = None
    """The most tokens of such a step, up to which all sizes are captured unless they are named: at
    most 8192; 0 = none."""
    disable_custom_all_reduce: bool = False
    """On cuda, with several ranks: NCCL sums everything. Otherwise few rows are summed, and normed,
    by a kernel that reads all GPUs' memory, where that can be had and is faster at the start."""
    null_worker: bool = False
    """Testing: a worker without a model, whose tokens are a hash of (seed, position)."""


class RecoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What survives the death of an actor, and when one counts as hung."""

    restart: bool = True
    """Start a dead or hung actor again and go on with every request; off = the engine ends."""
    fork_server: str = "auto"
    """auto (on, but off for `generate`, `eval` and `bench offline`) | on | off: keep a process that
    has imported the worker's libraries (some 150 MB), and one with those of all other actors (some
    40 MB), from which a dead actor starts again within milliseconds instead of seconds (with
    `restart`)."""
    ledger: bool = True
    """Write requests and their output to a ledger before output is sent (with `restart`)."""
    ledger_dir: str | None = None
    """Directory of the ledger; default: in the run directory, forgotten at a clean stop. With a
    directory of its own an engine resumes what was unfinished when it ended, however it ended, and
    has the answers that were not read yet, unless it ended with exit code 0."""
    ledger_patience: float = 2.0
    """Seconds for which requests wait for a ledger that cannot be written, as on a full disk; then
    they go on, and what is sent until it can be written again is not durable."""
    retain: float = 60.0
    """Seconds for which a finished request is kept for clients that lost their stream."""
    silence: float = 0.75
    """Seconds without a sign of life after which an actor is killed that is stopped or asleep; four
    times as long if it may only be starved, 60 while it loads."""
    max_restarts: int = 5
    """Restarts of one actor within `restart_window`; one more ends the engine. Those after a
    SIGKILL by somebody else do not count. 0 = never start one again."""
    restart_window: float = 60.0
    """Seconds."""
    upgrade_fault: str = ""
    """Testing: at this step of an upgrade kill the launcher, or, as STEP=ROLE, an actor, or, as
    STEP=stop, stop the engine; several are separated by commas."""
    request_budget: float = 10.0
    """Seconds that an actor (not the worker) may be busy with one request while others wait for it;
    past that it counts as hung, and the request is quarantined. Nine times as long for work on the
    side, as for a long prompt."""


class ProbeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health probes and metrics over HTTP, answered by the watchdog's process."""

    probe_port: int | None = None
    """TCP port of /readyz, /livez, /metrics, ...; 0 = a free one, shown by `ps`; default: none."""
    probe_host: str = "127.0.0.1"
    """Address to listen at. Probes ask for no key: open them to the machines that watch alone."""


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI-compatible HTTP API."""

    port: int | None = None
    """TCP port of /v1/chat/completions and the other routes; 0 = a free one, shown by `ps`;
    default: no HTTP."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    uds: str | None = None
    """Unix socket to answer HTTP at, instead of a port; with --port besides it. Who may connect,
    the umask and its folder say: usually this user alone."""
    ssl_certfile: str | None = None
    """Certificate (PEM, with those between it and its CA): the port speaks HTTPS, and nothing else.
    It is read again, as the key and ssl_ca_certs are, when the engine gets a SIGHUP."""
    ssl_keyfile: str | None = None
    """Its key (PEM); default: in the same file."""
    ssl_keyfile_password: str | None = None
    """What the key is encrypted with."""
    ssl_ca_certs: str | None = None
    """Certificates (PEM) of those who sign callers' certificates; goes with ssl_cert_reqs."""
    ssl_cert_reqs: int = 0
    """Callers' own certificates: 0 = not asked for, 1 = verified if there is one, 2 = required."""
    ssl_ciphers: str | None = None
    """Ciphers of TLS 1.2, as OpenSSL lists them; those of 1.3 are always on."""
    ssl_refresh: bool = False
    """Read the certificate, the key and ssl_ca_certs again as soon as one of them has changed."""
    gateways: int = 1
    """Processes that serve HTTP, side by side at one port."""
    api_key: str | None = None
    """What callers must send as `Authorization: Bearer ...`, or `sha256:` and its hash; default:
    nothing."""
    api_keys_file: str | None = None
    """File of more of them, one a line: a name, and the key or `sha256:` and its hash. Prefixes in
    the cache and fair shares are those of the name alone. Nobody but its owner, who is this user or
    root, may write it."""
    admin_key: str | None = None
    """The key of /flush_cache and its like, which also opens everything else."""
    cors_origins: str = ""
    """Origins whose pages may call, as `https://a.example,https://b.example`, or `*`; default:
    this engine's own page alone."""
    strict_model_name: bool = False
    """Serve who asks for a served name, or for none; off = also by the path or id that the engine
    was started with, by the last part of that, and as `default`."""
    tool_call_parser: str = "auto"
    """How the model writes calls of tools: auto (by its chat template) | none | a format, as hermes
    or mistral: docs/tools.md lists them."""
    reasoning_parser: str = "auto"
    """How it writes its reasoning: auto (by its chat template) | none | a format of
    docs/reasoning.md, also by its name in vLLM or SGLang."""
    max_body_bytes: int | None = None
    """Largest body of a request; default: 4 MiB, and 32 MiB where the model takes images or, with
    enable_prompt_embeds, embeddings."""
    access_log: bool = True
    """Log a line for each HTTP request: status, tokens, times, never any text."""
    allowed_hosts: str | None = None
    """Names that callers, browsers above all, may know the server by (the Host header), as
    `llm.example,*.lan`, or `*` for any; those of this machine's loopback are always among them, and
    any port. It holds for the probes' port, too. Default: where `host` is a loopback address those
    alone, so that a reverse proxy that passes its own name on needs this flag; elsewhere any."""
    max_connections: int = 4096
    """Connections of one process; a further one closes the one that has been idle longest, and is
    refused with 503 if none is."""
    body_timeout: float = 30.0
    """Seconds in which a request's head must have come, and its body."""
    send_timeout: float = 60.0
    """Seconds after which a caller is cut off who does not read its answer while buffers are
    full."""
    responses_store: str | None = None
    """File in which /v1/responses keeps responses (SQLite, made if it is not there); several
    gateways share it. Default: memory, and with several gateways nowhere."""
    responses_max_bytes: int = 64 << 20
    """Largest store of responses, over all tenants: beyond it the oldest of the tenant that holds
    most are forgotten. 0 = store none."""
    responses_max: int = 10_000
    """The most responses that are stored."""
    files_dir: str | None = None
    """Directory of /v1/files and /v1/batches, of this engine alone: what is there goes on after a
    restart. Default: neither."""
    files_max_bytes: int = 4 << 30
    """The most that may lie there, over all tenants; uploads beyond it are refused."""
    files_expire_after: float = 30 * 86400.0
    """Seconds for which a file is kept whose owner says nothing else, and a batch that has ended.
    """
    resume_grace: float = 30.0
    """Seconds for which a request goes on whose caller has gone: one with an Idempotency-Key, and
    any stream of a gateway that has died; another call takes it up."""
    recovery_patience: float = 600.0
    """Seconds, from an actor's death or the start on, for which new requests wait for the engine to
    be ready and are then served, unless their callers leave; later ones are refused with 503 and
    Retry-After until it is. What was accepted before goes on in any case. 0 = refuse at once, as
    suits a load balancer that has other engines."""


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
    log_format: str = "text"
    """text | json: lines on stderr; files in the run directory are JSON lines anyway."""
    log_interval: float = 10.0
    """Seconds between the log lines on what is running, and how fast; 0 = none."""
    log_stderr: bool = False
    """Lines on the work, every `log_interval` seconds and of HTTP requests, go to stderr, too;
    `actorium serve` always has it so."""
    listen: str | None = None
    """tcp://HOST:PORT: also serve clients of other machines, at PORT and the next two (three where
    the model takes images), encrypted, and only those whose keys are let in (`actorium keys`);
    default: this machine's user alone."""
    keys_dir: str | None = None
    """Where keys lie; default $XDG_CONFIG_HOME/actorium/keys, else ~/.config/actorium/keys."""
    recorder_bytes: int = 16 << 20
    """Flight recorder: bytes on disk for the last messages of the scheduler; 0 = none."""
    crash_reports: bool = True
    """When an actor dies, put its logs, the recording and the configuration into one file, in
    `crashes` beside the run directories; the last five are kept."""
    trace_dir: str | None = None
    """Directory into which each actor writes when its steps began and ended, for `actorium trace`;
    default: nowhere."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets a trace of each request (http://localhost:4317;
    without http:// it is put before); default: none. Needs the extra `otel`."""
    otlp_traces_protocol: str = "grpc"
    """How it is spoken to: grpc | http/protobuf (then a URL without a path is completed by
    /v1/traces)."""
    otlp_service_name: str = "actorium"
    """The name of the service that traces show."""
    plugins: str = "all"
    """Packages whose plug-ins are used: all (that are installed) | none | names, with commas
    between; one that is named and cannot be used refuses the start. `actorium plugins` lists them;
    docs/plugins.md"""
    record_prompts: bool = False
    """Keep prompts and completions in recordings; off = only which of them begin alike."""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    device: DeviceConfig = DeviceConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    probes: ProbeConfig = ProbeConfig()
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    adapters: AdapterConfig = AdapterConfig()
    kv_events: KVEventConfig = KVEventConfig()
    cluster: ClusterConfig = ClusterConfig()
    models: ModelsConfig = ModelsConfig()
    runtime: RuntimeConfig = RuntimeConfig()


KEYS = (("gateway", "api_key"), ("gateway", "admin_key"))
"""Fields whose values are compared with what callers send."""
SECRETS = (*KEYS, ("gateway", "ssl_keyfile_password"))
"""Fields whose values are never shown."""


def with_secrets_hidden(config: Config) -> dict[str, Any]:
    """The tree in JSON's types, secrets as `***`."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for section, field in SECRETS:
        if tree[section][field] is not None:
            tree[section][field] = "***"
    return tree


def without_secrets(config: Config) -> Config:
    """The tree without its secrets, for files that are passed on."""
    for section, field in SECRETS:
        bare = msgspec.structs.replace(getattr(config, section), **{field: None})
        config = msgspec.structs.replace(config, **{section: bare})
    return config


def dump(config: Config) -> bytes:
    """The tree as JSON, for the run directory. Of keys it has the hashes, of other secrets nothing:
    the file stays behind when the launcher is killed."""
    for section, field in SECRETS:
        if (key := getattr(getattr(config, section), field)) is not None:
            kept = hashed(key) if (section, field) in KEYS else None
            own = msgspec.structs.replace(getattr(config, section), **{field: kept})
            config = msgspec.structs.replace(config, **{section: own})
    return msgspec.json.encode(config)


def load(data: bytes) -> Config:
    """Inverse of `dump`, but for secrets. Raises `msgspec.ValidationError`."""
    return _decode(data)


_decode = msgspec.json.Decoder(Config).decode
"""Made at import: see `client/connection.py`."""
