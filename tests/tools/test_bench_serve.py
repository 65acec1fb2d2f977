"""`actorium bench serve`: its flags, whole runs at scripted servers of other makers' shapes, and
runs through a real engine."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_bench import Scripted
from helpers_cli import Cli, cli  # noqa: F401

from actorium.actors.config.tree import ModelConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http
from actorium.tools.bench.results import read_results
from actorium.tools.bench.server_backends import CHAT, COMPLETIONS, GENERATE
from actorium.tools.cli import bench_serve, bench_session
from actorium.tools.cli.bench_command import BenchServeOptions, check_serve
from actorium.tools.cli.bench_session import target_of
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flag_help import field_docs

VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{what}_{name}_ms" for what in ("mean", "median", "std", "p99")
      for name in ("ttft", "tpot", "itl", "e2el"))}
"""What vLLM's result files hold."""
DETAILED = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts",
            "errors"}


# --- scripted servers ----------------------------------------------------------------------------

def test_a_run_at_a_server_of_vllms_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_session, "SETTLE", 0.0)
    server, path = Scripted("vllm"), tmp_path / "all.json"
    with server.running() as url:
        for _ in range(2):
            assert bench_serve.run([
                "--backend", "vllm", "--base-url", url, "--num-prompts", "5", "--num-warmups", "2",
                "--random-input-len", "4", "--random-output-len", "5", "--request-rate", "200",
                "--header", "X-A=b", "--api-key", "secret", "--flush-cache", "--append-result",
                "--result-filename", str(path), "--seed", "3", "--top-p", "0.9"]) == 0
    asks = [body for place, body in server.seen if place == "/v1/completions"]
    assert len(asks) == 14 and asks[:7] == asks[7:]  # the seed is the load's
    assert {len(body["prompt"]) for body in asks} == {4}
    assert all(body["model"] == "org/served" and body["ignore_eos"] and body["top_p"] == 0.9
               and max(body["prompt"]) < 1000 for body in asks)
    assert not {str(body["prompt"]) for body in asks[:2]} & {str(b["prompt"]) for b in asks[2:7]}
    assert all(b"x-a: b" in head and b"authorization: bearer secret" in head
               for head in server.heads)
    assert [place for place, _ in server.seen].count("/flush_cache") == 2
    first, second = read_results(path)
    for result in (first, second):
        assert (result["model_id"], result["request_rate"]) == ("org/served", 200.0)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 25)
        assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
        assert (result["spec_decode_acceptance_rate"], result["spec_decode_num_drafts"]) == (75, 10)
    out, err = capfd.readouterr()
    assert "Position 1:" in out and "random ids are below 1000" in err


def test_a_run_at_a_server_of_sglangs_shape(tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_session, "SETTLE", 0.0)
    server, path = Scripted("sglang"), tmp_path / "sgl.json"
    with server.running() as url:
        assert bench_serve.run([
            "--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids",
            "--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "6",
            "--random-range-ratio", "0.5", "--warmup-requests", "1", "--json", str(path)]) == 0
    asks = [body for place, body in server.seen if place == "/generate"]
    assert len(asks) == 5 and all(4 <= len(body["input_ids"]) <= 8 for body in asks)
    assert all(3 <= body["sampling_params"]["max_new_tokens"] <= 6 for body in asks)
    result = json.loads(path.read_text())
    assert result["total_output_tokens"] == 20
    assert result["spec_decode_acceptance_length"] == 2.5


def test_a_missing_server_is_an_error() -> None:
    with pytest.raises(EngineUnavailable, match="--base-url: 127.0.0.1:1"):
        asyncio.run(bench_session._models(Http("127.0.0.1:1"), "", 0.3))


# --- flags ---------------------------------------------------------------------------------------

def test_flags_of_both_worlds() -> None:
    found = parse("actorium bench serve [MODEL]", [
        "--warmup-requests", "3", "--extra-body={}", "--disable-ignore-eos", "--dataset", "random",
        "--random_input", "4", "--random-seed", "9", "--tag", "x", "--http", "a:1", "--no-stream",
        "--goodput", "ttft:5", "tpot:6", "--port", "7", "--trust-remote-code"], BenchServeOptions)
    options = found.options
    assert (options.num_warmups, options.extra_request_body, options.seed) == (3, "{}", 9)
    assert (options.random_input_len, options.label, options.base_url) == (4, "x", "a:1")
    assert (options.ignore_eos, options.disable_stream) == (False, True)
    assert "ignore_eos" in found.written and options.goodput == ["ttft:5", "tpot:6"]
    assert options.port == 7 and found.config.gateway.port != 7
    assert found.config.model.seed == ModelConfig().seed


