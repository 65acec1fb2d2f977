"""The metrics of `/metrics`: vLLM's names, so that dashboards and gateways work, and our own.

Pure: heartbeats' gauges in, families of samples out; `probe_routes.metrics_text` turns these into
Prometheus' text. Tables say which gauge of which actor becomes which metric; what has labels of its
own, or is computed, has a function. Counters are those of the actor that counts: a restarted one
starts at 0 again, as Prometheus expects it of a process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from actorium.actors.config.cluster_settings import clustered
from actorium.actors.config.tree import Config
from actorium.actors.gauges import bytes_of
from actorium.actors.health import HUNG, READY_PHASES, SILENT
from actorium.actors.runtime import beat_gauges
from actorium.actors.runtime.beat_gauges import EAGER_REASONS, STEP_MODES, eager_key, steps_by_size
from actorium.actors.runtime.process import ProcessUsage
from actorium.actors.runtime.roles import group_of
from actorium.actors.watchdog.supervised import Supervised

SCHEDULER, DETOKENIZER, WORKER, MEDIA = "scheduler", "detokenizer", "worker-0", "media"
NODES_ROLE, RAY_ROLE = "nodes", "ray"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
MICRO = 1e-6
REASONS = ("stop", "length", "abort", "deadline", "error")
CAUSES = ("memory", "priority", "forced", "worker")
REJECTIONS = ("queue_full", "deadline", "context_overflow", "invalid_request", "unavailable",
              "quarantined")
DEATHS = ("killed", "oom", "fault", "exited", SILENT, HUNG)
"""Of an actor. These and `REJECTIONS` are told as 0 before the first one: to `increase` and `rate`
a counter whose first sample is 1 has not grown."""
REJECTED, WEIGHT_FORMAT = "rejected_", "weight_format_"
HTTP = f"http{beat_gauges.MARK}"
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
    Row("scheduler_steps", COUNTER, "Steps planned.", "steps"),
    Row("waiting_requests", GAUGE, "Requests of which a sequence waits."),
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

RAY = (
    Row("ray_groups", GAUGE, "Placement groups that there shall be.", role=RAY_ROLE),
    Row("ray_groups_running", GAUGE, "Those whose agent runs, as far as is known.", role=RAY_ROLE),
    Row("ray_away", GAUGE, "1 while Ray does not answer; what runs goes on.", role=RAY_ROLE),
)
"""Of a cluster's head that has Ray place nodes; after `actorium:`."""


class MetricSample(NamedTuple):
    suffix: str
    labels: dict[str, str]
    value: float


class MetricFamily(NamedTuple):
    """One metric; counters' names without `_total`."""

    name: str
    kind: str
    about: str
    samples: list[MetricSample]


class MetricsInput(NamedTuple):
    """What the metrics are made of."""

    actors: Mapping[str, Supervised]
    restarts: Mapping[tuple[str, str], int]
    """Restarts ordered, by (role, cause)."""
    processes: Mapping[str, ProcessUsage]
    """By role."""
    ready: bool
    config: Config
    model: str
    version: str
    now: float
    """CLOCK_MONOTONIC seconds."""


def families(facts: MetricsInput) -> Iterator[MetricFamily]:
    """Every metric."""
    common = {"model_name": facts.model, "engine": "0"}
    yield from (_row("vllm:", row, facts, common) for row in VLLM)
    yield from _vllm_special(facts, common)
    yield from (_row("actorium:", row, facts, {}) for row in ACTORIUM)
    for name, source, about in HISTOGRAMS:
        yield _histogram(name, source, about, facts, common if name.startswith("vllm:") else {})
    if clustered(facts.config.cluster):
        yield from _router(facts)
    yield from _http(facts)
    yield from _engine(facts)
    yield from _actors(facts)
    yield from _memory(facts)


def _gauges(facts: MetricsInput, role: str) -> Mapping[str, float]:
    actor = facts.actors.get(role)
    return {} if actor is None else actor.gauges


