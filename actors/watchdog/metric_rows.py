"""Which gauge of which actor becomes which metric: tables, for `metrics.py`."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER, DETOKENIZER, WORKER, MEDIA = "scheduler", "detokenizer", "worker-0", "media"
NODES_ROLE, RAY_ROLE = "nodes", "ray"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
MICRO = 1e-6


class Row(NamedTuple):
    """A gauge of one actor, as a metric."""

    name: str
    kind: str
    gauge: str
    about: str
    role: str = SCHEDULER
    scale: float = 1.0


VLLM = (
    Row("num_requests_running", GAUGE, "running", "Sequences in the batch."),
    Row("num_requests_waiting", GAUGE, "waiting", "Sequences that wait for a place in it."),
    Row("num_preemptions", COUNTER, "preemptions", "Sequences taken off the batch again."),
    Row("prompt_tokens", COUNTER, "cache_lookup_tokens",
        "Tokens of prompts taken up, computed or found in the prefix cache."),
    Row("prompt_tokens_cached", COUNTER, "cache_hit_tokens", "Those found in the prefix cache."),
    Row("generation_tokens", COUNTER, "tokens", "Tokens generated."),
    Row("prefix_cache_queries", COUNTER, "cache_lookup_tokens",
        "Prompt tokens looked up in the prefix cache."),
    Row("prefix_cache_hits", COUNTER, "cache_hit_tokens", "Those of them that were found."),
    Row("spec_decode_num_drafts", COUNTER, "spec_decode_num_drafts", "Windows verified."),
    Row("spec_decode_num_draft_tokens", COUNTER, "spec_decode_num_draft_tokens",
        "Draft tokens verified."),
    Row("spec_decode_num_accepted_tokens", COUNTER, "spec_decode_num_accepted_tokens",
        "Draft tokens accepted."),
)
"""After `vllm:`, with its labels."""

OWN = (
    Row("scheduler_steps", COUNTER, "steps", "Steps planned."),
    Row("waiting_requests", GAUGE, "waiting_requests", "Requests of which a sequence waits."),
    Row("device_busy_seconds", COUNTER, "busy_us",
        "Time of the device from the begin of a step to its end.", scale=MICRO),
    Row("device_idle_seconds", COUNTER, "idle_us",
        "Time the device had no step although there was work.", scale=MICRO),
    Row("device_late_seconds", COUNTER, "late_us",
        "Of the busy time, what the device may have idled at most: the host was still queueing the "
        "step when the device had come to it.", scale=MICRO),
    Row("evicted_pages", COUNTER, "evicted_pages", "Cached pages given up for others."),
    Row("host_pages", GAUGE, "host_pages", "Evicted pages that the host's memory holds."),
    Row("host_pages_stored", COUNTER, "host_pages_stored", "Evicted pages copied to the host."),
    Row("host_pages_unstored", COUNTER, "host_pages_unstored",
        "Evicted pages that were not, since no place of a copy could be taken."),
    Row("host_pages_hit", COUNTER, "host_pages_hit", "Pages copied back."),
    Row("host_pages_corrupt", COUNTER, "host_pages_corrupt",
        "Pages whose checksum was wrong: their tokens were computed again."),
    Row("host_pages_evicted", COUNTER, "host_pages_evicted",
        "Pages on the host given up for others."),
    Row("disk_pages", GAUGE, "disk_pages",
        "Pages in the directory of --disk-cache, as of the worker's last look at it."),
    Row("disk_bytes", GAUGE, "disk_bytes", "Bytes that they take."),
    Row("disk_pages_written", COUNTER, "disk_pages_written", "Pages written to the disk."),
    Row("disk_pages_unwritten", COUNTER, "disk_pages_unwritten",
        "Pages that could not be, as of a full disk, or a slow one."),
    Row("disk_pages_hit", COUNTER, "disk_pages_hit", "Pages read back from the disk."),
    Row("disk_pages_corrupt", COUNTER, "disk_pages_corrupt",
        "Files that were no whole page or had another checksum: their tokens were computed again."),
    Row("disk_pages_late", COUNTER, "disk_pages_late",
        "Pages that were not there within --disk-timeout: their tokens were computed."),
    Row("checkpoints", GAUGE, "checkpoints", "Recurrent states kept for prefix reuse."),
    Row("checkpoints_saved", COUNTER, "checkpoints_saved", "Recurrent states saved."),
    Row("checkpoints_evicted", COUNTER, "checkpoints_evicted", "Recurrent states given up."),
    Row("computed_prompt_tokens", COUNTER, "computed_prompt_tokens",
        "Prompt tokens computed, with those computed again after preemptions."),
    Row("target_itl_seconds", GAUGE, "target_itl_us",
        "Bound on the gap between tokens that prompts' chunks are cut to at present; 0 = none.",
        scale=MICRO),
    Row("paced_steps", COUNTER, "paced_steps", "Steps whose prompts' chunks were cut to it."),
    Row("deferred_prompt_tokens", COUNTER, "deferred_prompt_tokens",
        "Prompt tokens left to later steps by that, once for each step that left them."),
    Row("over_target_steps", COUNTER, "over_target_steps",
        "Steps with prompts and decodes that took longer than the target."),
    Row("mixed_step_seconds", COUNTER, "mixed_step_us",
        "Time of the steps with prompts and decodes, where there is a target.", scale=MICRO),
    Row("mixed_step_predicted_seconds", COUNTER, "mixed_step_predicted_us",
        "The time that was predicted of these steps.", scale=MICRO),
    Row("drafts", GAUGE, "spec_decode_k", "Draft tokens a sequence and step at present."),
    Row("acceptance_length", GAUGE, "spec_decode_acceptance_length",
        "Tokens that a verified window emits, the mean."),
    Row("resumed_sequences", COUNTER, "resumed_sequences",
        "Sequences gone on with after the death of a worker or a scheduler."),
    Row("resumed_tokens", COUNTER, "resumed_tokens",
        "Tokens of theirs that had been emitted before."),
    Row("retained_requests", GAUGE, "retained",
        "Finished requests kept for clients that lost their stream."),
    Row("retained_bytes", GAUGE, "retained_bytes", "Bytes that they take."),
    Row("suspects", GAUGE, "suspects", "Sequences suspected of killing the worker."),
    Row("quarantined_requests", COUNTER, "quarantined", "Requests convicted of it."),
    Row("ledger_bytes", GAUGE, "ledger_bytes", "Size of the ledger's files."),
    Row("ledger_full", GAUGE, "ledger_full",
        "1 while the ledger takes no more, and requests wait for it."),
    Row("ledger_not_durable", GAUGE, "ledger_not_durable",
        "1 while the ledger takes no more, and requests go on without."),
    Row("duplicate_tokens_dropped", COUNTER, "duplicates_dropped",
        "Tokens that came to the detokenizer once more.", DETOKENIZER),
    Row("kernels_compiled", COUNTER, "kernels_compiled",
        "Kernels compiled, or loaded from Triton's cache, when requests were being served.",
        WORKER),
    Row("graph_capture_seconds", GAUGE, "graph_capture_seconds",
        "What the worker took at its start to capture graphs or programs.", WORKER),
    Row("media_items", GAUGE, "media_items", "Images and videos that are held, prepared.", MEDIA),
    Row("media_bytes", GAUGE, "media_bytes", "Bytes of their patches.", MEDIA),
    Row("media_waiting", GAUGE, "media_waiting", "Images and videos that are being prepared.",
        MEDIA),
    Row("media_loaded", COUNTER, "media_loaded", "Images and videos prepared, or found.", MEDIA),
    Row("media_hits", COUNTER, "media_hits", "Those of them that were held already.", MEDIA),
    Row("media_refused", COUNTER, "media_refused", "Images and videos refused.", MEDIA),
    Row("media_evicted", COUNTER, "media_evicted", "Held ones given up for others.", MEDIA),
    Row("detokenizer_sequences", GAUGE, "detokenizer_sequences",
        "Sequences on their way to text.", DETOKENIZER),
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
    Row("replicas", GAUGE, "replicas", "Replicas of the cluster."),
    Row("replicas_ready", GAUGE, "replicas_ready", "Those that take requests."),
    Row("replicas_wanted", GAUGE, "replicas_wanted",
        "Replicas that are to stay, as people or the autoscaler have it."),
    Row("autoscale_active", GAUGE, "autoscale_active",
        "1 while the autoscaler changes their number."),
    Row("router_live_requests", GAUGE, "router_live", "Requests that the router's book has open."),
    Row("router_waiting_requests", GAUGE, "router_waiting",
        "Requests for which no replica is ready."),
    Row("router_index_pages", GAUGE, "index_pages",
        "Pages that the router knows to be cached at replicas."),
    Row("router_index_resyncs", COUNTER, "index_resyncs",
        "Times that it asked a replica for all that is cached there."),
    Row("routed_prompt_tokens", COUNTER, "routed_prompt_tokens", "Prompt tokens placed."),
    Row("routed_cached_tokens", COUNTER, "routed_cached_tokens",
        "Those that were cached where they were placed, as far as was known."),
    Row("routed_missed", COUNTER, "routed_missed",
        "Requests of whose prompt less was cached than their replica had said."),
    Row("migrated_requests", COUNTER, "migrated_requests",
        "Requests that went on at another replica."),
    Row("migrated_tokens", COUNTER, "migrated_tokens", "Tokens that they had emitted before."),
    Row("stale_frames", COUNTER, "stale_frames", "Frames of a replica's earlier life."),
    Row("stale_sequences", COUNTER, "stale_sequences",
        "Sequences of which a replica said something that were no longer its own."),
)
"""Of a cluster's router, which stands where an engine's scheduler does; after `actorium:`."""

NODES = (
    Row("nodes", GAUGE, "nodes", "Machines that may join the cluster.", NODES_ROLE),
    Row("nodes_joined", GAUGE, "nodes_joined", "Those that are heard of.", NODES_ROLE),
    Row("node_losses", COUNTER, "node_losses",
        "Times that one was given up: its connection broke, or it was silent.", NODES_ROLE),
    Row("node_replicas_failed", GAUGE, "node_replicas_failed",
        "Replicas at nodes that are not started again.", NODES_ROLE),
)
"""Of a cluster's head, where other machines have replicas; after `actorium:`."""

RAY = (
    Row("ray_groups", GAUGE, "ray_groups", "Placement groups that there shall be.", RAY_ROLE),
    Row("ray_groups_running", GAUGE, "ray_groups_running",
        "Those whose agent runs, as far as is known.", RAY_ROLE),
    Row("ray_away", GAUGE, "ray_away", "1 while Ray does not answer; what runs goes on.", RAY_ROLE),
)
"""Of a cluster's head that has Ray place nodes; after `actorium:`."""
