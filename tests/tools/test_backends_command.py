"""`actorium backends`: what each can do here, and what would be chosen."""

from __future__ import annotations

import json

import pytest
from helpers_models import CPU

from actorium.gpu.attention.attention_backend import NativeAttention
from actorium.gpu.attention.capabilities import DECODE
from actorium.tools.cli import main
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions

native = pytest.mark.skipif(bool(NativeAttention.missing(DECODE, CPU)), reason="no C kernels")


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["backends", "--device", "cpu", "--json", *argv]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


@native
def test_what_auto_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert {part: own["name"] for part, own in found["chosen"].items()} == {
        "extend": "native", "decode": "native"}
    assert not found["backends"]["native"]["decode"]["fault"]
    assert found["not_built"]["flash_attn"]["names"][0] == "fa"
    found = listed(capsys, "--kv-cache-dtype", "float16", "--speculative", "mtp:3")
    assert found["chosen"]["decode"]["name"] == "torch" and found["needs"]["query_len"] == 4
    assert "no pages in float16" in found["backends"]["native"]["decode"]["fault"]


@native
def test_what_is_asked_for_and_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--dtype", "float32", "-ac.backend", "CPU_ATTN")
    assert not found["chosen"] and found["refused"].startswith(
        "attention_backend: native cannot serve prompts: it takes no queries in float32")
    assert main(["backends", "--device", "cpu", "--prefill-attention-backend", "torch"]) == 0
    text = capsys.readouterr().out
    assert "prompts        torch (prefill_attention_backend: torch)" in text
    assert "flashinfer     flashinfer_mla" in text and "there is no adapter for it" in text


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["backends", "--device", "cuda"]) == 2
    assert "cuda was asked for" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [
    ["-ac.backend", "TRITON_ATTN"], ["--attention-config", '{"backend": "TRITON_ATTN"}'],
    ["--attention-config.backend", "TRITON_ATTN"], ["--attention-backend", "TRITON_ATTN"]])
def test_vllms_object(argv: list[str]) -> None:
    parsed = parse("actorium", argv, NoOptions)
    assert parsed.config.device.attention_backend == "TRITON_ATTN" and not parsed.notes
    more = parse("actorium", ["-ac", '{"use_cudnn_prefill": true}'], NoOptions)
    assert more.notes == ["-ac use_cudnn_prefill changes nothing here: a backend's kernels "
                          "choose it"]
