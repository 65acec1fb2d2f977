"""Faults that attention backends of others have had, planted in each kind of kernels, and what
finds them: `actorium compare`, and on the demo model `actorium eval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import helpers_faulty_attention
import pytest
import torch
from helpers_attention import INTERPRETED
from helpers_faults import PROMPTS, beside_torch
from helpers_faulty_attention import (
    MasksByQueries,
    SageInTorch,
    SmoothsInPlace,
    SmoothsPromptsAlone,
    TakesOtherScales,
    with_fault,
)
from helpers_models import CPU, load, write_checkpoint
from helpers_runtime import short_dir
from helpers_served import serving

from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.roles import GATEWAY, ROLES, WORKER
from actorium.gpu.attention.attention_backend import (
    AttentionBackend,
    NativeAttention,
    SageAttention,
    TorchAttention,
    TritonAttention,
)
from actorium.gpu.attention.capabilities import EXTEND
from actorium.gpu.models.decoder import Decoder
from actorium.kernels.cpu.native_library import library
from actorium.tools.cli import main
from actorium.tools.compare.comparison import PARTS, Bars, comparison_page, comparison_table
from actorium.tools.evaluation.demo_scores import evaluate

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
SCALES = torch.tensor([0.02, 0.2, 0.05, 0.01])
"""Of pages in FP8."""
BARS = Bars(max_kl=2e-3)
SHARP = Bars(max_kl=2e-4)
"""Where both round alike."""
FAULTS = [
    pytest.param(None, set(), id="none"),
    pytest.param(SmoothsInPlace, {"decode", "cached"}, id="smooths in place"),
    pytest.param(SmoothsPromptsAlone, {"decode"}, id="smooths prompts alone"),
    pytest.param(MasksByQueries, {"cached"}, id="masks by queries"),
    pytest.param(TakesOtherScales, set(PARTS), id="other scales")]
"""And the parts in which `compare` finds them, and in no other."""
Make = Callable[[torch.dtype], Decoder]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A model of this dtype."""
    made: dict[torch.dtype, Decoder] = {}

    def model(dtype: torch.dtype) -> Decoder:
        if dtype not in made:
            path = tmp_path_factory.mktemp("llama")
            dim = 32 if dtype is torch.bfloat16 else 16
            write_checkpoint(path, "LlamaForCausalLM", seed=3, dtype=dtype, head_dim=dim)
            made[dtype] = load(path)
        return made[dtype]

    return model


def backend_with(fault: type[AttentionBackend] | None, name: str) -> AttentionBackend:
    if name == "native":
        if why := NativeAttention.missing(EXTEND, CPU):
            pytest.skip(why)
        return with_fault(fault, NativeAttention)(library(), 2)
    if name == "sage in C":
        if why := SageAttention.missing(EXTEND, CPU):
            pytest.skip(why)
        return with_fault(fault, SageAttention)("cpu")
    if name == "sage in Triton":
        return with_fault(fault, SageAttention)("cuda")
    return with_fault(fault, {"torch": TorchAttention, "sage in torch": SageInTorch,
                              "triton": TritonAttention}[name])()


TRITON = [pytest.mark.slow, *INTERPRETED]


@pytest.mark.parametrize(("fault", "found_in"), FAULTS)
@pytest.mark.parametrize(("name", "kv_dtype"), [
    ("torch", None), ("sage in torch", None), ("native", None), ("native", INT8),
    ("sage in C", None), ("sage in C", INT8),
    pytest.param("torch", INT8, marks=pytest.mark.slow),
    pytest.param("sage in torch", INT8, marks=pytest.mark.slow),
    pytest.param("triton", None, marks=TRITON), pytest.param("triton", INT8, marks=TRITON),
    pytest.param("sage in Triton", None, marks=TRITON),
    pytest.param("sage in Triton", INT8, marks=TRITON)])
