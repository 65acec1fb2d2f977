"""Vectors of texts as sentence-transformers makes them, of the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.conformance
ST = "sentence_transformers.sentence_transformer.modules"
TEXTS = ["Once there was a fox.", "The dog sleeps.", "what do cows eat? " * 12, "¿Qué comen?"]


def write_model(path: Path, mode: str, architecture: str, dense: bool, normalize: bool,
                prompts: dict[str, str], include_prompt: bool = True) -> Any:
    """A random decoder with the demo model's tokenizer and modules behind it, as saved by the
    library; returns the library's model."""
    from helpers_models import write_checkpoint
    from transformers import PreTrainedTokenizerFast

    from actorium.actors.models.model_dir import DEMO_MODEL

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"),
                                        pad_token="<pad>", eos_token="<eos>")
    write_checkpoint(path / "body", architecture, vocab_size=len(tokenizer) + 7)
    tokenizer.save_pretrained(path / "body")
    modules = pytest.importorskip(ST)
    parts = [modules.Transformer(str(path / "body"), max_seq_length=40),
             modules.Pooling(64, pooling_mode=mode, include_prompt=include_prompt)]
    if dense:
        parts.append(modules.Dense(64, 24, activation_function=torch.nn.Tanh()))
    parts += [modules.Normalize()] * normalize
    model = library.SentenceTransformer(modules=parts, prompts=prompts, device="cpu")
    model.save(str(path / "saved"))
    return model


@pytest.mark.parametrize(("mode", "architecture", "dense", "normalize"), [
    ("lasttoken", "Qwen3ForCausalLM", False, True), ("mean", "LlamaForCausalLM", True, True),
    ("cls", "MistralForCausalLM", False, False), ("mean", "Qwen2ForCausalLM", False, False)])
def test_texts_have_the_library_s_vectors(tmp_path: Path, mode: str, architecture: str,
                                          dense: bool, normalize: bool) -> None:
    from helpers_runtime import short_dir

    from actorium.actors.client.requests import Request
    from actorium.actors.launcher.engine import Engine
    from actorium.actors.params import PoolingParams

    prompts = {"query": "Find: ", "document": ""}
    model = write_model(tmp_path, mode, architecture, dense, normalize, prompts)
    want = model.encode(TEXTS, convert_to_tensor=True)
    cut = model.encode(TEXTS, convert_to_tensor=True, truncate_dim=16)
    with short_dir() as base, Engine(tmp_path / "saved", device="cpu", dtype="float32",
                                     run_dir=str(base)) as engine:
        info = engine.client.server_info()
        assert info["tasks"] == ["embed", "token_embed"] and info["max_model_len"] == 40
        assert info["pooling"]["prompts"] == prompts
        for dimensions, expected in ((None, want), (16, cut)):
            pooling = PoolingParams(task="embed", dimensions=dimensions)
            requests = [Request(prompt=text, pooling=pooling, truncate_prompt_tokens=-1)
                        for text in TEXTS]
            for number, (answer,) in engine.client.run(requests):
                got = torch.tensor(answer.pooled.tolist())
                theirs = expected[number].float()
                if dimensions and normalize:  # ours has length 1 behind the cut, as vLLM's
                    theirs = torch.nn.functional.normalize(theirs, dim=-1)
                assert torch.nn.functional.cosine_similarity(got, theirs, dim=0) >= 0.9999
                torch.testing.assert_close(got, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("prompt", ["Find: ", "Represent it for retrieval:"])
def test_instructions_are_left_out_as_by_the_library(tmp_path: Path, prompt: str) -> None:
    from helpers_runtime import short_dir

    from actorium.actors.client.requests import Request
    from actorium.actors.launcher.engine import Engine
    from actorium.actors.params import PoolingParams

    model = write_model(tmp_path, "mean", "LlamaForCausalLM", False, True, {"query": prompt},
                        include_prompt=False)
    want = model.encode(TEXTS, convert_to_tensor=True, prompt_name="query").float()
    pooling = PoolingParams(task="embed", instruction=prompt)
    with short_dir() as base, Engine(tmp_path / "saved", device="cpu", dtype="float32",
                                     run_dir=str(base)) as engine:
        requests = [Request(prompt=prompt + text, pooling=pooling, truncate_prompt_tokens=-1)
                    for text in TEXTS]
        for number, (answer,) in engine.client.run(requests):
            got = torch.tensor(answer.pooled.tolist())
            assert torch.nn.functional.cosine_similarity(got, want[number], dim=0) >= 0.9999
    whole = model.encode([prompt + text for text in TEXTS], convert_to_tensor=True).float()
    assert torch.nn.functional.cosine_similarity(whole, want).max() < 0.999, "it matters"


PAIRS = ("{{ (messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first) "
         "or 'Judge.' }}{% for role in ['query', 'document'] %}<{{ role }}>: "
         "{{ messages | selectattr('role', 'eq', role) | map(attribute='content') | first }}"
         "{% endfor %} Answer:")


@pytest.mark.parametrize("instruct", [None, "Find the cow"])
def test_a_reranker_that_generates_has_the_library_s_scores(tmp_path: Path,
                                                            instruct: str | None) -> None:
    """A decoder with `LogitScore` behind it and a template for pairs, as Qwen3-Reranker."""
    from helpers_models import write_checkpoint
    from helpers_runtime import short_dir
    from transformers import PreTrainedTokenizerFast

    from actorium.actors.launcher.engine import Engine
    from actorium.actors.models.model_dir import DEMO_MODEL

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"),
                                        pad_token="<pad>", eos_token="<eos>", chat_template=PAIRS)
    write_checkpoint(tmp_path / "body", vocab_size=len(tokenizer) + 7)
    tokenizer.save_pretrained(tmp_path / "body")
    modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    body = pytest.importorskip(ST).Transformer(str(tmp_path / "body"),
                                               transformer_task="text-generation")
    model = library.CrossEncoder(modules=[body, modules.LogitScore(77, 5)], device="cpu")
    model.save(str(tmp_path / "saved"))
    want = model.predict([("what do cows eat?", text) for text in TEXTS], prompt=instruct)
    with short_dir() as base, Engine(tmp_path / "saved", device="cpu", dtype="float32",
                                     run_dir=str(base)) as engine:
        found = engine.client.score("what do cows eat?", TEXTS, instruct=instruct)
    assert found == pytest.approx(want.tolist(), abs=2e-5) and len(set(found)) == len(TEXTS)


def test_what_else_the_library_writes_is_refused_by_name(tmp_path: Path) -> None:
    from actorium.actors.config.tree import ModelConfig
    from actorium.actors.errors import BadModel
    from actorium.actors.models.pooling_shape import read_pooling

    write_model(tmp_path, "max", "LlamaForCausalLM", True, True, {})
    saved = tmp_path / "saved"
    raw = json.loads((saved / "config.json").read_text())
    with pytest.raises(BadModel, match="pooling_mode: one of cls, mean and lasttoken"):
        read_pooling(saved, raw, ModelConfig())
