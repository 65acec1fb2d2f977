"""Runs vLLM's and SGLang's parsers of reasoning on texts: their sources alone, without what they
import.

    python oracle_reasoning.py FOLDER < CASES > ANSWERS

FOLDER holds their packages (`setup.sh parsers`). CASES is JSON: a list of [engine, name of the
parser, template variables, texts]. ANSWERS is JSON: for each case a list of [reasoning, content],
or the text of an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any

STUBBED = ("sglang", "vllm", "torch", "transformers", "xgrammar")


class AnyClass(type):
    """A class of which every attribute is its own name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class AnyObject:
    """Whatever is done with it, it does nothing."""

    def __init__(self, *_args: Any, **_more: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_more: None


class Stub(types.ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = AnyClass(name, (AnyObject,), {}) if name[:1].isupper() \
            else lambda *_args, **_more: AnyObject()
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is missing of the packages of `STUBBED`."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return Stub(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


class Words:
    """A tokenizer in whose vocabulary every mark is one token."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    init_kwargs: dict[str, Any] = {}
    version = 13
    """Of Mistral's."""

    def __init__(self) -> None:
        self._ids = {mark: number for number, mark in enumerate(MARKS)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(self, text: str, **_more: Any) -> list[int]:
        return [self._ids.setdefault(text, len(self._ids))]

    def __len__(self) -> int:
        return 1 << 16


MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
         "<mm:think>", "</mm:think>", "<response>", "</response>", "<tool_call>", "</tool_call>",
         "<assistant>", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>",
         "<ifm|think>", "</ifm|think>", "<ifm|tool_calls>", "Ġ</", "</", "think", ">", "><", ">\n",
         ">\n\n", "<|tool_calls_section_begin|>", "<minimax:tool_call>", "<seed:tool_call>",
         "<|channel>", "<channel|>", "[TOOL_CALLS]", "<|START_THINKING|>", "<|END_THINKING|>")


def answers(engine: str, name: str, args: dict[str, Any], texts: list[str]) -> Any:
    """What a parser says of each text."""
    if engine == "sglang":
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        return [ReasoningParser(name, force_reasoning=args.get("force"))
                .parse_non_stream(text) for text in texts]
    from vllm.reasoning import ReasoningParserManager

    parser, request = ReasoningParserManager.get_reasoning_parser(name), AnyObject()
    request.chat_template_kwargs = args
    return [parser(Words(), chat_template_kwargs=args).extract_reasoning(text, request)
            for text in texts]


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.append(Stubs())
    found: list[Any] = []
    for case in json.load(sys.stdin):
        try:
            found.append(answers(*case))
        except Exception as error:  # what it needs is not there, say
            found.append(f"{type(error).__name__}: {error}")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
