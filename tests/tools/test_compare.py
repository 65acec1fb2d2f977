"""`actorium compare`: figures by hand, faults that it must find, and both kinds of sides."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers_faulty_attention
import pytest
import torch
from helpers_attention import FEW
from helpers_faulty_attention import (
    MasksByQueries,
    SageInTorch,
    SageMasksByQueries,
    SageSmoothsInPlace,
    SageTakesOtherScales,
    SmoothsInPlace,
    TakesOtherScales,
)
from helpers_models import Seq, Stepper, load, write_checkpoint
from helpers_runtime import short_dir
from helpers_served import serving
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.roles import GATEWAY, ROLES, WORKER
from actorium.gpu.attention.attention_backend import AttentionBackend, TorchAttention
from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.models.registry import Model
from actorium.tools.cli import main
from actorium.tools.cli.compare_command import run
from actorium.tools.compare.comparison import (
    PARTS,
    Bars,
    Heard,
    Reading,
    compared,
    comparison_table,
)
from actorium.tools.compare.comparison_page import comparison_page
from actorium.tools.compare.listener import TOP, likeliest
from actorium.tools.compare.position_distance import distance, first_divergence

E4M3 = torch.float8_e4m3fn
PROMPTS = [[(5 * i + 3 * n) % 89 + 5 for i in range(n)] for n in (9, 33, 70)]
BARS = Bars(max_kl=1e-4, min_agreement=0.99)
SAGE_BARS = Bars(max_kl=3e-3, min_agreement=0.9)
"""What 8 bits are let differ by."""


# --- figures -------------------------------------------------------------------------------------

def test_a_distance_by_hand() -> None:
    one = {"a": math.log(0.5), "b": math.log(0.3), "c": math.log(0.2)}
    other = {"a": math.log(0.25), "b": math.log(0.5), "c": math.log(0.25)}
    found = distance(one, other)
    assert found.kl == pytest.approx(
        0.5 * math.log(2) + 0.3 * math.log(0.6) + 0.2 * math.log(0.8))
    assert found.largest == pytest.approx(math.log(2)) and found.overlap == 1
    assert not found.same_first and distance(one, one) == (0.0, 0.0, True, 1.0)


def test_tokens_that_one_side_alone_names() -> None:
    """All that is known of `b` on the other side is that it is not likelier than the last."""
    one = {"a": math.log(0.6), "b": math.log(0.3)}
    other = {"a": math.log(0.6), "c": math.log(0.01)}
    found = distance(one, other)
    assert found.largest == pytest.approx(math.log(30)) and found.overlap == 0.5
    # b 0.3 against 0.01 at most, all others 0.1 against 0.39 at least
    assert found.kl == pytest.approx(0.3 * math.log(30) + 0.1 * math.log(0.1 / 0.39))


@FEW
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0, 4))
def test_the_divergence_is_a_lower_bound(seed: int, count: int, apart: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    a = (2 * torch.randn(30, generator=gen, dtype=torch.float64))
    b = (a + apart * torch.randn(30, generator=gen, dtype=torch.float64)).log_softmax(-1)
    a = a.log_softmax(-1)
    whole = float((a.exp() * (a - b)).sum())
    found = distance(top(a, count), top(b, count))
    assert -1e-12 <= found.kl <= whole + 1e-9
    assert found.largest <= float((a - b).abs().max()) + 1e-9
    assert distance(top(a, 30), top(b, 30)).kl == pytest.approx(whole, abs=1e-9)


def top(logprobs: Tensor, count: int = TOP) -> dict[str, float]:
    values, ids = logprobs.topk(count)
    return {str(i): float(v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)}


def test_the_token_that_was_read_is_no_bound_for_others() -> None:
    told = {str(i): -float(i) for i in range(TOP)} | {"read": -40.0}
    assert "read" not in likeliest(told, TOP) and len(likeliest(told, TOP)) == TOP


def test_where_answers_part() -> None:
    assert first_divergence("abc", "abc") is None
    assert (first_divergence("abc", "abd"), first_divergence("ab", "abc")) == (2, 2)


# --- planted faults ------------------------------------------------------------------------------

def heard(model: Model, backend: AttentionBackend, kv_dtype: torch.dtype | None,
          texts: Sequence[list[int]] | None = None) -> list[Heard]:
    """What a model says with this backend, as a server would: an answer token by token, it as part
    of a prompt, and its end behind a prefix that is in the pages."""
    model.attention = StepAttention(backend, backend)
    found = []
    for number, prompt in enumerate(PROMPTS):
        steps = Stepper(model, kv_dtype=kv_dtype)
        seq, tops = Seq(list(prompt)), []
        row = steps.step([(seq, len(prompt))])[0]
        for _ in range(12):
            tops.append(top(row.log_softmax(-1)))
            seq.tokens.append(int(row.argmax()))
            row = steps.step([], [seq])[0]
        answer = seq.tokens[len(prompt):]
        whole = [*prompt, *(answer if texts is None else texts[number])]
        rows = steps.step([(Seq(list(whole)), len(whole))], every_row=True).log_softmax(-1)
        behind = Seq(list(whole))
        steps.step([(behind, len(whole) - 5)])
        last = steps.step([(behind, 5)])[0].log_softmax(-1)
        found.append(Heard(
            str(number), " ".join(map(str, answer)), Reading([*map(str, answer)], tops),
            Reading([*map(str, whole)], [None, *map(top, rows[:-1])]),
            Reading(["next"], [top(last)])))
    return found


def faults(model: Model, backend: AttentionBackend, kv_dtype: torch.dtype | None = None,
           bars: Bars = BARS) -> dict[str, Any]:
    one = heard(model, TorchAttention(), kv_dtype)
    texts = [[int(token) for token in own.decode.tokens] for own in one]
    return compared(one, heard(model, backend, kv_dtype, texts), bars)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "LlamaForCausalLM", seed=3)
    return path


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Model:
    return load(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    model = load(checkpoint)
    for layer in model.layers:
        layer.mixer.kv_scales = torch.tensor([0.02, 0.2, 0.05, 0.01])  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(("backend", "kv_dtype", "found_in"), [
    (TorchAttention(), None, set()), (TorchAttention(), E4M3, set()),
    (SmoothsInPlace(), None, {"decode", "cached"}), (MasksByQueries(), None, {"cached"}),
    (TakesOtherScales(), E4M3, set(PARTS))])
def test_planted_faults_are_found(model: Model, backend: AttentionBackend,
                                  kv_dtype: torch.dtype | None, found_in: set[str]) -> None:
    result = faults(model, backend, kv_dtype)
    assert {fault.partition(":")[0] for fault in result["faults"]} == found_in, result["parts"]
    clean = [result["parts"][name]["largest_kl"] for name in set(PARTS) - found_in]
    assert all(kl < 1e-6 for kl in clean)
    assert (result["equal_answers"] == len(PROMPTS)) is ("decode" not in found_in)
    page, table = comparison_page({"a": "<x>", "b": "", **result}), comparison_table(result)
    assert "&lt;x&gt;" in page and "<svg" in page and table.count("fails: ") == len(
        result["faults"])


@pytest.mark.parametrize(("kind", "found_in"), [
    (SageInTorch, set()), (SageSmoothsInPlace, {"decode", "cached"}),
    (SageMasksByQueries, {"cached"}), (SageTakesOtherScales, set(PARTS))])
def test_planted_faults_of_eight_bits_are_found(plain: Model, kind: type[SageInTorch],
                                                found_in: set[str]) -> None:
    result = faults(plain, kind(), bars=SAGE_BARS)
    assert {fault.partition(":")[0] for fault in result["faults"]} == found_in, result["parts"]
    clean = [result["parts"][name]["mean_kl"] for name in set(PARTS) - found_in]
    assert all(kl < SAGE_BARS.max_kl / 3 for kl in clean)


def test_what_cannot_be_compared_holds_no_bar() -> None:
    nothing = Reading(["a"], [None])
    one, other = (Heard("p", "t", own, own, own) for own in (nothing, Reading(["b"], [None])))
    result = compared([one], [other], Bars(max_kl=9.0))
    assert result["faults"] == [f"{name}: nothing could be compared" for name in PARTS]
    assert result["parts"]["extend"]["texts_cut_otherwise"] == 1
    assert compared([one], [other], Bars())["faults"] == []


# --- the command ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("argv", "says"), [
    (["", ], "two configurations are needed"), (["", "", "--max-kl", "-1"], "--max-kl: must not"),
    (["", "", "--min-agreement", "2"], "--min-agreement: must be between 0 and 1"),
    (["", "", "--answer-tokens", "0"], "--answer-tokens: must be at least 1"),
    (["", "'", "--max-kl", "1"], "neither flags nor a URL"),
    (["", "", "--prompts", "nowhere.txt"], "--prompts: cannot read nowhere.txt"),
    (["", "--attention-backend fa3"], "--attention-backend: flash_attn is not built in"),
    (["", "", "--base-url", "http://x"], "a server is named as A or B")])
def test_wrong_words(argv: list[str], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        run("compare", argv)


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
