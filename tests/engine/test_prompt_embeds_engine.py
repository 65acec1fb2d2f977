"""Prompts given as embeddings by a whole engine: over HTTP and the SDK, with replicas, while the
worker and the scheduler are killed."""

from __future__ import annotations

import os
import signal
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from helpers_served import serving
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from actorium import SamplingParams
from actorium.actors.client.client import Client
from actorium.actors.errors import ContextOverflow, InvalidRequest
from actorium.actors.models.model_dir import DEMO_MODEL

TEXT = "Once upon a time there was a fox"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def table() -> Tensor:
    """The embedding table of the demo model."""
    for path in Path(DEMO_MODEL).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith("embed_tokens.weight"):
                    found: Tensor = file.get_tensor(name)
                    return found
    raise AssertionError("no table")


def rows_of(client: Client, text: str) -> Tensor:
    return table()[client.tokenize(text)]


def base64(rows: Any) -> str:
    return b64encode(save({"prompt_embeds": torch.as_tensor(rows)})).decode()


def kill(client: Client, role: str) -> None:
    pid, = (actor.pid for actor in client.status().actors if actor.role == role)
    os.kill(pid, signal.SIGKILL)


def test_rows_over_http_and_the_sdk() -> None:
    with serving(device="cpu", dtype="float32", enable_prompt_embeds=True,
                 max_num_batched_tokens=32, max_model_len=512) as served, httpx.Client(
                     base_url=f"http://{served.host}:{served.port}", timeout=60) as http:
        client = served.engine.client
        ids = client.tokenize(TEXT) * 5  # several chunks
        rows, want = table()[ids], client.generate(ids, GREEDY)
        found = client.generate(params=GREEDY, prompt_embeds=rows)
        assert found.token_ids == want.token_ids and found.text == want.text
        assert found.usage.prompt_tokens == len(ids) and found.usage.cached_tokens == 0
        again = client.generate(params=GREEDY, prompt_embeds=rows.float().numpy())
        assert again.token_ids == want.token_ids
        assert again.usage.cached_tokens == (0 if rows.dtype != torch.float32 else
                                             (len(ids) - 1) // 16 * 16)
        assert client.generate(params=GREEDY, prompt_embeds=rows).usage.cached_tokens \
            == (len(ids) - 1) // 16 * 16
        several = client.generate(params=GREEDY, prompt_embeds=[rows[:9], rows])
        assert several[1].token_ids == want.token_ids
        streamed = client.stream(params=GREEDY, prompt_embeds=rows)
        assert [token for delta in streamed for token in delta.token_ids] == want.token_ids

        body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 1}
        both = http.post("/v1/completions", json=body | {
            "prompt": [TEXT], "prompt_embeds": [base64(rows), base64(rows[:9])]}).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in both["choices"]] == [
            want.text, several[0].text, client.generate(TEXT, GREEDY).text]
        alone = http.post("/v1/completions", json=body | {
            "prompt": None, "prompt_embeds": base64(rows)}).json()
        assert alone["choices"][0]["text"] == want.text
        assert alone["usage"]["prompt_tokens"] == len(ids)
        for change, field in (
                ({"prompt_embeds": base64(rows[:, :-1].contiguous())}, "prompt_embeds"),
                ({"prompt_embeds": base64(rows.float() / 0)}, "prompt_embeds"),
                ({"prompt_embeds": base64(rows.double())}, "prompt_embeds"),
                ({"prompt_embeds": "gAJ9cQAu"}, "prompt_embeds"),
                ({"prompt_embeds": "no base64!"}, "prompt_embeds"),
                ({"prompt_embeds": ["no base64!"]}, "prompt_embeds"),
                ({"prompt_embeds": base64(rows.repeat(99, 1))}, "prompt_embeds"),
                ({"echo": True}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
                ({"suffix": "b"}, "suffix"), ({"truncate_prompt_tokens": 4},
                                              "truncate_prompt_tokens"),
                ({"return_token_ids": True}, "return_token_ids"),
                ({"add_special_tokens": False}, "add_special_tokens")):
            refused = http.post("/v1/completions", json=body | {"prompt_embeds": base64(rows)}
                                | change)
            assert refused.status_code == 400, (change, refused.text)
            assert refused.json()["error"]["param"] == field, refused.text
        nothing = http.post("/v1/completions", json=body)
        assert nothing.status_code == 400 and nothing.json()["error"]["param"] == "prompt"
        chat = http.post("/v1/chat/completions", json=body | {
            "messages": [{"role": "user", "content": "a"}], "prompt_embeds": base64(rows)})
        assert chat.status_code == 400 and chat.json()["error"]["param"] == "prompt_embeds"
        lists = http.post("/generate", json={"input_embeds": [[0.0, 1.0]]})
        assert lists.status_code == 400 and "input_embeds: not supported" in lists.text
        with pytest.raises(ContextOverflow):  # 8 MiB, in one message
            client.generate(prompt_embeds=torch.zeros(8 << 10, 256))
        with pytest.raises(InvalidRequest, match="prompt_logprobs: not with prompt_embeds"):
            client.generate(params=SamplingParams(prompt_logprobs=1), prompt_embeds=rows)
        with pytest.raises(InvalidRequest, match="prompt_embeds: not together with prompt"):
            client.generate("a", prompt_embeds=rows)
        streams = [client.stream(params=GREEDY, prompt_embeds=rows[-n:]) for n in range(20, 28)]
        kill(client, "worker-0")
        found = [[token for delta in one for token in delta.token_ids] for one in streams]
        assert found == [one.token_ids for one in client.generate(
            [ids[-n:] for n in range(20, 28)], GREEDY)]


def test_without_the_flag_they_are_refused_by_its_name() -> None:
    """However large they are: a message that a front does not take would end the connection."""
    with serving(device="cpu", dtype="float32", max_body_bytes=64 << 20) as served:
        client, rows = served.engine.client, rows_of(served.engine.client, TEXT)
        large = torch.zeros(3 << 10, 1 << 10)
        for one in (rows, large):
            with pytest.raises(InvalidRequest, match="start it with --enable-prompt-embeds"):
                client.generate(prompt_embeds=one)
            with pytest.raises(InvalidRequest, match="start it with --enable-prompt-embeds"):
                list(client.stream(prompt_embeds=one))
            with httpx.Client(base_url=f"http://{served.host}:{served.port}", timeout=60) as http:
                refused = http.post("/v1/completions", json={"prompt_embeds": base64(one)})
            assert refused.status_code == 400
            assert "--enable-prompt-embeds" in refused.json()["error"]["message"]
        assert client.generate(TEXT, GREEDY).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "roles"), [
    ({}, ("worker-0", "scheduler")), ({"replicas": 2}, ("replica-0", "scheduler")),
    ({"tensor_parallel_size": 2}, ("worker-1",))])
def test_rows_outlive_who_computes_them(settings: dict[str, int], roles: tuple[str, ...]) -> None:
    """Streams of prompts by embeddings go on with the same tokens."""
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    with serving(device="cpu", dtype="float32", enable_prompt_embeds=True, max_num_seqs=8,
                 max_model_len=1024, restart=True, **settings) as served:
        client = served.engine.client
        rows = torch.randn(6, 24, table().shape[1], generator=torch.Generator().manual_seed(1))
        rows = rows * table().float().std()
        want = [one.token_ids for one in client.generate(params=params, prompt_embeds=[*rows])]
        assert len({tuple(one) for one in want}) == 6
        for role in roles:
            streams = [client.stream(params=params, prompt_embeds=own) for own in rows]
            found = [[*next(one).token_ids] for one in streams]
            kill(client, role)
            for own, stream in zip(found, streams, strict=True):
                own += [token for delta in stream for token in delta.token_ids]
            assert found == want
