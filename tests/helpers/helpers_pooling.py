"""Tiny random checkpoints that pool prompts, and what transformers makes of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers_models import tiny_config, write_checkpoint
from helpers_worker import Ring
from torch import Tensor
from torch.nn import functional

from actorium.actors.params import PoolingTask, ResolvedParams, ResolvedPooling
from actorium.gpu.step.runner import ModelRunner

SAMPLED = ResolvedParams(max_tokens=6, temperature=0.0)
NOT_SAMPLED = ResolvedParams(max_tokens=1, temperature=0.0)


def write_classifier(path: Path, architecture: str, **options: Any) -> Any:
    """A random checkpoint of a class that makes scores; returns transformers' model."""
    import transformers

    family = architecture.partition("For")[0].removesuffix("Text")
    config = tiny_config(f"{family}ForCausalLM", **{"pad_token_id": 0, **options})
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + (weight if weight.ndim == 1 else 0))
    model.save_pretrained(path)
    return model


def write_embedder(path: Path, architecture: str = "LlamaForCausalLM", **options: Any) -> Any:
    """A random checkpoint of a decoder; returns transformers' model without its head."""
    return write_checkpoint(path, architecture, **options).model


def hidden_rows(body: Any, ids: list[int]) -> Tensor:
    """[tokens, hidden] behind the final norm, by transformers."""
    with torch.no_grad():
        rows: Tensor = body(torch.tensor([ids])).last_hidden_state[0]
    return rows


def logits(model: Any, ids: list[int]) -> Tensor:
    """Scores before softmax or sigmoid, by transformers: [1, labels], or [1, tokens, labels]."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits
    return found


def pool_all(runner: ModelRunner, prompts: list[list[int]], pooling: ResolvedPooling,
             sampled: int = 0, **ring: Any) -> list[Tensor]:
    """What the prompts are pooled to, together with so many completions of them."""
    run = Ring(runner, **ring)
    for i, prompt in enumerate(prompts):
        if i < sampled:
            run.submit(prompt, SAMPLED)
        run.submit(prompt, NOT_SAMPLED, pooling=pooling)
    found = []
    for out in run.run():
        if out.pooled is None:
            assert len(out.tokens) == SAMPLED.max_tokens, "a completion beside them is whole"
            continue
        assert out.finish == "stop" and not out.tokens
        found.append(torch.tensor(out.pooled.tolist()))
    return found


def assert_near(got: list[Tensor], want: list[Tensor]) -> None:
    """Of a cosine of at least 0.9999, and of the same length."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert functional.cosine_similarity(ours, theirs, dim=-1).min() >= 0.9999
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def resolved(task: PoolingTask, every_row: bool = False, **more: Any) -> ResolvedPooling:
    """Pooling parameters as the tokenizer resolves them."""
    return ResolvedPooling(task, every_row or task.startswith("token"), **more)
