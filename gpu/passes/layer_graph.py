"""A part of a model as a graph: traced from its `forward`, rewritten by passes, then functions.

Graphs are `torch.fx`'s, made of proxies; what becomes of them is printed as Python, and nothing is
compiled. What belongs to a part (its weights, its mixer) appears as an attribute of `self`, so that
parts whose graphs are equal share one function, bound to each of them.
"""

from __future__ import annotations

import linecache
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import isfinite
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from actorium.gpu.families.layer_shapes import ExpertShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.split_layers import SummedLinear
from actorium.gpu.passes import canonical_ops as c
from actorium.kernels.linear import Gated, Linear

Target = Callable[..., Any]
PLAIN = (bool, int, float, str, type(None), ModelShape, ExpertShape)


class Pending(Enum):
    """What is still to be done to the hidden states that a layer is given, or gives."""

    NOTHING = 0
    SUM = 1
    """They come as two numbers, to be added."""
    REDUCE = 2
    """The first of the two is a rank's part of a sum over the ranks."""

    def __bool__(self) -> bool:
        return self is not Pending.NOTHING


class TracedPart:
    """A part while it is traced: its numbers are as they are, parts that have a `forward` are
    traced as well, and all else is an attribute of the graph's `self`."""

    def __init__(self, part: Any, path: str, tracer: PartTracer) -> None:
        self._part, self._path, self._tracer = part, path, tracer

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._part, name), f"{self._path}.{name}".lstrip(".")
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, MethodType) and value.__self__ is self._part:
            return MethodType(value.__func__, self)
        if hasattr(value, "forward"):
            return TracedPart(value, path, self._tracer)
        return Proxy(self._tracer.attribute(path), self._tracer)

    @property
    def node_(self) -> Node:
        """The part itself, as an argument of an operation."""
        return self._tracer.attribute(self._path)


