"""Hidden states of prompts and completions by a whole engine: over HTTP and the SDK, while the
worker is killed."""

from __future__ import annotations

import json
import os
import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import pytest
import torch
from helpers_adapters import merged, toy_adapter
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_runtime import short_dir
from helpers_served import serving
from safetensors.numpy import load

from actorium.actors.client.requests import Completion, Request
from actorium.actors.errors import InvalidRequest
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import Pooled
from actorium.actors.params import PoolingParams, SamplingParams

TEXT = "Once upon a time there was a fox"
LAYERS = (0, 2, -1)


def asked(layers: tuple[int, ...]) -> PoolingParams:
    return PoolingParams(task="hidden_states", layers=layers)


def read(answer: str) -> Any:
    (tensor,) = load(b64decode(answer)).values()
    return tensor


def test_hidden_states_over_http_and_the_sdk() -> None:
    with serving(device="cpu", dtype="float32", enable_return_hidden_states=True,
                 max_num_batched_tokens=32) as served, httpx.Client(
                     base_url=f"http://{served.host}:{served.port}", timeout=60) as http:
        client = served.engine.client
        assert client.server_info()["tasks"] == ["generate", "embed", "token_embed",
                                                 "hidden_states"]
        ids = client.tokenize(TEXT) * 9  # several chunks

        def pooled(layers: tuple[int, ...]) -> Pooled:
            ((_, (completion,)),) = client.run([Request(prompt=ids, pooling=asked(layers))])
            assert completion.pooled is not None
            return completion.pooled

        client.generate(ids)  # what is cached must not be left out
        mine = pooled(LAYERS)
        assert mine.shape == [len(ids), 3, mine.shape[2]] and mine.dtype == "F32"
        assert np.array_equal(mine.array(), load(mine.safetensors("a"))["a"])
        told = http.post("/pooling", json={"input": ids, "task": "hidden_states",
                                           "layers": LAYERS}).json()
        assert np.allclose(read(told["data"][0]["data"]), mine.array(), atol=1e-3)
        body = {"input_ids": [ids, ids[:5]], "return_hidden_states": LAYERS,
                "sampling_params": {"max_new_tokens": 0}}
        several = http.post("/generate", json=body).json()
        assert [read(one["meta_info"]["hidden_states"]).shape[0] for one in several] == [
            len(ids), 5]
        assert [one["meta_info"]["completion_tokens"] for one in several] == [0, 0]
        assert np.allclose(read(several[0]["meta_info"]["hidden_states"]), mine.array(), atol=1e-3)
        last = http.post("/generate", json=body | {"return_hidden_states": True}).json()
        assert np.allclose(read(last[0]["meta_info"]["hidden_states"])[:, 0], mine.array()[:, 2],
                           atol=1e-3)

        for change, why in (({"return_logprob": True}, "with max_new_tokens=0 not"),
                            ({"return_hidden_states": [999]}, "must be between"),
                            ({"return_hidden_states": [999], "sampling_params": {}}, "must be"),
                            ({"sampling_params": {"n": 5}}, "at most 8 texts"),
                            ({"input_ids": [[1]] * 9}, "at most 8 texts")):
            refused = http.post("/generate", json=body | change)
            assert refused.status_code == 400, refused.text
            message = refused.json()["error"]["message"]
            assert message.startswith("return_hidden_states: ") and why in message, message
        refused = http.post("/pooling", json={"input": [[1]] * 9, "task": "hidden_states"})
        assert refused.json()["error"]["message"].startswith("input: at most 8")
        with pytest.raises(InvalidRequest, match="layers: must be between -"):
            raise next(result for _, result in client.run(
                [Request(prompt=ids, pooling=asked((77,)))]))

        pids = {actor.role: actor.pid for actor in client.status().actors}
        requests = [Request(prompt=ids, pooling=asked(LAYERS)) for _ in range(12)]
        for _, result in client.run(requests):
            assert np.allclose(result[0].pooled.array(), mine.array(), atol=1e-3)
            if pid := pids.pop("worker-0", None):
                os.kill(pid, signal.SIGKILL)