def _row(prefix: str, row: Row, facts: MetricsInput, labels: dict[str, str]) -> MetricFamily:
    value = _gauges(facts, row.role).get(row.gauge or row.name, 0.0) * row.scale
    return _family(prefix + row.name, row.kind, row.about, [(labels, value)])


def _family(name: str, kind: str, about: str,
            values: list[tuple[dict[str, str], float]]) -> MetricFamily:
    suffix = "_total" if kind == COUNTER else ""
    return MetricFamily(name, kind, about,
                        [MetricSample(suffix, labels, v) for labels, v in values])


def _vllm_special(facts: MetricsInput, common: dict[str, str]) -> Iterator[MetricFamily]:
    """Returns vLLM's metrics that have a label of their own, or are computed."""
    gauges = _gauges(facts, SCHEDULER)
    total = gauges.get("free_pages", 0.0) + gauges.get("used_pages", 0.0)
    usage = gauges.get("held_pages", 0.0) / total if total else 0.0
    yield _family("vllm:kv_cache_usage_perc", GAUGE, "Pages that sequences hold; 1 = all.",
                  [(common, usage)])
    memory = facts.config.memory
    info = {"block_size": str(memory.page_size), "num_gpu_blocks": f"{total:.0f}",
            "cache_dtype": memory.kv_cache_dtype,
            "enable_prefix_caching": str(memory.prefix_cache)}
    yield _family("vllm:cache_config_info", GAUGE, "How the pages are.", [(common | info, 1.0)])
    yield _family("vllm:request_success", COUNTER, "Sequences that have ended, by reason.",
                  [(common | {"finished_reason": reason}, gauges.get(f"finished_{reason}", 0.0))
                   for reason in REASONS])
    waiting, deferred = gauges.get("waiting", 0.0), gauges.get("waiting_deferred", 0.0)
    yield _family("vllm:num_requests_waiting_by_reason", GAUGE,
                  "capacity: for a place in the batch; deferred: for a grammar to be compiled, or "
                  "for the end of a trial (of who kills the worker).",
                  [(common | {"reason": "capacity"}, waiting - deferred),
                   (common | {"reason": "deferred"}, deferred)])
    cached = gauges.get("cache_hit_tokens", 0.0)
    yield _family("vllm:prompt_tokens_by_source", COUNTER, "Where the prompt tokens came from.",
                  [(common | {"source": "local_compute"},
                    gauges.get("cache_lookup_tokens", 0.0) - cached),
                   (common | {"source": "local_cache_hit"}, cached)])
    yield _family("vllm:prompt_tokens_cached_by_source", COUNTER,
                  "Which memory had the prompt tokens that were cached.",
                  [(common | {"source": "device"}, cached)])
    yield _family("vllm:admission_rejections", COUNTER, "Requests refused by a limit of the queue.",
                  [(common | {"reason": "max_num_queued_reqs"},
                    gauges.get("rejected_queue_full", 0.0))])
    positions = sorted(int(name.removeprefix(DRAFTED)) for name in gauges
                       if name.startswith(DRAFTED))
    yield _family("vllm:spec_decode_num_accepted_tokens_per_pos", COUNTER,
                  "Draft tokens accepted, by position.",
                  [(common | {"position": str(i)}, gauges[f"{DRAFTED}{i}"]) for i in positions])


def _http(facts: MetricsInput) -> Iterator[MetricFamily]:
    """Returns the HTTP metrics of all gateways together, by prometheus_fastapi_instrumentator's
    names."""
    gateways = [actor.gauges for role, actor in facts.actors.items() if role.startswith("gateway")]
    counts: Counter[tuple[str, ...]] = Counter()
    for gauges in gateways:
        counts.update({tuple(name.split(beat_gauges.MARK)[1:]): int(n)
                       for name, n in gauges.items() if name.startswith(HTTP)})
    yield _family("http_requests", COUNTER, "HTTP requests answered, by route.", [
        ({"method": method, "handler": handler, "status": status}, float(n))
        for (method, handler, status), n in sorted(counts.items())])
    histograms = [beat_gauges.read(gauges, beat_gauges.HTTP_REQUESTS) for gauges in gateways]
    if histograms:
        columns = [sum(column) for column in zip(*(each for each, _ in histograms), strict=True)]
        yield _buckets("http_request_duration_highr_seconds",
                       "From the head of an HTTP request to the end of its answer.",
                       beat_gauges.HTTP_REQUESTS, columns,
                       sum(total for _, total in histograms), {})


