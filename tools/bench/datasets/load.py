"""From flags to the requests of a load."""

from __future__ import annotations

import random

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.dataset_files import custom_requests, sharegpt_requests
from actorium.tools.bench.datasets.generated import (
    random_requests,
    shared_prefix_requests,
    sonnet_requests,
)
from actorium.tools.bench.datasets.options import DatasetOptions, check_dataset
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens
from actorium.tools.demo.demo_tasks import TASKS, held_out

DEMO_OUTPUT = 128
"""Tokens to generate for a demo task at most: its answers are shorter."""


def load_dataset(options: DatasetOptions, tokens: Tokens, style: str,
                 chat: bool) -> list[SampleRequest]:
    """Returns the requests: the same ones for the same options.

    style: vllm or sglang (see `DatasetOptions.dataset_style`). chat: they go to a chat endpoint, so
    that prompts are text. Raises `BadConfig`.
    """
    check_dataset(options)
    as_text = chat or not options.tokenize_prompt
    if options.name == "random":
        return random_requests(options, tokens, style, as_text)
    if options.name == "generated-shared-prefix":
        return shared_prefix_requests(options, tokens, as_text)
    if options.name == "sharegpt":
        return sharegpt_requests(options, tokens, style)
    if options.name == "sonnet":
        return sonnet_requests(options, tokens)
    if options.name == "custom":
        return custom_requests(options)
    return demo_requests(options)


def demo_requests(options: DatasetOptions) -> list[SampleRequest]:
    """Chats on the demo model's tasks (held-out items), in an order that the seed says. Raises
    `BadConfig` if there are not so many."""
    number = options.requests
    each = -(-number // len(TASKS))
    try:
        items = [item for task in TASKS for item in held_out(task, each)]
    except ValueError as error:
        raise BadConfig(f"--num-prompts: {error}", "num_prompts") from None
    random.Random(options.seed).shuffle(items)
    output = options.output_len or DEMO_OUTPUT
    return [SampleRequest(None, [{"role": "user", "content": item.prompt}], output)
            for item in items[:number]]
