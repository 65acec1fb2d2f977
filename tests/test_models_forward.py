"""The forward pass against transformers: fp32, random tiny checkpoints, ragged mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import Seq, Stepper, generate, load, write_checkpoint

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 128}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {}),
    ("llama-mha-tied", "LlamaForCausalLM",
     {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("llama-bias-mqa", "LlamaForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama3-rope", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    ("llama-linear", "LlamaForCausalLM",
     {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    ("llama-dynamic", "LlamaForCausalLM",
     {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ("llama-yarn", "LlamaForCausalLM", {"rope_parameters": YARN}),
    ("llama-odd-head", "LlamaForCausalLM", {"head_dim": 10}),
    ("mistral", "MistralForCausalLM", {"num_attention_heads": 8, "head_dim": 8}),
    ("mistral-window", "MistralForCausalLM", {"sliding_window": 9}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen2-window", "Qwen2ForCausalLM",
     {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", "Qwen3ForCausalLM", {}),
    ("qwen3-tied-bias", "Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3-yarn", "Qwen3ForCausalLM", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
]
LENGTHS = (1, 33, 5, 18, 18, 7)


def prompts(vocab: int = 199) -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab, (n,), generator=gen).tolist() for n in LENGTHS]


def reference(model: Any, prompt: list[int], new: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens (no end of sequence) and the logits of every position, by transformers."""
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new,
                             do_sample=False, eos_token_id=None,
                             attention_mask=torch.ones(1, len(prompt)))
        return out[0, len(prompt):].tolist(), model(out).logits[0]


@pytest.mark.parametrize(("name", "architecture", "options"), CASES, ids=[c[0] for c in CASES])
def test_parity_with_transformers(
    tmp_path: Path, name: str, architecture: str, options: dict[str, Any]
) -> None:
    theirs = write_checkpoint(tmp_path, architecture, **options)
    ours = load(tmp_path)
    want = [reference(theirs, p, 12) for p in prompts()]
    for page_size, chunk in ((16, 512), (1, 7), (64, 7)):
        stepper = Stepper(ours, pages=4000 // page_size, page_size=page_size)
        got = generate(stepper, prompts(), 12, chunk, budget=40)
        assert got == [tokens for tokens, _ in want]
        for prompt, (tokens, logits) in zip(prompts(), want, strict=True):
            seq = Seq(prompt + tokens)
            rows = [stepper.step([(seq, min(chunk, len(seq.tokens) - seq.done))], every_row=True)]
            while seq.done < len(seq.tokens):
                rows.append(stepper.step([(seq, min(chunk, len(seq.tokens) - seq.done))],
                                         every_row=True))
            assert torch.allclose(torch.cat(rows), logits, atol=1e-4, rtol=0)
