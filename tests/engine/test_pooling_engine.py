"""Vectors and scores by a whole engine: of texts, while every process is killed, by two ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_pooling import assert_near, hidden_rows, logits, write_classifier, write_embedder
from helpers_runtime import short_dir
from helpers_text import byte_level, write_tokenizer
from torch.nn import functional

from actorium.actors.client.client import Client
from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import InvalidRequest
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import PoolingParams, ResolvedPooling, SamplingParams
from actorium.tools.null.null_worker import pooled_tokens

EMBED, CLASSIFY = PoolingParams(task="embed"), PoolingParams(task="classify")
MORTAL = ("worker-0", "scheduler", "tokenizer", "detokenizer")


def ask(client: Client, requests: list[Request]) -> list[Completion]:
    found: list[Any] = [None] * len(requests)
    for number, result in client.run(requests):
        if not isinstance(result, list):
            raise result
        (found[number],) = result
    return found


def test_texts_become_vectors_beside_completions() -> None:
    """Of the demo model; a text has the vector of its tokens, and truncation cuts its end."""
    with short_dir() as base, Engine(device="cpu", run_dir=str(base),
                                     max_num_batched_tokens=32) as engine:
        client = engine.client
        info = client.server_info()
        assert info["tasks"] == ["generate", "embed", "token_embed"]
        texts = [f"{i} + {i} = " * (1 + i) for i in range(20)]
        ids = [client.tokenize(text) for text in texts]
        told = ask(client, [Request(prompt=text, pooling=EMBED) for text in texts]
                   + [Request(prompt=own, pooling=EMBED) for own in ids]
                   + [Request(prompt=texts[9], params=SamplingParams(max_tokens=5,
                                                                     ignore_eos=True))]
                   + [Request(prompt=texts[9], pooling=EMBED, truncate_prompt_tokens=4),
                      Request(prompt=ids[9][:4], pooling=EMBED)])
        vectors = [np.array(each.pooled.tolist()) for each in told if each.pooled is not None]
        assert len(vectors) == 42 and len(told[40].token_ids) == 5
        for text, tokens in zip(vectors[:20], vectors[20:40], strict=True):
            assert text.shape == (info["pooling"]["width"],)
            assert abs(float(text @ text) - 1) < 1e-5 and float(text @ tokens) > 0.9999
        assert float(vectors[40] @ vectors[41]) > 0.9999
        assert told[0].usage.prompt_tokens == len(ids[0]) and not told[0].usage.completion_tokens
        with pytest.raises(InvalidRequest, match="task: the model does not serve classify, but"):
            ask(client, [Request(prompt="a", pooling=CLASSIFY)])
        with pytest.raises(InvalidRequest, match="dimensions: 9999 are more than"):
            ask(client, [Request(prompt="a", pooling=PoolingParams(task="embed", dimensions=9999))])


def test_whoever_dies_each_vector_comes_once_and_is_right() -> None:
    with short_dir() as base, Engine(
            "", null_worker=True, skip_tokenizer=True, run_dir=str(base), max_num_seqs=8,
            max_num_batched_tokens=64) as engine:
        chance = np.random.default_rng(1)
        prompts = [chance.integers(0, 512, size).tolist()
                   for size in chance.integers(1, 200, 1200).tolist()]
        pids = {actor.role: actor.pid for actor in engine.client.status().actors}
        mortal = list(MORTAL)
        done = 0
        for number, result in engine.client.run(
                [Request(prompt=prompt, pooling=EMBED) for prompt in prompts], window=200):
            assert isinstance(result, list), result
            assert result[0].pooled == pooled_tokens(np.array(prompts[number], np.int32),
                                                     ResolvedPooling("embed"))
            done += 1
            if done % 200 == 0 and mortal:
                os.kill(pids[mortal.pop()], signal.SIGKILL)
        assert done == len(prompts) and not mortal


def test_a_gritlm_pools_what_is_behind_its_instruction(tmp_path: Path) -> None:
    """As its authors' code: attention to both sides, the mean behind the mark, of length 1."""
    tokenizer = byte_level()
    body = write_embedder(tmp_path, "MistralForCausalLM", vocab_size=tokenizer.get_vocab_size(),
                          is_causal=False, sliding_window=None)
    write_tokenizer(tmp_path, tokenizer)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["GritLM"],
                                "is_causal": True, "sliding_window": 8}))
    begins = ["<|embed|>\n", "<|user|>\nFind the heron.\n<|embed|>\n"]
    texts = [begin + text for begin in begins for text in ("the heron", "what do cows eat? " * 5)]
    with short_dir() as base, Engine(str(tmp_path), device="cpu", dtype="float32",
                                     run_dir=str(base)) as engine:
        assert engine.client.server_info()["tasks"] == ["embed", "token_embed"]
        found = [torch.tensor(vector) for vector in engine.client.embed(texts)]
    want = []
    for text in texts:
        begin = next(each for each in begins if text.startswith(each))
        rows = hidden_rows(body, tokenizer.encode(text).ids)[len(tokenizer.encode(begin).ids):]
        want.append(functional.normalize(rows.mean(0), dim=-1))
    assert_near(found, want)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_two_ranks_pool_as_one(tmp_path: Path, dtype: str, least: float) -> None:
    model = tmp_path / "model"
    scored = write_classifier(model, "LlamaForSequenceClassification", num_labels=3)
    prompts = [[5, 9, 100, 33], list(range(3, 80))]
    with short_dir() as base, Engine(
            model, device="cpu", dtype=dtype, skip_tokenizer=True, threads=2,
            tensor_parallel_size=2, run_dir=str(base), max_num_batched_tokens=32,
            enable_return_hidden_states=True) as engine:
        assert engine.client.server_info()["tasks"] == ["classify", "hidden_states"]
        told = ask(engine.client, [Request(prompt=own, pooling=CLASSIFY) for own in prompts])
        hidden = ask(engine.client, [Request(prompt=own, pooling=PoolingParams(
            task="hidden_states", layers=(0, 1, -1))) for own in prompts])
        with pytest.raises(InvalidRequest, match="the model does not generate; it serves classify"):
            engine.client.generate([1, 2, 3])
    for own, each in zip(prompts, hidden, strict=True):
        with torch.no_grad():
            want = scored.model(torch.tensor([own]), output_hidden_states=True).hidden_states
        assert each.pooled is not None
        given = torch.tensor(each.pooled.array())
        wanted = torch.stack([want[layer][0] for layer in (0, 1, -1)], 1)
        assert functional.cosine_similarity(given, wanted, dim=-1).min() >= least
        torch.testing.assert_close(given.norm(dim=-1), wanted.norm(dim=-1), rtol=0.02, atol=0)
    if dtype == "float32":
        assert_near([torch.tensor(each.pooled.tolist()) for each in told if each.pooled],
                    [logits(scored, own)[0].softmax(-1) for own in prompts])


@pytest.mark.slow
def test_a_decoder_served_for_vectors_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    body = write_embedder(model)
    with short_dir() as base, Engine(
            model, device="cpu", dtype="float32", skip_tokenizer=True, runner="pooling",
            pooler_config={"pooling_type": "MEAN"}, run_dir=str(base)) as engine:
        assert engine.client.server_info()["tasks"] == ["embed", "token_embed"]
        (told,) = ask(engine.client, [Request(prompt=[5, 9, 100], pooling=EMBED)])
    assert told.pooled is not None
    want = functional.normalize(hidden_rows(body, [5, 9, 100]).mean(0), dim=-1)
    assert_near([torch.tensor(told.pooled.tolist())], [want])
