"""Hidden states of prompts by a whole engine: over HTTP and the SDK, while the worker is killed."""

from __future__ import annotations

import os
import signal
from base64 import b64decode
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from helpers_served import serving
from safetensors.numpy import load

from actorium.actors.client.requests import Request
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Pooled
from actorium.actors.params import PoolingParams

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

        for change, why in (({"stream": True}, "not in a stream"),
                            ({"sampling_params": {"max_new_tokens": 3}}, "of prompts alone"),
                            ({"return_hidden_states": [999]}, "must be between"),
                            ({"input_ids": [[1]] * 9}, "at most 8")):
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