def test_hidden_states_of_completions() -> None:
    """Each choice's are those of its text as a prompt, by every way to ask."""
    with serving(device="cpu", dtype="float32", enable_return_hidden_states=True,
                 max_num_batched_tokens=32) as served, httpx.Client(
                     base_url=f"http://{served.host}:{served.port}", timeout=60) as http:
        client = served.engine.client
        ids = client.tokenize(TEXT)

        def check(tokens: list[int], rows: Any, layers: tuple[int, ...] = LAYERS) -> None:
            ((_, (want,)),) = client.run([Request(prompt=ids + tokens, pooling=asked(layers))])
            assert want.pooled is not None and rows.shape == want.pooled.array().shape
            assert np.allclose(rows, want.pooled.array(), atol=1e-3)

        params = SamplingParams(max_tokens=40, n=2, seed=1, stop=["."], hidden_states=LAYERS,
                                logprobs=0)
        for one in client.generate(TEXT, params):
            check(one.token_ids, one.pooled.array())
            assert one.usage.prompt_tokens == len(ids) and len(one.token_ids) == len(one.logprobs)
        *before, last = client.stream(TEXT, msgspec.structs.replace(params, n=1))
        assert not any(one.pooled for one in before) and last.finish_reason
        check([token for one in [*before, last] for token in one.token_ids], last.pooled.array())

        body = {"text": TEXT, "return_hidden_states": LAYERS,
                "sampling_params": {"max_new_tokens": 20, "n": 2, "sampling_seed": 1}}
        for one in http.post("/generate", json=body).json():
            check(one["output_ids"], read(one["meta_info"]["hidden_states"]))
            assert one["meta_info"]["prompt_tokens"] == len(ids)
            assert one["meta_info"]["hidden_states_version"] == "default"
        body |= {"stream": True, "return_hidden_states": True, "sampling_params": {
            "max_new_tokens": 20, "temperature": 0}}
        key = {"Idempotency-Key": "once"}
        events = streamed(http.post("/generate", json=body, headers=key).text)
        _, whole = events[-1]
        assert len(events) > 2 and ["hidden_states" in event["meta_info"] for _, event in events] \
            == [False] * (len(events) - 1) + [True]
        check(whole["output_ids"], read(whole["meta_info"]["hidden_states"]), (-1,))
        assert whole["meta_info"]["completion_tokens"] == 20
        rest = streamed(http.post("/generate", json=body, headers=key | {
            "Last-Event-ID": events[1][0]}).text)
        assert len(rest) < len(events) and rest[-1][1]["meta_info"]["hidden_states"] \
            == whole["meta_info"]["hidden_states"]
        gateway = next(a.pid for a in client.status().actors if a.role.startswith("gateway"))
        with http.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            parts = [next(lines)]
            os.kill(gateway, signal.SIGKILL)  # its successor goes on with both requests
            parts += lines
        assert parts[-2] == "data: [DONE]" and sum('"hidden_states":' in one for one in parts) == 1
        refused = http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": {
            "hidden_states": [0]}})
        assert refused.status_code == 400 and "hidden_states" in refused.text
        with pytest.raises(InvalidRequest, match="hidden_states: .* or lower max_tokens"):
            client.generate(ids, SamplingParams(max_tokens=1000, hidden_states=(0,) * 1000))

        norm = np.array(client.get_weights("model.norm.weight", most=9999)["values"], np.float32)
        client.update_weights({"model.norm.weight": norm * 2}, version=7)
        changed = http.post("/generate", json=body | {"stream": False}).json()
        assert changed["meta_info"]["hidden_states_version"] == "7"
        check(changed["output_ids"], read(changed["meta_info"]["hidden_states"]), (-1,))

        pids = {actor.role: actor.pid for actor in client.status().actors}
        params = SamplingParams(max_tokens=12, temperature=0, hidden_states=LAYERS)
        mortal = ["worker-0", "scheduler", "detokenizer"]
        for _, (one,) in client.run([Request(prompt=ids, params=params) for _ in range(24)]):
            check(one.token_ids, one.pooled.array())
            if mortal:
                os.kill(pids[mortal.pop()], signal.SIGKILL)


def streamed(text: str) -> list[tuple[str, Any]]:
    """(id, content) of each event."""
    parts = [part.partition("\ndata: ") for part in text.split("\n\n") if "\ndata: {" in part]
    return [(head.removeprefix("id: "), json.loads(content)) for head, _, content in parts]


LAYERED = SamplingParams(max_tokens=9, temperature=0, hidden_states=(0, 1, -1))
PROMPTS = [[5, 9, 100, 33, 7], list(range(3, 60))]


def assert_as_transformers(model: Any, prompt: list[int], one: Completion) -> None:
    with torch.no_grad():
        rows = model(torch.tensor([prompt + one.token_ids]), output_hidden_states=True)
    want = torch.stack([rows.hidden_states[layer][0] for layer in (0, 1, -1)], 1)
    assert one.pooled is not None
    torch.testing.assert_close(torch.tensor(one.pooled.array()), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_completions_of_two_ranks_and_of_an_adapter(tmp_path: Path, ranks: int) -> None:
    model = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=2)
    models = {None: model, "a": merged(model, toy_adapter(model, tmp_path / "a", seed=1))}
    with short_dir() as base, Engine(
            tmp_path / "model", device="cpu", dtype="float32", skip_tokenizer=True, threads=1,
            tensor_parallel_size=ranks, run_dir=str(base), max_num_batched_tokens=32,
            enable_lora=True, lora_modules=[f"a={tmp_path / 'a'}"],
            enable_return_hidden_states=True) as engine:
        for name, own in models.items():
            told = engine.client.generate(PROMPTS, LAYERED, adapter=name)
            for prompt, one in zip(PROMPTS, told, strict=True):
                assert_as_transformers(own, prompt, one)


@pytest.mark.slow
def test_completions_of_a_hybrid_with_drafts(tmp_path: Path) -> None:
    oracle = write_hybrid(tmp_path, DENSE, 5, torch.float32, mtp_num_hidden_layers=1, head_dim=32,
                          layer_types=["linear_attention", "full_attention"] * 2,
                          num_hidden_layers=4)
    add_mtp(tmp_path, oracle)
    with short_dir() as base, Engine(
            tmp_path, device="cpu", dtype="float32", skip_tokenizer=True, threads=2,
            run_dir=str(base), speculative="mtp:2,fixed", enable_return_hidden_states=True
            ) as engine:
        told = engine.client.generate(PROMPTS, LAYERED)
    assert sum(one.usage.draft_tokens for one in told)
    for prompt, one in zip(PROMPTS, told, strict=True):
        assert_as_transformers(oracle, prompt, one)
