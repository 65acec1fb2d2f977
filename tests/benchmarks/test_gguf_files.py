"""The benchmark of GGUF files beside llama.cpp, without llama.cpp: the model that it measures says
what the one says that it is made of, and its figures are those that they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from helpers_benchmarks import benchmark
from helpers_gguf import own_cache, write_model

__all__ = ["own_cache"]
files = benchmark("scenarios.gguf_files")


@pytest.mark.parametrize("tied", [True, False])
def test_a_wider_model_says_the_same(tmp_path: Path, own_cache: Path, tied: bool) -> None:
    narrow, wide = tmp_path / "narrow.gguf", tmp_path / "wide.gguf"
    write_model(narrow, "LlamaForCausalLM", "F32", hidden_size=96, num_attention_heads=6,
                num_key_value_heads=3, head_dim=16, tie_word_embeddings=tied)
    files.write_wide(narrow, wide, 128)
    window = [5, 3, 8, 1, 9, 2, 7]
    odds = [files.odds_of(files.own_logits(files.loaded(own, "float32", "none", 1), window))
            for own in (narrow, wide)]
    assert float((odds[0] - odds[1]).abs().max()) < 1e-4
    assert float(files.divergence(*odds).max()) < 1e-8
    assert float(files.divergence(odds[0], odds[0].roll(1, 0)).min()) > 1e-5
    shapes = {own.name: own.shape.tolist() for own in gguf.GGUFReader(wide).tensors}
    assert shapes["blk.0.attn_q.weight"] == shapes["blk.0.attn_output.weight"] == [128, 128]
    assert shapes["blk.0.attn_k.weight"] == [128, 64]


@pytest.mark.parametrize("tied", [True, False])
def test_one_token_by_hand_is_as_the_engine_has_it(tmp_path: Path, own_cache: Path, tied: bool
                                                   ) -> None:
    file = tmp_path / "toy.gguf"
    write_model(file, "LlamaForCausalLM", "F32", hidden_size=96, num_attention_heads=6,
                num_key_value_heads=3, head_dim=16, tie_word_embeddings=tied)
    want = files.odds_of(files.own_logits(files.loaded(file, "float32", "none", 1), [5]))[0]
    found, largest = files.first_token(file, 5)
    assert float((found - want).abs().max()) < 1e-4
    rounded = [float(files.divergence(found, files.first_token(file, 5, **how)[0])) for how in (
        {"hidden": files.bfloat16}, {"inputs": files.int8(16)}, {"inputs": files.int8(32)})]
    assert min(rounded) > 1e-9 and largest > 0


def test_divergence_is_that_of_odds() -> None:
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert float(files.divergence(half, quarter)) == pytest.approx(0.143841, abs=1e-6)


def test_one_token_that_makes_the_mean_is_seen() -> None:
    even, lone = torch.full((1000,), 0.002), torch.full((1000,), 0.001)
    lone[7] = 2.0
    assert files.spread(lone)["mean"] > files.spread(even)["mean"]
    assert files.spread(lone)["median"] < files.spread(even)["median"]
    assert files.spread(lone)["most"] == 2.0


def test_types_that_mix_others_are_apart() -> None:
    assert {"Q3_K_S", "Q3_K_L", "Q4_K_S", "Q5_K_M"} <= set(files.MIXTURES)
    assert {"Q4_K", "Q6_K", "IQ2_XS", "MXFP4"} <= set(files.TYPES)
    assert not set(files.MIXTURES) & set(files.TYPES)


PEER = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    if task["task"] == "end":
        break
    answer = {"error": "cannot"} if task["task"] == "bad" else {"answer": task}
    print(json.dumps(answer), flush=True)
"""


def test_what_the_peer_cannot_do_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        theirs = files.LlamaCpp(process)
        assert theirs.ask("load", model="m") == {"task": "load", "model": "m"}
        for task, why in (("bad", "cannot"), ("end", "ended")):
            with pytest.raises(RuntimeError, match=why):
                theirs.ask(task)


def test_ratios_are_above_one_where_ours_is_faster() -> None:
    found = files.times_as_fast([1.0, 2.0, 1.0], [2.0, 4.0, 2.0])
    assert found["median"] == 2.0 and found["low"] <= 2.0 <= found["high"]
    assert json.dumps(found)
