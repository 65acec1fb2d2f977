"""What tests of quantised weights ask of a model, and the tiny checkpoints of every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from helpers_deepseek import write_deepseek
from helpers_hybrid import DENSE, MOE, NEXT, write_hybrid
from helpers_mamba import write_granite
from helpers_models import Seq, Stepper, write_checkpoint
from helpers_speculation import Work
from torch import Tensor

from actorium.actors.params import ResolvedParams
from actorium.gpu.models.decoder import Decoder

PROMPT = [5, 9, 30, 2, 77, 140, 8, 8, 61, 17, 120, 4]
WRITERS: dict[str, Callable[..., Any]] = {
    "llama": partial(write_checkpoint, architecture="LlamaForCausalLM", mlp_bias=True),
    "qwen3": write_checkpoint,
    "gemma3": partial(write_checkpoint, architecture="Gemma3ForCausalLM", sliding_window=9),
    "hybrid": partial(write_hybrid, architecture=DENSE),
    "next": partial(write_hybrid, architecture=NEXT),
    "moe": partial(write_hybrid, architecture=MOE),
    "granite": write_granite,
    "deepseek": write_deepseek,
    "mixtral": partial(write_checkpoint, architecture="MixtralForCausalLM"),
    "granite-moe": partial(write_checkpoint, architecture="GraniteMoeForCausalLM",
                           attention_multiplier=0.2),
    "gpt-oss": partial(write_checkpoint, architecture="GptOssForCausalLM", num_local_experts=6,
                       sliding_window=9),
    "gemma2": partial(write_checkpoint, architecture="Gemma2ForCausalLM", sliding_window=9),
}


def told_of(model: Decoder) -> Tensor:
    """Log-probabilities of the tokens of a prompt."""
    params = ResolvedParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (out,) = Work([list(range(40, 75))], [params]).plain(model)
    return torch.tensor([float(one) for one in np.frombuffer(
        b"".join(part.chosen for part in out.prompt_logprobs), np.float32)])


def logits(model: Decoder) -> Tensor:
    """Of every token of PROMPT."""
    return Stepper(model, pages=8).step([(Seq(list(PROMPT)), len(PROMPT))], every_row=True)


def off(got: Tensor, want: Tensor) -> float:
    """Share of the wanted numbers' size that the found ones are off."""
    return float((got - want).norm() / want.norm())
