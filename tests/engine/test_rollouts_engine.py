"""What a trainer asks of rollouts, through all processes and over deaths of some: experts."""

from __future__ import annotations

import json
import os
import signal
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from helpers_hybrid import MOE, write_hybrid
from helpers_runtime import short_dir
from helpers_served import Served

from actorium import Engine, SamplingParams
from actorium.actors.gateway import actor

PROMPT = [(7 * i + 3) % 199 for i in range(40)]
PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True,
                        routed_experts=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("moe")
    return path, write_hybrid(path, MOE, 5)


@pytest.fixture(scope="module")
def served(model: tuple[Path, Any]) -> Iterator[Served]:
    with short_dir() as base, Engine(
            model[0], run_dir=str(base), port=0, skip_tokenizer=True, device="cpu", threads=1,
            max_num_seqs=4, force_preempt_every=25) as engine:
        where = actor.where(base / engine.name)
        assert where is not None
        yield Served(engine, where.host, where.port)


def routed(oracle: Any, tokens: list[int]) -> list[list[list[int]]]:
    """What transformers' routers choose, sorted: of all tokens but the last."""
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = torch.stack([own.softmax(-1).topk(3).indices.sort(-1).values for own in logits], 1)
    found: list[list[list[int]]] = chosen.tolist()
    return found[:-1]


def kill(engine: Engine, role: str) -> None:
    os.kill(next(a.pid for a in engine.client.status().actors if a.role == role), signal.SIGKILL)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "worker-0"])
def test_experts_are_told_once_whoever_dies(served: Served, model: tuple[Path, Any],
                                            role: str) -> None:
    tokens, experts = list[int](), None
    for delta in served.engine.client.stream(PROMPT, PARAMS):
        if len(tokens) < 20 <= len(tokens) + len(delta.token_ids):
            kill(served.engine, role)
        tokens += delta.token_ids
        assert experts is None, "they come with the end alone"
        experts = delta.routed_experts
    assert experts is not None
    assert [[sorted(own) for own in layers] for layers in experts.tolist()] == routed(
        model[1], PROMPT + tokens)


def test_experts_over_http(served: Served, model: tuple[Path, Any]) -> None:
    def post(path: str, **body: Any) -> Any:
        asked = Request(f"{served.url}{path}", json.dumps(body).encode(),
                        {"content-type": "application/json"})
        try:
            with urlopen(asked, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            return error.code, json.loads(error.read())

    sampled = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, whole = post("/v1/completions", prompt=PROMPT, return_routed_experts=True, n=2,
                         return_token_ids=True, **sampled)
    assert status == 200, whole
    for choice in whole["choices"]:
        shown = choice["routed_experts"]
        assert shown["dtype"] == "uint8"
        values = np.frombuffer(b64decode(shown["data"]), np.uint8).reshape(shown["shape"])
        want = routed(model[1], PROMPT + choice["token_ids"])
        assert np.sort(values, -1).tolist() == want
    status, theirs = post("/generate", input_ids=PROMPT, return_routed_experts=True,
                          sampling_params={"max_new_tokens": 8, "temperature": 0,
                                           "ignore_eos": True})
    assert status == 200, theirs
    numbers = np.frombuffer(b64decode(theirs["meta_info"]["routed_experts"]), np.int32)
    assert np.sort(numbers.reshape(values.shape), -1).tolist() == want
    status, also = post("/inference/v1/generate", token_ids=PROMPT,
                        sampling_params={**sampled, "routed_experts": True})
    assert status == 200, also
    assert also["choices"][0]["routed_experts"] == shown
    status, none = post("/v1/completions", prompt=PROMPT, **sampled)
    assert "routed_experts" not in none["choices"][0]
    status, refused = post("/v1/completions", prompt=PROMPT, return_routed_experts=True,
                           stream=True, **sampled)
    assert status == 400 and "return_routed_experts" in str(refused)
