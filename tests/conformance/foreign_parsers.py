"""Runs vLLM's and SGLang's parsers of tool calls on texts: a program of its own, in the environment
that tests/conformance/setup.sh parsers makes. Only the parsers of their wheels are there; the rest
of what they import is replaced by names without behaviour.

    python foreign_parsers.py FOLDER < request.json > answer.json

request: {"vllm": parser's name | "sglang": name, "tools": [...], "texts": [[piece, ...], ...]};
answer: for each text {"calls": [[name, arguments], ...], "text": ...} of the pieces one by one if
there are several, or {"error": ...}.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

MARK = re.compile(r"<[^<>\s=]{1,60}>|\[[A-Z_]{4,}\]")
"""A token of its own. `<function=NAME>` is none: no vocabulary knows the name."""


class Open(type):
    """Classes of which every attribute is its name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{cls.__name__}.{name}")


class Name(str):
    """A name, as is each of its attributes; calling it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self}.{name}")

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class Record(metaclass=Open):
    """Keeps what it is made with; other attributes are None."""

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {key: value.model_dump() if isinstance(value, Record) else value
                for key, value in self.__dict__.items() if value is not None}


class Quiet:
    """A logger, or settings, none of which is on."""

    def __getattr__(self, _: str) -> Quiet:
        return self

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


class Replaced(types.ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name in ("init_logger", "get_logger"):
            made = lambda *_: Quiet()  # noqa: E731
        elif name in ("envs", "environ", "logger"):
            made = Quiet()
        elif name in ("random_uuid", "make_tool_call_id"):
            made = lambda *_, **__: "id"  # noqa: E731
        elif name.startswith("is_"):
            made = lambda *_, **__: name == "is_list_of"  # noqa: E731
        elif name.isupper():  # settings
            made = 5.0 if "TIMEOUT" in name else False
        else:
            made = Open(name, (Record,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what the folder does not have."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return Replaced(spec.name)

    def exec_module(self, module: Any) -> None:
        return None


class Tokens:
    """A tokenizer with a token for each mark of a text, and for each other character."""

    def __init__(self, texts: list[str]) -> None:
        marks = sorted({mark for text in texts for mark in MARK.findall(text)})
        known = ["<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>",
                 *marks]
        self._ids = {text: number for number, text in enumerate(dict.fromkeys(known))}
        self.init_kwargs: dict[str, Any] = {}
        self.all_special_tokens = marks
        self.all_special_ids = [self._ids[mark] for mark in marks]
        self.bos_token = self.eos_token = "<none>"
        self.version = 11

    def get_vocab(self) -> dict[str, int]:
        return Vocabulary(self._ids)

    vocab = property(get_vocab)

    def tokenize(self, text: str) -> list[str]:
        out, at = [], 0
        for mark in MARK.finditer(text):
            out += [*text[at:mark.start()], mark[0]]
            at = mark.end()
        return [*out, *text[at:]]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.get(piece, 100_000 + ord(piece[0])) for piece in self.tokenize(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        names = {number: text for text, number in self._ids.items()}
        return "".join(names.get(one) or chr(one - 100_000) for one in ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)

    def convert_ids_to_tokens(self, ids: Any, **_: Any) -> list[str]:
        return [self.decode([one]) for one in ids]


class Vocabulary(dict):  # type: ignore[type-arg]
    """Has every mark that a parser looks up."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self and MARK.fullmatch(str(key)):
            self[key] = len(self) + 1000
        return super().get(key, default)

    def __missing__(self, key: Any) -> Any:
        self[key] = len(self) + 1000
        return self[key]


def replace_the_rest(folder: Path) -> None:
    """Makes modules of the folder importable, and puts names in the place of all others."""
    sys.path.insert(0, str(folder))
    for package in ("vllm", "sglang", "sglang.srt"):  # their own would import everything
        module = types.ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
        sys.modules[package] = module
    roots = ("vllm", "sglang", "xgrammar", "transformers", "torch")
    sys.meta_path.append(Finder(roots))


