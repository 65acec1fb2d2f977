"""lm-eval with a local task over `/v1/completions`: log-likelihoods and generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wire import Server

from actorium.actors.params import SamplingParams

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.conformance
ROWS = [("Once upon a", [" time", " stone"]), ("The cat sat on the", [" mat", " sea of"]),
        ("A dog", [" barked", " sang a song"])]


def local(server: Server, **more: Any) -> Any:
    """lm-eval's client of an OpenAI-like server, with token ids as prompts unless told."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    given = {"model": server.model, "base_url": f"{server.url}/v1/completions",
             "tokenizer_backend": "huggingface", "tokenizer": str(server.directory),
             "num_concurrent": 4, "max_retries": 1, "batch_size": 2, "max_length": 512} | more
    return LocalCompletionsAPI(**given)


def test_log_likelihoods_are_the_engines(server: Server) -> None:
    from lm_eval.api.instance import Instance

    model = local(server)
    pairs = [(context, more) for context, choices in ROWS for more in choices]
    found = model.loglikelihood([
        Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)])
    for (context, more), (total, greedy) in zip(pairs, found, strict=True):
        before, after = model._encode_pair(context, more)
        done = server.client.generate(before + after, SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=1))
        told = done.prompt_logprobs[len(before):]
        # Logits are bfloat16: a prompt of which another part was cached may round otherwise, by
        # an eighth for a token at the most.
        assert total == pytest.approx(sum(one.logprob for one in told), abs=0.13 * len(told))
        assert greedy == all(one.rank == 1 for one in told)


def test_generations_are_the_engines(server: Server) -> None:
    from lm_eval.api.instance import Instance

    given = {"until": ["."], "max_gen_toks": 16, "temperature": 0}
    found = local(server, batch_size=1).generate_until([
        Instance("generate_until", {}, (context, dict(given)), number)
        for number, (context, _) in enumerate(ROWS)])
    for (context, _), text in zip(ROWS, found, strict=True):
        want = server.client.generate(context, SamplingParams(
            max_tokens=16, temperature=0.0, stop=["."]))
        assert text == want.text


def test_a_whole_task(server: Server, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"context": context, "choices": choices, "right": 0}) + "\n"
                            for context, choices in ROWS * 4))
    (tmp_path / "ending.yaml").write_text(f"""
task: ending
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}]
""")
    result = simple_evaluate(model=local(server), tasks=["ending"], bootstrap_iters=0,
                             task_manager=TaskManager(include_path=str(tmp_path)))
    assert 0 <= result["results"]["ending"]["acc,none"] <= 1
    assert result["n-samples"]["ending"]["effective"] == len(ROWS) * 4
