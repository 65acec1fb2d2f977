"""Datasets made of random tokens: `random`, and groups of prompts with a prefix in common."""

from __future__ import annotations

import math
import random

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.options import DatasetOptions
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens


def length_range(mean: int, ratio: float | None, style: str) -> tuple[int, int]:
    """(least, most) tokens, both included.

    style vllm: mean x (1 - ratio) to mean x (1 + ratio), ratio below 1. style sglang: mean x ratio
    to mean. No ratio: the mean alone. Raises `BadConfig`.
    """
    if ratio is None:
        return mean, mean
    if style == "vllm":
        if not 0 <= ratio < 1:
            raise BadConfig("--random-range-ratio: must be at least 0 and below 1, got "
                            f"{ratio} (--dataset-style sglang: from len x ratio to len)",
                            "random_range_ratio")
        return max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio)))
    if not 0 <= ratio <= 1:
        raise BadConfig(f"--random-range-ratio: must be from 0 to 1, got {ratio}",
                        "random_range_ratio")
    return max(1, int(mean * ratio)), mean


def random_requests(options: DatasetOptions, tokens: Tokens, style: str,
                    as_text: bool) -> list[SampleRequest]:
    """Random prompts; all begin with the same --random-prefix-len tokens."""
    rng = random.Random(options.seed)
    inputs = length_range(options.input_len or options.random_input_len,
                          options.random_range_ratio, style)
    outputs = length_range(options.output_len or options.random_output_len,
                           options.random_range_ratio, style)
    vocabulary = tokens.vocabulary()
    prefix = vocabulary.draw(rng, options.random_prefix_len)
    found = []
    for _ in range(options.requests):
        ids = prefix + vocabulary.draw(rng, rng.randint(*inputs))
        output = rng.randint(*outputs)
        if as_text:
            text, count = tokens.need("--dataset-name random as text").text_of(ids, rng)
            found.append(SampleRequest(text, None, output, count))
        else:
            found.append(SampleRequest(ids, None, output, len(ids)))
    return found


def shared_prefix_requests(options: DatasetOptions, tokens: Tokens,
                           as_text: bool) -> list[SampleRequest]:
    """Groups of prompts, each a system prompt that the group has in common and a question of its
    own; in random order unless told otherwise."""
    rng = random.Random(options.seed)
    vocabulary = tokens.vocabulary()

    def drawn(mean: int) -> list[int]:
        return vocabulary.draw(rng, _between(rng, mean, options.gsp_range_ratio))

    found = []
    for _ in range(options.gsp_num_groups):
        system = drawn(options.gsp_system_prompt_len)
        for _ in range(options.gsp_prompts_per_group):
            ids = system + drawn(options.gsp_question_len)
            output = _between(rng, options.output_len or options.gsp_output_len,
                              options.gsp_range_ratio)
            found.append(SampleRequest(ids, None, output, len(ids)))
    if not options.gsp_ordered:
        rng.shuffle(found)
    found = found[:options.requests]
    if not as_text:
        return found
    tokenizer = tokens.need("--dataset-name generated-shared-prefix as text")
    texts = [tokenizer.decode(request.prompt) for request in found  # the prefix stays the same
             if isinstance(request.prompt, list)]
    return [request._replace(prompt=text, prompt_len=len(tokenizer.encode(text)))
            for request, text in zip(found, texts, strict=True)]


def _between(rng: random.Random, mean: int, ratio: float) -> int:
    return rng.randint(*length_range(mean, ratio, "sglang"))