def _histogram(name: str, source: str, about: str, facts: MetricsInput,
               labels: dict[str, str]) -> MetricFamily:
    counts, total = beat_gauges.read(_gauges(facts, SCHEDULER), source)
    return _buckets(name, about, source, counts, total, labels)


def _buckets(name: str, about: str, source: str, counts: list[float], total: float,
             labels: dict[str, str]) -> MetricFamily:
    samples, below = [], 0.0
    for bound, count in zip([*beat_gauges.BOUNDS[source], float("inf")], counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else str(bound)
        samples.append(MetricSample("_bucket", labels | {"le": le}, below))
    samples += [MetricSample("_count", labels, below), MetricSample("_sum", labels, total)]
    return MetricFamily(name, HISTOGRAM, about, samples)


def _engine(facts: MetricsInput) -> Iterator[MetricFamily]:
    gauges = _gauges(facts, SCHEDULER)
    yield _family("actorium:info", GAUGE, "The engine.", [
        ({"name": facts.config.runtime.name, "version": facts.version, "model": facts.model}, 1.0)])
    yield _family("actorium:ready", GAUGE, "1 while the engine is ready.",
                  [({}, float(facts.ready))])
    busy, idle = gauges.get("busy_us", 0.0), gauges.get("idle_us", 0.0)
    idled = idle + gauges.get("late_us", 0.0)
    rejected = dict.fromkeys(REJECTIONS, 0.0) | {
        name.removeprefix(REJECTED): n for name, n in gauges.items() if name.startswith(REJECTED)}
    roles = {group_of(role) for role in facts.actors}
    restarts = {**dict.fromkeys(itertools.product(roles, DEATHS), 0), **facts.restarts}
    yield _family("actorium:device_idle_ratio", GAUGE,
                  "Part of the device's time with work in which it waited for the host, at most, "
                  "since the start.", [({}, idled / (busy + idle) if busy + idle else 0.0)])
    yield _family("actorium:pages", GAUGE, "Pages by state; cached ones may be held, too.",
                  [({"state": state}, gauges.get(f"{state}_pages", 0.0))
                   for state in ("free", "held", "cached", "quarantined")])
    yield _family("actorium:rejected_requests", COUNTER, "Requests refused, by the error's code.",
                  [({"code": code}, n) for code, n in sorted(rejected.items())])
    yield _family("actorium:preemptions", COUNTER, "Preemptions by cause.",
                  [({"cause": cause}, gauges.get(f"preemptions_{cause}", 0.0)) for cause in CAUSES])
    yield _family("actorium:restarts", COUNTER, "Restarts of actors, by cause.",
                  [({"role": role, "cause": cause}, float(n))
                   for (role, cause), n in sorted(restarts.items())])


def _router(facts: MetricsInput) -> Iterator[MetricFamily]:
    """Of a cluster, whose scheduler is the router."""
    rows: tuple[Row, ...] = ROUTER + NODES if NODES_ROLE in facts.actors else ROUTER
    rows += RAY if RAY_ROLE in facts.actors else ()
    yield from (_row("actorium:", row, facts, {}) for row in rows)
    gauges = _gauges(facts, SCHEDULER)
    yield _family("actorium:routed_requests", COUNTER,
                  "Placements, by what decided: prefix (most of the prompt is cached there), load, "
                  "or load alone as a cache was unknown (blind).",
                  [({"by": by}, gauges.get(f"routed_by_{by}", gauges.get(f"routed_{by}", 0.0)))
                   for by in ROUTED])
    yield _family("actorium:autoscale_decisions", COUNTER,
                  "Changes of the number of replicas by the autoscaler, by why: queue (too many "
                  "wait), ttft (first tokens take too long), room (fewer would do), min, max (its "
                  "bounds).",
                  [({"reason": why}, gauges.get(f"autoscaled_by_{why}", 0.0))
                   for why in AUTOSCALED])


def _actors(facts: MetricsInput) -> Iterator[MetricFamily]:
    actors = sorted(facts.actors.values(), key=lambda actor: actor.role)

    def each(name: str, about: str, values: list[float], kind: str = GAUGE) -> MetricFamily:
        return _family(f"actorium:{name}", kind, about, [
            ({"role": w.role}, v) for w, v in zip(actors, values, strict=True)])

    beat = facts.config.runtime.heartbeat
    yield each("actor_up", "1 while the actor works and is heard of.",
               [float(w.is_ready(facts.now, beat)) for w in actors])
    yield each("actor_epoch", "Its incarnation; 1 = it was never started again.",
               [float(w.epoch) for w in actors])
    yield each("actor_steps", "Work done, in its own units.", [float(w.step) for w in actors],
               COUNTER)
    yield each("step_age_seconds", "Since its work last moved; 0 while it rests.",
               [0.0 if w.phase in READY_PHASES - {"stepping"} else max(0.0, facts.now - w.moved)
                for w in actors])
    yield each("beat_age_seconds", "Since it was last heard of.",
               [max(0.0, facts.now - w.seen) for w in actors])
    yield _family("actorium:actor_phase", GAUGE, "The phase it is in.",
                  [({"role": w.role, "phase": w.phase}, 1.0) for w in actors])
    yield each("actor_quarantined_requests", "Requests that it failed on, or died of.",
               [w.gauges.get("journal_quarantined", 0.0) for w in actors], COUNTER)
    yield each("bad_frames", "Frames that came to it and are no messages.",
               [w.gauges.get("bad_frames", 0.0) for w in actors], COUNTER)
    yield each("refused_connections", "Connections by tcp of which it does not know the key.",
               [w.gauges.get("refused_connections", 0.0) for w in actors], COUNTER)
    known = sorted(facts.processes.items())
    yield _family("actorium:process_cpu_seconds", COUNTER, "CPU time of its process.",
                  [({"role": role}, p.cpu_seconds) for role, p in known])
    yield _family("actorium:process_resident_memory_bytes", GAUGE, "Memory of its process.",
                  [({"role": role}, float(p.resident_bytes)) for role, p in known])


def _memory(facts: MetricsInput) -> Iterator[MetricFamily]:
    worker = _gauges(facts, WORKER)
    yield _family("actorium:worker_steps", COUNTER, "Steps by how the worker ran them.",
                  [({"mode": mode}, worker[f"steps_{mode}"]) for mode in STEP_MODES
                   if f"steps_{mode}" in worker])
    yield _family("actorium:worker_steps_by_size", COUNTER,
                  "Steps by how the worker ran them and the size that served them: sequences of "
                  "graphs and programs of decodes, tokens of segments; of eager steps the power of "
                  "two that their tokens are within.",
                  [({"mode": mode, "size": str(size)}, count)
                   for (mode, size), count in steps_by_size(worker).items()])
    yield _family("actorium:worker_eager_steps", COUNTER,
                  "Steps run operation by operation, by why: off (no graphs or programs could "
                  "serve them), images, tokens or sequences (no size that is captured), prompts.",
                  [({"reason": reason}, worker.get(f"steps_{eager_key(reason)}", 0.0))
                   for reason in EAGER_REASONS if "steps_eager" in worker])
    yield _family("actorium:weight_bytes", GAUGE, "Bytes of the weights by how they are held.",
                  [({"format": name.removeprefix(WEIGHT_FORMAT)}, count)
                   for name, count in sorted(worker.items()) if name.startswith(WEIGHT_FORMAT)])
    memory = bytes_of(worker)
    yield _family("actorium:device_memory_bytes", GAUGE, "The worker's memory.",
                  [({"what": what, "kind": kind}, float(count[kind]))
                   for what, count in sorted(memory.items()) for kind in ("measured", "planned")])
