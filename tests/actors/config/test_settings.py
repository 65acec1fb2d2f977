"""Where settings come from, who wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actorium.actors.config import sources as settings
from actorium.actors.config import tree as configs
from actorium.actors.config.adapter_settings import parse_lora_modules
from actorium.actors.config.parsed_values import parse_disk_cache
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flag_help import field_docs
from actorium.tools.cli.flags import Flag, NoOptions, command_flags


def config_of(*argv: str) -> Config:
    return parse("actorium serve", argv, NoOptions).config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("ACTORIUM_"):
            monkeypatch.delenv(name)


def test_without_sources_the_config_is_its_defaults() -> None:
    assert config_of() == Config()
    assert settings.from_kwargs() == Config()


ALIASES = [
    ("gateway.uds", "/run/a.sock", ["--uds", "/run/a.sock"]),
    ("gateway.ssl_certfile", "c.pem", ["--ssl-certfile", "c.pem"], ["--ssl-cert-file=c.pem"]),
    ("model.model", "some/dir", ["some/dir"], ["--model", "some/dir"], ["--model-path=some/dir"]),
    ("model.max_model_len", 32768, ["--max-model-len", "32768"], ["--context-length", "32k"],
     ["--context_length=32K"]),
    ("model.skip_tokenizer", True, ["--skip-tokenizer"], ["--skip-tokenizer-init"],
     ["--skip-tokenizer=true"]),
    ("model.load_format", "dummy", ["--load-format", "dummy"]),
    ("model.model_impl", "transformers", ["--model-impl", "transformers"],
     ["--model_impl=transformers"]),
    ("model.dtype", "bfloat16", ["--dtype", "bfloat16"], ["--dtype=bf16"]),
    ("model.served_model_name", ("x",), ["--served-model-name", "x"], ["--alias=x"]),
    ("model.served_model_name", ("x", "y/z"), ["--served-model-name", "x", "y/z"],
     ["--alias", "x,y/z"], ["--served-model-name", "x", "--served-model-name=y/z"]),
    ("memory.memory_fraction", 0.5, ["--gpu-memory-utilization", "0.5"],
     ["--mem-fraction-static=0.5"], ["--memory-fraction", ".5"]),
    ("memory.page_size", 64, ["--page-size", "64"], ["--block-size", "64"]),
    ("memory.max_total_tokens", 1 << 20, ["--max-total-tokens", "1m"]),
    ("memory.kv_cache_dtype", "float32", ["--kv-cache-dtype", "float32"]),
    ("memory.kv_cache_dtype", "fp8_e4m3", ["--kv-cache-dtype", "fp8"],
     ["--kv-cache-dtype=fp8_e4m3"], ["--kv-cache-dtype", "float8_e4m3fn"]),
    ("memory.kv_cache_dtype", "fp8_e5m2", ["--kv-cache-dtype", "fp8_e5m2"]),
    ("memory.kv_cache_dtype", "int8", ["--kv-cache-dtype", "int8"],
     ["--kv-cache-dtype=int8_per_token_head"]),
    ("memory.debug_memory", True, ["--debug-memory"]),
    ("memory.audit_every", 7, ["--audit-every", "7"]),
    ("memory.prefix_cache", False, ["--no-prefix-cache"], ["--enable-prefix-caching", "false"],
     ["--no-enable-prefix-caching"], ["--disable-radix-cache"], ["--disable-radix-cache", "True"],
     ["--enable-prefix-caching=off"]),
    ("memory.prefix_cache", True, ["--enable-prefix-caching"], ["--enable_prefix_caching=true"],
     ["--disable-radix-cache", "false"]),
    ("memory.eviction_policy", "lfu", ["--eviction-policy", "lfu"],
     ["--radix-eviction-policy", "lfu"]),
    ("scheduler.schedule_policy", "lpm", ["--schedule-policy", "lpm"],
     ["--scheduling-policy", "lpm"]),
    ("scheduler.tenant_weights", {"a": 2.0, "b": 0.5}, ["--tenant-weights", "a=2,b=.5"],
     ["--tenant-weights", '{"a": 2, "b": 0.5}'], ["--tenant_weights= b=0.5, a=2.0 "]),
    ("scheduler.max_num_seqs", 7, ["--max-num-seqs", "7"], ["--max-running-requests", "7"]),
    ("scheduler.max_num_batched_tokens", 512, ["--max-num-batched-tokens", "512"],
     ["--chunked-prefill-size", "512"]),
    ("scheduler.max_num_queued_reqs", 9, ["--max-num-queued-reqs", "9"],
     ["--max-queued-requests", "9"]),
    ("scheduler.sleep_after", 90.0, ["--sleep-after", "90"], ["--sleep-idle-seconds", "90"]),
    ("scheduler.overlap", False, ["--no-overlap"], ["--disable-overlap-schedule"],
     ["--overlap=false"]),
    ("device.device", "cpu", ["--device", "cpu"]),
    ("device.enforce_eager", True, ["--enforce-eager"]),
    ("device.graph_batch_sizes", "1,2,4", ["--graph-batch-sizes", "1,2,4"],
     ["--cuda-graph-bs-decode", "1,2,4"], ["--cuda-graph-bs=1,2,4"]),
    ("device.graph_max_tokens", 512, ["--graph-max-tokens", "512"],
     ["--piecewise-cuda-graph-max-tokens", "512"], ["--cuda-graph-max-bs-prefill=512"]),
    ("device.graph_token_counts", "8,64", ["--graph-token-counts", "8,64"],
     ["--piecewise-cuda-graph-tokens=8,64"]),
    ("device.kernels", "torch", ["--kernels", "torch"]),
    ("runtime.name", "other", ["--name", "other"]),
]
LORA = "--enable-lora"


@pytest.mark.parametrize("words", [
    ["--lora-modules", "a=/x", "b=/y"], ["--lora-paths", "a=/x,b=/y"],
    ["--lora-modules", '{"name": "a", "path": "/x"}', '{"lora_name": "b", "lora_path": "/y"}'],
    ["--lora-modules", '[{"name": "a", "path": "/x", "base_model_name": null}, '
     '{"name": "b", "path": "/y", "pinned": false}]']])
def test_adapters_are_named_as_other_engines_name_them(words: list[str]) -> None:
    settings = config_of(LORA, *words).adapters
    assert [module[:2] for module in parse_lora_modules(settings.lora_modules)] == [
        ("a", "/x"), ("b", "/y")]


def test_the_other_settings_of_adapters_have_two_names() -> None:
    for words in (["--max-loras", "3", "--max-cpu-loras", "5"],
                  ["--max-loras-per-batch", "3", "--max-loaded-loras=5"]):
        settings = config_of(LORA, *words, "--max-lora-rank", "64").adapters
        assert (settings.max_loras, settings.max_cpu_loras, settings.max_lora_rank) == (3, 5, 64)


@pytest.mark.parametrize(("key", "value", "spellings"),
                         [(key, value, rest) for key, value, *rest in ALIASES])
def test_every_spelling_sets_the_same_field(key: str, value: object,
                                            spellings: list[list[str]]) -> None:
    section, name = key.split(".")
    want = settings.resolve({name: settings.Setting(value, "test")}, environ={})
    assert getattr(getattr(want, section), name) == value
    for argv in spellings:
        assert config_of(*argv) == want, argv


EVENTS = "--kv-events-endpoint=tcp://*:5557"
BAD_FLAGS = [
    (["--kv-events-topic", "a"], "--kv-events-topic", "goes with --kv-events-endpoint"),
    (["--kv-events-endpoint", "*:5557"], "--kv-events-endpoint", "must be tcp://HOST:PORT"),
    (["--kv-events-endpoint", "tcp://*:70000"], "--kv-events-endpoint", "must be tcp://HOST:PORT"),
    ([EVENTS, "--no-prefix-cache"], "--kv-events-endpoint", "goes with the prefix cache"),
    ([EVENTS, "--kv-events-replay-endpoint", "tcp://*:5557"], "--kv-events-replay-endpoint",
     "another one than kv_events_endpoint"),
    ([EVENTS, "--kv-events-layout", "json"], "--kv-events-layout", "one of map, array"),
    ([EVENTS, "--kv-events-buffer", "0"], "--kv-events-buffer", "between 1 and 1,000,000"),
    (["--remote-cache", "pages:6379"], "--remote-cache", "must be redis://HOST:PORT/DB"),
    (["--remote-cache", "redis://u:secret@a/0"], "--remote-cache", "without a password"),
    (["--remote-cache", "redis://a/0", "--disk-cache", "/x:1g"], "--remote-cache",
     "cannot be combined with disk_cache"),
    (["--remote-cache-password-file", "f"], "--remote-cache-password-file", "goes with"),
    ([EVENTS, "--kv-events-hwm", "0"], "--kv-events-hwm", "between 1 and 10,000,000"),
    (["--speculative", "auto,fixed"], "--speculative", "must be auto, off, or METHOD"),
    (["--speculative", "auto+mtp:1"], "--speculative", "must be auto, off, or METHOD"),
    (["--speculative", "draft:3"], "--speculative", "draft needs a model that drafts"),
    (["--speculative", "ngram", "--speculative-model", "/x"], "--speculative-model",
     "it drafts by draft or eagle3"),
    (["--prompt-lookup-max", "0"], "--prompt-lookup-max", "between 1 and 64"),
    (["--prompt-lookup-min", "6"], "--prompt-lookup-min", "--prompt-lookup-max, which is 5"),
    (["--suffix-decoding-max-tree-depth", "1"], "--suffix-decoding-max-tree-depth", "2 and 256"),
    (["--suffix-decoding-max-spec-factor", "0"], "--suffix-decoding-max-spec-factor", "above 0"),
    (["--suffix-decoding-min-token-prob", "1.5"], "--suffix-decoding-min-token-prob", "0 and 1"),
    (["--suffix-global-bytes", "64M"], "--suffix-global-bytes", "needs the method suffix"),
    (["--plugins", "a,,b"], "--plugins", "all, none or names of packages"),
    (["--tool-call-parser", "nobodys"], "--tool-call-parser", "must be one of auto, none, harmony"),
    (["--max-loras", "2"], "--max-loras", "goes with --enable-lora"),
    ([LORA, "--max-loras", "0"], "--max-loras", "between 1 and 256"),
    ([LORA, "--max-lora-rank", "0"], "--max-lora-rank", "between 1 and 1024"),
    ([LORA, "--max-cpu-loras", "2"], "--max-cpu-loras", "between --max-loras, which is 8, and"),
    ([LORA, "--lora-dir", "/none/such"], "--lora-dir", "a folder that is there"),
    (["--weights-dir", "/none/such"], "--weights-dir", "a folder that is there"),
    ([LORA, "--lora-modules", "a=/x", "a=/y"], "--lora-modules", "'a' is given twice"),
    ([LORA, "--lora-modules", "a="], "--lora-modules", "'a' has no path"),
    ([LORA, "--lora-modules", "=x"], "--lora-modules", "a name of 1 to 256 characters"),
    ([LORA, "--lora-modules", '{"name": "a"}'], "--lora-modules", "path is missing"),
    ([LORA, "--lora-modules", '{"name": "a", "path": "/x", "pinned": true}'], "--lora-modules",
     "'pinned' is not served"),
    ([LORA, "--lora-modules", "[1]"], "--lora-modules", "JSON objects with name and path"),
    ([LORA, "--lora-modules", "{"], "--lora-modules", "NAME=PATH or a JSON object"),
    (["MODEL", "--models-dir", "d"], "MODEL", "goes into the file of --models or the folder"),
    (["--models-max", "2"], "--models-max", "goes with --models-dir or --models"),
    (["--models-max", "-1", "--models-dir", "d"], "--models-max", "must not be negative"),
    (["--models-memory=-1", "--models", "f"], "--models-memory", "must not be negative"),
    (["--keep-alive", "soon", "--models", "f"], "--keep-alive", "seconds or a duration"),
    (["--models-wait", "0", "--models", "f"], "--models-wait", "above 0 seconds"),
    (["--models-queue", "0", "--models", "f"], "--models-queue", "at least 1"),
    (["--replicas", "2", "--models", "f"], "--replicas", "has no replicas"),
    (["--listen", "tcp://a:1", "--models", "f"], "--listen", "speak to one engine"),
    (["--files-max-bytes", "1k"], "--files-max-bytes", "must be between 1 MiB and 1 PiB"),
    (["--files-expire-after", "60"], "--files-expire-after", "must be at least 3600 seconds"),
    (["--background-seqs", "-1"], "--background-seqs", "must be between 0 and 65536"),
    (["--ssl-cert-reqs", "3", "--ssl-certfile", "c"], "--ssl-cert-reqs", "must be 0, 1 or 2"),
    (["--ssl-ca-certs", "ca", "--ssl-cert-file", "c"], "--ssl-ca-certs", "needs ssl_cert_reqs"),
    (["--ssl-refresh"], "--ssl-refresh", "goes with ssl_certfile"),
    (["--ssl-ciphers", "HIGH"], "--ssl-ciphers", "goes with ssl_certfile"),
    (["--ssl-keyfile-password", "x"], "--ssl-keyfile-password", "goes with ssl_certfile"),
    (["--uds="], "--uds", "must not be empty"),
    (["--otlp-traces-endpoint", "ftp://a"], "--otlp-traces-endpoint", "must be HOST:PORT, http://"),
    (["--otlp-traces-endpoint", "http://user:key@a"], "--otlp-traces-endpoint", "must be HOST"),
    (["--otlp-traces-protocol", "http/json"], "--otlp-traces-protocol", "grpc or http/protobuf"),
    (["--otlp-service-name", ""], "--otlp-service-name", "1 to 256 printable characters"),
    (["--max-running-requests", "0"], "--max-running-requests", "between 1 and 32768, got 0"),
    (["--max-num-seqs", "many"], "--max-num-seqs", "a whole number"),
    (["--max-num-seqs", "1.5"], "--max-num-seqs", "a whole number"),
    (["--max-num-seqs"], "--max-num-seqs", "a value is missing"),
    (["--max-num-seqs", "--no-overlap"], "--max-num-seqs", "a value is missing"),
    (["--block-size", "24"], "--block-size", "power of two"),
    (["--page-size=-16"], "--page-size", "power of two"),
    (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization", "between 0.05 and 0.98"),
    (["--mem-fraction-static", "2"], "--mem-fraction-static", "between 0.05 and 0.98"),
    (["--context-length", "1.0001k"], "--context-length", "a whole number"),
    (["--context-length", "0"], "--context-length", "at least 2"),
    (["--dtype", "int3"], "--dtype", "must be one of"),
    (["--model-impl", "terratorch"], "--model-impl", "auto, actorium or transformers"),
    (["--load-format", "pickle"], "--load-format", "auto, safetensors or dummy"),
    (["--device", "tpu"], "--device", "auto, cpu or cuda"),
    (["--enforce-eager=perhaps"], "--enforce-eager", "true or false"),
    (["--cuda-graph-bs", "1,two"], "--cuda-graph-bs", "must be auto, off, or numbers"),
    (["--cuda-graph-bs", "0"], "--cuda-graph-bs", "numbers between 1 and 32768"),
    (["--graph-token-counts", "off,8"], "--graph-token-counts", "auto, all, off, or numbers"),
    (["--name", "a/b"], "--name", "letters"),
    (["--chunked-prefil-size", "4"], "--chunked-prefil-size", "did you mean --chunked-prefill-si"),
    (["--sleep-after=-1"], "--sleep-after", "must not be negative"),
    (["--sleep-level", "3"], "--sleep-level", "must be 1 or 2"),
    (["--scheduling-policy", "sjf"], "--scheduling-policy", "must be fcfs, lpm, priority or fair"),
    (["--radix-eviction-policy", "fifo"], "--radix-eviction-policy", "must be lru, lfu or prior"),
    (["--audit-every", "0"], "--audit-every", "at least 1"),
    (["--enable-prefix-caching=perhaps"], "--enable-prefix-caching", "true or false"),
    (["--nonsense"], "--nonsense", "no such flag"),
    (["-x"], "-x", "no such flag"),
    (["one", "two"], "two", "unexpected argument"),
    (["--model", "one", "two"], "two", "unexpected argument"),
    (["--config"], "--config", "a value is missing"),
    (["--config", "/nowhere/x.toml"], "--config", "cannot read /nowhere/x.toml"),
]


@pytest.mark.parametrize(("argv", "name", "why"), BAD_FLAGS)
def test_a_bad_flag_is_named_as_it_was_written(argv: list[str], name: str, why: str) -> None:
    with pytest.raises(BadConfig) as caught:
        config_of(*argv)
    assert caught.value.message.startswith(f"{name}: ")
    assert why in caught.value.message
    assert "\n" not in caught.value.message


def test_later_sources_override_earlier_ones(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[scheduler]\nmax_num_seqs = 3\nmax_num_batched_tokens = 4\n'
                    'max_num_queued_reqs = 5\n[model]\nmax_model_len = "4k"\n')
    monkeypatch.setenv("ACTORIUM_MAX_NUM_SEQS", "30")
    monkeypatch.setenv("ACTORIUM_MAX_NUM_BATCHED_TOKENS", "40")
    config = config_of("--config", str(file), "--max-running-requests", "300")
    assert config.scheduler.max_num_seqs == 300
    assert config.scheduler.max_num_batched_tokens == 40
    assert config.scheduler.max_num_queued_reqs == 5
    assert config.model.max_model_len == 4096
    assert config.memory.page_size == 16
    monkeypatch.setenv("ACTORIUM_CONFIG", str(file))
    assert settings.from_kwargs().scheduler.max_num_queued_reqs == 5
    assert settings.from_kwargs(max_queued_requests=6).scheduler.max_num_queued_reqs == 6


@pytest.mark.parametrize(("text", "names"), [
    ("[scheduler]\nmax_num_sequences = 3", "scheduler.max_num_sequences: unknown key"),
    ("[memory]\nmax_num_seqs = 3", "memory.max_num_seqs: unknown key (it belongs in [scheduler])"),
    ("max_num_seqs = 3", "max_num_seqs: unknown key (it belongs in [scheduler])"),
    ("[schedular]\nx = 3", "schedular: unknown key (did you mean scheduler?)"),
    ("scheduler = 3", "scheduler: must be a table"),
    ("[scheduler]\nmax_num_seqs = true", "scheduler.max_num_seqs: must be a whole number"),
    ("[scheduler]\nmax_num_seqs = -1", "scheduler.max_num_seqs: must be between 1 and 32768"),
    ("[scheduler]\nmax_num_seqs = 1.5", "scheduler.max_num_seqs: must be a whole number"),
    ("[model]\nmodel = 3", "model.model: must be a string"),
    ("[scheduler", "is not TOML"),
])
def test_a_bad_toml_key_is_named(tmp_path: Path, text: str, names: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        settings.resolve({}, str(file), {})
    assert names in caught.value.message
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_toml_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="is not TOML"):
        settings.resolve({}, str(file), {})


@pytest.mark.parametrize(("name", "value", "why"), [
    ("ACTORIUM_MAX_NUM_SEQ", "3", "did you mean ACTORIUM_MAX_NUM_SEQS"),
    ("ACTORIUM_MAX_NUM_SEQS", "x", "a whole number"),
    ("ACTORIUM_MAX_NUM_SEQS", "0", "between 1 and 32768, got 0"),
    ("ACTORIUM_OVERLAP", "maybe", "true or false"),
    ("ACTORIUM_HEARTBEAT", "inf", "between 0.01 and 60"),
])
def test_a_bad_variable_is_named(name: str, value: str, why: str) -> None:
    with pytest.raises(BadConfig) as caught:
        settings.resolve({}, None, {name: value, "PATH": "/bin"})
    assert caught.value.message.startswith(f"{name}: ")
    assert why in caught.value.message


def test_variables_set_every_kind() -> None:
    config = settings.resolve({}, None, {
        "ACTORIUM_OVERLAP": "off", "ACTORIUM_MAX_MODEL_LEN": "none", "ACTORIUM_DTYPE": "half",
        "ACTORIUM_HEARTBEAT": "1", "ACTORIUM_RUN_DIR": "/x", "ACTORIUM_KV_CACHE_BYTES": "2g"})
    assert config.scheduler.overlap is False
    assert config.model.max_model_len is None
    assert config.model.dtype == "float16"
    assert config.runtime.heartbeat == 1.0
    assert config.runtime.run_dir == "/x"
    assert config.memory.kv_cache_bytes == 2 << 30


def test_keyword_arguments(tmp_path: Path) -> None:
    config = settings.from_kwargs(tmp_path, context_length="32k", block_size=32, overlap=False)
    assert config.model.model == str(tmp_path)
    assert config.model.max_model_len == 32768
    assert config.memory.page_size == 32
    assert not config.scheduler.overlap
    for wrong, why in [({"block_sise": 1}, "block_sise: no such setting"),
                       ({"block_size": 24}, "block_size: must be a power of two"),
                       ({"page_size": "a"}, "page_size: must be a whole number"),
                       ({"page_size": 16, "block_size": 16}, "block_size: given twice"),
                       ({"overlap": 1}, "overlap: must be true or false")]:
        with pytest.raises(BadConfig, match=why):
            settings.from_kwargs(**wrong)


BAD_TABLES = [
    ("a", "must be a table (name=number,... or a JSON object), got 'a' without '='"),
    ("[1]", "must be a table"),
    ("a=x", "a: must be a number, got 'x'"),
    ("a=", "a: must be a number, got ''"),
    ("a=1,a=2", "a is given twice"),
    ('{"a":', "is not a JSON object"),
    ('{"a": true}', "a: must be a number, got True"),
    ('{"a": [1]}', "a: must be a number, got [1]"),
    ("a=0", "every weight must be above 0 and finite, got {'a': 0.0}"),
    ("a=nan", "every weight must be above 0"),
    ("a=1e400", "every weight must be above 0"),
    ("a=1,b c=2", "'b c' is no tenant's name (at most 64 ASCII characters, no space), got {'a'"),
    (f"{'x' * 65}=1", f"'{'x' * 65}' is no tenant's name"),
    ('{"caf\u00e9": 1}', "'caf\u00e9' is no tenant's name"),
    ('{"a\\n": 1}', "'a\\n' is no tenant's name"),
]


@pytest.mark.parametrize(("text", "why"), BAD_TABLES)
def test_a_bad_table_is_named_in_every_source(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f"[scheduler]\ntenant_weights = '{text}'\n")
    for give, origin in (
            (lambda: config_of("--tenant-weights", text), "--tenant-weights"),
            (lambda: settings.resolve({}, None, {"ACTORIUM_TENANT_WEIGHTS": text}),
             "ACTORIUM_TENANT_WEIGHTS"),
            (lambda: settings.resolve({}, str(file), {}), f"{file}: scheduler.tenant_weights"),
            (lambda: settings.from_kwargs(tenant_weights=text), "tenant_weights")):
        with pytest.raises(BadConfig) as caught:
            give()
        assert caught.value.message.startswith(f"{origin}: {why}")
        assert "\n" not in caught.value.message


def test_tables_as_tables(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("[scheduler.tenant_weights]\na = 2\n'b=c' = 0.5\n")
    want = {"a": 2.0, "b=c": 0.5}
    assert settings.resolve({}, str(file), {}).scheduler.tenant_weights == want
    assert settings.from_kwargs(tenant_weights=want).scheduler.tenant_weights == want
    assert settings.resolve({}, str(file), {"ACTORIUM_TENANT_WEIGHTS": "x=1"}
                            ).scheduler.tenant_weights == {"x": 1.0}
    for wrong, why in [({"a": "z"}, "tenant_weights: a: must be a number, got 'z'"),
                       ({1: 2}, "tenant_weights: a name must be a string, got 1"),
                       (3, "tenant_weights: must be a table")]:
        with pytest.raises(BadConfig, match=why):
            settings.from_kwargs(tenant_weights=wrong)
    file.write_text("[scheduler.tenant_weights]\na = true\n")
    with pytest.raises(BadConfig, match="scheduler.tenant_weights: a: must be a number, got True"):
        settings.resolve({}, str(file), {})


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a command."""

    prompt: list[str] = []
    """What to say."""
    max_tokens: int | None = None
    """How long."""
    json: bool = False


