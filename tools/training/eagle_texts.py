"""Conversations that a chat model writes alone, and the acceptance of an EAGLE-3 head on them.

Where nobody brings questions, the model is given its chat template up to the user's words and
writes these, too; then it answers them. So a head learns from what its model says, and no data set
is needed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from actorium import Client, Completion, Engine, SamplingParams
from actorium.actors.client.requests import Request

QUESTION_TOKENS, ANSWER_TOKENS = 60, 160
HELD_OUT = 32
"""The last of the conversations, which nothing is trained on."""
_WORDS = "@@words@@"


class WrittenConversation(NamedTuple):
    """Token ids."""

    prompt: list[int]
    answer: list[int]


def write_texts(model: Path, file: Path, count: int, seed: int, questions: Sequence[str] = ()
                ) -> None:
    """Writes conversations, a JSON object a line. questions: what users say; (): the model is asked
    for so many, of which those that end are kept."""
    tokenizer = AutoTokenizer.from_pretrained(str(model))

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    before, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": _WORDS}], tokenize=False, add_generation_prompt=True
    ).split(_WORDS)
    draw = random.Random(seed)
    with Engine(model, speculative="off", max_num_seqs=32) as engine:
        asked = [encoded(own) for own in questions] or list(_asked(
            engine.client, encoded(before), count, tokenizer.eos_token_id, draw))
        prompts = [[*encoded(before), *own, *encoded(after)] for own in asked]
        # As a server does: some callers sample, some do not.
        params = [SamplingParams(max_tokens=ANSWER_TOKENS, temperature=draw.choice((0.0, 0.7)),
                                 seed=draw.getrandbits(32)) for _ in prompts]
        answers = _completed(engine.client, prompts, params)
        with file.open("w", encoding="utf-8") as out:
            for number, answer in answers:
                text = WrittenConversation(prompts[number], answer.token_ids)
                out.write(json.dumps(text._asdict()) + "\n")


def _asked(client: Client, start: list[int], count: int, end: int, draw: random.Random
           ) -> Iterator[list[int]]:
    """Yields the tokens of what the model says as the user."""
    params = [SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0, top_p=0.95,
                             seed=draw.getrandbits(32)) for _ in range(count)]
    for _, own in _completed(client, [start] * count, params):
        if own.finish_reason == "stop":
            yield own.token_ids[:-1] if own.token_ids[-1:] == [end] else own.token_ids


def _completed(client: Client, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
               ) -> Iterator[tuple[int, Completion]]:
    """Yields (number of the prompt, its completion) as they end."""
    requests = [Request(prompt=prompt, params=own)
                for prompt, own in zip(prompts, params, strict=True)]
    for done, (number, result) in enumerate(client.run(requests), 1):
        if isinstance(result, Exception):
            raise result
        if done % 50 == 0:
            print(f"{done} of {len(requests)}", flush=True)
        yield number, result[0]


def read_texts(file: Path) -> list[WrittenConversation]:
    """Reads what `write_texts` wrote."""
    return [WrittenConversation(**json.loads(line)) for line in file.read_text().splitlines()]


def measured(model: Path, head: Path, texts: Sequence[WrittenConversation], drafts: int,
             temperature: float, **config: Any) -> dict[str, Any]:
    """What an engine with the head says of its drafts, after the answers to these prompts."""
    with Engine(model, speculative=f"eagle3:{drafts},fixed", speculative_model=str(head),
                max_num_seqs=8, **config) as engine:
        params = [SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=i)
                  for i in range(len(texts))]
        list(_completed(engine.client, [own.prompt for own in texts], params))
        counts: dict[str, Any] = engine.client.server_info()["speculation"]
        return counts
