"""The sandbox of chat templates: jinja2's, with bounds on the size of what an expression makes.

A template may come with an untrusted model. Where it shares a process with other requests
(`shared`), nothing in it makes a long text, list or number, and its processor time is bounded: what
would exceed this raises `TooMuch` and is rendered in a process of its own, which the kernel bounds.
There, only loops, `*` and `**` are bounded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from time import thread_time
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TICKS = 200_000
"""Loop iterations + macro calls of one render: about a second."""
MAX_CHARS = 8 << 20
SHARED_MAX_ITEMS = 1 << 20
"""The most characters or items an expression makes, where it shares a process with others."""
MAX_BETWEEN = 16
"""The most characters between the items of JSON, likewise."""
SHARED_MAX_BITS = 4096
"""The most bits of a number, likewise."""
SHARED_MAX_SECONDS = 0.25
"""The most processor time of a render, likewise."""
TICK, CONCAT = "_actorium_tick", "_actorium_concat"
LINEAR = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "groupby", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort",
    "string", "title", "tojson", "trim", "unique", "upper"))
"""Filters that make no more than they are given, or that are bounded here."""
GROWING = frozenset(("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate",
                     "zfill"))
"""String methods with which a short call can make a long text."""


class TooMuch(TemplateError):
    """The render exceeds its bounds."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's turns for training: no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of templates; see the module. A tick is counted at the head of each loop body
    and macro."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, shared: bool) -> None:
        """shared: the template is compiled and rendered beside other requests."""
        self.shared = shared
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=self._printed,
                         extensions=["jinja2.ext.loopcontrols", Generation])
        for name, own in self.filters.items():
            if name not in LINEAR:
                self.filters[name] = self._apart(own)
        self.filters |= {"tojson": self._tojson, "string": self._string, "join": self._join,
                         "replace": self._replace}
        lorem: Any = self.globals["lipsum"]
        self.globals["lipsum"] = self._apart(lorem)
        self.globals[CONCAT] = self._concat

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick))  # type: ignore[attr-defined]
        _replace_concats(tree)
        tree.set_environment(self)
        return tree

    # --- bounds ---

    def check(self, size: int) -> None:
        """Raises `TooMuch` where something of so many characters or items would be made."""
        if self.shared and size > SHARED_MAX_ITEMS:
            raise TooMuch("a text or a list is too long")

    def _walk(self, value: Any) -> None:
        """Checks the size of a value's text: lists that contain one another may be short, with a
        text too long to print."""
        if not self.shared or not isinstance(value, list | tuple | dict):
            return
        left, todo = SHARED_MAX_ITEMS // 16, [value]
        while todo:
            own = todo.pop()
            for item in ([*own, *own.values()] if isinstance(own, dict) else own):
                left -= 1 + len(item) // 16 if isinstance(item, str) else 1
                if left < 0:
                    raise TooMuch("a text is too long")
                if isinstance(item, list | tuple | dict):
                    todo.append(item)

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that is not called beside other requests."""
        @functools.wraps(function)
        def apart(*args: Any, **kwargs: Any) -> Any:
            if self.shared:
                raise TooMuch(f"{function.__name__} is not available")
            return function(*args, **kwargs)

        return apart

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("** is not available")
        if operator == "*":
            self._check_product(left, right)
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self.check(len(left) + len(right))
        elif isinstance(left, str) and self.shared:
            raise TooMuch("% is not available")
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                if len(one) * other > MAX_CHARS:
                    raise TemplateError("a repetition is too long")
                self.check(len(one) * other)
        if (self.shared and isinstance(left, int) and isinstance(right, int)
                and left.bit_length() + right.bit_length() > SHARED_MAX_BITS):
            raise TooMuch("a number is too large")

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self._method(obj, attribute) or super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self._method(obj, argument) or super().getitem(obj, argument)

    def _method(self, obj: Any, name: Any) -> Any:
        """Returns the bounded version of a string's method; None for everything else."""
        if not isinstance(obj, str) or not isinstance(name, str):
            return None
        if name == "replace":
            return functools.partial(self._replace, obj)
        if name == "join":
            return lambda items: self._join(items, obj)
        if name in GROWING and self.shared:
            raise TooMuch(f"{name} is not available")
        return None

    # --- what is looked after ---

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        if self.shared:
            self.check(len(text) + (len(text) // max(1, len(old)) + 1) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, items: Any, between: str = "", attribute: str | int | None = None) -> str:
        found = list(items)
        if attribute is not None:
            found = list(map(make_attrgetter(self, attribute), found))
        return self._concat(*found, between=str(between))

    def _concat(self, *parts: Any, between: str = "") -> str:
        for part in parts:
            self._walk(part)
        texts = list(map(str, parts))
        self.check(sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def _string(self, value: Any) -> str:
        self._walk(value)
        return str(value)

    def _printed(self, value: Any) -> Any:
        self._walk(value)
        return value

    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        """Encodes as in transformers: no HTML escapes, unlike jinja's own."""
        self._walk(value)
        between = len(indent) if isinstance(indent, str) else indent or 0
        if self.shared and max(between, sum(map(len, separators or ()))) > MAX_BETWEEN:
            raise TooMuch("tojson: too much between items")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)


def _replace_concats(tree: nodes.Node) -> None:
    """Replaces `a ~ b` by a call, whose size can be checked."""
    for node in tree.iter_child_nodes():
        _replace_concats(node)
    for field in tree.fields:
        value = getattr(tree, field)
        if isinstance(value, nodes.Concat):
            setattr(tree, field, _call(value))
        elif isinstance(value, list):
            value[:] = [_call(own) if isinstance(own, nodes.Concat) else own for own in value]


def _call(node: nodes.Concat) -> nodes.Call:
    return nodes.Call(nodes.Name(CONCAT, "load"), node.nodes, [], None, None, lineno=node.lineno)


class Ticks:
    """Counts one render's iterations and its processor time."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._until = thread_time() + SHARED_MAX_SECONDS if most < MAX_TICKS else None

    def __call__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise TooMuch(f"more than {MAX_TICKS} loop iterations")
        if not self._left % 64:
            self.look()
        return ""

    def look(self) -> None:
        """Raises `TooMuch` when the time is over."""
        if self._until is not None and thread_time() > self._until:
            raise TooMuch("more time than it was given")
