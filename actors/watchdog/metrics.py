"""The metrics of `/metrics`: vLLM's names, so that dashboards and gateways work, and our own.

Pure: heartbeats' gauges in, families of samples out; `probe_routes.metrics_text` turns these into
Prometheus' text. Most of them are rows of `metric_tables`; what has labels of its own, or is
computed, has a function. What is counted of requests goes on over restarts, since the scheduler's
ledger has it; other counters start at 0 again, as Prometheus expects it of a process. Counters of
an actor that was never heard of are left out: 0 would be a restart from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from actorium.actors.config.cluster_settings import NODES_ROLE, RAY_ROLE, clustered
from actorium.actors.config.parsed_values import DRAFTS
from actorium.actors.config.tree import Config
from actorium.actors.health import BY_METHOD, READY_PHASES, SPECULATION, bytes_of, cache_usage
from actorium.actors.params import PoolingTask
from actorium.actors.runtime import beat_gauges
from actorium.actors.runtime.beat_gauges import (
    EAGER_REASONS,
    POOLED,
    POOLED_TOKENS,
    PREEMPTION_CAUSES,
    STEP_MODES,
    eager_key,
    steps_by_size,
)
from actorium.actors.runtime.process import ProcessUsage
from actorium.actors.runtime.roles import MANAGER_ROLE, SCHEDULER, WORKER, group_of
from actorium.actors.watchdog.metric_tables import (
    ACTORIUM,
    AUTOSCALED,
    COUNTER,
    DEATHS,
    DRAFTED,
    GAUGE,
    HISTOGRAM,
    HISTOGRAMS,
    HTTP,
    MODELS,
    NODES,
    RAY,
    REASONS,
    REJECTED,
    REJECTIONS,
    ROUTED,
    ROUTER,
    VLLM,
    WEIGHT_FORMAT,
    Row,
)
from actorium.actors.watchdog.supervised import Supervised


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
    yield from (_row("actorium:", row, facts, {}) for row in ACTORIUM)
    if MANAGER_ROLE in facts.actors:
        yield from (_row("actorium:", row, facts, {}) for row in MODELS)
    for family in (*_vllm_special(facts, common), *_requests(facts), *_histograms(facts, common)):
        known = family.kind == GAUGE or _is_known(facts, SCHEDULER)
        yield family if known else family._replace(samples=[])
    if clustered(facts.config.cluster):
        yield from _router(facts)
    yield from _http(facts)
    yield from _engine(facts)
    yield from _actors(facts)
    yield from _memory(facts)
    yield from _drafts(facts)


def _gauges(facts: MetricsInput, role: str) -> Mapping[str, float]:
    actor = facts.actors.get(role)
    return {} if actor is None else actor.known_gauges


def _is_known(facts: MetricsInput, role: str) -> bool:
    """Whether this actor, or its predecessor, has sent its counters."""
    actor = facts.actors.get(role)
    return actor is not None and bool(actor.known_gauges or actor.phase in READY_PHASES)


def _row(prefix: str, row: Row, facts: MetricsInput, labels: dict[str, str]) -> MetricFamily:
    value = _gauges(facts, row.role).get(row.gauge or row.name, 0.0) * row.scale
    known = row.kind == GAUGE or row.role not in (SCHEDULER, WORKER) or _is_known(facts, row.role)
    return _family(prefix + row.name, row.kind, row.about, [(labels, value)] if known else [])


def _family(name: str, kind: str, about: str,
            values: list[tuple[dict[str, str], float]]) -> MetricFamily:
    suffix = "_total" if kind == COUNTER else ""
    return MetricFamily(name, kind, about,
                        [MetricSample(suffix, labels, v) for labels, v in values])


def _vllm_special(facts: MetricsInput, common: dict[str, str]) -> Iterator[MetricFamily]:
    """Returns vLLM's metrics that have a label of their own, or are computed."""
    gauges = _gauges(facts, SCHEDULER)
    total = gauges.get("free_pages", 0.0) + gauges.get("used_pages", 0.0)
    yield _family("vllm:kv_cache_usage_perc", GAUGE, "Pages that sequences hold; 1 = all.",
                  [(common, cache_usage(gauges))])
    memory = facts.config.memory
    info = {"block_size": str(memory.page_size), "num_gpu_blocks": f"{total:.0f}",
            "cache_dtype": memory.kv_cache_dtype,
            "enable_prefix_caching": str(memory.prefix_cache)}
    yield _family("vllm:cache_config_info", GAUGE, "How the pages are.", [(common | info, 1.0)])
    level = gauges.get("sleep_level", 0.0)
    yield _family("vllm:engine_sleep_state", GAUGE,
                  "1 for the engine's state; sleep at level 1 is weights_offloaded, at level 2 "
                  "discard_all.",
                  [(common | {"sleep_state": state}, float(level == number)) for number, state in
                   enumerate(("awake", "weights_offloaded", "discard_all"))])
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
    if facts.config.adapters.enable_lora:
        yield _adapters_in_use(facts, gauges, common)
    positions = sorted(int(name.removeprefix(DRAFTED)) for name in gauges
                       if name.startswith(DRAFTED))
    yield _family("vllm:spec_decode_num_accepted_tokens_per_pos", COUNTER,
                  "Draft tokens accepted, by position.",
                  [(common | {"position": str(i)}, gauges[f"{DRAFTED}{i}"]) for i in positions])


def _adapters_in_use(facts: MetricsInput, gauges: Mapping[str, float],
                     common: dict[str, str]) -> MetricFamily:
    running, waiting = (",".join(sorted(
        name.partition(beat_gauges.MARK)[2] for name, count in gauges.items()
        if count and name.startswith(f"{what}{beat_gauges.MARK}")))
        for what in (beat_gauges.RUNNING_WITH, beat_gauges.WAITING_FOR))
    return _family("vllm:lora_requests_info", GAUGE, "Which LoRA adapters run, and are waited for.",
                   [(common | {"running_lora_adapters": running, "waiting_lora_adapters": waiting,
                               "max_lora": str(facts.config.adapters.max_loras)}, 1.0)])


