"""The flags that say which requests a load is made of: the names that vLLM and SGLang give them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.tools.cli.flags import check_least

DATASETS = ("random", "sharegpt", "sonnet", "custom", "demo", "generated-shared-prefix")
WITH_FILE = ("sharegpt", "custom")
SYNONYMS = {"random-ids": "random", "gsp": "generated-shared-prefix"}
STYLES = ("vllm", "sglang")
DEFAULT_REQUESTS = {"demo": 100}
"""Requests where --num-prompts is absent: `MANY`, but for these."""
MANY = 1000


class DatasetOptions(Struct, frozen=True, kw_only=True):
    """The load: which requests."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "dataset_name": ("dataset",), "num_prompts": ("num-prompt",),
        "random_input_len": ("random-input",), "random_output_len": ("random-output",),
        "random_range_ratio": ("range-ratio",), "seed": ("load-seed",)}
    """Field -> further names of its flag."""

    dataset_name: str = "random"
    """random | sharegpt | sonnet (verse made here) | custom (JSON lines) | demo (chats on the demo
    model's tasks) | generated-shared-prefix."""
    dataset_path: str | None = None
    """File of sharegpt (ShareGPT's JSON) or custom (JSON lines: prompt or messages, and
    output_tokens where wanted)."""
    dataset_style: str | None = None
    """vllm | sglang: whose meaning --random-range-ratio and sharegpt's filters have. Default: of
    the backend, in `bench offline` SGLang's."""
    num_prompts: int | None = None
    """Requests; default: 1000, of demo 100, of generated-shared-prefix groups x prompts."""
    seed: int = 0
    """Of the load: prompts, lengths, order and arrivals."""
    disable_shuffle: bool = False
    """Take a file's entries in their order."""
    oversample: bool = True
    """Repeat entries of a file that has fewer than --num-prompts."""
    input_len: int | None = None
    """Tokens of a prompt: --random-input-len or --sonnet-input-len."""
    output_len: int | None = None
    """Tokens to generate, for any dataset."""
    random_input_len: int = 1024
    """Tokens of a random prompt."""
    random_output_len: int = 128
    """Tokens to generate for it."""
    random_range_ratio: float | None = None
    """Lengths vary, evenly. vLLM's meaning: from len x (1 - ratio) to len x (1 + ratio); SGLang's:
    from len x ratio to len. Default: every length is as said."""
    random_prefix_len: int = 0
    """Tokens, besides, that all random prompts begin with."""
    tokenize_prompt: bool = True
    """Random prompts go as token ids, whose number is exact; --no-tokenize-prompt: as text, which
    is what vLLM and SGLang send by default. Chats are always text."""
    sharegpt_output_len: int | None = None
    """Tokens to generate; default: as many as the file's answer has."""
    sharegpt_context_len: int | None = None
    """Leave out conversations longer than this, and others only by SGLang's rule."""
    custom_output_len: int = 256
    """Tokens to generate where a line has no output_tokens."""
    sonnet_input_len: int = 550
    """Tokens of a prompt at most."""
    sonnet_output_len: int = 150
    """Tokens to generate."""
    sonnet_prefix_len: int = 200
    """Tokens that all prompts begin with."""
    gsp_num_groups: int = 64
    """Groups of prompts with a system prompt in common."""
    gsp_prompts_per_group: int = 16
    """Prompts of each group."""
    gsp_system_prompt_len: int = 2048
    """Tokens of a system prompt."""
    gsp_question_len: int = 128
    """Tokens of what follows it."""
    gsp_output_len: int = 256
    """Tokens to generate."""
    gsp_range_ratio: float = 1.0
    """Lengths vary evenly from len x ratio to len."""
    gsp_ordered: bool = False
    """Group after group, instead of in random order."""

    @property
    def name(self) -> str:
        return SYNONYMS.get(self.dataset_name, self.dataset_name)

    @property
    def requests(self) -> int:
        if self.num_prompts is not None:
            return self.num_prompts
        if self.name == "generated-shared-prefix":
            return self.gsp_num_groups * self.gsp_prompts_per_group
        return DEFAULT_REQUESTS.get(self.name, MANY)


_AT_LEAST = {
    "num_prompts": 1, "input_len": 1, "output_len": 1, "random_input_len": 1,
    "random_output_len": 1, "random_prefix_len": 0, "sharegpt_output_len": 1,
    "sharegpt_context_len": 1, "custom_output_len": 1, "sonnet_input_len": 1,
    "sonnet_output_len": 1, "sonnet_prefix_len": 0, "gsp_num_groups": 1,
    "gsp_prompts_per_group": 1, "gsp_system_prompt_len": 1, "gsp_question_len": 1,
    "gsp_output_len": 1,
}


def check_dataset(options: DatasetOptions) -> None:
    """Raise `BadConfig`, naming the flag, on a value out of range and on a file that is missing or
    of no use."""
    check_least(options, _AT_LEAST)
    if options.name not in DATASETS:
        raise BadConfig(f"--dataset-name: must be one of {', '.join(DATASETS)}, got "
                        f"{options.dataset_name!r}", "dataset_name")
    if options.dataset_style not in (None, *STYLES):
        raise BadConfig(f"--dataset-style: must be vllm or sglang, got {options.dataset_style!r}",
                        "dataset_style")
    if (options.dataset_path is None) == (options.name in WITH_FILE):
        what = "takes no file" if options.dataset_path else "needs a file"
        raise BadConfig(f"--dataset-path: --dataset-name {options.dataset_name} {what}",
                        "dataset_path")
    if not 0 <= options.gsp_range_ratio <= 1:
        raise BadConfig("--gsp-range-ratio: must be from 0 to 1, got "
                        f"{options.gsp_range_ratio}", "gsp_range_ratio")


_USED_BY = {"random_": ("random",), "sharegpt_": ("sharegpt",), "custom_": ("custom",),
            "sonnet_": ("sonnet",), "gsp_": ("generated-shared-prefix",),
            "input_len": ("random", "sonnet"), "dataset_style": ("random", "sharegpt"),
            "disable_shuffle": WITH_FILE, "oversample": WITH_FILE,
            "tokenize_prompt": ("random", "generated-shared-prefix")}
"""Beginning of a field -> the datasets that it is for."""


def unused(options: DatasetOptions, written: Mapping[str, str]) -> list[str]:
    """The flags, as they were written, that the chosen dataset has no use for. written: field ->
    flag."""
    return [flag for field, flag in written.items() if field in options.__struct_fields__
            and any(field.startswith(part) and options.name not in names
                    for part, names in _USED_BY.items())]


def print_unused(options: DatasetOptions, written: Mapping[str, str]) -> None:
    found = unused(options, written)
    if found:
        print(f"actorium: {', '.join(found)} {'changes' if len(found) == 1 else 'change'} nothing "
              f"with --dataset-name {options.name}", file=sys.stderr)