def vllm_parser(name: str, tools: list[Any], texts: list[str]) -> Any:
    protocol: Any = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    given = [protocol.ChatCompletionToolsParam(type="function", function=Record(**one["function"]))
             for one in tools]
    package = importlib.import_module("vllm.tool_parsers")
    file, cls = package._TOOL_PARSERS_TO_REGISTER[name]
    kind = getattr(importlib.import_module(f"vllm.tool_parsers.{file}"), cls)
    if name.startswith("cohere"):
        kind = cohere(kind)
    request = protocol.ChatCompletionRequest(tools=given, tool_choice="auto",
                                             skip_special_tokens=False)
    return lambda tokens: kind(tokens, given), request


def cohere(kind: Any) -> Any:
    """The parser that vLLM uses in the place of this name of a format."""
    protocol: Any = importlib.import_module("vllm.parser.cohere_command")

    class Parser(protocol.CohereCommandParser):  # type: ignore[misc]
        tool_parser_cls = kind
        engine_based_streaming = True

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            _, content, calls = self.parse(text, request)
            return Record(content=content,
                          tool_calls=[Record(function=call) for call in calls or ()])

        def extract_tool_calls_streaming(self, *given: Any) -> Any:
            return self.parse_delta(given[2], given[5], given[6], finished=False)

        def finish_streaming(self) -> Any:
            return self._to_delta([self._streaming.flush_partials()], Record())

    return Parser


def by_vllm(asked: dict[str, Any]) -> list[Any]:
    texts = ["".join(pieces) for pieces in asked["texts"]]
    make, request = vllm_parser(asked["vllm"], asked["tools"], texts)
    out = []
    for pieces in asked["texts"]:
        tokens = Tokens(["".join(pieces)])
        try:
            parser = make(tokens)
            out.append(_streamed(parser, tokens, pieces, request) if len(pieces) > 1
                       else _whole(parser.extract_tool_calls(pieces[0], request)))
        except Exception as error:
            out.append({"error": f"{type(error).__name__}: {error}"[:300]})
    return out


def _whole(found: Any) -> dict[str, Any]:
    return {"text": found.content or "", "calls": [
        [call.function.name, call.function.arguments] for call in found.tool_calls or ()]}


def _streamed(parser: Any, tokens: Tokens, pieces: list[str], request: Any) -> dict[str, Any]:
    text, calls = "", {}
    before, ids, deltas = "", [], []
    for piece in pieces:
        more = tokens.encode(piece)
        deltas.append(parser.extract_tool_calls_streaming(
            before, before + piece, piece, ids, ids + more, more, request))
        before, ids = before + piece, ids + more
    if getattr(parser, "engine_based_streaming", False):
        deltas.append(parser.finish_streaming())
    for delta in filter(None, deltas):
        text += delta.content or ""
        for call in delta.tool_calls or ():
            own = calls.setdefault(call.index, ["", ""])
            function = call.function or {}
            function = function if isinstance(function, dict) else vars(function)
            own[0] += function.get("name") or ""
            own[1] += function.get("arguments") or ""
    return {"text": text, "calls": [calls[key] for key in sorted(calls)]}


def by_sglang(asked: dict[str, Any]) -> list[Any]:
    protocol: Any = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    tools = [protocol.Tool(type="function", function=protocol.Function(**one["function"]))
             for one in asked["tools"]]
    module = importlib.import_module("sglang.srt.function_call.function_call_parser")
    out = []
    for pieces in asked["texts"]:
        kind = module.FunctionCallParser.ToolCallParserEnum[asked["sglang"]]
        try:
            detector = kind()
            if len(pieces) == 1:
                found = detector.detect_and_parse(pieces[0], tools)
                out.append({"text": found.normal_text or "",
                            "calls": [[call.name, call.parameters] for call in found.calls]})
                continue
            text, calls = "", {}
            for piece in pieces:
                found = detector.parse_streaming_increment(piece, tools)
                text += found.normal_text or ""
                for call in found.calls:
                    own = calls.setdefault(call.tool_index, ["", ""])
                    own[0] += call.name or ""
                    own[1] += call.parameters or ""
            out.append({"text": text, "calls": [calls[key] for key in sorted(calls)]})
        except Exception as error:
            out.append({"error": f"{type(error).__name__}: {error}"[:300]})
    return out


if __name__ == "__main__":
    replace_the_rest(Path(sys.argv[1]))
    asked = json.load(sys.stdin)
    json.dump(by_vllm(asked) if "vllm" in asked else by_sglang(asked), sys.stdout)
