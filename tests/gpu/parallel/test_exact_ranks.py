"""With `--exact on` a token's bits do not depend on its company, on ranks as on one; with
`--exact-ranks` not on the number of ranks either. Whole models in bf16, log-probabilities to the
bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import CONFIGS, name_of, shape_of
from helpers_hybrid import SPARSE, write_hybrid
from helpers_kinds import write_bf16_kind
from helpers_mamba import write_granite
from helpers_models import write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_worker import Ring

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.parallel.rank_slices import rank_faults
from actorium.gpu.worker.device import open_device
from actorium.kernels.cpu.native_library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")
BF16 = torch.bfloat16
PARAMS = ResolvedParams(max_tokens=8, temperature=0.0, logprobs=3)
PROMPTS = [[(7 * i + n) % 190 + 2 for i in range(n)] for n in (1, 5, 70, 33)]
KINDS: dict[str, Callable[[Path], Any]] = {
    **{kind: partial(write_bf16_kind, kind=kind) for kind in (
        "llama", "qwen3", "gemma3", "moe", "qwen35", "deepseek")},
    "odd": lambda path: write_checkpoint(
        path, "LlamaForCausalLM", dtype=BF16, head_dim=32, intermediate_size=90, mlp_bias=True,
        attention_bias=True, tie_word_embeddings=True, vocab_size=201),
    "shared expert": lambda path: write_hybrid(path, SPARSE, 5, BF16, head_dim=32),
    "granite": lambda path: write_granite(
        path, dtype=BF16, num_local_experts=4, mamba_n_groups=2, hidden_size=128, mamba_n_heads=16),
}


def opened_config(path: Path, ranks: int, exact_ranks: int, tokens: int = 48, **device: Any
                  ) -> Config:
    return Config(model=ModelConfig(model=str(path)),
                  memory=MemoryConfig(page_size=16, max_total_tokens=1600, checkpoints=2),
                  scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=tokens),
                  device=DeviceConfig(device="cpu", threads=ranks, exact="on",
                                      exact_ranks=exact_ranks, **device),
                  speculation=SpeculationConfig(speculative="off"))


def served(config: Config, group: RankGroup, together: bool = True, **ring: Any) -> list[str]:
    """What each prompt's request gave: tokens, and the bits of log-probabilities."""
    runner = open_device(config, 1, lambda *_: None, {}, group).runner
    run = Ring(runner, budget=config.scheduler.max_num_batched_tokens, **ring)
    for prompt in PROMPTS:
        run.submit(prompt, PARAMS)
        if not together:
            run.run()
    return [f"{own.tokens} " + " ".join(b"".join(getattr(row, name) for row in own.logprobs).hex()
                                        for name in ("chosen", "top_ids", "top_logprobs"))
            for own in run.run()]


def on_ranks(tmp_path: Path, size: int, config: Config, **options: Any) -> list[str]:
    """The same on so many ranks, which agree."""
    folder = tmp_path / f"{size} {len(list(tmp_path.iterdir()))}"
    found = whole(run_ranks(folder, size, lambda group: served(config, group, **options)))
    assert all(own == found[0] for own in found)
    return found[0]


def written(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    KINDS[kind](path)
    return path


FAST = ("llama",)


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in KINDS])
def test_other_sequences_change_nothing_on_two_ranks(tmp_path: Path, kind: str) -> None:
    """Alone, and together in small chunks with other steps, and preempted."""
    path = written(tmp_path, kind)
    alone = on_ranks(tmp_path, 2, opened_config(path, 2, 1, 256), together=False)
    other = on_ranks(tmp_path, 2, opened_config(path, 2, 1, 19, enforce_eager=True),
                     force_preempt_every=4)
    assert alone == other


@pytest.mark.parametrize(("kind", "most"), [
    pytest.param(kind, most, marks=[pytest.mark.slow] * (kind not in FAST or most > 2))
    for kind in KINDS for most in (2, 4) if (kind, most) not in (("granite", 4), ("odd", 4))])
def test_the_number_of_ranks_changes_nothing(tmp_path: Path, kind: str, most: int) -> None:
    path = written(tmp_path, kind)
    alone = served(opened_config(path, 1, most, 256), LoneRank(), together=False)
    for size in (2, 4)[:most // 2]:
        assert on_ranks(tmp_path, size, opened_config(path, size, most)) == alone, size


@pytest.mark.parametrize(("write", "words"), [
    (lambda path: write_checkpoint(path), "weights in float32"),
    (lambda path: write_checkpoint(path, dtype=BF16, intermediate_size=97), "MLPs of 97"),
    (lambda path: write_checkpoint(path, dtype=BF16, num_attention_heads=3, head_dim=32,
                                   num_key_value_heads=1), "share 3 attention heads evenly"),
    (lambda path: write_granite(path, dtype=BF16), "Mamba-2"),
    (lambda path: write_checkpoint(path, "Olmo2ForCausalLM", dtype=BF16), "norms over all heads")])
def test_what_cannot_have_the_bits_of_two_ranks_is_refused(
        tmp_path: Path, write: Callable[[Path], Any], words: str) -> None:
    write(tmp_path)
    with pytest.raises(BadConfig, match=words) as error:
        served(opened_config(tmp_path, 1, 2), LoneRank())
    assert error.value.message.startswith("exact_ranks: 2 ranks and fewer")


@pytest.mark.parametrize(("device", "words"), [
    ({"exact": "on", "exact_ranks": 3}, "must be 1, 2, 4, 8 or 16"),
    ({"exact_ranks": 2}, "with --exact on alone"),
    ({"exact": "on", "exact_ranks": 2, "tensor_parallel_size": 4}, "a multiple of")])
def test_the_flag_is_checked(device: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        validate(Config(device=DeviceConfig(**device)))


def test_without_the_flag_it_does(tmp_path: Path) -> None:
    """Else the same bits would show nothing. MLPs are wide: AMX sums by 32 columns, so that few are
    seldom rounded otherwise in bf16."""
    write_checkpoint(tmp_path, dtype=BF16, head_dim=32, intermediate_size=2048)
    alone = served(opened_config(tmp_path, 1, 1), LoneRank())
    assert on_ranks(tmp_path, 2, opened_config(tmp_path, 2, 1)) != alone


def test_attention_beside_a_recurrent_layer_has_no_equal_bits() -> None:
    """`actorium verify` found other tokens with two ranks than with one."""
    told = {name_of(config) for config in CONFIGS
            if any("beside it" in why for why in rank_faults(shape_of(config), 2))}
    assert told == {"FalconH1ForCausalLM"}