def test_help_has_a_text_for_every_flag() -> None:
    fields = {field.name for field in msgspec.structs.fields(BenchServeOptions)}
    assert fields <= set(field_docs(BenchServeOptions))


def target(named: bool = False, there: bool = False, **values: Any) -> tuple[Any, ...]:
    looked: list[str] = []

    def answers(url: str) -> bool:
        looked.append(url)
        return there

    found = target_of(BenchServeOptions(**values), {}, named, answers)
    return found.backend, found.endpoint, found.url, found.starts_engine, looked


def test_the_base_url_selects_the_server() -> None:
    vllm, sglang = "http://127.0.0.1:8000", "http://127.0.0.1:30000"
    assert target() == ("actorium", "", None, True, [])
    assert target(named=True) == ("actorium", "", None, False, [])
    assert target(base_url="self") == ("openai", COMPLETIONS, None, True, [])
    assert target(base_url="http://a:1") == ("openai", COMPLETIONS, "http://a:1", False, [])
    assert target(port=9) == ("openai", COMPLETIONS, "http://127.0.0.1:9", False, [])
    assert target(host="0.0.0.0")[2] == vllm and target(host="::1")[2] == "http://[::1]:8000"
    assert target(host="b", backend="sglang") == ("sglang", GENERATE, "http://b:30000", False, [])
    assert target(backend="vllm", there=True) == ("vllm", COMPLETIONS, vllm, False, [vllm])
    assert target(backend="vllm") == ("vllm", COMPLETIONS, None, True, [vllm])
    assert target(backend="sglang-oai", there=True)[2:] == (sglang, False, [sglang])
    assert target(named=True, backend="openai-chat") == ("openai-chat", CHAT, None, False, [])
    assert target(backend="vllm", port=1, endpoint=CHAT)[1] == CHAT
    assert target(backend="vllm", port=1, dataset_name="demo")[1] == CHAT
    for bad, named in (({"backend": "actorium", "port": 1}, "--backend"),
                       ({"endpoint": CHAT}, "--endpoint"),
                       ({"base_url": "http://a:1", "port": 2}, "--base-url")):
        with pytest.raises(BadConfig, match=named):
            target(**bad)


@pytest.mark.parametrize(("values", "named"), [
    ({"burstiness": 0.0}, "--burstiness"), ({"request_rate": -1.0}, "--request-rate"),
    ({"max_concurrency": -1}, "--max-concurrency"), ({"num_warmups": -1}, "--num-warmups"),
    ({"backend": "tgi"}, "--backend"), ({"endpoint": "/v1/rerank"}, "--endpoint"),
    ({"percentile_metrics": "ttft,p99"}, "--percentile-metrics"),
    ({"metric_percentiles": "101"}, "--metric-percentiles"),
    ({"metric_percentiles": "x"}, "--metric-percentiles"), ({"goodput": ["itl:5"]}, "--goodput"),
    ({"goodput": ["ttft"]}, "--goodput"), ({"profile": True}, "--profile"),
    ({"extra_request_body": "[1]"}, "--extra-request-body"), ({"header": ["x"]}, "--header"),
    ({"metadata": ["=1"]}, "--metadata"), ({"ramp_up_strategy": "linear"}, "--ramp-up-strategy"),
    ({"dataset_name": "wiki"}, "--dataset-name")])
def test_flags_out_of_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        check_serve(BenchServeOptions(**values), {})


def test_flags_that_exclude_each_other() -> None:
    options = BenchServeOptions(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=2)
    check_serve(options, {})
    with pytest.raises(BadConfig, match="--request-rate"):
        check_serve(options, {"request_rate": "--request-rate"})


def test_what_options_mean() -> None:
    options = BenchServeOptions(goodput=["ttft:500", "e2el:9.5"], metadata=["tp=1", "a = b=c"],
                           metric_percentiles="50,99.9", top_p=0.5)
    assert options.goals == {"ttft": 500.0, "e2el": 9.5}
    assert options.pairs("metadata") == {"tp": "1", "a": "b=c"}
    assert options.percentile_names == ["p50", "p99.9"]
    assert options.metrics == ["ttft", "tpot", "itl", "itl_per_token", "e2el"]
    assert options.sampling == {"temperature": 0.0, "top_p": 0.5}
    assert math.isinf(options.request_rate)


