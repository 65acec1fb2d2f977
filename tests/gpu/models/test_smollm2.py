"""A model that was really trained: SmolLM2-135M-Instruct, GGUF in Q4_1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers_gguf import own_cache, unpaired
from helpers_models import Seq, Stepper, load, oracle_logits
from helpers_smollm2 import smollm2
from helpers_worker import Ring, make_runner
from tokenizers import Tokenizer
from torch import Tensor

from actorium.actors.models.model_dir import eos_ids, read_config, resolve
from actorium.actors.params import ResolvedParams
from actorium.actors.tokenizer.chat_template import load as load_template
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer

__all__ = ["own_cache", "smollm2"]
NEW = 6
PROMPTS = ["The capital of France is", "1, 2, 3, 4, 5,", "def add(a, b):\n    return"]
TEXT = """The Alps are the highest and most extensive mountain range system that lies entirely in
Europe, and stretch approximately 1,200 km across eight countries. The mountains were formed over
tens of millions of years as the African and Eurasian tectonic plates collided."""
DIVERGENCE = 0.02
"""Nats a token from the dequantised model in bfloat16: inputs of products are in 8 bits."""
CHAT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Hello!<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    """Transformers' Llama in float32 with what the gguf package makes of the file."""
    import transformers
    from transformers.initialization import no_init_weights

    reader = gguf.GGUFReader(str(smollm2))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100_000.0, tie_word_embeddings=True)
    with no_init_weights():  # seconds, for what is overwritten
        model = transformers.LlamaForCausalLM(config).eval()
    model.tie_weights()
    weights: dict[str, Tensor] = {}
    for own in reader.tensors:
        wide = gguf.dequantize(own.data, own.tensor_type).reshape(tuple(map(int, own.shape[::-1])))
        weights[own.name] = torch.from_numpy(np.array(wide))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = names.get_name(name, try_suffixes=(".weight",))
            heads = {"attn_q": 9, "attn_k": 3}.get(own.split(".")[-2], 0)
            weight = weights[own]
            parameter.copy_(unpaired(weight, heads) if heads else weight)
    return model


@pytest.fixture
def folder(smollm2: Path) -> Path:
    return resolve(str(smollm2))


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    ring = Ring(make_runner(model))
    for prompt in prompts:
        ring.submit(prompt, ResolvedParams(max_tokens=NEW, temperature=0.0))
    return [o.tokens for o in ring.run()]


@pytest.mark.slow
def test_greedy_tokens_of_what_it_is_worth_equal_transformers(
        oracle: Any, folder: Path, tokenizer: Tokenizer) -> None:
    """Each is the likeliest of all by transformers, which is asked once a prompt."""
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    found = greedy(load(folder, dtype="float32", quantization="none"), prompts)
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = oracle_logits(oracle, prompt + tokens[:-1])[len(prompt) - 1:]
        assert len(tokens) == NEW and tokens == logits.argmax(-1).tolist()
    assert tokenizer.decode(found[0]).startswith(" Paris")
    assert tokenizer.decode(found[1]).startswith(" 6, 7")


@pytest.mark.slow
def test_held_in_codes_it_says_nearly_the_same(folder: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    odds = []
    for quantization in ("none", "auto"):
        model = load(folder, quantization=quantization)
        logits = Stepper(model).step([(Seq(ids), len(ids))], every_row=True)
        odds.append(logits.double().log_softmax(-1))
    divergence = (odds[0].exp() * (odds[0] - odds[1])).sum(-1).mean()
    assert 0 < divergence < DIVERGENCE, float(divergence)
    [tokens] = greedy(model, [tokenizer.encode(PROMPTS[0]).ids])
    assert tokenizer.decode(tokens).startswith(" Paris")


@pytest.mark.slow
def test_text_is_cut_as_the_model_was_taught(oracle: Any, tokenizer: Tokenizer) -> None:
    """Likelihood of plain text: tokens that were cut otherwise would be far less likely."""
    ids = tokenizer.encode(TEXT).ids
    odds = oracle_logits(oracle, ids).log_softmax(-1)
    loss = -odds[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean()
    assert loss < 3.2, float(loss)


def test_template_and_special_tokens_come_out_of_the_file(folder: Path,
                                                          tokenizer: Tokenizer) -> None:
    template = load_template(folder, None).pick(None, False)
    assert template is not None
    assert template.special["eos_token"] == "<|im_end|>"
    # <reponame> begins another file of code.
    assert eos_ids(read_config(folder), {}) == (2, 0, tokenizer.token_to_id("<reponame>"))
    from jinja2 import Template
    assert Template(template.source).render(
        messages=[{"role": "user", "content": "Hello!"}], add_generation_prompt=True) == CHAT
    assert tokenizer.decode(tokenizer.encode(CHAT).ids, skip_special_tokens=False) == CHAT