def test_options_of_a_command_beside_the_settings() -> None:
    parsed = parse("actorium x", ["--prompt", "a", "-b c", "--prompt=--d=e", "--json",
                                  "--max-tokens",
                                  "2k", "--prompt", "", "--page-size", "1", "--", "dir"],
                   CommandOptions)
    assert parsed.options == CommandOptions(prompt=["a", "-b c", "--d=e", ""], max_tokens=2048,
                                            json=True)
    assert parsed.config.memory.page_size == 1
    assert parsed.config.model.model == "dir"
    assert parsed.written["max_tokens"] == "--max-tokens"
    with pytest.raises(BadConfig, match="--max-tokens: must be a whole number"):
        parse("actorium x", ["--max-tokens", "few"], CommandOptions)


@pytest.mark.parametrize(("argv", "prompt", "model"), [
    (["--prompt", "-abc"], ["-abc"], ""), (["--prompt=--"], ["--"], ""),
    (["--prompt", "-"], ["-"], ""), (["--prompt", "--d e"], ["--d e"], ""),
    (["--prompt", "-1e5", "--json", "dir"], ["-1e5"], "dir"),
    (["--json", "dir", "--prompt", ""], [""], "dir"),
    (["--prompt", "a", "--", "-dir"], ["a"], "-dir"),
    (["--api-key", "-s0mething-secret", "--prompt", "=", "--json", "true"], ["="], ""),
    (["--prompt", "a", "-c", "512", "dir"], ["a"], "dir"),
])
def test_values_that_begin_with_a_dash_are_values(argv: list[str], prompt: list[str],
                                                  model: str) -> None:
    parsed = parse("actorium x", argv, CommandOptions)
    assert (parsed.options.prompt, parsed.config.model.model) == (prompt, model)
    assert parsed.config.gateway.api_key in (None, "-s0mething-secret")


