"""The tables of `/metrics`: which gauge of which actor becomes which metric.

What has labels of its own, or is computed, is in `metrics`.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.cluster_settings import NODES_ROLE, RAY_ROLE
from actorium.actors.health import HUNG, SILENT
from actorium.actors.runtime.beat_gauges import MARK
from actorium.actors.runtime.roles import MANAGER_ROLE, SCHEDULER, TRACER_ROLE, WORKER

DETOKENIZER, MEDIA = "detokenizer", "media"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
MICRO = 1e-6
REASONS = ("stop", "length", "abort", "deadline", "error")
REJECTIONS = ("queue_full", "deadline", "context_overflow", "invalid_request", "unavailable",
              "quarantined", "unknown_adapter")
DEATHS = ("killed", "oom", "fault", "exited", SILENT, HUNG)
"""Of an actor. These and `REJECTIONS` are exported as 0 before the first one: to `increase` and
`rate` a counter whose first sample is 1 has not grown."""
REJECTED, WEIGHT_FORMAT = "rejected_", "weight_format_"
HTTP = f"http{MARK}"
ROUTED = ("prefix", "load", "blind")
AUTOSCALED = ("queue", "ttft", "room", "min", "max")
DRAFTED = "spec_decode_num_accepted_tokens_pos_"


class Row(NamedTuple):
    """A gauge of one actor, as a metric."""

    name: str
    kind: str
    about: str
    gauge: str = ""
    """Where its name is another one."""
    role: str = SCHEDULER
    scale: float = 1.0


VLLM = (
    Row("num_requests_running", GAUGE, "Sequences in the batch.", "running"),
    Row("num_requests_waiting", GAUGE, "Sequences that wait for a place in it.", "waiting"),
    Row("num_preemptions", COUNTER, "Sequences taken off the batch again.", "preemptions"),
    Row("prompt_tokens", COUNTER,
        "Tokens of prompts taken up, computed or found in the prefix cache.",
        "cache_lookup_tokens"),
    Row("prompt_tokens_cached", COUNTER, "Those found in the prefix cache.", "cache_hit_tokens"),
    Row("generation_tokens", COUNTER, "Tokens generated.", "tokens"),
    Row("prefix_cache_queries", COUNTER,
        "Prompt tokens looked up in the prefix cache.", "cache_lookup_tokens"),
    Row("prefix_cache_hits", COUNTER, "Those of them that were found.", "cache_hit_tokens"),
    Row("spec_decode_num_drafts", COUNTER, "Windows verified."),
    Row("spec_decode_num_draft_tokens", COUNTER, "Draft tokens verified."),
    Row("spec_decode_num_accepted_tokens", COUNTER, "Draft tokens accepted."),
)
"""After `vllm:`, with its labels."""

ACTORIUM = (
    Row("started_sequences", COUNTER,
        "Sequences of accepted requests, and one for each request that was refused."),
    Row("open_sequences", GAUGE,
        "Those of them that have not ended. The others are in vllm:request_success_total."),
    Row("scheduler_steps", COUNTER, "Steps planned.", "steps"),
    Row("waiting_requests", GAUGE, "Requests of which a sequence waits."),
    Row("sleeping", GAUGE, "Level at which the engine sleeps; 0 = it is awake.", "sleep_level"),
    Row("paused", GAUGE, "1 while requests are held back (/pause)."),
    Row("device_busy_seconds", COUNTER,
        "Time of the device from the begin of a step to its end.", "busy_us", scale=MICRO),
    Row("device_idle_seconds", COUNTER,
        "Time the device had no step although there was work.", "idle_us", scale=MICRO),
    Row("device_late_seconds", COUNTER,
        "Of the busy time, what the device may have idled at most: the host was still queueing the "
        "step when the device had come to it.", "late_us", scale=MICRO),
    Row("evicted_pages", COUNTER, "Cached pages given up for others."),
    Row("host_pages", GAUGE, "Evicted pages that the host's memory holds."),
    Row("host_pages_stored", COUNTER, "Evicted pages copied to the host."),
    Row("host_pages_unstored", COUNTER,
        "Evicted pages that were not, since no place of a copy could be taken."),
    Row("host_pages_hit", COUNTER, "Pages copied back."),
    Row("host_pages_corrupt", COUNTER,
        "Pages whose checksum was wrong: their tokens were computed again."),
    Row("host_pages_evicted", COUNTER, "Pages on the host given up for others."),
    Row("disk_pages", GAUGE,
        "Pages in the directory of --disk-cache, as of the worker's last look at it."),
    Row("disk_bytes", GAUGE, "Bytes that they take."),
    Row("disk_pages_written", COUNTER, "Pages written to the disk."),
    Row("disk_pages_unwritten", COUNTER,
        "Pages that could not be, as of a full disk, or a slow one."),
    Row("disk_pages_hit", COUNTER, "Pages read back from the disk."),
    Row("disk_pages_corrupt", COUNTER,
        "Files that were no whole page or had another checksum: their tokens were computed again."),
    Row("disk_pages_late", COUNTER,
        "Pages that were not there within --disk-timeout: their tokens were computed."),
    Row("checkpoints", GAUGE, "Recurrent states kept for prefix reuse."),
    Row("checkpoints_saved", COUNTER, "Recurrent states saved."),
    Row("checkpoints_evicted", COUNTER, "Recurrent states given up."),
    Row("computed_prompt_tokens", COUNTER,
        "Prompt tokens computed, with those computed again after preemptions."),
    Row("target_itl_seconds", GAUGE,
        "Bound on the gap between tokens that prompts' chunks are cut to at present; 0 = none.",
        "target_itl_us", scale=MICRO),
    Row("paced_steps", COUNTER, "Steps whose prompts' chunks were cut to it."),
    Row("deferred_prompt_tokens", COUNTER,
        "Prompt tokens left to later steps by that, once for each step that left them."),
    Row("over_target_steps", COUNTER,
        "Steps with prompts and decodes that took longer than the target."),
    Row("mixed_step_seconds", COUNTER,
        "Time of the steps with prompts and decodes, where there is a target.",
        "mixed_step_us", scale=MICRO),
    Row("mixed_step_predicted_seconds", COUNTER,
        "The time that was predicted of these steps.", "mixed_step_predicted_us", scale=MICRO),
    Row("drafts", GAUGE, "Draft tokens a sequence and step at present.", "spec_decode_k"),
    Row("acceptance_length", GAUGE,
        "Tokens that a verified window emits, the mean.", "spec_decode_acceptance_length"),
    Row("resumed_sequences", COUNTER,
        "Sequences gone on with after the death of a worker or a scheduler."),
    Row("resumed_tokens", COUNTER, "Tokens of theirs that had been emitted before."),
    Row("adapters", GAUGE, "LoRA adapters that requests may name."),
    Row("adapters_held", GAUGE, "Adapters in the worker's memory."),
    Row("adapters_running", GAUGE, "Different adapters of the sequences in the batch."),
    Row("adapter_loads", COUNTER, "Adapters that the worker was asked to read."),
    Row("adapter_evictions", COUNTER, "Adapters that gave way to others in its memory."),
    Row("adapter_failures", COUNTER, "Adapters that it could not serve."),
    Row("retained_requests", GAUGE,
        "Finished requests kept for clients that lost their stream.", "retained"),
    Row("retained_bytes", GAUGE, "Bytes that they take."),
    Row("suspects", GAUGE, "Sequences suspected of killing the worker."),
    Row("quarantined_requests", COUNTER, "Requests convicted of it.", "quarantined"),
    Row("ledger_bytes", GAUGE, "Size of the ledger's files."),
    Row("ledger_full", GAUGE, "1 while the ledger takes no more, and requests wait for it."),
    Row("ledger_not_durable", GAUGE,
        "1 while the ledger takes no more, and requests go on without."),
    Row("duplicate_tokens_dropped", COUNTER,
        "Tokens that came to the detokenizer once more.", "duplicates_dropped", DETOKENIZER),
    Row("kernels_compiled", COUNTER,
        "Kernels compiled, or loaded from Triton's cache, when requests were being served.",
        role=WORKER),
    Row("graph_capture_seconds", GAUGE,
        "What the worker took at its start to capture graphs or programs.", role=WORKER),
    Row("media_items", GAUGE, "Images and videos that are held, prepared.", role=MEDIA),
    Row("media_bytes", GAUGE, "Bytes of their patches.", role=MEDIA),
    Row("media_waiting", GAUGE, "Images and videos that are being prepared.", role=MEDIA),
    Row("media_loaded", COUNTER, "Images and videos prepared, or found.", role=MEDIA),
    Row("media_hits", COUNTER, "Those of them that were held already.", role=MEDIA),
    Row("media_refused", COUNTER, "Images and videos refused.", role=MEDIA),
    Row("media_evicted", COUNTER, "Held ones given up for others.", role=MEDIA),
    Row("trace_spans_exported", COUNTER, "Spans that the collector of traces has taken.",
        role=TRACER_ROLE),
    Row("trace_spans_dropped", COUNTER,
        "Spans given up, since the collector did not take them in time.", role=TRACER_ROLE),
    Row("trace_spans_waiting", GAUGE, "Spans that wait for the collector.", role=TRACER_ROLE),
    Row("detokenizer_sequences", GAUGE, "Sequences on their way to text.", role=DETOKENIZER),
)
"""After `actorium:`."""

HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "first_token", "From arrival to the first token."),
    ("vllm:inter_token_latency_seconds", "between_tokens",
        "Between the steps that emit a sequence's tokens."),
    ("vllm:request_time_per_output_token_seconds", "per_token",
        "Mean time of a sequence's tokens after the first one."),
    ("vllm:e2e_request_latency_seconds", "request", "From arrival to the end."),
    ("vllm:request_queue_time_seconds", "queued", "From arrival to the batch."),
    ("vllm:request_prefill_time_seconds", "prefill", "From the batch to the first token."),
    ("vllm:request_decode_time_seconds", "decode", "From the first token to the end."),
    ("vllm:request_inference_time_seconds", "inference", "From the batch to the end."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "Prompt tokens of ended sequences."),
    ("vllm:request_generation_tokens", "generation_tokens", "Tokens of ended sequences."),
    ("vllm:request_max_num_generation_tokens", "most_generation_tokens",
     "Tokens of the longest choice of ended requests."),
    ("vllm:request_params_n", "choices", "Choices that ended requests asked for."),
    ("vllm:request_params_max_tokens", "max_tokens",
     "max_tokens of ended requests, capped at what the engine can hold."),
    ("vllm:request_num_preemptions", "preemptions", "Preemptions of ended sequences."),
    ("vllm:request_prefill_kv_computed_tokens", "prefill_tokens",
     "Prompt tokens of ended sequences that no cache had."),
    ("vllm:iteration_tokens_total", "step_tokens", "Tokens that a step computes."),
    ("actorium:device_step_seconds", "step", "Time the device takes for a step."),
)

ROUTER = (
    Row("replicas", GAUGE, "Replicas of the cluster."),
    Row("replicas_ready", GAUGE, "Those that take requests."),
    Row("replicas_wanted", GAUGE,
        "Replicas that are to stay, as people or the autoscaler have it."),
    Row("autoscale_active", GAUGE, "1 while the autoscaler changes their number."),
    Row("router_live_requests", GAUGE, "Requests that the router's book has open.", "router_live"),
    Row("router_waiting_requests", GAUGE,
        "Requests for which no replica is ready.", "router_waiting"),
    Row("router_index_pages", GAUGE,
        "Pages that the router knows to be cached at replicas.", "index_pages"),
    Row("router_index_resyncs", COUNTER,
        "Times that it asked a replica for all that is cached there.", "index_resyncs"),
    Row("routed_prompt_tokens", COUNTER, "Prompt tokens placed."),
    Row("routed_cached_tokens", COUNTER,
        "Those that were cached where they were placed, as far as was known."),
    Row("routed_missed", COUNTER,
        "Requests of whose prompt less was cached than their replica had said."),
    Row("migrated_requests", COUNTER, "Requests that went on at another replica."),
    Row("migrated_tokens", COUNTER, "Tokens that they had emitted before."),
    Row("stale_frames", COUNTER, "Frames of a replica's earlier life."),
    Row("stale_sequences", COUNTER,
        "Sequences of which a replica said something that were no longer its own."),
)
"""Of a cluster's router, which stands where an engine's scheduler does; after `actorium:`."""

NODES = (
    Row("nodes", GAUGE, "Machines that may join the cluster.", role=NODES_ROLE),
    Row("nodes_joined", GAUGE, "Those that are heard of.", role=NODES_ROLE),
    Row("node_losses", COUNTER,
        "Times that one was given up: its connection broke, or it was silent.", role=NODES_ROLE),
    Row("node_replicas_failed", GAUGE,
        "Replicas at nodes that are not started again.", role=NODES_ROLE),
)
"""Of a cluster's head, where other machines have replicas; after `actorium:`."""