# --- runs ----------------------------------------------------------------------------------------

def test_a_run_through_the_engine(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    done = cli.run("bench", "serve", "--shape", "TINY", "--null-worker", "--device", "cpu",
                   "--num-prompts", "20", "--max-concurrency", "4", "--output-len", "8",
                   "--goodput", "ttft:60000", "--save-result", "--result-dir", str(tmp_path),
                   "--result-filename", "run.json", "--metadata", "version=1")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (20, 160)
    assert result["total_input_tokens"] == 20 * 1024 and result["version"] == "1"
    assert set(result) >= VLLM_FIELDS and not DETAILED & set(result)
    assert result["request_goodput"] == result["request_throughput"] > 0
    text = done.stdout.decode()
    assert "Serving Benchmark Result" in text and "Peak concurrent requests:" in text
    assert cli.entries() == []


@contextmanager
def engine_over_http(cli: Cli) -> Iterator[str]:  # noqa: F811
    """The URL of a running engine named `measured`."""
    with cli.serve("--name", "measured", "--null-worker", "--device", "cpu", "--port", "0"):
        found = where(engine_dir("measured", cli.run_dir))
        assert found is not None
        yield found.url


def talks(folder: Path) -> Path:
    """A ShareGPT file."""
    path = folder / "talks.json"
    path.write_text(json.dumps([{"conversations": [
        {"from": "human", "value": f"What comes after the number {n}, and why?"},
        {"from": "gpt", "value": f"After {n} comes {n + 1}, by counting on."}]}
        for n in range(40)]))
    return path



KINDS = ("openai", "openai-chat", "vllm", "sglang-oai", "sglang")


def test_every_backend_of_a_served_engine(cli: Cli, tmp_path: Path,  # noqa: F811
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", cli.run_dir)
    with engine_over_http(cli) as url:
        for kind in KINDS:
            path = tmp_path / f"{kind}.json"
            assert bench_serve.run([
                "--backend", kind, "--base-url", url, "--num-prompts", "6", "--input-len", "9",
                "--output-len", "8", "--max-concurrency", "3", "--save-detailed", "--ignore-eos",
                "--json", str(path), "--tokenizer", ""]) == 0
            result = json.loads(path.read_text())
            assert (result["completed"], result["total_output_tokens"]) == (6, 48), kind
            # On a busy machine each answer may come in one event, without a gap.
            fields = {name for name in VLLM_FIELDS if any(result["itls"]) or "itl" not in name}
            assert set(result) >= fields | DETAILED and result["backend"] == kind
            assert all(result["generated_texts"]) and result["errors"] == [""] * 6
            assert result["total_output_tokens_retokenized"] > 0
        path = tmp_path / "pasted.json"
        line = (f"--backend vllm --model {DEMO_MODEL} --served-model-name demo --endpoint "
                f"/v1/completions --dataset-name sharegpt --dataset-path {talks(tmp_path)} "
                f"--num-warmups 5 --num-prompts 30 --seed 42 --base-url {url} --json {path}")
        assert bench_serve.run(line.split()) == 0
        assert json.loads(path.read_text())["completed"] == 30
        path = tmp_path / "sdk.json"
        assert bench_serve.run(["--name", "measured", "--num-prompts", "6", "--input-len", "9",
                                "--output-len", "8", "--json", str(path), "--flush-cache"]) == 0
        assert json.loads(path.read_text())["total_output_tokens"] == 48


def test_a_run_over_its_own_http(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "serve.json"
    done = cli.run("bench", "serve", "--null-worker", "--device", "cpu", "--num-prompts", "12",
                   "--input-len", "9", "--max-concurrency", "4", "--output-len", "8",
                   "--http", "self", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
    assert (result["total_input_tokens"], result["base_url"]) == (108, "self")
    assert result["median_ttft_ms"] > 0 and cli.entries() == []


def test_a_missing_engine_is_an_error(cli: Cli) -> None:  # noqa: F811
    done = cli.run("bench", "serve", "--http", "127.0.0.1:1")
    assert done.returncode == 1 and b"--base-url: 127.0.0.1:1: Connect" in done.stderr


def test_bad_words_end_in_one_line(cli: Cli) -> None:  # noqa: F811
    for flags, named in ((("--http", "ftp://x"), "--base-url"), (("--profile",), "--profile"),
                         (("--dataset", "demo", "--shape", "TINY"), "--shape")):
        done = cli.run("bench", "serve", *flags)
        assert done.returncode == 2 and named in done.stderr.decode()
