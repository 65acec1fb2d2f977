"""Command lines that people paste from the documents of other engines."""

from __future__ import annotations

import shlex
from typing import IO

import pytest
from helpers_cli import Cli, cli, one_line

from actorium.actors.config import sources as settings
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.launcher import preflight
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.models import model_dir as models
from actorium.tools.cli import foreign_flags, main
from actorium.tools.cli.bench_offline import OfflineOptions
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.flags import NoOptions, command_flags
from actorium.tools.cli.serve_command import ServeOptions
from actorium.tools.cli.translate import foreign_flags_table

__all__ = ["cli"]

DEMO = str(models.DEMO_MODEL)
PIECEWISE = ("--model-path M --enable-piecewise-cuda-graph --piecewise-cuda-graph-compiler eager "
             "--disable-radix-cache --device {device} --host 127.0.0.1 --port 30000")
SAGE = "--model-path M --attention-backend {name} --device {device} --host 127.0.0.1 --port 21000"
SGLANG = ("--model-path M --host 0.0.0.0 --port 30000 --trust-remote-code --tp-size {tp} "
          "--enable-cache-report --log-level info --max-running-requests 64 --mem-fraction-static "
          "0.65 --chunked-prefill-size 8192 --attention-backend {attends} --chat-template qwen2-vl "
          "--mm-attention-backend fa3 --disable-radix-cache --enable-piecewise-cuda-graph "
          "--piecewise-cuda-graph-max-tokens 8192 --piecewise-cuda-graph-compiler eager")
VLLM = ("M --tensor-parallel-size {tp} --gpu-memory-utilization 0.94 --max-model-len {length} "
        "--max-num-seqs 32 --max-num-batched-tokens 8192 --block-size 32 --language-model-only "
        "-O3 --enable-auto-tool-choice --reasoning-parser qwen3 --tool-call-parser qwen3_coder "
        "--attention-backend {attends} --enable-prefix-caching --speculative-config.method mtp "
        "--speculative-config.num_speculative_tokens 2 "
        "--speculative-config.rejection_sample_method probabilistic --load-format instanttensor")


