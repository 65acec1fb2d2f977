"""Datasets in files: ShareGPT's JSON, and JSON lines of one's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.options import DatasetOptions
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens


class ShareGptFilter(NamedTuple):
    """Which conversations of a ShareGPT file are of use, by their tokens."""

    shortest: int
    """Of the prompt; of the answer too, unless its length is given."""
    prompt: int | None
    """Longest prompt."""
    total: int | None
    """Most tokens of prompt and answer together."""

    def keeps(self, prompt: int, output: int, output_given: bool) -> bool:
        """Whether a conversation is of use."""
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
    told otherwise. Raises `BadConfig`."""
    tokenizer = tokens.need("--dataset-name sharegpt")
    rule = filter_of(style, options.sharegpt_context_len)
    given = options.sharegpt_output_len or options.output_len
    talks = _conversations(options)
    rng = random.Random(options.seed)
    if not options.disable_shuffle:
        rng.shuffle(talks)
    found: list[SampleRequest] = []
    for question, answer in talks:
        if len(found) == options.requests:
            break
        prompt = len(tokenizer.encode(question, special=True))
        output = given or len(tokenizer.encode(answer, special=True))
        if rule.keeps(prompt, output, given is not None):
            found.append(SampleRequest(question, None, output, prompt))
    if not found:
        raise BadConfig(f"--dataset-path: {options.dataset_path}: none of its {len(talks)} "
                        "conversations is of use (too short or too long)", "dataset_path")
    return _enough(found, options, rng)


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
    """As many as were asked for: some twice, where there are fewer."""
    if not options.oversample or options.num_prompts is None:
        return found
    return found + rng.choices(found, k=options.requests - len(found))
