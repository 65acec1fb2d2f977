"""Tokens and log-probabilities in bf16, to the bit, alone and together, in other chunks, behind
cached prefixes, preempted, and with drafts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import add_mtp, write_deepseek
from helpers_fp8 import write_twins
from helpers_hybrid import DENSE, MOE, write_hybrid
from helpers_mamba import write_granite
from helpers_models import write_checkpoint
from helpers_recurrent import write_recurrent

from actorium import Engine, SamplingParams
from actorium.actors.errors import BadConfig

BF16, NEW = torch.bfloat16, 24
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=2)
SHARED = [(11 * i + 5) % 199 for i in range(40)]
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (1, 3, 17, 40, 131)] + [
    [*SHARED, *range(3 * n)] for n in (1, 2, 30)]
GDN = {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
       "num_hidden_layers": 4}

CHOSEN = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8,
          "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
          "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
          "index_topk": 31, "index_head_dim": 12, "index_n_heads": 16}
"""Queries attend to some of the tokens, which an indexer chooses."""


def write_mtp(path: Path) -> None:
    """Qwen3.5 with a layer that drafts."""
    add_mtp(path, write_hybrid(path, DENSE, 5, BF16, mtp_num_hidden_layers=1, **GDN))


def write_blocks(path: Path) -> None:
    """Llama in FP8 with scales of blocks, several to a row."""
    source = path / "wide"
    write_checkpoint(source, "LlamaForCausalLM", dtype=BF16, hidden_size=256, head_dim=64,
                     intermediate_size=384)
    write_twins(source, path / "fp8", path / "twin", block=True)
    for file in (path / "fp8").iterdir():
        file.rename(path / file.name)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "Qwen3": lambda path: write_checkpoint(path, dtype=BF16, head_dim=32),
    "Llama": lambda path: write_checkpoint(path, "LlamaForCausalLM", dtype=BF16, head_dim=32),
    "Gemma 3": lambda path: write_checkpoint(
        path, "Gemma3ForCausalLM", dtype=BF16, head_dim=32, sliding_window=32,
        sliding_window_pattern=2),
    "Qwen3-MoE": lambda path: write_hybrid(path, MOE, 5, BF16, head_dim=32),
    "Qwen3.5": write_mtp,
    "Granite 4": lambda path: write_granite(
        path, dtype=BF16, num_local_experts=4, mamba_n_groups=2, hidden_size=128, mamba_n_heads=16),
    "Bamba": lambda path: write_recurrent(path, "BambaForCausalLM", dtype=BF16, hidden_size=128,
                                          mamba_n_heads=16, mamba_n_groups=2),
    "Falcon-H1": lambda path: write_recurrent(path, "FalconH1ForCausalLM", dtype=BF16,
                                              hidden_size=128, mamba_d_ssm=128, mamba_d_head=16),
    "LFM2": lambda path: write_recurrent(path, "Lfm2ForCausalLM", dtype=BF16, hidden_size=128,
                                         block_multiple_of=32),
    "Mamba-2": lambda path: write_recurrent(path, "Mamba2ForCausalLM", dtype=BF16),
    "Jamba": lambda path: write_recurrent(path, "JambaForCausalLM", dtype=BF16, hidden_size=128),
    "DeepSeek": lambda path: add_mtp(path, write_deepseek(path, 3, BF16)),
    "DeepSeek-V3.2": lambda path: write_checkpoint(
        path, "DeepseekV32ForCausalLM", dtype=BF16, **CHOSEN),
    "Llama, FP8": lambda path: write_checkpoint(path, "LlamaForCausalLM", dtype=BF16, head_dim=32),
    "Llama, FP8 in blocks": write_blocks,
    "rows of any length": lambda path: write_checkpoint(
        path, dtype=BF16, head_dim=32, intermediate_size=100),
}


@pytest.fixture
def base() -> Iterator[str]:
    path = tempfile.mkdtemp(dir="/tmp", prefix="act")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def engine(path: Path, base: str, **settings: Any) -> Engine:
    return Engine(path, run_dir=base, **{
        "skip_tokenizer": True, "device": "cpu", "threads": 2, "exact": "on",
        "max_num_seqs": 8, **settings})


def heard(completions: list[Any]) -> list[Any]:
    """Everything that a client is told of them, number by number."""
    return [(list(c.token_ids), [(entry.logprob, entry.top) for entry in c.logprobs])
            for c in completions]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind != "Qwen3")) for kind in WRITERS])
def test_a_request_is_the_same_in_any_company(base: str, tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path)
    kept = {"quantization": "fp8"} if "FP8" in kind else {}
    with engine(tmp_path, base, max_num_batched_tokens=512, speculative="off", **kept) as one:
        alone = [heard([one.client.generate(prompt, GREEDY)])[0] for prompt in PROMPTS]
        assert heard(one.client.generate(PROMPTS, GREEDY)) == alone, "together, prefixes cached"
    drafts = {"speculative": "mtp:2"} if kind in ("Qwen3.5", "DeepSeek") else {}
    with engine(tmp_path, base, max_num_batched_tokens=16, force_preempt_every=5, threads=1,
                disable_radix_cache=True, **drafts, **kept) as other:
        assert heard(other.client.generate(PROMPTS[::-1], GREEDY))[::-1] == alone


def test_what_cannot_be_exact_is_refused_or_told(base: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)  # float32
    with pytest.raises(BadConfig, match=r"exact: on was asked for.* float32 are torch's"):
        engine(tmp_path, base)
    write_checkpoint(tmp_path, dtype=BF16, head_dim=32)
    with pytest.raises(BadConfig, match="exact_ranks: must be a multiple of"):
        engine(tmp_path, base, tensor_parallel_size=4, exact_ranks=2)
    write_checkpoint(tmp_path, dtype=BF16, head_dim=32, intermediate_size=97)
    with pytest.raises(BadConfig, match="2 parts of MLPs of 97 are not equal"):
        engine(tmp_path, base, exact_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3-MoE", "Qwen3.5"])
def test_one_rank_and_two_are_the_same(base: str, tmp_path: Path, kind: str) -> None:
    """Alone on one; together, preempted, in small steps on two, with drafts where there are any."""
    WRITERS[kind](tmp_path)
    with engine(tmp_path, base, exact_ranks=2, speculative="off") as one:
        alone = [heard([one.client.generate(prompt, GREEDY)])[0] for prompt in PROMPTS]
    drafts = {"speculative": "mtp:2"} if kind == "Qwen3.5" else {}
    with engine(tmp_path, base, exact_ranks=2, tensor_parallel_size=2, max_num_batched_tokens=16,
                force_preempt_every=5, **drafts) as two:
        assert heard(two.client.generate(PROMPTS, GREEDY)) == alone