class PartTracer(GraphAppendingTracer):
    """Knows parts that are given to operations as a whole."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._known: dict[str, Node] = {}

    def attribute(self, path: str) -> Node:
        """`self.path`, read once."""
        if path not in self._known:
            self._known[path] = self.graph.get_attr(path)
        return self._known[path]

    def create_arg(self, a: Any) -> Any:
        return a.node_ if isinstance(a, TracedPart) else super().create_arg(a)


class PartGraph:
    """The graph of one part, and what passes ask of it."""

    def __init__(self, part: Any, name: str, inputs: Sequence[str],
                 given_as: Pending = Pending.NOTHING) -> None:
        """inputs: names of `forward`'s arguments; given_as: how the first of them comes. name: for
        people, as `layers.3`."""
        self.part, self.name, self.graph = part, name, Graph()
        tracer = PartTracer(self.graph)
        given: list[Any] = [Proxy(self.graph.placeholder(own), tracer) for own in inputs]
        if given_as:
            first, second = given[0][0], given[0][1]
            if given_as is Pending.REDUCE:  # any group of the layer is that of all its ranks
                first = c.all_reduce(first, Proxy(tracer.attribute("mixer.o.group"), tracer))
            given[0] = c.add(first, second)
        out = type(part).forward(TracedPart(part, "", tracer), *given)
        self.graph.output(tracer.create_arg(out))

    # --- what passes ask --------------------------------------------------------------------------

    def nodes(self, *targets: Target) -> list[Node]:
        """The nodes of these operations, in order."""
        return [node for node in self.graph.nodes if node.target in targets]

    def object(self, node: Any) -> Any:
        """The attribute that a node reads."""
        if not isinstance(node, Node) or node.op != "get_attr":
            raise TypeError(f"{self.name}: {node} is no attribute")
        return self.object_at(str(node.target))

    def object_at(self, path: str) -> Any:
        """The attribute of this path."""
        return attrgetter(path)(self.part)

    @property
    def output(self) -> Node:
        """The last node."""
        return next(iter(reversed(self.graph.nodes)))

    def replace(self, node: Node, target: Target, args: tuple[Any, ...], *unused: Node) -> Node:
        """Replaces a node by an operation, which takes over its uses, and erases the nodes
        `unused`, which nothing else uses. Returns the new node."""
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args)
        node.replace_all_uses_with(made)
        self.erase(node, *unused)
        return made

    def share(self, node: Node, total: Node, normed: int, summed: int) -> None:
        """Of a node that gives a norm and the sum before it, give users of the node the one, and
        users of `total` the other; normed, summed: their places."""
        takers = list(node.users)
        first, second = self.item(node, normed), self.item(node, summed)
        for taker in takers:
            taker.replace_input_with(node, first)
        total.replace_all_uses_with(second)

    def item(self, node: Node, place: int) -> Node:
        """One of the results of a node that has several, behind it."""
        with self.graph.inserting_after(node):
            return self.graph.call_function(operator.getitem, (node, place))

    def erase(self, *nodes: Node) -> None:
        """Take out nodes that nothing uses any more."""
        for node in nodes:
            self.graph.erase_node(node)

    def leave_sum(self) -> bool:
        """Return both parts of the last sum, for another graph to add them, where there is one that
        nothing else uses; whether there was."""
        (total,) = self.output.args
        if not isinstance(total, Node) or total.target is not c.add or len(total.users) > 1:
            return False
        self.output.args = (total.args,)
        self.erase(total)
        return True

    def leave_part(self, dtype: torch.dtype) -> bool:
        """The same of a last sum whose first number is a sum over the ranks: a rank's part of it is
        returned."""
        (total,) = self.output.args
        if not isinstance(total, Node) or total.target is not c.add or len(total.users) > 1:
            return False
        found = self.rank_part(total, dtype)
        if found is None:
            return False
        y, residual = total.args
        assert isinstance(y, Node)
        self.output.args = ((found[0], residual),)
        self.erase(total, y)
        return True

    def rank_part(self, total: Node, dtype: torch.dtype) -> tuple[Node, Node] | None:
        """(the part, the group) of a sum over ranks that is the first number of this addition and
        nothing else, where the group makes both at once."""
        y = total.args[0]
        if not isinstance(y, Node) or len(y.users) > 1:
            return None
        if y.target is c.all_reduce:
            part, group = y.args
            assert isinstance(part, Node) and isinstance(group, Node)
            return (part, group) if self.object(group).sums(dtype) else None
        if y.target is not c.linear or not reduces(self.object(y.args[1]), dtype):
            return None
        product = y.args[1]
        assert isinstance(product, Node)
        with self.graph.inserting_before(y):
            group = self.graph.get_attr(f"{product.target}.group")
            return self.graph.call_function(c.linear_part, y.args), group

    # --- what is made of it -----------------------------------------------------------------------

    def key(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Equal for graphs that passes rewrite alike."""
        nodes = self.graph.nodes
        return (*((node.op, node.target, repr(node.args)) for node in nodes),
                *(_capability(self.object(node), dtype) for node in nodes
                  if node.op == "get_attr"))

    def prune(self) -> None:
        """Take out what is read and not used any more."""
        for node in reversed(list(self.graph.nodes)):
            reads = node.op == "get_attr" or node.target in (operator.getitem, getattr)
            if reads and not node.users:
                self.graph.erase_node(node)

    def readable(self) -> str:
        """The graph as Python, to be read."""
        code = self.graph.python_code("self").src.strip() + "\n"
        code = code.replace(f"{c.__name__.replace('.', '_')}_", "ops.")
        return re.sub(r";  [\w =]+ = None$", "", code, flags=re.MULTILINE)


def reduces(product: Any, dtype: torch.dtype) -> bool:
    """Whether this product is a sum over ranks that is made with what is added to it."""
    return isinstance(product, SummedLinear) and product.sums(dtype)


def is_item(node: Any, place: int) -> bool:
    """Whether a node is that result of another one."""
    return bool(isinstance(node, Node) and node.target is operator.getitem
                and node.args[1] == place)


