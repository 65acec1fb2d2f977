"""What docstrings, comments and documents name of the code is there: files, modules, and what is
in them."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

from helpers_code_facts import ROOT

ROOMS = ("actors", "gpu", "kernels", "tools", "benchmarks", "tests", "docs")
FILE = re.compile(r"(?<![\w/.<$*{~-])((?:[\w.-]+/)*[\w-]+\.(?:py|c|h))(?![\w/*(])")
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
CLASS = re.compile(r"`([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+)`")
COMMENT = re.compile(r"#.*(`|\.(py|c|h)\b)")
"""A line that may have a comment with a reference."""
DATA = {"json", "csv", "txt", "seg", "sh", "example", "ggml", "yml"}
"""Second parts of what has a dot and is no name of Python's."""
ELSEWHERE = {
    "ggml-common.h", "convert_hf_to_gguf.py", "categories.py", "NAME.py", "Gemma3TextConfig",
    "sglang.bench_serving", "Executor.submit", "JITFunction._do_compile", "tl.tensor",
    "tl.constexpr", "attention_backends.py", "prompt_attention.py", "int8_pages.py", "kv_dtype.py",
    "image_pacing.py", "quality.py"}
"""Of other projects; and scripts of older trees, which documents name with the tree."""


@cache
def paths() -> tuple[str, ...]:
    """Of all files, from the repository's root."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.*")
             if path.is_file() and "__pycache__" not in path.parts]
    return tuple(str(path.relative_to(ROOT)) for path in [*found, *ROOT.glob("*.md")])


@cache
def suffixes() -> dict[str, list[str]]:
    """The files of each path's end, and of each module's."""
    found: dict[str, list[str]] = {}
    for path in paths():
        parts = path.split("/")
        for at in range(len(parts)):
            found.setdefault("/".join(parts[at:]), []).append(path)
    return found


@cache
def folders() -> frozenset[str]:
    return frozenset(part for path in paths() for part in path.split("/")[:-1])


NAMES = ("id", "attr", "arg", "name", "asname")
"""Fields of nodes that hold names."""
WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def code_of(path: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """(identifiers, docstrings) of a file: the former are what its code names (variables,
    attributes, arguments, definitions) and the words of its strings. One walk for both, which
    keeps no tree: most of this file's time goes into it."""
    names, docstrings = set[str](), []
    below: list[ast.AST] = [ast.parse((ROOT / path).read_text())]
    while below:
        node = below.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                names.update(WORD.findall(node.value))
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.append(node.value.value)
            continue
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                below += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                if value._fields:  # no operator or context
                    below.append(value)
            elif field in NAMES and isinstance(value, str):
                names.update(value.split("."))
    return frozenset(names), tuple(docstrings)


def identifiers(path: str) -> frozenset[str]:
    return code_of(path)[0]


@cache
def everywhere() -> frozenset[str]:
    return frozenset().union(*(identifiers(path) for path in paths() if path.endswith(".py")))


def prose(path: str) -> Iterator[str]:
    """Docstrings and comments of a file; all of a document."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        yield text
    elif path.endswith((".c", ".h")):
        yield from re.findall(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL)
    else:
        yield from code_of(path)[1]
        if COMMENT.search(text):
            yield from (token.string
                        for token in tokenize.generate_tokens(io.StringIO(text).readline)
                        if token.type == tokenize.COMMENT)


def resolves(parts: list[str]) -> bool:
    """Whether this is a module, or what one names."""
    for count in range(len(parts), 0, -1):
        stem = "/".join(parts[:count])
        modules = [*suffixes().get(f"{stem}.py", []), *suffixes().get(f"{stem}/__init__.py", [])]
        if modules:
            return any(set(parts[count:]) <= identifiers(module) for module in modules)
    return False


@cache
def installed(name: str) -> bool:
    return name in sys.stdlib_module_names or find_spec(name) is not None


def is_dead(path: str, dotted: str) -> bool:
    """Whether a dotted name in this file's prose is of nothing that is there."""
    parts = dotted.removeprefix("actorium.").split(".")
    first, own = parts[0], identifiers(path) if path.endswith(".py") else everywhere()
    if DATA & set(parts) or first not in ROOMS and installed(first):
        return False
    if first in folders() or f"{first}.py" in suffixes():
        return not resolves(parts) and not (
            first not in ROOMS and first in own and set(parts) <= everywhere()) and not (
            set(parts) <= identifiers("actors/config/tree.py"))
    return not set(parts) <= everywhere() or not (first[0].isupper() or first in own)


def faults(path: str) -> list[str]:
    found = []
    for text in prose(path):
        found += [name for name in FILE.findall(text) if name not in suffixes()
                  and not (ROOT / path).parent.joinpath(name).exists()]
        found += [name for name in DOTTED.findall(text)
                  if not FILE.fullmatch(name) and is_dead(path, name)]
        if not path.endswith(".md"):
            found += [name for name in CLASS.findall(text) if name not in everywhere()]
    return [f"{path}: {name}" for name in found if name.rpartition("/")[2] not in ELSEWHERE]


def test_names_in_docstrings_comments_and_documents_are_there() -> None:
    files = [path for path in paths()
             if path.endswith((".py", ".md", ".c", ".h")) and path != "CHANGELOG.md"]
    assert [fault for path in files for fault in faults(path)] == []


def test_what_is_not_there_is_seen() -> None:
    here = "kernels/triton/decode.py"
    for dead in ("kernels.reference.attention.torch_decode", "paged_attention.no_such_thing",
                 "no_such_module.Thing", "gpu.no_such_module"):
        assert is_dead(here, dead), dead
    for there in ("kernels.reference.paged_attention.torch_decode", "ssd.ssd_step",
                  "scheduler.max_num_seqs", "torch.fx", "Config.device"):
        assert not is_dead(here, there), there
