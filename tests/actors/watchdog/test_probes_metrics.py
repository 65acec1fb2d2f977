"""The metrics' text, from heartbeats; the dashboard against what is exported. No processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers_cluster import ClusterBox, settings
from helpers_code_facts import files
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from actorium.actors.cluster.nodes.nodes_core import NodesCore
from actorium.actors.cluster.ray.ray_actor import RayCore
from actorium.actors.cluster.scaling.autoscale import REASONS
from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.cluster_settings import NODES_ROLE, RAY_ROLE, ClusterConfig
from actorium.actors.config.tree import Config, ModelConfig, RuntimeConfig
from actorium.actors.model_manager.manager_core import ManagerCore
from actorium.actors.model_manager.model_record import EngineLimits
from actorium.actors.models.model_dir import served_name
from actorium.actors.runtime import beat_gauges
from actorium.actors.runtime.beat_gauges import (
    EAGER_REASONS,
    MARK,
    RUNNING_WITH,
    WAITING_FOR,
    Histogram,
)
from actorium.actors.runtime.process import ProcessUsage, process_usage
from actorium.actors.runtime.roles import MANAGER_ROLE
from actorium.actors.watchdog.metric_tables import (
    ACTORIUM,
    AUTOSCALED,
    HISTOGRAMS,
    MODELS,
    NODES,
    RAY,
    ROUTER,
    VLLM,
)
from actorium.actors.watchdog.metrics import MetricsInput, families
from actorium.actors.watchdog.probe_routes import metrics_text
from actorium.actors.watchdog.restart_policy import Restarts
from actorium.actors.watchdog.supervised import Supervised, starting

DASHBOARD = Path(__file__).parents[3] / "tools/grafana/actorium.json"
NAMES_OF_VLLM = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:request_success_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:request_time_per_output_token_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_bucket",
    "vllm:iteration_tokens_total_sum", "vllm:cache_config_info",
    "vllm:num_requests_waiting_by_reason", "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_cached_by_source_total",
    "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:request_inference_time_seconds_bucket", "vllm:request_num_preemptions_bucket",
    "vllm:request_prefill_kv_computed_tokens_bucket", "vllm:admission_rejections_total",
    "vllm:spec_decode_num_drafts_total")
"""As dashboards and gateways for vLLM ask for them."""
QUERIED_BY_VLLMS_DASHBOARD = (
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count",
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum")
"""All that the panels of the example dashboard of vLLM 0.32 ask for (its
examples/observability/prometheus_grafana/grafana.json), each by the label model_name."""
VLLMS_REQUEST_LATENCIES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
                           50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
VLLMS_FIRST_TOKENS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5,
                      5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
VLLMS_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
              10.0, 20.0, 40.0, 80.0)


CLUSTER = Config(cluster=ClusterConfig(replicas=2))


def actors(**scheduler: float) -> dict[str, Supervised]:
    found = {role: starting(role, 10 + i, 1, 100.0)
             for i, role in enumerate(("scheduler", "worker-0", "detokenizer"))}
    for actor in found.values():
        actor.phase = "idle"
    found["scheduler"].gauges = scheduler
    found["worker-0"].gauges = {"weights_bytes": 5.0, "weights_bytes_planned": 6.0,
                                "steps_full_graph": 7.0, "steps_eager": 2.0,
                                "steps_eager_for_images": 2.0,
                                "steps_full_graph_of_8": 5.0, "steps_full_graph_of_16": 2.0,
                                "graph_capture_seconds": 1.5,
                                "weight_format_bfloat16": 2.0, "weight_format_int8 (rows)": 3.0}
    return found


def facts(gauges: dict[str, float] | None = None, **more: Any) -> MetricsInput:
    made = MetricsInput(actors(**(gauges or {})), {("worker-0", "killed"): 2},
                 {"scheduler": ProcessUsage(1.5, 4096)}, True,
                 Config(model=ModelConfig(model="a/model"), runtime=RuntimeConfig(name="e")),
                 "model", "1.2", 103.0)
    return made._replace(**more)


def values(made: MetricsInput,
           accept: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """A sample's name and labels (less the common ones) -> value, as Prometheus reads the text."""
    text = metrics_text(made, accept)[0].decode()
    return {(sample.name, frozenset((k, v) for k, v in sample.labels.items()
                                    if k not in ("model_name", "engine"))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def value(made: MetricsInput, name: str, **labels: str) -> float:
    return values(made)[name, frozenset(labels.items())]


def test_an_endpoint_picker_finds_what_it_reads() -> None:
    """The five metrics that the Gateway API's inference extension reads by default, and the labels
    that it takes apart, as its source has them."""
    made = facts({"running": 3.0, "waiting": 4.0, "free_pages": 10.0, "used_pages": 30.0,
                  "held_pages": 20.0, f"{RUNNING_WITH}{MARK}poet": 1.0,
                  f"{WAITING_FOR}{MARK}judge": 2.0},
                 config=Config(adapters=AdapterConfig(enable_lora=True, max_loras=2)))
    found = values(made)
    assert [found[f"vllm:{name}", frozenset()] for name in (
        "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")] == [4, 3, 0.5]
    labels = {name: dict(own) for name, own in found}
    adapters, cache = labels["vllm:lora_requests_info"], labels["vllm:cache_config_info"]
    assert adapters["running_lora_adapters"].split(",") == ["poet"]
    assert adapters["waiting_lora_adapters"].split(",") == ["judge"]
    assert int(adapters["max_lora"]) == 2 and int(cache["num_gpu_blocks"]) == 40
    assert int(cache["block_size"]) == made.config.memory.page_size


def test_gauges_become_the_metrics_of_vllm() -> None:
    made = facts({"running": 3.0, "waiting": 4.0, "tokens": 50.0, "finished_length": 7.0,
                  "free_pages": 10.0, "used_pages": 30.0, "held_pages": 20.0,
                  "spec_decode_num_accepted_tokens_pos_0": 8.0,
                  "spec_decode_num_accepted_tokens_pos_1": 6.0,
                  "spec_decode_by_mtp_num_accepted_tokens": 9.0,
                  "spec_decode_by_suffix_num_accepted_tokens": 5.0})
    assert value(made, "vllm:num_requests_running") == 3
    assert value(made, "vllm:generation_tokens_total") == 50
    assert value(made, "vllm:request_success_total", finished_reason="length") == 7
    assert value(made, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(made, "vllm:kv_cache_usage_perc") == 0.5
    assert value(made, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 6
    assert value(made, "actorium:spec_decode_num_accepted_tokens_total", method="suffix") == 5
    text = metrics_text(made)[0].decode()
    labels = {s.name: s.labels for f in text_string_to_metric_families(text) for s in f.samples}
    assert labels["vllm:num_requests_running"] == {"model_name": "model", "engine": "0"}


def test_every_name_of_vllm_is_there() -> None:
    names = {name for name, _ in values(facts())}
    assert [name for name in NAMES_OF_VLLM if name not in names] == []


def test_no_panel_of_vllms_dashboard_is_empty() -> None:
    served = {sample.name: sample.labels
              for family in text_string_to_metric_families(metrics_text(facts())[0].decode())
              for sample in family.samples}
    for name in QUERIED_BY_VLLMS_DASHBOARD:
        assert served[name]["model_name"] == "model", name


@pytest.mark.parametrize(("name", "bounds"), [
    ("request", VLLMS_REQUEST_LATENCIES), ("queued", VLLMS_REQUEST_LATENCIES),
    ("first_token", VLLMS_FIRST_TOKENS), ("between_tokens", VLLMS_GAPS),
    ("choices", (1, 2, 5, 10, 20)), ("preemptions", (1, 2, 3, 4, 5, 10, 20)),
    ("max_tokens", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
    ("step_tokens", (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))])
def test_every_bucket_of_vllm_is_there(name: str, bounds: tuple[float, ...]) -> None:
    assert set(bounds) <= set(beat_gauges.BOUNDS[name])


def test_waiting_requests_and_prompt_tokens_add_up() -> None:
    made = facts({"waiting": 5.0, "waiting_deferred": 2.0, "cache_lookup_tokens": 70.0,
                  "cache_hit_tokens": 30.0, "rejected_queue_full": 4.0, "rejected_deadline": 1.0})
    for name, label, parts in (
            ("vllm:num_requests_waiting_by_reason", "reason", {"capacity": 3, "deferred": 2}),
            ("vllm:prompt_tokens_by_source_total", "source",
             {"local_compute": 40, "local_cache_hit": 30}),
            ("actorium:rejected_requests_total", "code", {"queue_full": 4, "deadline": 1})):
        assert {k: value(made, name, **{label: k}) for k in parts} == parts
    assert value(made, "vllm:num_requests_waiting") == 5
    assert value(made, "vllm:prompt_tokens_total") == 70
    assert value(made, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 4


def test_what_is_rare_is_reported_before_it_happens() -> None:
    """To Prometheus' `increase` a counter whose first sample is 1 has not grown."""
    made = facts(restarts={("worker-0", "killed"): 2}, actors=actors() | {
        "worker-1": starting("worker-1", 9, 1, 100.0)})
    for role in ("scheduler", "worker-0", "detokenizer"):
        for cause in ("killed", "oom", "fault", "exited", "silent", "hung"):
            want = 2 if (role, cause) == ("worker-0", "killed") else 0
            assert value(made, "actorium:restarts_total", role=role, cause=cause) == want
    assert not [labels for name, labels in values(made)  # a rank's are its group's
                if name == "actorium:restarts_total" and ("role", "worker-1") in labels]
    for code in ("queue_full", "deadline", "context_overflow", "invalid_request", "unavailable",
                 "quarantined"):
        assert value(made, "actorium:rejected_requests_total", code=code) == 0


def test_steps_by_how_the_worker_ran_them() -> None:
    made = facts()
    assert value(made, "actorium:worker_steps_total", mode="full_graph") == 7
    assert ("actorium:worker_steps_total", frozenset({("mode", "piecewise_graph")})) \
        not in values(made)
    assert value(made, "actorium:worker_steps_by_size_total", mode="full_graph", size="8") == 5
    assert value(made, "actorium:worker_steps_by_size_total", mode="full_graph", size="16") == 2
    assert {reason: value(made, "actorium:worker_eager_steps_total", reason=reason)
            for reason in EAGER_REASONS} == {**dict.fromkeys(EAGER_REASONS, 0), "images": 2}
    assert value(made, "actorium:graph_capture_seconds") == 1.5


def test_http_requests_of_each_gateway() -> None:
    """Not their sum: when one of them dies, that would fall, and count as begun at 0 again."""
    seen = Histogram(beat_gauges.HTTP_REQUESTS)
    seen.add(0.02)
    made = facts()
    for i in range(2):
        made.actors[f"gateway-{i}"] = starting(f"gateway-{i}", 30 + i, 1, 100.0)
        made.actors[f"gateway-{i}"].gauges = {"http|POST|/v1/completions|2xx": 3.0 + i,
                                             "http|GET|/metrics|4xx": 1.0, **seen.gauges()}
    for i in range(2):
        role = f"gateway-{i}"
        assert value(made, "http_requests_total", method="POST", handler="/v1/completions",
                     status="2xx", role=role) == 3 + i
        assert value(made, "http_requests_total", method="GET", handler="/metrics", status="4xx",
                     role=role) == 1
        assert value(made, "http_request_duration_highr_seconds_bucket", le="0.025", role=role) == 1
        assert value(made, "http_request_duration_highr_seconds_count", role=role) == 1


@pytest.mark.parametrize("known", ["predecessor", "nothing"])
def test_no_counter_falls_while_an_actor_is_started_again(known: str) -> None:
    """Until its first heartbeat the scheduler has its predecessor's counters. A watchdog that is
    new itself reports none: 0 would be a counter that has begun anew."""
    made = facts({"started_sequences": 5.0, "finished_stop": 3.0, "open_sequences": 2.0,
                  "tokens": 70.0, "first_token|3": 4.0, "first_token|sum": 0.2})
    before = values(made)
    fresh = starting("scheduler", 99, 2, 102.0)
    if known == "predecessor":
        fresh.before = made.actors["scheduler"].known_gauges
    made.actors["scheduler"] = fresh
    after = values(made)
    if known == "predecessor":
        for each in before:
            if each[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert after[each] == before[each]
        assert after["actorium:open_sequences", frozenset()] == 2
    else:
        names = {name for name, _ in after}
        assert not names & {"vllm:generation_tokens_total", "actorium:started_sequences_total",
                            "vllm:request_success_total", "actorium:rejected_requests_total",
                            "vllm:time_to_first_token_seconds_count"}
        assert after["vllm:num_requests_running", frozenset()] == 0


def test_metrics_without_a_vllm_name() -> None:
    made = facts({"busy_us": 3e6, "idle_us": 1e6, "late_us": 5e5, "cached_pages": 9.0,
                  "preemptions_memory": 2.0})
    made.actors["scheduler"].phase, made.actors["scheduler"].seen = "stepping", 102.0
    made.actors["worker-0"].seen = 90.0
    made.actors["detokenizer"].gauges = {"duplicates_dropped": 11.0}
    for want, name, labels in (
            (3.0, "actorium:device_busy_seconds_total", {}),
            (0.375, "actorium:device_idle_ratio", {}),
            (1.0, "actorium:device_idle_seconds_total", {}),
            (0.5, "actorium:device_late_seconds_total", {}),
            (9.0, "actorium:pages", {"state": "cached"}),
            (2.0, "actorium:preemptions_total", {"cause": "memory"}),
            (2.0, "actorium:restarts_total", {"role": "worker-0", "cause": "killed"}),
            (1.0, "actorium:actor_up", {"role": "scheduler"}),
            (0.0, "actorium:actor_up", {"role": "worker-0"}),
            (3.0, "actorium:step_age_seconds", {"role": "scheduler"}),
            (0.0, "actorium:step_age_seconds", {"role": "detokenizer"}),
            (13.0, "actorium:beat_age_seconds", {"role": "worker-0"}),
            (1.0, "actorium:actor_phase", {"role": "scheduler", "phase": "stepping"}),
            (1.5, "actorium:process_cpu_seconds_total", {"role": "scheduler"}),
            (4096.0, "actorium:process_resident_memory_bytes", {"role": "scheduler"}),
            (11.0, "actorium:duplicate_tokens_dropped_total", {}),
            (1.0, "actorium:ready", {})):
        assert value(made, name, **labels) == want, (name, labels)


def test_a_histogram_is_cumulative_and_complete() -> None:
    seen = Histogram("first_token")
    for seconds in (0.0004, 0.003, 0.003, 9999.0):
        seen.add(seconds)
    made = facts(seen.gauges())
    name = "vllm:time_to_first_token_seconds"
    buckets = {labels: n for (found, labels), n in values(made).items()
               if found == f"{name}_bucket"}
    assert len(buckets) == len(beat_gauges.FIRST_TOKEN) + 1
    assert [value(made, f"{name}_bucket", le=le) for le in ("0.001", "0.0025", "0.005", "2560.0",
                                                             "+Inf")] == [1, 1, 3, 3, 4]
    assert value(made, f"{name}_count") == 4
    assert value(made, f"{name}_sum") == pytest.approx(9999.0064)


def test_weights_by_format() -> None:
    for held, want in (("bfloat16", 2.0), ("int8 (rows)", 3.0)):
        assert value(facts(), "actorium:weight_bytes", format=held) == want


TEXT, OPENMETRICS = "text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0"
ACCEPTS = {
    "none": ("", TEXT),
    "curl": ("*/*", TEXT),
    "prometheus 2.24": ("application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;"
                        "q=0.5,*/*;q=0.1", TEXT),
    "prometheus 2.42": ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
                        "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
                        OPENMETRICS),
    "prometheus 2.53, native beat_gauges": (
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;"
        "encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,"
        "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,"
        "*/*;q=0.1", OPENMETRICS),
    "prometheus 3": (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
        "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", OPENMETRICS),
    "prometheus 3, escaping underscores": (
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
        "escaping=underscores;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", OPENMETRICS),
    "prometheus 3, escaping dots": ("application/openmetrics-text;version=1.0.0;escaping=dots;"
                                    "q=0.5,text/plain;version=0.0.4;q=0.2", OPENMETRICS),
    "prometheus 3, escaping values": ("text/plain;version=1.0.0;escaping=values;q=0.3,"
                                      "text/plain;version=0.0.4;q=0.2,*/*;q=0.1", TEXT),
    "vmagent": ("text/plain;version=0.0.4;q=1,*/*;q=0.1", TEXT),
    "datadog, text first": ("text/plain, application/openmetrics-text;q=0.3", TEXT),
    "openmetrics alone": ("application/openmetrics-text", OPENMETRICS),
    "openmetrics refused": ("application/openmetrics-text;q=0,text/plain;q=0.2", TEXT),
    "a browser": ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT),
    "nonsense": ("application/openmetrics-text;version=x;q=y,;;=,text/plain;version=z", TEXT)}
"""Who asks -> the `Accept` header as their sources build it, and the format to be answered."""


@pytest.mark.parametrize("asks", ACCEPTS)
def test_every_accept_header_gets_the_names_as_documented(asks: str) -> None:
    accept, kind = ACCEPTS[asks]
    made = facts({"tokens": 5.0})
    text, told = metrics_text(made, accept)
    assert told == f"{kind}; charset=utf-8"
    samples, names = set(), set()
    parse = text_string_to_metric_families if kind == TEXT else openmetrics_families
    for family in parse(text.decode()):
        names.add(family.name)
        samples |= {sample.name for sample in family.samples}
    assert names == {family.name for family in families(made)}
    assert samples == {family.name + sample.suffix for family in families(made)
                       for sample in family.samples}


def test_of_a_cluster_the_router_is_reported() -> None:
    gauges = {"replicas": 2.0, "replicas_ready": 1.0, "routed_by_prefix": 5.0, "routed_blind": 1.0,
              "migrated_requests": 3.0}
    found = facts(gauges, config=CLUSTER)
    assert value(found, "actorium:replicas_ready") == 1
    assert value(found, "actorium:migrated_requests_total") == 3
    assert {by: value(found, "actorium:routed_requests_total", by=by)
            for by in ("prefix", "load", "blind")} == {"prefix": 5, "load": 0, "blind": 1}
    assert not [f.name for f in families(facts(gauges)) if "rout" in f.name]


def test_nodes_are_reported_where_other_machines_may_join() -> None:
    core = NodesCore({"a": 1, "b": 2}, "c-1", b"", 1, 3.0, 60.0, Restarts(3, 60.0, 0), True)
    nodes = starting(NODES_ROLE, 9, 1, 100.0)
    nodes.gauges = core.health().gauges
    found = facts(actors={NODES_ROLE: nodes}, config=CLUSTER)
    assert value(found, "actorium:nodes") == 2
    assert value(found, "actorium:nodes_joined") == 0
    assert {row.gauge or row.name for row in NODES} == set(core.health().gauges)
    assert not [f.name for f in families(facts(config=CLUSTER)) if "node" in f.name]


def test_placement_groups_are_reported_where_ray_places_nodes() -> None:
    core = RayCore(2.0, 0, False, 0)
    ray = starting(RAY_ROLE, 9, 1, 100.0)
    ray.gauges = core.health().gauges | {"ray_away": 1.0}
    found = facts(actors={RAY_ROLE: ray}, config=CLUSTER)
    assert value(found, "actorium:ray_away") == 1 and value(found, "actorium:ray_groups") == 0
    assert {row.gauge or row.name for row in RAY} == set(core.health().gauges)


def test_models_are_reported_where_there_are_several() -> None:
    core = ManagerCore(EngineLimits(), 60.0, 10)
    manager = starting(MANAGER_ROLE, 9, 1, 100.0)
    manager.gauges = core.health().gauges | {"engines": 3.0, "starts": 7.0}
    found = facts(actors={MANAGER_ROLE: manager})
    assert value(found, "actorium:model_engines") == 3
    assert value(found, "actorium:model_starts_total") == 7
    assert {row.gauge or row.name for row in MODELS} == set(core.health().gauges)
    assert not [f.name for f in families(facts()) if f.name.startswith("actorium:model")]


def test_every_gauge_of_the_router_has_a_metric() -> None:
    told = {row.gauge or row.name for row in ROUTER}
    told |= {f"routed_{by}" for by in ("by_prefix", "by_load", "blind")}
    told |= {f"autoscaled_by_{why}" for why in AUTOSCALED}
    router = ClusterBox(settings()).router
    gauges = router.assignments.gauges() | router.fleet.gauges()
    assert sorted(gauges.keys() - told) == [] and "routed_blind" in gauges
    assert set(AUTOSCALED) == set(REASONS)


def test_metrics_are_answered_before_any_heartbeat() -> None:
    assert value(facts(actors={}), "vllm:num_requests_running") == 0
    assert ("actorium:actor_up", frozenset()) not in values(facts(actors={}))


def test_names_are_given_once_and_each_has_a_text() -> None:
    made = list(families(facts()))
    assert len({f.name for f in made}) == len(made)
    assert all(f.about.endswith(".") for f in made)
    # Two names of vLLM are of one thing.
    gauges = [(row.role, row.gauge or row.name) for row in ACTORIUM]
    assert len(set(gauges)) == len(gauges)
    assert {source for _, source, _ in HISTOGRAMS} | {beat_gauges.HTTP_REQUESTS} \
        == set(beat_gauges.BOUNDS)


def test_every_row_is_of_a_gauge_that_is_reported() -> None:
    """A gauge that no code names, as a misspelt one, would be 0 for ever."""
    code = "".join(path.read_text() for package in ("actors", "gpu") for path in files(package)
                   if path.parent.name != "watchdog")
    named = set(re.findall(r'"(\w+)"', code))
    rows = [*VLLM, *ACTORIUM]
    assert [row for row in rows
            if (row.gauge or row.name).removeprefix("spec_decode_") not in named] == []


def test_the_dashboard_names_only_metrics_that_are_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    gauges = {"spec_decode_num_accepted_tokens_pos_0": 1.0, "rejected_queue_full": 1.0,
              "spec_decode_by_mtp_num_accepted_tokens": 1.0,
              "spec_decode_by_mtp_num_draft_tokens": 2.0, "spec_decode_by_mtp_num_drafts": 1.0}
    nodes = {role: starting(role, 9, 1, 100.0) for role in (NODES_ROLE, RAY_ROLE, MANAGER_ROLE)}
    exported = {name for name, _ in values(facts(actors=actors(**gauges) | nodes, config=CLUSTER))}
    asked = {name for expression in expressions(dashboard)
             for name in re.findall(r"(?:vllm|actorium):\w+", expression)}
    assert len(asked) > 40
    assert sorted(asked - exported) == []


def test_the_rule_in_the_documents_fires_when_a_sequence_is_lost() -> None:
    text = (DASHBOARD.parents[2] / "docs/operations.md").read_text()
    rule = re.search(r"expr: (actorium:\w+) != 0$", text, re.MULTILINE)
    assert rule is not None
    books = {"started_sequences": 9.0, "finished_stop": 3.0, "finished_error": 2.0,
             "finished_abort": 1.0, "open_sequences": 3.0}
    assert value(facts(books), rule[1]) == 0
    assert value(facts(books | {"open_sequences": 2.0}), rule[1]) == 1
    assert value(facts(books | {"finished_deadline": 1.0}), rule[1]) == -1


def test_the_dashboard_shows_every_metric() -> None:
    """Of ours, and what it says of vLLM's: a metric that nobody looks at is not worth its name."""
    text = DASHBOARD.read_text()
    nodes = {role: starting(role, 9, 1, 100.0) for role in (NODES_ROLE, RAY_ROLE, MANAGER_ROLE)}
    told = families(facts(actors=actors() | nodes, config=CLUSTER))
    missing = [f.name for f in told if f.name not in text]
    assert missing == ["vllm:cache_config_info"]


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [p for p in dashboard["panels"] if p["type"] != "row"]
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(p["targets"] and p["title"] for p in panels)
    for expression in expressions(dashboard):
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")
    for panel in panels:  # counters are rates, gauges are not
        for target in panel["targets"]:
            for name, call in re.findall(r"((?:rate|increase)\()?((?:vllm|actorium):\w+)",
                                         target["expr"]):
                counts = call.endswith(("_total", "_bucket"))
                assert bool(name) == counts, target["expr"]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    found = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    return found + [v["query"]["query"] for v in dashboard["templating"]["list"]
                    if isinstance(v["query"], dict)]


def test_a_model_is_called_as_clients_call_it() -> None:
    assert served_name(Config()) == "demo"
    assert served_name(Config(model=ModelConfig(model="/a/b"))) == "b"
    assert served_name(Config(model=ModelConfig(model="/a/b", served_model_name=("c", "d")))) == "c"
    assert served_name(Config(model=ModelConfig(model="."))) == Path.cwd().name


def test_process_time_and_memory_are_reported() -> None:
    import os

    mine = process_usage(os.getpid())
    assert mine is not None and mine.cpu_seconds > 0 and mine.resident_bytes > 1 << 20
    assert process_usage(2**22 + 1) is None