def _capability(own: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """What passes look at in what belongs to a part."""
    forms = [None if form is None else (form.columns, form.plain, form.int8, form.norms is None)
             for form in (getattr(one, "form", None)
                          for one in (own, getattr(own, "experts", None)))]
    return (type(own), *forms, isinstance(own, Linear) and own.sums(dtype))


def lowered(g: PartGraph, ops: Any) -> Graph:
    """A copy of the graph in which every operation is what runs it: a function of the backend, or
    a method of the object it is given."""
    functions = c.functions(ops)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in g.graph.nodes:
        target = node.target
        if target in c.METHODS:
            method, place = c.METHODS[target]
            if target is c.linear and isinstance(g.object(node.args[1]), Gated):
                method = "halves"
            args = [copies[own] if isinstance(own, Node) else own for own in node.args]
            copies[node] = graph.call_method(method, (args.pop(place), *args))
            copies[node].meta["middle"] = target in c.MIDDLES
            continue
        copies[node] = graph.node_copy(node, lambda own: copies[own])
        if node.op == "call_function" and target is not operator.getitem and target is not getattr:
            copies[node].target = functions[target]
    graph.lint()
    return graph


class Line(NamedTuple):
    """A line of a function."""

    name: str
    """What it is of, "" for nobody."""
    text: str
    reads: tuple[str, ...]


class Lines:
    """A lowered graph as lines of Python, of which functions of `self` and inputs are made. Each of
    its nodes is written once, whatever number of functions it is in."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.objects: dict[str, Any] = {}
        """What is neither a node nor a number, by the name that lines have for it."""
        self.inputs = [node.name for node in self.nodes if node.op == "placeholder"]
        self.lines = {node: Line(node.name, self._text(node),
                                 tuple(own.name for own in node.all_input_nodes))
                      for node in self.nodes if node.op != "placeholder"}

    def whole(self, name: str) -> str:
        """The graph as one function."""
        return _function(name, self.inputs, list(self.lines.values()))

    def layer(self) -> dict[str, str]:
        """`LayerRun`'s functions, by name: a layer's graph as a whole, for some rows of what it
        gives, and cut at its middle."""
        place = next(at for at, node in enumerate(self.nodes) if node.meta.get("middle"))
        middle = self.nodes[place]
        before, behind = self.nodes[:place], self.nodes[place + 1:]
        read = {own for node in behind for own in node.all_input_nodes}
        used = [node for node in before if node in read and node.name != "step"]
        carried = [node.name for node in used if node.op != "get_attr"]
        first, last = ([self.lines[node] for node in part if node in self.lines]
                       for part in (before, behind))
        whole = self.lines[middle]
        some = Line(whole.name, f"{whole.text[:-1]}, rows)", (*whole.reads, "rows"))
        chosen = [Line(own, f"{own} = {own}.index_select(0, rows)", (own, "rows"))
                  for own in carried]
        taken = str(middle.args[1])
        given = [Line(own, f"{own} = carried[{at}]", ("carried",))
                 for at, own in enumerate(carried)]
        # What is read of the layer before the middle is read again behind it.
        again = [self.lines[node] for node in used if node.op == "get_attr"]
        out = Line("", f"return ({taken}, ({''.join(f'{own}, ' for own in carried)}))",
                   (taken, *carried))
        return {
            "whole": _function("whole", self.inputs, [*first, whole, *last]),
            "few": _function("few", [*self.inputs, "rows"], [*first, some, *chosen, *last]),
            "enter": _function("enter", self.inputs, [*first, out]),
            "leave": _function("leave", [middle.name, "carried"], [*given, *again, *last])}

    def compiled(self, sources: Mapping[str, str], file: str) -> tuple[FunctionType, ...]:
        """The functions of these names. file: where tracebacks say they are; they show its
        lines."""
        source = "\n".join(sources.values())
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        found = dict(self.objects)
        exec(compile(source, file, "exec"), found)
        return tuple(found[name] for name in sources)

    def _text(self, node: Node) -> str:
        args = [self._argument(own) for own in node.args]
        if node.op == "output":
            return f"return {args[0]}"
        if node.op == "get_attr":
            made = f"self.{node.target}"
        elif node.op == "call_method":
            made = f"{args[0]}.{node.target}({', '.join(args[1:])})"
        elif node.target is operator.getitem:
            made = f"{args[0]}[{args[1]}]"
        else:
            assert callable(node.target)
            made = f"{self._object(node.target)}({', '.join(args)})"
        return f"{node.name} = {made}"

    def _argument(self, own: Any) -> str:
        if isinstance(own, Node):
            return own.name
        if isinstance(own, tuple | list):
            parts = "".join(f"{self._argument(part)}, " for part in own)
            if isinstance(own, list):
                return f"[{parts}]"
            # Nodes may be in a named tuple, too.
            return f"({parts})" if type(own) is tuple else f"{self._object(type(own))}({parts})"
        if own is None or type(own) in (bool, int, str) or type(own) is float and isfinite(own):
            return repr(own)
        return self._object(own)

    def _object(self, own: Any) -> str:
        """Its name, which no node has."""
        for name, other in self.objects.items():
            if other is own:
                return name
        word = re.sub(r"\W", "", getattr(own, "__name__", type(own).__name__))
        name = f"{word}__{len(self.objects)}"
        self.objects[name] = own
        return name


def _function(name: str, inputs: Sequence[str], lines: Sequence[Line]) -> str:
    """Its source. Behind the last line that reads something it is let go, so that its memory is
    free for what comes."""
    held: set[str] = set()
    text: list[str] = []
    for line in reversed(lines):
        freed = [own for own in dict.fromkeys((*line.reads, line.name))
                 if own and own not in held and not line.text.startswith("return ")]
        held.update(line.reads)
        text.append(f"    {line.text}" + "".join(f";  {own} = None" for own in freed))
    head = f"def {name}({', '.join(('self', *inputs))}):"
    return "\n".join((head, *reversed(text))) + "\n"

