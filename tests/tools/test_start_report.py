"""What is told of an engine that has become ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig
from actorium.actors.runtime.worker_info import WorkerInfo, read_info, write_info
from actorium.gpu.plan.graph_memory import Graphs, GraphShape
from actorium.gpu.worker.device import describe_graphs
from actorium.tools.cli.engines import report_lines

WORKER = WorkerInfo(device="cuda H200", dtype="bfloat16", weights_bytes=60 << 30,
                    kv_dtype="bfloat16", kv_bytes=20 << 30, kv_tokens=340_000, max_model_len=32_768,
                    full_length=10, max_num_seqs=32, graphs="decodes of 1 to 32 requests (9 sizes)",
                    kernels="Triton", attention="Triton", exact="on, costs 1.2 %")
INFO: dict[str, Any] = {
    "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<tool_call></think>"
                     "{% endfor %}\n", "has_tokenizer": True,
    "generation_defaults": {"temperature": 0.7, "top_p": 0.8}}


def rows(config: Config | None = None, worker: WorkerInfo | None = WORKER,
         info: dict[str, Any] | None = INFO) -> dict[str, str]:
    """Subject -> what is told of it."""
    found = report_lines(config or Config(), worker, info)
    assert all("\n" not in line for line in found)
    return {line[:13].strip(): line[13:] for line in found}


def test_a_line_a_subject() -> None:
    found = rows()
    assert list(found) == ["weights", "KV cache", "level", "graphs", "kernels", "exact", "chat",
                           "parsers", "sampling"]
    assert found["weights"] == "60.0 GiB on cuda H200, bfloat16"
    assert found["KV cache"] == ("340,000 tokens (20.0 GiB, bfloat16), 10 full-length requests at "
                                 "once (32,768 tokens each)")
    assert found["level"] == "-O2: passes all"
    assert found["graphs"] == "decodes of 1 to 32 requests (9 sizes)"
    assert found["exact"] == ("on, costs 1.2 %: a token has the same bits in any batch, chunk or "
                              "recovery")
    off = msgspec.structs.replace(WORKER, exact="off here: images", inexact="images")
    assert rows(worker=off)["exact"] == "off here: images"
    assert found["chat"].startswith("the model's template: {% for m in messages %}<|im_start|>")
    assert found["chat"].endswith("...") and len(found["chat"]) < 90
    assert found["parsers"] == "tool calls: hermes; reasoning: qwen3"
    assert found["sampling"] == (
        "temperature 0.7, top_p 0.8 (the model's generation_config.json); others: "
        "--generation-config vllm, --override-generation-config JSON")


def test_what_capture_took() -> None:
    for seconds, told in ((4.16, ", captured in 4.2 s"), (0.01, "")):
        worker = msgspec.structs.replace(WORKER, capture_seconds=seconds)
        assert rows(worker=worker)["graphs"] == f"decodes of 1 to 32 requests (9 sizes){told}"


def test_a_missing_file_is_reported() -> None:
    worker = msgspec.structs.replace(WORKER, full_length=0, graphs="", no_graphs="a CPU has none",
                                     state_bytes=5 << 20, checkpoints=3, drafts=2)
    found = rows(worker=worker, info={"has_tokenizer": False, "chat_template": None})
    assert "not one of 32,768 tokens" in found["KV cache"]
    assert "--max-model-len" in found["KV cache"]
    assert found["graphs"] == "none: a CPU has none"
    assert found["states"].startswith("5.0 MiB for 32 requests at once and 3 checkpoints")
    assert found["drafts"] == "up to 2 a step, by the model's MTP layer"
    assert found["chat"] == "no template (the engine runs without a tokenizer)"
    assert found["sampling"].startswith("temperature 1, nothing cut off (the model has no others)")
    assert rows(worker=None, info=None) == {}


@pytest.mark.parametrize(("settings", "told"), [
    ({"generation_config": "vllm"}, "temperature 1, nothing cut off (--generation-config vllm); "),
    ({"generation_config": "/some/dir", "override_generation_config": {"top_k": 3.0}},
     "temperature 1, nothing cut off (/some/dir and --override-generation-config)"),
])
def test_where_sampling_defaults_come_from(settings: dict[str, Any], told: str) -> None:
    config = Config(model=ModelConfig(**settings))
    assert rows(config, info={**INFO, "generation_defaults": {}})["sampling"].startswith(told)


def test_sampling_that_the_maker_recommends_is_said_to_be_so(tmp_path: Path) -> None:
    own = tmp_path / "SmolLM2-135M-Instruct"
    own.mkdir()
    info = {**INFO, "model_path": str(own),
            "generation_defaults": {"temperature": 0.2, "top_p": 0.9}}
    told = rows(info=info)["sampling"]
    assert told.startswith("temperature 0.2, top_p 0.9 (its maker's for SmolLM2-135M-Instruct, "
                           "whose files name none); others: --generation-config vllm, ")
    (own / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9}')
    assert "(the model's generation_config.json)" in rows(info=info)["sampling"]


def test_a_completion_limit_is_printed() -> None:
    config = Config(model=ModelConfig(override_generation_config={"max_new_tokens": 200.0}))
    info = {**INFO, "limits": {"max_new_tokens": 200},
            "generation_defaults": {"temperature": 0.7, "top_p": 0.8, "max_tokens": 200}}
    found = rows(config, info=info)["sampling"]
    assert found.startswith("temperature 0.7, top_p 0.8, at most 200 new tokens (the model's gen")


def test_template_variables_are_printed() -> None:
    kwargs = {"enable_thinking": False, "m": [1]}
    config = Config(model=ModelConfig(default_chat_template_kwargs=kwargs))
    assert rows(config)["chat"].endswith(
        "...; enable_thinking=False, m=[1] (the template does not name enable_thinking)")


def test_templates_and_parsers_that_were_chosen() -> None:
    config = Config(model=ModelConfig(chat_template="chat.jinja"),
                    gateway=GatewayConfig(tool_call_parser="none", reasoning_parser="deepseek_r1"))
    found = rows(config)
    assert found["chat"] == "the template in chat.jinja"
    assert found["parsers"] == "tool calls: none; reasoning: deepseek_r1"
    inline = Config(model=ModelConfig(chat_template="{{ messages }}"))
    assert rows(inline)["chat"].startswith("the template given: ")


def test_sizes_of_graphs() -> None:
    decodes = [GraphShape(rows, q_len) for rows in (8, 4, 2, 1) for q_len in (2, 1)]
    assert describe_graphs(Graphs(decodes, [])) == "decodes of 1, 2, 4, 8 requests"
    assert describe_graphs(Graphs([], [256, 128, 64, 32, 16])) == (
        "steps with prompts of 16 to 256 (5 sizes) tokens")
    assert describe_graphs(Graphs([], [], 64)) == "decodes of up to 64 rows, captured as they come"
    assert describe_graphs(Graphs([], [])) == ""


def test_a_workers_report_is_read(tmp_path: Path) -> None:
    assert read_info(tmp_path, "worker-0") is None
    write_info(tmp_path, "worker-0", WORKER)
    assert read_info(tmp_path, "worker-0") == WORKER
    assert [file.name for file in tmp_path.iterdir()] == ["worker-0.json"]


def test_what_a_template_lacks_is_said() -> None:
    templates = {"default": "{{ messages }}", "tool_use": "<tool_call>{{ tools }}{{ messages }}"}
    info = {**INFO, "chat_template": "{{ messages }}", "chat_templates": templates}
    found = rows(Config(), info=info | {"generic_tools": ["default"]})["parsers"]
    assert found == "tool calls: hermes; those of the template tool_use; reasoning: none"
    found = rows(Config(), info=info | {"generic_tools": ["default", "tool_use"]})["parsers"]
    assert "which the system message asks for: the template has no place for tools" in found