@pytest.mark.parametrize(("argv", "error"), [
    (["--json", "-x"], "-x: no such flag"), (["--json", "a", "b"], "b: unexpected argument"),
    (["--json", "--", "-a", "-b"], "-b: unexpected argument"),
    (["--prompt", "--json"], "--prompt: a value is missing"),
    (["--no-json=x"], "--no-json: must be true or false"), (["--cofnig", "x"], "--cofnig: no such"),
])
def test_unknown_arguments_are_named(argv: list[str], error: str) -> None:
    with pytest.raises(BadConfig) as caught:
        parse("actorium x", argv, CommandOptions)
    assert caught.value.message.startswith(error)


def test_every_setting_has_a_flag_a_default_and_a_text() -> None:
    flags = {flag.dest: flag for flag in command_flags(NoOptions)}
    assert set(flags) == set(settings.fields())
    documented = {name for section in msgspec.structs.fields(Config)
                  for name in field_docs(section.type)}
    assert documented == set(settings.fields())
    spelt = [name for flag in flags.values() for name in flag.names]
    assert len(spelt) == len(set(spelt))
    assert all(isinstance(flag, Flag) for flag in flags.values())


def test_help_shows_both_families(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("actorium serve [MODEL]", ["--help"], NoOptions, "Start an engine.")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in ("--max-running-requests", "--max-num-seqs", "Sequences that run at once", "256",
                 "--enable-prefix-caching", "--radix-eviction-policy", "--scheduling-policy",
                 "--tenant-weights NAME=NUMBER,..."):
        assert name in text


def test_an_object_of_json_comes_from_anywhere(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"enable_thinking": False, "style": {"tone": ["dry", 2]}}
    file = tmp_path / "engine.toml"
    file.write_text('[model.default_chat_template_kwargs]\nenable_thinking = false\n'
                    'style = {tone = ["dry", 2]}\n')
    for found in (config_of("--config", str(file)),
                  settings.from_kwargs(default_chat_template_kwargs=wanted)):
        assert found.model.default_chat_template_kwargs == wanted
        assert configs.load(configs.dump(found)) == found
    monkeypatch.setenv("ACTORIUM_DEFAULT_CHAT_TEMPLATE_KWARGS", '{"x": 1.5}')
    assert config_of("--config", str(file)).model.default_chat_template_kwargs == {"x": 1.5}


@pytest.mark.parametrize(("line", "error"), [
    ("style = 1979-05-27", "must be what JSON can say: "),
    ("style = inf", "must be what JSON can say: "),
    ("bos_token = 'x'", "'bos_token' may not be set"),
])
def test_invalid_json_is_refused(line: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f"[model.default_chat_template_kwargs]\n{line}\n")
    with pytest.raises(BadConfig) as caught:
        config_of("--config", str(file))
    assert caught.value.message.startswith(
        f"{file}: model.default_chat_template_kwargs: {error}")


@pytest.mark.parametrize(("text", "size"), [
    ("8GiB", 8 << 30), ("512MiB", 512 << 20), ("64kib", 64 << 10), ("1.5GiB", 3 << 29),
    ("8G", 8 << 30), ("8589934592", 8 << 30)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert config_of("dir", "--host-cache", text).memory.host_cache == size


@pytest.mark.parametrize(("text", "size"), [
    ("/var/pages:64GiB", 64 << 30), ("/var/pages:2T", 2 << 40), ("/a:b:16m", 16 << 20)])
def test_a_directory_and_its_bound(text: str, size: int) -> None:
    found = parse_disk_cache(config_of("dir", "--disk-cache", text).memory.disk_cache)
    assert found == (Path(text.rpartition(":")[0]), size)


@pytest.mark.parametrize("text", ["/var/pages", "64GiB", ":64GiB", "/var/pages:", "/var/pages:much",
                                  "/var/pages:12XiB"])
def test_a_disk_cache_without_directory_or_size_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="^--disk-cache: must be a directory and a size, as DIR:"):
        config_of("dir", "--disk-cache", text)


def test_a_disk_cache_has_room_for_something() -> None:
    with pytest.raises(BadConfig, match="^--disk-cache: must have room for at least 1 MiB"):
        config_of("dir", "--disk-cache", "/var/pages:64KiB")


@pytest.mark.parametrize("text", ["GiB", "8iB", "8XiB", "8 potatoes", "1.0000000001KiB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="a whole number"):
        config_of("dir", "--host-cache", text)
