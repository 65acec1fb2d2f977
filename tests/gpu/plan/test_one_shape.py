"""The plan and the worker hold the same shape of a model, or refuse it with the same words.

Both are asked as users ask them: by `actorium plan`, and by what opens the worker's device.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_configs import EXPERTS, MAMBA, SMALL

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import ActoriumError
from actorium.gpu.worker.device import open_device
from actorium.tools.cli import main

BUDGET = 3 << 20
FLAGS = ["--memory", str(BUDGET), "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]


def planned(path: Path, *flags: str) -> dict[str, Any] | str:
    """What the command prints; or, where it refuses, its words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", str(path), *FLAGS, "--json", *flags])
    if code:
        return err.getvalue().removeprefix("actorium: error: ").strip()
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def served(path: Path) -> dict[str, Any] | str:
    """The pools and states of a worker that has opened its device; or its words."""
    config = Config(
        model=ModelConfig(model=str(path), load_format="dummy"),
        memory=MemoryConfig(kv_cache_bytes=BUDGET),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
        device=DeviceConfig(device="cpu", threads=1))
    try:
        opened = open_device(config, 1, lambda *_: None, {})
    except ActoriumError as e:
        return str(e)
    runner = opened.runner
    return {"pools": [(group.window, pool.pages, len(pool.layers), pool.bytes)
                      for group, pool in zip(runner.model.shape.groups, runner.pools, strict=True)],
            "states": runner.states.bytes if runner.states else 0,
            "dtype": opened.info.dtype, "longest": opened.ready.max_model_len}


def same(path: Path, raw: dict[str, Any]) -> dict[str, Any] | str:
    """What both say."""
    (path / "config.json").write_text(json.dumps(raw))
    plan, worker = planned(path), served(path)
    if not isinstance(plan, str):
        pools = sum(pool["bytes"] for pool in plan["pools"])
        plan = {"pools": [(pool["window"], pool["pages"], pool["layers"], pool["bytes"])
                          for pool in plan["pools"]],
                "states": plan["used"] - pools, "dtype": plan["weights_dtype"],
                "longest": plan["max_model_len"]}
    assert plan == worker
    return worker


# --- what the two once read differently ----------------------------------------------------------

TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(("raw", "windows"), [
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 48, "layer_types": TYPES}, [48]),
    ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": None}, [0]),
    ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "layer_types": TYPES}, [32, 0]),
    ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "head_dim": None}, [0]),
    ({"architectures": ["GraniteMoeHybridForCausalLM"], **MAMBA, "num_local_experts": 0,
      "layer_types": ["attention"] * 4}, [0]),
    ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
     [0]),
], ids=["Mistral's layer_types", "Gemma 3 without windows", "Gemma 3", "heads of 128 for a MoE",
        "Granite without Mamba", "yarn without original positions"])
def test_both_hold_the_same(raw: dict[str, Any], windows: list[int], tmp_path: Path) -> None:
    found = same(tmp_path, {**SMALL, **raw})
    assert isinstance(found, dict)
    assert [window for window, *_ in found["pools"]] == windows
    assert found["states"] == 0 and found["longest"] == SMALL["max_position_embeddings"]


@pytest.mark.parametrize(("raw", "words"), [
    ({"head_dim": 15}, "head_dim: must be even, got 15"),
    ({"hidden_act": "gelu"}, "hidden_act: only silu is supported, got 'gelu'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
     "rope_scaling.rope_type: must be one of default, linear, dynamic, llama3, yarn, "
     "got 'longrope'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor: must be a positive number, got None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0 is supported"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a positive number, got 'small'"),
    ({"max_position_embeddings": None}, "config.json has no usable max_position_embeddings"),
    ({"max_position_embeddings": "far"}, "max_position_embeddings: must be a positive integer"),
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
    ({"dtype": "int8"}, "dtype: must be float32, bfloat16 or float16, got 'int8'"),
    ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
     "final_logit_softcapping: is not supported, got 30.0"),
    ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "use_sliding_window": True},
     "use_sliding_window: is not supported for this architecture"),
])
def test_both_refuse_with_the_same_words(raw: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = same(tmp_path, {**SMALL, "architectures": ["LlamaForCausalLM"], **raw})
    assert isinstance(found, str) and words in found
