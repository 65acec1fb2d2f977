"""From flags to the requests of a load, and the datasets made here from a seed: random tokens,
prompts in groups with a prefix in common, verse (lines of some ten syllables about nothing much),
and the demo model's tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.dataset_files import custom_requests, sharegpt_requests
from actorium.tools.bench.datasets.options import DatasetOptions, check_dataset
from actorium.tools.bench.datasets.sample import LocalTokenizer, SampleRequest, Tokens
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


# --- verse ----------------------------------------------------------------------------------------

TASK = "Here are some lines of verse. Write more lines in the same manner.\n\n"
POOL = 400
"""Different lines that the prompts are made of."""

_WORDS = {
    "N": ("moon", "stone", "tide", "lamp", "field", "wing", "bell", "road", "frost", "sail",
          "clock", "leaf", "bridge", "rain", "door", "smoke", "shore", "thread", "crow", "glass"),
    "M": ("river", "garden", "window", "candle", "meadow", "harbour", "winter", "orchard",
          "pocket", "shepherd", "mountain", "silence", "letter", "morning", "kettle", "thunder"),
    "A": ("pale", "slow", "bright", "cold", "small", "old", "soft", "deep", "strange", "brown"),
    "B": ("gentle", "hollow", "silver", "crooked", "quiet", "distant", "broken", "golden"),
    "V": ("turns", "waits", "falls", "sings", "leans", "burns", "drifts", "sleeps", "calls",
          "climbs"),
    "P": ("near", "past", "down", "by", "through", "toward"),
}
"""Nouns of one and two syllables, adjectives of one and two, verbs, prepositions."""
_LINES = (
    "the A N V P the B M N",
    "and P the M every N now V",
    "a B N that V P A N and N",
    "where A N V the M V alone",
    "so V the N P all the B M",
    "no M V P any N I knew",
    "the N, the M and the N still V",
    "I keep the B N P your A M",
)


def line(rng: random.Random) -> str:
    """One line, with its end of line."""
    words = [rng.choice(_WORDS[word.rstrip(",")]) + word[1:] if word.rstrip(",") in _WORDS else word
             for word in rng.choice(_LINES).split()]
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}{rng.choice((',', ',', ';', '.'))}\n"


def sonnet_requests(options: DatasetOptions, tokens: Tokens) -> list[SampleRequest]:
    """Prompts of at most --sonnet-input-len tokens; the first --sonnet-prefix-len of them (the
    task included) are the same in all."""
    tokenizer = tokens.need("--dataset-name sonnet")
    limit = options.input_len or options.sonnet_input_len
    rng = random.Random(options.seed)
    pool = [line(rng) for _ in range(POOL)]
    prefix = _filled_with_lines(TASK, pool, options.sonnet_prefix_len, tokenizer)
    if max(options.sonnet_prefix_len, len(tokenizer.encode(prefix))) >= limit:
        raise BadConfig(f"--sonnet-input-len: {limit} tokens leave no room for lines after those "
                        f"of the prefix (--sonnet-prefix-len {options.sonnet_prefix_len})",
                        "sonnet_input_len")
    found = []
    for _ in range(options.requests):
        text = _filled_with_lines(prefix, rng.choices(pool, k=limit), limit, tokenizer)
        found.append(SampleRequest(text, None, options.output_len or options.sonnet_output_len,
                                   len(tokenizer.encode(text))))
    return found


def _filled_with_lines(text: str, lines: Iterable[str], limit: int,
                       tokenizer: LocalTokenizer) -> str:
    """The text with as many of the lines as `limit` tokens have room for."""
    size, taken = len(tokenizer.encode(text)), []
    for each in lines:
        size += len(tokenizer.encode(each))
        if size > limit:
            break
        taken.append(each)
    while taken and len(tokenizer.encode(text + "".join(taken))) > limit:
        taken.pop()  # the whole may have a token more than its lines
    return text + "".join(taken)
