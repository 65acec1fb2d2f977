"""Makes the requests of a load from flags: read from files (ShareGPT's JSON, JSON lines), or
generated from a seed: random tokens, groups of prompts with a shared prefix, verse (lines of some
ten syllables), and the demo model's tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.options import DatasetOptions, check_dataset
from actorium.tools.bench.datasets.sample import LocalTokenizer, SampleRequest, Tokens
from actorium.tools.demo.demo_tasks import TASKS, held_out


class ShareGptFilter(NamedTuple):
    """Which conversations of a ShareGPT file are of use, by their tokens."""

    shortest: int
    """Fewest tokens of the prompt, and of the answer unless its length is given."""
    prompt: int | None
    """Longest prompt."""
    total: int | None
    """Most tokens of prompt and answer together."""

    def keeps(self, prompt: int, output: int, output_given: bool) -> bool:
        return (prompt >= self.shortest and (output_given or output >= self.shortest)
                and (self.prompt is None or prompt <= self.prompt)
                and (self.total is None or prompt + output <= self.total))


def filter_of(style: str, context: int | None) -> ShareGptFilter:
    """vLLM's: 4 tokens each at least, prompts of 1,024 and 2,048 in all at most. SGLang's: 2 at
    least, and --sharegpt-context-len if that is given, which vLLM does not have."""
    if style == "vllm" and context is None:
        return ShareGptFilter(4, 1024, 2048)
    return ShareGptFilter(2, None, context)


def sharegpt_requests(options: DatasetOptions, tokens: Tokens, style: str) -> list[SampleRequest]:
    """The first turn of each conversation; as many tokens to generate as the second one has, unless
    a length is given. Raises `BadConfig`."""
    tokenizer = tokens.need("--dataset-name sharegpt")
    rule = filter_of(style, options.sharegpt_context_len)
    given = options.sharegpt_output_len or options.output_len
    talks = _conversations(options)
    rng = random.Random(options.seed)
    if not options.disable_shuffle:
        rng.shuffle(talks)
    requests: list[SampleRequest] = []
    for question, answer in talks:
        if len(requests) == options.requests:
            break
        prompt = len(tokenizer.encode(question, special=True))
        output = given or len(tokenizer.encode(answer, special=True))
        if rule.keeps(prompt, output, given is not None):
            requests.append(SampleRequest(question, None, output, prompt))
    if not requests:
        raise BadConfig(f"--dataset-path: {options.dataset_path}: none of its {len(talks)} "
                        "conversations is of use (too short or too long)", "dataset_path")
    return _enough(requests, options, rng)


def _conversations(options: DatasetOptions) -> list[tuple[str, str]]:
    entries = _decoded(_read(options), str(options.dataset_path))
    if not isinstance(entries, list):
        raise BadConfig(f"--dataset-path: {options.dataset_path}: must be a JSON list of "
                        "conversations", "dataset_path")
    found = []
    for entry in entries:
        turns = _turns(entry)
        if turns is not None and len(turns) >= 2:
            found.append((turns[0], turns[1]))
    return found


def _turns(entry: Any) -> list[str] | None:
    """The texts of a conversation, None if the entry holds none."""
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, list):
        return None
    texts = [turn.get("value", turn.get("content")) for turn in turns if isinstance(turn, dict)]
    known = [text for text in texts if isinstance(text, str)]
    return known if len(known) == len(turns) else None


def custom_requests(options: DatasetOptions) -> list[SampleRequest]:
    """Each line an object with `prompt` (text or token ids), `messages` or `conversations` (whose
    first turn is taken), and `output_tokens` if it has a length of its own. Raises `BadConfig`."""
    rng = random.Random(options.seed)
    found = list(_lines(options))
    if not found:
        raise BadConfig(f"--dataset-path: {options.dataset_path}: holds no line", "dataset_path")
    if not options.disable_shuffle:
        rng.shuffle(found)
    return _enough(found[:options.requests], options, rng)


def _lines(options: DatasetOptions) -> Iterator[SampleRequest]:
    for number, text in enumerate(_read(options).splitlines(), 1):
        if not text.strip():
            continue
        where = f"{options.dataset_path}, line {number}"
        entry = _decoded(text, where)
        if not isinstance(entry, dict):
            raise BadConfig(f"--dataset-path: {where}: must be a JSON object", "dataset_path")
        output = options.output_len or entry.get("output_tokens", entry.get("output_len"))
        if output is None:
            output = options.custom_output_len
        if not isinstance(output, int) or isinstance(output, bool) or output < 1:
            raise BadConfig(f"--dataset-path: {where}: output_tokens: must be a whole number of "
                            f"at least 1, got {output!r}", "dataset_path")
        yield _line(entry, output, where)


def _line(entry: dict[str, Any], output: int, where: str) -> SampleRequest:
    prompt, messages, turns = entry.get("prompt"), entry.get("messages"), _turns(entry)
    if isinstance(messages, list) and messages and prompt is None:
        return SampleRequest(None, messages, output)
    if isinstance(prompt, str) and prompt and messages is None:
        return SampleRequest(prompt, None, output)
    if isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt):
        return SampleRequest(prompt, None, output, len(prompt))
    if prompt is None and messages is None and turns:
        return SampleRequest(turns[0], None, output)
    raise BadConfig(f"--dataset-path: {where}: one of prompt (text or token ids), messages and "
                    "conversations is needed", "dataset_path")


def _read(options: DatasetOptions) -> bytes:
    try:
        return Path(str(options.dataset_path)).expanduser().read_bytes()
    except OSError as error:
        raise BadConfig(f"--dataset-path: {options.dataset_path}: {error.strerror}",
                        "dataset_path") from None


def _decoded(text: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadConfig(f"--dataset-path: {where}: no JSON: {error}", "dataset_path") from None


def _enough(found: list[SampleRequest], options: DatasetOptions,
            rng: random.Random) -> list[SampleRequest]:
    """Returns as many requests as asked for, repeating some if there are fewer."""
    if not options.oversample or options.num_prompts is None:
        return found
    return found + rng.choices(found, k=options.requests - len(found))


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