def words(line: str, **values: object) -> list[str]:
    """A pasted line, of the demo model."""
    return [DEMO if word == "M" else word for word in shlex.split(line.format(**values))]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("ACTORIUM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(preflight, "NODES", ())
    monkeypatch.setattr(preflight.ctypes, "CDLL", missing)


def serve(*argv: str) -> Parsed[ServeOptions]:
    return parse("actorium serve [MODEL]", argv, ServeOptions, checks=[check_machine])


def section(config: Config, key: str) -> object:
    return getattr(getattr(config, key.split(".")[0]), key.split(".")[1])


PASTED = [
    (words(SAGE, name="triton", device="cpu"),
     {"gateway.port": 21000, "gateway.host": "127.0.0.1", "device.device": "cpu",
      "device.attention_backend": "triton"}, []),
    (words("M --otlp-traces-endpoint localhost:4317"),
     {"runtime.otlp_traces_endpoint": "localhost:4317"}, []),
    (words(PIECEWISE, device="cpu"), {"memory.prefix_cache": False, "gateway.port": 30000,
                                      "device.graph_token_counts": "all"},
     ["--piecewise-cuda-graph-compiler"]),
    (words(SGLANG, tp=1, attends="torch_native"),
     {"scheduler.max_num_seqs": 64, "memory.memory_fraction": 0.65, "memory.prefix_cache": False,
      "scheduler.max_num_batched_tokens": 8192, "model.chat_template": None,
      "device.graph_token_counts": "all", "device.graph_max_tokens": 8192,
      "gateway.host": "0.0.0.0"},
     ["--trust-remote-code", "--enable-cache-report", "--chat-template",
      "--mm-attention-backend", "--piecewise-cuda-graph-compiler"]),
    (words(VLLM, tp=1, length=262144, attends="TRITON_ATTN"),
     {"model.max_model_len": 262144, "memory.page_size": 32, "scheduler.max_num_seqs": 32,
      "memory.prefix_cache": True, "speculation.speculative": "mtp:2", "model.load_format": "auto",
      "device.optimization_level": 3, "model.language_model_only": True,
      "gateway.reasoning_parser": "qwen3", "gateway.tool_call_parser": "qwen3_coder"},
     ["--enable-auto-tool-choice",
      "--speculative-config.rejection_sample_method", "--load-format"]),
]


@pytest.mark.parametrize(("argv", "fields", "told"), PASTED)
def test_a_pasted_line_sets_known_flags_and_reports_the_rest(
        argv: list[str], fields: dict[str, object], told: list[str],
        capsys: pytest.CaptureFixture[str]) -> None:
    parsed = serve(*argv)
    assert parsed.config.model.model == DEMO
    assert {key: section(parsed.config, key) for key in fields} == fields
    lines = capsys.readouterr().err.splitlines()
    assert [f"actorium: {note}" for note in parsed.notes] == lines
    assert all("nothing here: " in line for line in lines)
    for flag in told:
        assert sum(flag in line.split(" change")[0].replace(",", " ").split()
                   for line in lines) == 1, (flag, lines)


@pytest.mark.parametrize("line", [
    "--num-prompts 1 --model-path M --attention-backend triton --enable-torch-compile "
    "--cuda-graph-max-bs 4",
    "--model-path M --num-prompts 200"])
def test_the_engines_flags_of_a_pasted_benchmark(line: str) -> None:
    argv = [word for word in words(line) if word not in ("--num-prompts", "1", "200")]
    config = parse("actorium bench offline [MODEL]", argv, OfflineOptions).config
    assert config.model.model == DEMO
    pasted = "--cuda-graph-max-bs" in argv
    assert config.device.graph_max_batch_size == (4 if pasted else None)
    assert config.device.optimization_level == 3


@pytest.mark.parametrize("flag", ["--tp", "-tp", "--tp-size", "--tensor-parallel-size"])
def test_ranks_under_each_of_their_names(flag: str) -> None:
    assert serve(flag, "2").config.device.tensor_parallel_size == 2


QUANTIZATIONS = ("auto, none, fp8, int8, int4, awq, gptq, bitsandbytes, compressed-tensors, "
                 "modelopt, mxfp4, torchao, hqq, auto-round or gguf")
ONE_GROUP = "must be 1: an engine is one group of ranks (--tp) on one machine, got '2'"
RANKS = "must be between 1 and 1024, got 0"


@pytest.mark.parametrize(("argv", "error"), [
    (words(SGLANG, tp=1, attends="fa3"), "--attention-backend: flash_attn is not built in: must be "
     "one of auto, torch, native, triton, sage, got 'fa3'"),
    (words(SAGE, name="triton", device="cuda"), "--device: cuda was asked for, but this"),
    (words(PIECEWISE, device="cuda"), "--device: cuda was asked for, but this machine has no CUDA"),
    (words(SGLANG, tp=0, attends="auto"), f"--tp-size: {RANKS}"),
    (words(VLLM, tp=0, length=262144, attends="auto"), f"--tensor-parallel-size: {RANKS}"),
    (["-tp", "0"], f"-tp: {RANKS}"),
    (["--tp=0", "--trust-remote-code"], f"--tp: {RANKS}"),
    (["-tp", "17"], "-tp: must be at most 16, got 17"),
    (["--pipeline-parallel-size", "2"], f"--pipeline-parallel-size: {ONE_GROUP}"),
    (["--ssl-key-file", "key.pem"], "--ssl-key-file: goes with ssl_certfile"),
    (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "--ssl-cert-reqs: needs ssl_ca_certs"),
    (["--http2"], "--http2: not here: HTTP/1.1 is served"),
    (["--lora", "a.gguf"], "--lora: not here: an adapter (LoRA) is served beside the model"),
    (["--lora-modules", "a=b", "c=d"], "--lora-modules: goes with --enable-lora"),
    (["--enable-lora", "--lora-dtype", "float16"],
     "--lora-dtype: must be auto: adapters (LoRA) are computed in --dtype"),
    (["--code-revision", "v2"], "--code-revision: must be main: the tokenizer is the model's"),
    (["--cpu-offload-gb", "4"], "--cpu-offload-gb: must be 0: "),
    (["--quantization", "nvfp4"],
     f"--quantization: must be {QUANTIZATIONS}, got 'nvfp4'"),
    (["-q", "int3"], f"-q: must be {QUANTIZATIONS}, got 'int3'"),
    (["-q", "int4", "--quantization-group", "16"],
     "--quantization-group: must be 32, 64 or 128 (or 0 in int8), got 16"),
    (["-q", "int4", "--quantization-group", "0"], "--quantization-group: must be 32, 64 or 128"),
    (["--quantization-group", "64"], "--quantization-group: goes with quantization int8 or int4"),
    (["-q", "fp8", "--quantization-head", "int8"],
     "--quantization-head: goes with quantization int8 or int4"),
    (["-q", "int8", "--quantization-head", "fp8"],
     "--quantization-head: must be auto, none, int8 or int4, got 'fp8'"),
    (["--chat-template", "no-such"], "--chat-template: no such file: 'no-such'"),
    (["--speculative-config", "{"], "--speculative-config: is not a JSON object"),
    (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
     "--speculative-config method: drafts are made by a checkpoint's own MTP layer (mtp), got 'ng"),
    (["--speculative-config", '{"methods": "mtp"}'],
     "--speculative-config methods: no such key (did you mean method?)"),
    (["--speculative-config.num_speculative_tokens", "17"],
     "--speculative-config.num_speculative_tokens: must be between 1 and 16, got 17"),
    (["--speculative-num-draft-tokens", "1"],
     "--speculative-num-draft-tokens: must be between 2 and 17"),
    (["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "other"],
     "--speculative-draft-model-path: must be the model itself"),
    (["--speculative", "off", "--spec-tokens", "2"],
     "--spec-tokens: cannot be combined with --speculative"),
    (["--max-logprobs", "100"], "--max-logprobs: a request gets at most 20, got 100"),
    (["--default-chat-template-kwargs", '{"enable_thinking": False}'],
     "--default-chat-template-kwargs: is not a JSON object: "),
    (["--default-chat-template-kwargs", "enable_thinking=false"],
     "--default-chat-template-kwargs: is not a JSON object: "),
    (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: is not a JSON object: "),
    (["--default-chat-template-kwargs", '{"messages": []}'],
     "--default-chat-template-kwargs: 'messages' may not be set"),
    (["--default-chat-template-kwargs", '{"enable-thinking": false}'],
     "--default-chat-template-kwargs: 'enable-thinking' may not be set"),
    (["--default-chat-template-kwargs", '{"add_generation_prompt": false}'],
     "--default-chat-template-kwargs: add_generation_prompt is for each request to say"),
    (["--override-generation-config", '{"temperature": -1}'],
     "--override-generation-config: temperature: must be between"),
    (["--override-generation-config", '{"max_length": 5}'],
     "--override-generation-config: max_length is none of temperature, top_k"),
    (["--override-generation-config", '{"max_new_tokens": 0}'],
     "--override-generation-config: max_new_tokens: must be a whole number between 1 and "),
    (["--override-generation-config.max_new_tokens", "1.5"],
     "--override-generation-config.max_new_tokens: max_new_tokens: must be a whole number"),
    (["--preferred-sampling-params", '{"max_new_tokens": 5}'],
     "--preferred-sampling-params: max_new_tokens is no default here but a limit"),
    (["--override-generation-config", "top_k=1.5"], "--override-generation-config: "),
    (["--generation-config", "/nowhere"],
     "--generation-config: must be auto, vllm or a folder with a generation_config.json, got '/no"),
    (["--cuda-graph-max-bs=-1"], "--cuda-graph-max-bs: must be between 0 and 32768, got -1"),
    (["-O4"], "-O: must be 0, 1, 2 or 3, got 4"),
    (["-O.mode=3"], "-O.mode: no such flag (did you mean -O?)"),
    (["--compilation-config", "{"], "--compilation-config: is not a JSON object"),
    (["-cc", '{"cudagraph_modes": "FULL"}'],
     "-cc cudagraph_modes: no such key (did you mean cudagraph_mode"),
    (["-cc.cudagraph_mode=SOME"], "-cc.cudagraph_mode: must be one of NONE, PIECEWISE, FULL, F"),
    (["-cc.mode=4"], "-cc.mode: must be one of NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, VLLM"),
    (["--cudagraph-capture-sizes", "[1, 0]"],
     "--cudagraph-capture-sizes: must be auto, off, or numbers between 1 and 32768"),
    (["--piecewise-cuda-graph-tokens", "8", "--disable-piecewise-cuda-graph"],
     "--disable-piecewise-cuda-graph: cannot be combined with --piecewise-cuda-graph-tokens"),
    (["--max-model-len.x", "3"], "--max-model-len.x: no such flag (did you mean --max-model-len?)"),
    (["--trust-remote-cod"], "--trust-remote-cod: no such flag (did you mean --trust-remote-code"),
    (["--enable-log-requests=perhaps"], "--enable-log-requests: must be true or false"),
])
def test_contradictions_are_refused_in_one_line(
        argv: list[str], error: str, capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["serve", *argv]) == 2
    assert one_line(capsys.readouterr().err.encode()).startswith(f"actorium: error: {error}")


@pytest.mark.parametrize(("argv", "key", "value"), [
    (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'],
     "speculation.speculative", "mtp:3"),
    (["-sc", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 1}'],
     "speculation.speculative", "mtp:1"),
    (["--speculative_config.method=mtp"], "speculation.speculative", "mtp:2"),
    (["--speculative-algorithm", "NEXTN"], "speculation.speculative", "mtp:2"),
    (["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3",
      "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"],
     "speculation.speculative", "mtp:3"),
    (["--speculative-algo", "NEXTN", "--speculative-num-draft-tokens", "4"],
     "speculation.speculative", "mtp:3"),
    (["--max-model-len", "32k"], "model.max_model_len", 32768),
    (["--max-model-len", "auto"], "model.max_model_len", None),
    (["--load-format", "runai_streamer"], "model.load_format", "auto"),
    (["--load-format", "safetensors"], "model.load_format", "safetensors"),
    (["--model-impl", "vllm"], "model.model_impl", "actorium"),
    (["--model-impl", "sglang"], "model.model_impl", "actorium"),
    (["--model-impl", "transformers"], "model.model_impl", "transformers"),
    (["--log-level", "WARNING"], "runtime.log_level", "warning"),
    (["--log-level", "critical"], "runtime.log_level", "error"),
    (["--tool-call-parser", "qwen25"], "gateway.tool_call_parser", "hermes"),
    (["--tool-call-parser", "gemma4"], "gateway.tool_call_parser", "gemma4"),
    (["--reasoning-parser", "gemma4"], "gateway.reasoning_parser", "gemma4"),
    (["--cuda-graph-bs", "1", "2", "4"], "device.graph_batch_sizes", "1,2,4"),
    (["--cudagraph-capture-sizes", "[1, 2]"], "device.graph_batch_sizes", "1,2"),
    (["--cudagraph-capture-sizes", "1", "2", DEMO], "device.graph_token_counts", "1,2"),
    (["--cuda-graph-sizes", "1,2"], "device.graph_batch_sizes", "1,2"),
    (["--max-cudagraph-capture-size", "64"], "device.graph_max_batch_size", 64),
    (["--max-cudagraph-capture-size", "64"], "device.graph_max_tokens", 64),
    (["--cuda-graph-max-bs", "4"], "device.graph_max_batch_size", 4),
    (["--cuda-graph-max-bs-decode", "0"], "device.graph_max_batch_size", 0),
    (["--cuda-graph-bs-prefill", "8", "64"], "device.graph_token_counts", "8,64"),
    (["--cuda-graph-backend-prefill", "disabled"], "device.graph_token_counts", "off"),
    (["--cuda-graph-backend-prefill", "tc_piecewise"], "device.graph_token_counts", "all"),
    (["--cuda-graph-backend-decode", "disabled"], "device.graph_batch_sizes", "off"),
    (["--piecewise-cuda-graph-max-tokens", "64"], "device.graph_max_tokens", 64),
    (["--enforce-piecewise-cuda-graph"], "device.graph_token_counts", "all"),
    (["--enable-piecewise-cuda-graph", "--piecewise-cuda-graph-tokens", "8", "16"],
     "device.graph_token_counts", "8,16"),
    (["-O2"], "device.optimization_level", 2), (["-O", "1"], "device.optimization_level", 1),
    (["--optimization-level", "3"], "device.optimization_level", 3),
    (["-O=0"], "device.passes", "none"), (["-O1"], "device.passes", "all"),
    (["-O3"], "device.passes", "auto"), (["-O3", "--passes", "none"], "device.passes", "none"),
    (["-O0", "--passes", "all"], "device.passes", "all"),
    (["-O1"], "device.graph_batch_sizes", "off"), (["-O0"], "device.graph_token_counts", "off"),
    (["-O1", "--cuda-graph-max-bs", "8"], "device.graph_batch_sizes", "auto"),
    (["-O1", "--cuda-graph-max-bs", "8"], "device.graph_token_counts", "off"),
    (["-O0", "--enable-cuda-graph"], "device.graph_batch_sizes", "auto"),
    (["-O0", "--enable-piecewise-cuda-graph"], "device.graph_token_counts", "all"),
    (["--enable-torch-compile"], "device.optimization_level", 3),
    (["--enable-torch-compile", "-O1"], "device.optimization_level", 1),
    (["--disable-torch-compile"], "device.optimization_level", 3),
    (["-cc", '{"mode": 0, "cudagraph_mode": "NONE"}'], "device.enforce_eager", True),
    (["-cc", '{"mode": 0, "cudagraph_mode": "NONE"}'], "device.passes", "none"),
    (["--compilation-config", "3"], "device.passes", "auto"),
    (["--compilation-config", '{"level": 3, "custom_ops": ["all"]}'], "device.passes", "auto"),
    (["-cc.mode=VLLM_COMPILE"], "device.passes", "auto"),
    (["-cc.cudagraph_mode=FULL_DECODE_ONLY", "--cudagraph-capture-sizes", "1", "4"],
     "device.graph_token_counts", "off"),
    (["-cc.cudagraph_mode=FULL_DECODE_ONLY", "--cudagraph-capture-sizes", "1", "4"],
     "device.graph_batch_sizes", "1,4"),
    (["-cc.cudagraph_mode=1"], "device.graph_batch_sizes", "off"),
    (["-cc", '{"cudagraph_capture_sizes": [1, 2, 4], "max_cudagraph_capture_size": 2}'],
     "device.graph_batch_sizes", "1,2,4"),
    (["-cc", '{"cudagraph_capture_sizes": []}'], "device.enforce_eager", True),
    (["-cc", '{"use_cudagraph": false}', "--enforce-eager"], "device.enforce_eager", True),
    (["-cc", '{"debug_dump_path": "graphs"}'], "device.dump_passes", "graphs"),
    (["-O1", "-cc", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'], "device.graph_token_counts",
     "auto"),
    (["--disable-piecewise-cuda-graph"], "device.graph_token_counts", "off"),
    (["--disable-cuda-graph"], "device.enforce_eager", True),
    (["--enable-priority-scheduling"], "scheduler.schedule_policy", "priority"),
    (["--enable-deterministic-inference"], "device.exact", "on"),
    (["--no-enable-deterministic-inference"], "device.exact", "auto"),
    (["--kv-offloading-size", "1.5", "--kv-offloading-backend", "native"], "memory.host_cache",
     3 << 29),
    (["--kv-offloading-size", "0"], "memory.host_cache", 0),
    (["--enable-hierarchical-cache", "--hicache-size", "30", "--hicache-ratio", "2"],
     "memory.host_cache", 30_000_000_000),
    (["--enable-hierarchical-cache", "--hicache-ratio", "2.0"], "memory.host_cache", 0),
    (["--hicache-size", "30"], "memory.host_cache", 0),
    (["-cram", "512"], "memory.host_cache", 512 << 20),
    (["--cache-ram", "-1"], "memory.host_cache", 0),
    (["--cache-ram=0", "--host-cache", "1g"], "memory.host_cache", 1 << 30),
    (["--allowed-origins", '["https://a.example", "*"]'], "gateway.cors_origins",
     "https://a.example,*"),
    (["--async-scheduling"], "scheduler.overlap", True),
    (["--default-chat-template-kwargs", '{"enable_thinking": false, "a": [1, {"b": null}]}'],
     "model.default_chat_template_kwargs", {"enable_thinking": False, "a": [1, {"b": None}]}),
    (["--chat-template-kwargs", '{"enable_thinking":false}'],
     "model.default_chat_template_kwargs", {"enable_thinking": False}),
    (["--default-chat-template-kwargs.enable_thinking", "false",
      "--default-chat-template-kwargs.reasoning-effort=low"],
     "model.default_chat_template_kwargs", {"enable_thinking": False, "reasoning_effort": "low"}),
    (["--default-chat-template-kwargs", "{}"], "model.default_chat_template_kwargs", {}),
    (["--override-generation-config", '{"temperature": 0.5}'], "model.override_generation_config",
     {"temperature": 0.5}),
    (["--override-generation-config.top_k", "5", "--override-generation-config.top-p=.5"],
     "model.override_generation_config", {"top_k": 5.0, "top_p": 0.5}),
    (["--override-generation-config", '{"max_new_tokens": 200}'],
     "model.override_generation_config", {"max_new_tokens": 200.0}),
    (["--preferred-sampling-params", '{"min_p": 0.1}'], "model.override_generation_config",
     {"min_p": 0.1}),
    (["--sampling-defaults", "openai"], "model.generation_config", "vllm"),
    (["--generation-config", "vllm"], "model.generation_config", "vllm"),
    (["--no-async-scheduling"], "scheduler.overlap", False),
    (["--disable-log-stats"], "runtime.log_interval", 0.0),
    (["--disable-log-requests"], "gateway.access_log", False),
    (["--api-server-count", "3"], "gateway.gateways", 3),
    (["--shutdown-timeout", "5"], "runtime.drain_timeout", 5.0),
    (["-m", DEMO], "model.model", DEMO),
    (["-hf", "org/name:Q4_K_M"], "model.model", "org/name:Q4_K_M"),
    (["org/name", "--revision", "v2"], "model.revision", "v2"),
    (["--download-dir", "/big"], "model.download_dir", "/big"),
    (["-c", "512"], "model.max_model_len", 512),
    (["-np", "4", "--alias", "x"], "scheduler.max_num_seqs", 4),
    (["--dtype", "half"], "model.dtype", "float16"),
    (["--random-seed", "3"], "model.seed", 3),
])
def test_another_engines_form_of_a_setting(argv: list[str], key: str, value: object) -> None:
    assert section(serve(*argv).config, key) == value


@pytest.mark.parametrize("argv", [
    ["--tensor-parallel-size", "1"], ["--lora-eviction-policy", "lru"], ["-q", "none"],
    ["--tokenizer-revision", "main"], ["--max-logprobs", "20"], ["--runner", "generate"],
    ["--lora-dtype", "auto"], ["--disaggregation-mode", "null"], ["--enable-piecewise-cuda-graph"]])
def test_flags_that_ask_for_nothing_are_accepted_silently(
        argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(*argv).notes == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["{}", "enable-{}", "no-disable-{}", "no-{}", "no-enable-{}",
                                  "disable-{}"])
def test_every_form_of_a_switch(form: str) -> None:
    off = form.startswith("no-enable") or form in ("no-{}", "disable-{}")
    assert serve("--" + form.format("prefix-caching")).config.memory.prefix_cache is not off
    assert serve("--" + form.format("radix-cache")).config.memory.prefix_cache is not off
    assert serve("--" + form.format("cuda-graph")).config.device.enforce_eager is off
    assert serve("--" + form.format("enforce-eager")).config.device.enforce_eager is not off
    assert len(serve("--" + form.format("cache-report")).notes) == 1


def test_torch_compile_says_what_it_is_taken_as() -> None:
    assert serve("--enable-torch-compile").notes == [
        "--enable-torch-compile is taken as -O3: passes over the layers' graphs, and graphs of "
        "steps; nothing is compiled by Inductor"]
    assert serve("--enable-torch-compile", "-O1").notes == [
        "--enable-torch-compile changes nothing here: the level is given"]
    assert serve("-cc.pass_config.fuse_norm_quant=True").notes == [
        "-cc.pass_config.fuse_norm_quant changes nothing here: nothing is compiled by torch "
        "(--passes, --graph-batch-sizes, --graph-token-counts)"]
    assert serve("-cc", '{"custom_ops": ["all"], "pass_config": {}}').notes == [
        "-cc custom_ops, -cc pass_config change nothing here: nothing is compiled by torch "
        "(--passes, --graph-batch-sizes, --graph-token-counts)"]


@pytest.mark.parametrize(("argv", "said"), [
    (["--enable-hierarchical-cache", "--hicache-ratio", "2"],
     "--enable-hierarchical-cache, --hicache-ratio change nothing here: --host-cache SIZE says how "
     "much of the host's memory pages get"),
    (["--enable-hierarchical-cache"],
     "--enable-hierarchical-cache changes nothing here: --host-cache SIZE says how much of the "
     "host's memory pages get"),
    (["--enable-hierarchical-cache", "--hicache-size", "8"],
     "--hicache-size is taken as the sum over all ranks"),
    (["--hicache-size", "8"], "--hicache-size changes nothing without --enable-hierarchical-cache"),
    (["--hicache-storage-backend", "file"],
     "--hicache-storage-backend changes nothing here: --disk-cache DIR:SIZE keeps pages on a disk"),
    (["--cache-ram", "-1"], "--cache-ram -1 changes nothing here: --host-cache SIZE says how much "
     "of the host's memory pages get")])
def test_tiers_of_which_nobody_says_how_large(argv: list[str], said: str) -> None:
    assert serve(*argv).notes == [said]


@pytest.mark.parametrize(("argv", "error"), [
    (["--kv-offloading-size", "8", "--kv-offloading-backend", "lmcache"],
     "--kv-offloading-backend: must be native: pages lie in --host-cache and --disk-cache alone, "
     "got 'lmcache'"),
    (["--kv-offloading-size", "-8"], "--kv-offloading-size: must not be negative, got -8"),
    (["--kv-offloading-size", "nan"], "--kv-offloading-size: is no size, got nan"),
    (["--enable-hierarchical-cache", "--hicache-size", "much"],
     "--hicache-size: must be a number, got 'much'"),
    (["--cache-ram", "8192", "--host-cache", "8g"],
     "--cache-ram: cannot be combined with --host-cache")])
def test_tiers_that_cannot_be(argv: list[str], error: str) -> None:
    with pytest.raises(BadConfig) as caught:
        serve(*argv)
    assert str(caught.value) == error


@pytest.mark.parametrize("line", [
    # parallelism that is not there
    "--enable-expert-parallel", "-ep", "--enable-ep-moe", "--enable-deepep-moe", "--enable-eplb",
    "--enable-dp-attention", "--enable-dp-lm-head", "--moe-a2a-backend deepep",
    "--ep-num-redundant-experts 2", "--elastic-ep-backend mooncake", "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb", "--gpu-id-step 2", "--main-gpu 1",
    # what others would be sent, or find in a file or at a route
    "--collect-detailed-traces all", "--profiler-config {\"profiler\":\"torch\"}",
    "--enable-layerwise-nvtx-tracing", "--crash-dump-folder /tmp/a", "--enable-mfu-metrics",
    "--kv-cache-metrics", "--show-hidden-metrics-for-version 0.9",
    "--bucket-time-to-first-token 0.1 0.5", "--enable-log-outputs", "--log-requests-level 3",
    "--log-config-file a.yaml", "--enable-logging-iteration-details", "--props",
    "--enable-tokenizer-info-endpoint",
    # other answers
    "--mm-processor-kwargs {\"max_pixels\":100}", "--media-io-kwargs {\"video\":{}}",
    "--video-pruning-rate 0.5", "--enable-mm-embeds", "--incremental-streaming-output",
    "--constrained-json-disable-any-whitespace", "--enable-fp32-lm-head", "--reasoning-format none",
    "--structured-outputs-config {\"disable_any_whitespace\":true}",
    "--structured-outputs-config.enable_in_reasoning=True",
    # other memory, files and code
    "--num-gpu-blocks-override 100", "--mamba-cache-dtype float16", "--cache-type-k q8_0",
    "--enable-lmcache", "--lmcache-config-file a.yaml", "--delete-ckpt-after-loading",
    "--worker-cls my.Worker",
    # who may see what
    "--hf-token abc", "--api-prefix /llm", "--allowed-methods GET", "--allow-credentials",
    "--disable-fastapi-docs", "--no-webui", "--no-trust-request-chat-template",
    "--disable-priority-preemption"])
def test_what_would_be_missed_is_refused(line: str) -> None:
    """Not taken with a line that it changes nothing: the answers, routes, files, events, places or
    limits that it asks for are not there."""
    flag, *values = line.split(" ")
    with pytest.raises(BadConfig) as caught:
        serve(flag, *values)
    assert str(caught.value).startswith(flag.partition("=")[0]), str(caught.value)


@pytest.mark.parametrize("argv", [
    ["--kv-events-config", "{}"], ["--mm-processor-kwargs", "{}"], ["--moe-a2a-backend", "none"],
    ["--log-requests-level", "0"], ["--cache-type-k", "f16", "--cache-type-v", "f16"],
    ["--reasoning-format", "deepseek"], ["--allowed-methods", '["*"]'], ["--main-gpu", "0"],
    ["--mamba-cache-dtype", "auto"], ["--video-pruning-rate", "0.0"],
    ["--no-enable-expert-parallel"], ["--disable-dp-attention"], ["--enable-fastapi-docs"],
    ["--webui"], ["--trust-request-chat-template"], ["--enable-priority-preemption"]])
def test_what_asks_for_nothing_is_taken(argv: list[str]) -> None:
    assert serve(*argv).notes == []


def test_the_object_of_structured_output() -> None:
    told = serve("--structured-outputs-config", '{"backend": "xgrammar", "reasoning_parser": '
                 '"qwen3", "disable_any_whitespace": false}')
    assert told.config.gateway.reasoning_parser == "qwen3"
    assert told.notes == ["--structured-outputs-config backend changes nothing here: llguidance "
                          "makes the masks of structured output"]
    with pytest.raises(BadConfig, match=r"--structured-outputs-config backends: no such key"):
        serve("--structured-outputs-config", '{"backends": 1}')


def test_reranking_is_served_anyway() -> None:
    (note,) = serve("--reranking").notes
    assert note == "--reranking changes nothing here: /v1/rerank and /v1/score are served anyway"


@pytest.mark.parametrize(("words", "runner", "convert"), [
    (["--embedding"], "pooling", "auto"), (["--embeddings"], "pooling", "auto"),
    (["--is-embedding"], "pooling", "auto"), (["--task", "auto"], "auto", "auto"),
    (["--task", "embed"], "pooling", "embed"), (["--task", "score"], "pooling", "classify"),
    (["--task", "reward"], "pooling", "auto"), (["--task", "generate"], "generate", "auto"),
    (["--runner", "pooling", "--convert", "embed"], "pooling", "embed")])
def test_what_a_model_is_served_for(words: list[str], runner: str, convert: str) -> None:
    model = serve(*words).config.model
    assert (model.runner, model.convert) == (runner, convert)


def test_how_prompts_are_pooled_in_other_words() -> None:
    for words in (["--pooling", "mean"], ["--override-pooler-config", '{"pooling_type": "MEAN"}']):
        assert serve(*words).config.model.pooler_config == {"pooling_type": "MEAN"}
    for words, why in ((["--task", "draft"], "--task: must be one of auto, generate"),
                       (["--pooling", "rank"], "pooling_type: must be one of LAST, MEAN, CLS"),
                       (["--pooler-config", '{"step_tag_id": 3}'], "step_tag_id is none of"),
                       (["--task", "embed", "--runner", "pooling"], "cannot be combined")):
        with pytest.raises(BadConfig, match=why):
            serve(*words)


@pytest.mark.parametrize(("config", "endpoint"), [
    ('{"enable_kv_cache_events": true}', "tcp://*:5557"), ('{"publisher": "zmq"}', "tcp://*:5557"),
    ('{"enable_kv_cache_events": false, "publisher": "zmq"}', ""), ('{"publisher": "null"}', ""),
    ('{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/a"}', "ipc:///tmp/a")])
def test_whether_events_of_the_cache_are_published(config: str, endpoint: str) -> None:
    assert serve("--kv-events-config", config).config.kv_events.kv_events_endpoint == endpoint


def test_every_key_of_vllms_events() -> None:
    told = serve("--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:1", "hwm": 2, '
                 '"replay_endpoint": "tcp://*:3", "buffer_steps": 4, "max_queue_size": 5, '
                 '"topic": "t"}', "--no-strict-model-name")
    events = told.config.kv_events
    assert (events.kv_events_endpoint, events.kv_events_hwm, events.kv_events_topic,
            events.kv_events_replay_endpoint, events.kv_events_buffer) == (
                "tcp://*:1", 2, "t", "tcp://*:3", 4)
    assert "max_queue_size changes nothing here" in told.notes[0]
    for config, why in (('{"publisher": "nats"}', "publisher: must be zmq or null, got 'nats'"),
                        ('{"end_point": "tcp://*:1"}', "end_point: no such key")):
        with pytest.raises(BadConfig, match=why):
            serve("--kv-events-config", config)


def test_flags_of_one_reason_share_a_line() -> None:
    notes = serve("--sampling-backend", "flashinfer", "--moe-runner-backend", "triton",
                  "--sampling-backend", "flashinfer").notes
    assert notes == ["--sampling-backend, --moe-runner-backend change nothing here: kernels are "
                     "chosen by --kernels, those of attention by --attention-backend"]


def test_other_tools_names_of_quantization() -> None:
    for value, own in (("fp8", "fp8"), ("ptpc_fp8", "fp8"), ("w8a8_fp8", "fp8"), ("null", "auto"),
                       ("compressed-tensors", "compressed-tensors"), ("unquant", "none"),
                       ("none", "none"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq"),
                       ("gguf", "gguf"), ("w8a8_int8", "compressed-tensors"), ("int8", "int8"),
                       ("int4", "int4")):
        told = serve("--quantization", value)
        assert told.config.model.quantization == own and told.notes == []
    told = serve("-q", "fp8_per_tensor")
    assert told.config.model.quantization == "fp8" and "a scale for each row" in told.notes[0]
    told = serve("-q", "experts_int8")
    assert told.config.model.quantization == "int8" and "not of experts alone" in told.notes[0]


def test_keyword_arguments_accept_inverted_switches() -> None:
    assert not settings.from_kwargs(disable_radix_cache=True).memory.prefix_cache
    assert settings.from_kwargs(disable_radix_cache=False).memory.prefix_cache
    assert settings.from_kwargs(disable_cuda_graph=True).device.enforce_eager
    assert not settings.from_kwargs(enable_prefix_caching=False).memory.prefix_cache


def test_the_tables_are_clean() -> None:
    """No flag stands twice, each reason is short, and no value is one of ours already."""
    foreign = foreign_flags_table()
    own = {name for flag in command_flags(NoOptions) for name, _ in flag.spellings}
    assert len(foreign) > 300
    assert all("_" not in name and not name.startswith("-") for name in foreign)
    groups = (*foreign_flags.ACCEPTED, *foreign_flags.REFUSED)
    assert all(len(group.reason) <= 120 and "\n" not in group.reason for group in groups)
    assert not set(foreign_flags.VALUES) - set(settings.fields())
    named = [name for group in groups
             for names in (group.switches, group.valued, group.lists) for name in names.split()]
    assert len(named) == len(set(named))
    assert {"trust-remote-code", "swap-space"} <= set(foreign) - own


def until(stream: IO[bytes], text: bytes) -> bytes:
    """The lines up to the one with `text`."""
    found = b""
    while text not in found:
        line = stream.readline()
        assert line, found
        found += line
    return found


def test_the_longest_line_starts_an_engine(cli: Cli) -> None:
    argv = words(VLLM, tp=1, length=512, attends="CPU_ATTN")
    with cli.serve(*argv, "--port", "0", "--kv-cache-bytes", "64m") as process:
        notes = process.report.decode()  # type: ignore[attr-defined]
        assert "--language-model-only" not in notes
        assert process.stderr is not None
        block = until(process.stderr, b"HTTP at ")
        told = {line[2:14].strip(): line for line in block.decode().splitlines()}
        assert "full-length requests at once (512 tokens each)" in told["KV cache"]
        # The demo model's template has no place for tools: calls come as they are asked for.
        assert "tool calls: hermes, which the system message asks for" in told["parsers"]
        assert told["parsers"].endswith("reasoning: qwen3")
        assert {"weights", "states", "graphs", "kernels", "chat", "sampling"} <= set(told)
        assert cli.run("stop").returncode == 0
        assert process.wait(20) == 0