def test_planted_faults_are_found(make: Make, name: str, kv_dtype: torch.dtype | None,
                                  fault: type[AttentionBackend] | None,
                                  found_in: set[str]) -> None:
    """In the parts that they spoil; the others stay far within the bars."""
    model = make(torch.bfloat16 if name in ("native", "sage in C") else torch.float32)
    for layer in model.layers:
        layer.mixer.kv_scales = None  # type: ignore[attr-defined]
    exact = name in ("torch", "triton") and kv_dtype is None
    prompts, bars = PROMPTS[1:] if "riton" in name else PROMPTS, SHARP if exact else BARS
    result = beside_torch(model, backend_with(fault, name), kv_dtype, bars, prompts)
    assert {fault.partition(":")[0] for fault in result["faults"]} == found_in, result["parts"]
    clean = [result["parts"][part]["mean_kl"] for part in set(PARTS) - found_in]
    assert all(kl < (1e-6 if exact else bars.max_kl / 3) for kl in clean)
    if exact:
        assert (result["equal_answers"] == len(prompts)) is ("decode" not in found_in)
    page, table = comparison_page({"a": "<x>", "b": "", **result}), comparison_table(result)
    assert "&lt;x&gt;" in page and "<svg" in page and table.count("fails: ") == len(
        result["faults"])


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize(("fault", "found_in"), [FAULTS[0], FAULTS[3], FAULTS[4]])
def test_they_are_found_over_pages_in_fp8(make: Make, name: str,
                                          fault: type[AttentionBackend] | None,
                                          found_in: set[str]) -> None:
    model = make(torch.bfloat16 if name == "native" else torch.float32)
    for layer in model.layers:
        layer.mixer.kv_scales = SCALES  # type: ignore[attr-defined]
    result = beside_torch(model, backend_with(fault, name), E4M3, BARS)
    assert {fault.partition(":")[0] for fault in result["faults"]} == found_in, result["parts"]


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "found"), [
    ("", False), ("smoothing", True), ("half_smoothing", False), ("masking", True),
    ("scaling", True)])
def test_what_questions_find_on_a_trained_model(worker: str, found: bool,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """C's kernels over pages in INT8. A small mean that comes off prompts alone goes unnoticed by
    whoever counts right answers, but not by whoever compares; a mask that is wrong behind a prefix
    alone is found where prompts are read in chunks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(helpers_faulty_attention.__file__).parent))
    roles = dict(ROLES) | {"gateway-0": GATEWAY}
    if worker:
        roles[WORKER] = f"helpers_faulty_attention:{worker}_worker"
    with Engine("", attention_backend="native", kv_cache_dtype="int8", device="cpu",
                fork_server="off", roles=roles,
                max_num_batched_tokens=32 if worker == "masking" else 2048) as engine:
        result = evaluate(engine.client, 3, SamplingParams(temperature=0.0, max_tokens=48))
    short = [task for task in result.tasks if task.task != "story"]
    share = sum(task.right for task in short) / sum(task.count for task in short)
    assert share <= 0.9 if found else share == 1, result.tasks


@pytest.mark.slow
def test_a_server_with_a_fault_beside_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_dir() as run_dir:  # whose sockets' names must be short
        monkeypatch.setenv("ACTORIUM_RUN_DIR", str(run_dir))
        compared_with_a_server(tmp_path, monkeypatch, capsys)


def compared_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(helpers_faulty_attention.__file__).parent))
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text('Once upon a time there was a dragon\n{"prompt": "12 + 30 ="}\n')
    argv = ["--prompts", str(prompts), "--answer-tokens", "24", "--max-kl", "0.01",
            "--json", str(report), "--html", str(tmp_path / "report.html"), "--device", "cpu"]
    with serving(attention_backend="torch", device="cpu") as right:
        assert main(["compare", "--attention-backend native", right.url, *argv]) == 0
    faulty = dict(ROLES) | {"gateway-0": GATEWAY,
                            WORKER: "helpers_faulty_attention:smoothing_worker"}
    with serving(attention_backend="torch", device="cpu", fork_server="off",
                 roles=faulty) as wrong:
        assert main(["compare", "--attention-backend torch", wrong.url, *argv]) == 1
    assert "fails: decode: mean KL" in capsys.readouterr().out
    assert json.loads(report.read_text())["faults"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
