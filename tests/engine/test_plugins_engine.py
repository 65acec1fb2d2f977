"""A package with a plug-in of each kind, beside a whole engine: its model family is served, its
logits processor holds through deaths, its formats are read."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from helpers_models import write_checkpoint
from helpers_plugins import write_example, write_package
from helpers_served import Served

from actorium import Client, Engine, InvalidRequest, SamplingParams
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway import actor
from actorium.actors.params import ProcessorCall
from actorium.actors.plugins.entry_points import LOGITS_PROCESSORS
from actorium.actors.runtime.rundir import engine_dir

NEW = 48
PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(40, 70))]
SIZES = (2, 3, 0)
"""Of the sequences that must not be repeated, for each prompt; 0 = none."""

RAISING = """
class Raising:
    arguments = ()
    def check(self, args): pass
    def __call__(self, logits, rows): raise RuntimeError("no luck")
RAISING = Raising()
"""
WHY = "logits_processors: raising: raised RuntimeError"


def chosen(oracle: Any, prompt: list[int], size: int) -> list[int]:
    """Greedy tokens by transformers with its own processor."""
    ids = torch.tensor([prompt])
    full = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                           max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None,
                           pad_token_id=0, no_repeat_ngram_size=size)
    found: list[int] = full[0, len(prompt):].tolist()
    return found


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint of the example's family, and what it must say."""
    path = tmp_path_factory.mktemp("model")
    oracle: Any = write_checkpoint(path, "LlamaForCausalLM", seed=5)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["ExampleForCausalLM"], "model_type": "example",
               "depth": config.pop("num_hidden_layers")}
    (path / "config.json").write_text(json.dumps(config))
    return path, [chosen(oracle, *pair) for pair in zip(PROMPTS, SIZES, strict=True)]


@pytest.fixture(scope="module")
def served(want: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[Served]:
    with serving(want[0], tmp_path_factory.mktemp("site")) as own:
        yield own


@contextmanager
def serving(model: Path, site: Path, **more: Any) -> Iterator[Served]:
    """An engine with the example, and a processor that raises."""
    write_example(site)
    write_package(site, "raising", {LOGITS_PROCESSORS: {"raising": "plugged_raising:RAISING"}})
    (site / "plugged_raising.py").write_text(RAISING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with Engine(model, skip_tokenizer=True, device="cpu", threads=1, port=0,
                    max_restarts=20, **more) as engine:
            path = engine_dir(engine.name)
            assert isinstance(path, Path)
            where = actor.where(path)
            assert where is not None
            yield Served(engine, where.host, where.port)


def params(size: int) -> SamplingParams:
    call = ProcessorCall("no_repeated_ngrams", {"ngram_size": size})
    return SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True,
                          logits_processors=[call] if size else None)


def test_the_family_and_the_processor(served: Served, want: tuple[Path, list[list[int]]]) -> None:
    got = served.engine.client.generate(PROMPTS, [params(size) for size in SIZES])
    assert [list(one.token_ids) for one in got] == want[1]


@pytest.mark.parametrize("role", ["worker-0", "scheduler"])
def test_a_death_changes_nothing(served: Served, want: tuple[Path, list[list[int]]],
                                 role: str) -> None:
    client, tokens, killed = served.engine.client, [], False
    for delta in client.stream(PROMPTS[0], params(SIZES[0])):
        tokens += delta.token_ids
        if not killed:
            assert len(tokens) < NEW
            [pid] = [one.pid for one in client.status().actors if one.role == role]
            os.kill(pid, signal.SIGKILL)
            killed = True
    assert tokens == want[1][0]


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_by_http_with_the_names_of_others(served: Served,
                                          want: tuple[Path, list[list[int]]]) -> None:
    name, args = "no_repeated_ngrams", {"ngram_size": SIZES[0]}
    body = {"model": "default", "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}
    for fields in ({"logits_processors": [{"qualname": name, "kwargs": args}]},
                   {"vllm_xargs": args},
                   {"custom_logit_processor": name, "custom_params": args}):
        answer = post(f"{served.url}/v1/completions", body | fields)
        assert answer["choices"][0]["token_ids"] == want[1][0], fields
    answer = post(f"{served.url}/generate", {
        "input_ids": PROMPTS[0], "custom_logit_processor": name, "sampling_params": {
            "max_new_tokens": NEW, "temperature": 0, "ignore_eos": True,
            "custom_params": args}})
    assert answer["output_ids"] == want[1][0]


@pytest.mark.parametrize(("call", "why"), [
    (ProcessorCall("nobody"), "there is no 'nobody'; this engine has no_repeated_ngrams, raising"),
    (ProcessorCall("no_repeated_ngrams", {"ngram_size": 1}), "ngram_size: must be a number"),
    (ProcessorCall("no_repeated_ngrams", {"size": 2}), "has no argument 'size', but ngram_size"),
    (ProcessorCall("", {"size": 2}), "vllm_xargs: 'size': no logits processor has such"),
    (ProcessorCall("x", {"a": "b" * 70_000}), "bytes of arguments exceed the limit")])
def test_what_is_wrong_is_refused_by_name(served: Served, call: ProcessorCall, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        served.engine.client.generate([1], SamplingParams(logits_processors=[call]))


def test_one_that_raises_harms_its_own_request_alone(served: Served,
                                                     want: tuple[Path, list[list[int]]]) -> None:
    fails_alone(served, want[1][0])
    with pytest.raises(HTTPError, match="500") as caught:
        post(f"{served.url}/v1/completions", {"model": "default", "prompt": [1], "max_tokens": 4,
                                              "logits_processors": ["raising"]})
    assert json.load(caught.value)["error"]["message"] == WHY


@pytest.mark.slow
def test_two_ranks_agree_on_what_raises(want: tuple[Path, list[list[int]]],
                                        tmp_path: Path) -> None:
    with serving(want[0], tmp_path, tensor_parallel_size=2) as served:
        fails_alone(served, want[1][0])


def fails_alone(served: Served, want: list[int]) -> None:
    """A request whose processor raises ends, in the middle of another one's answer; the worker goes
    on."""
    def workers() -> list[int]:
        return [one.pid for one in client.status().actors if one.role.startswith("worker")]

    bad = SamplingParams(max_tokens=4, logits_processors=[ProcessorCall("raising")])
    with Client(served.engine.name) as client:
        before, tokens = workers(), []
        for delta in client.stream(PROMPTS[0], params(SIZES[0])):
            if not tokens:
                with pytest.raises(ActoriumError) as caught:
                    served.engine.client.generate([1], bad)
                assert (caught.value.code, caught.value.message) == ("internal", WHY)
            tokens += delta.token_ids
        assert tokens == want and workers() == before