MODELS = (
    Row("models", GAUGE, "Models that are served.", role=MANAGER_ROLE),
    Row("model_engines", GAUGE, "Engines that run for them.", "engines", MANAGER_ROLE),
    Row("model_engines_planned_bytes", GAUGE, "What these engines take by their plans.",
        "planned_bytes", MANAGER_ROLE),
    Row("model_uses", GAUGE, "Requests that engines have been granted for.", "uses",
        MANAGER_ROLE),
    Row("model_waiting_uses", GAUGE, "Requests that wait for engines.", "waiting_uses",
        MANAGER_ROLE),
    Row("model_starts", COUNTER, "Engines started.", "starts", MANAGER_ROLE),
    Row("model_evictions", COUNTER, "Engines ended since another one needed the memory.",
        "evictions", MANAGER_ROLE),
    Row("model_engine_failures", COUNTER, "Engines that did not start, or ended by themselves.",
        "failed_engines", MANAGER_ROLE),
)
"""Of a server of several models; after `actorium:`."""

RAY = (
    Row("ray_groups", GAUGE, "Placement groups that there shall be.", role=RAY_ROLE),
    Row("ray_groups_running", GAUGE, "Those whose agent runs, as far as is known.", role=RAY_ROLE),
    Row("ray_away", GAUGE, "1 while Ray does not answer; what runs goes on.", role=RAY_ROLE),
)
"""Of a cluster's head that has Ray place nodes; after `actorium:`."""