def _http(facts: MetricsInput) -> Iterator[MetricFamily]:
    """The gateways' HTTP metrics, by prometheus_fastapi_instrumentator's names; by role, since each
    begins at 0 after a restart, and their sum would not."""
    gateways = {role: actor.known_gauges for role, actor in sorted(facts.actors.items())
                if role.startswith("gateway")}
    counts = sorted((name.split(beat_gauges.MARK)[1:], role, n) for role, gauges in gateways.items()
                    for name, n in gauges.items() if name.startswith(HTTP))
    yield _family("http_requests", COUNTER, "HTTP requests answered, by route.", [
        ({"method": method, "handler": handler, "status": status, "role": role}, n)
        for (method, handler, status), role, n in counts])
    samples = [sample for role, gauges in gateways.items() for sample in _buckets(
        "", "", beat_gauges.HTTP_REQUESTS, *beat_gauges.read(gauges, beat_gauges.HTTP_REQUESTS),
        {"role": role}).samples if gauges]
    if samples:
        yield MetricFamily("http_request_duration_highr_seconds", HISTOGRAM,
                           "From the head of an HTTP request to the end of its answer.", samples)


def _histograms(facts: MetricsInput, common: dict[str, str]) -> Iterator[MetricFamily]:
    for name, source, about in HISTOGRAMS:
        counts, total = beat_gauges.read(_gauges(facts, SCHEDULER), source)
        yield _buckets(name, about, source, counts, total,
                       common if name.startswith("vllm:") else {})


def _buckets(name: str, about: str, source: str, counts: list[float], total: float,
             labels: dict[str, str]) -> MetricFamily:
    samples, below = [], 0.0
    for bound, count in zip([*beat_gauges.BOUNDS[source], float("inf")], counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else str(bound)
        samples.append(MetricSample("_bucket", labels | {"le": le}, below))
    samples += [MetricSample("_count", labels, below), MetricSample("_sum", labels, total)]
    return MetricFamily(name, HISTOGRAM, about, samples)


def _requests(facts: MetricsInput) -> Iterator[MetricFamily]:
    gauges = _gauges(facts, SCHEDULER)
    rejected = dict.fromkeys(REJECTIONS, 0.0) | {
        name.removeprefix(REJECTED): n for name, n in gauges.items() if name.startswith(REJECTED)}
    ended = sum(gauges.get(f"finished_{reason}", 0.0) for reason in REASONS)
    yield _family("actorium:unaccounted_sequences", GAUGE,
                  "Sequences started, less those that have ended and those that are open: 0, "
                  "unless one was lost or counted twice.",
                  [({}, gauges.get("started_sequences", 0.0) - ended
                    - gauges.get("open_sequences", 0.0))])
    yield _family("actorium:rejected_requests", COUNTER, "Requests refused, by the error's code.",
                  [({"code": code}, n) for code, n in sorted(rejected.items())])
    yield _family("actorium:preemptions", COUNTER, "Preemptions by cause.",
                  [({"cause": cause}, gauges.get(f"preemptions_{cause}", 0.0))
                   for cause in PREEMPTION_CAUSES])
    for name, stem, what in (("pooled_sequences", POOLED, "Sequences"),
                             ("pooled_prompt_tokens", POOLED_TOKENS, "Prompt tokens of sequences")):
        yield _family(f"actorium:{name}", COUNTER, f"{what} that ended with a vector or scores.",
                      [({"task": task}, gauges.get(f"{stem}{task}", 0.0))
                       for task in get_args(PoolingTask)])


def _engine(facts: MetricsInput) -> Iterator[MetricFamily]:
    gauges = _gauges(facts, SCHEDULER)
    yield _family("actorium:info", GAUGE, "The engine.", [
        ({"name": facts.config.runtime.name, "version": facts.version, "model": facts.model}, 1.0)])
    yield _family("actorium:ready", GAUGE, "1 while the engine is ready.",
                  [({}, float(facts.ready))])
    busy, idle = gauges.get("busy_us", 0.0), gauges.get("idle_us", 0.0)
    idled = idle + gauges.get("late_us", 0.0)
    roles = {group_of(role) for role in facts.actors}
    restarts = {**dict.fromkeys(itertools.product(roles, DEATHS), 0), **facts.restarts}
    yield _family("actorium:device_idle_ratio", GAUGE,
                  "Part of the device's time with work in which it waited for the host, at most, "
                  "since the start.", [({}, idled / (busy + idle) if busy + idle else 0.0)])
    yield _family("actorium:pages", GAUGE, "Pages by state; cached ones may be held, too.",
                  [({"state": state}, gauges.get(f"{state}_pages", 0.0))
                   for state in ("free", "held", "cached", "quarantined")])
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


def _drafts(facts: MetricsInput) -> Iterator[MetricFamily]:
    """Yields by method what vLLM's metrics of speculation have the sums of."""
    gauges = _gauges(facts, SCHEDULER)
    for name, about in (("num_drafts", "Windows verified"),
                        ("num_draft_tokens", "Draft tokens verified"),
                        ("num_accepted_tokens", "Draft tokens accepted")):
        found = {method: f"{SPECULATION}{BY_METHOD}{method}_{name}" for method in DRAFTS}
        yield _family(f"actorium:spec_decode_{name}", COUNTER, f"{about}, by what made the drafts.",
                      [({"method": method}, gauges[gauge]) for method, gauge in found.items()
                       if gauge in gauges])
