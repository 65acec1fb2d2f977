"""The tools of OpenAI's APIs, in the forms of chats and of responses, as functions that the model
is shown, and what `tool_choice` says of them. Tools that nobody here can run are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from actorium.actors.gateway.api.tool_choice import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
    is_built_in,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.custom_calls import INPUT


class CustomTool(Struct, kw_only=True):
    """A tool whose input is text, in the form of chats."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class OfferedTool(Struct, kw_only=True):
    """A tool: in chats a function's fields stand in `function`, in responses in the tool itself.
    Some clients mix the two, or leave the type out."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[OfferedTool] | UnsetType = UNSET
    """Of a namespace: its functions."""
    format: dict[str, Any] | UnsetType = UNSET
    """Of a custom tool: what its input is."""
    function: Function | UnsetType = UNSET
    custom: CustomTool | UnsetType = UNSET


class NamespacedName(NamedTuple):
    """The name of a function in a namespace."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Returns the name that the model sees: Codex names the namespaces of MCP servers so that
        this comes to `mcp__SERVER__TOOL`."""
        return f"{self.namespace.removesuffix('__')}__{self.name}"


class ToolOffer(NamedTuple):
    """The tools of a request."""

    tools: list[Tool]
    """Those that the model is shown."""
    customs: frozenset[str]
    """Names of those whose input is text."""
    namespaces: dict[str, NamespacedName]
    """Those of namespaces, by the names that the model sees."""
    ignored: list[str]
    """Types of the others, which cannot be run."""


def offered(tools: Sequence[OfferedTool] | None) -> ToolOffer:
    """Returns the tools of a request. Raises `HttpError`."""
    offer = ToolOffer([], frozenset(), {}, [])
    customs = set()
    for place, space, one in _each(tools or ()):
        if is_built_in(one.type):
            if one.type not in offer.ignored:
                offer.ignored.append(one.type)
            continue
        function = _function(one)
        if function is None or not function.name:
            raise HttpError(400, f"{place}: only functions and custom tools with a name, "
                            "namespaces of them and known built-in tools are taken, got "
                            f"{one.type[:40]!r}", "tools")
        if space:
            name = NamespacedName(space, function.name)
            function.name = str(name)
            offer.namespaces[function.name] = name
        if one.type == "custom":
            customs.add(function.name)
        offer.tools.append(Tool("function", function))
    return offer._replace(customs=frozenset(customs))


def _each(tools: Sequence[OfferedTool]) -> Iterator[tuple[str, str, OfferedTool]]:
    """Yields (place, namespace, tool) of every tool, those of namespaces one by one. Raises
    `HttpError`."""
    for i, one in enumerate(tools):
        place = f"tools[{i}]"
        if one.type != "namespace":
            yield place, "", one
        elif not one.name:
            raise HttpError(400, f"{place}.name: is required of a namespace", "tools")
        else:
            for j, inner in enumerate(() if one.tools is UNSET else one.tools):
                yield f"{place}.tools[{j}]", one.name, inner


def _function(one: OfferedTool) -> Function | None:
    """Returns the function that the model is shown, None if the tool is none."""
    if one.type == "custom":
        own = CustomTool(name=one.name or "", description=one.description,
                         format=None if one.format is UNSET else one.format) \
            if one.custom is UNSET else one.custom
        return Function(own.name, _described(own), INPUT, None)
    if one.type != "function":
        return None
    if one.function is not UNSET:
        return Function(one.function.name, one.function.description, one.function.parameters,
                        one.function.strict)
    return Function(one.name or "", one.description, one.parameters, one.strict)


def _described(tool: CustomTool) -> str | None:
    """Returns the description of a custom tool with the grammar of its input: nothing else says
    what the input must be."""
    wanted = tool.format or {}
    wanted = wanted.get("grammar") or wanted  # where chats have its fields
    if not wanted.get("definition"):
        return tool.description
    grammar = f"The input must match this {wanted.get('syntax', '')} grammar:\n" \
        f"{wanted['definition']}"
    return f"{tool.description}\n\n{grammar}" if tool.description else grammar


# --- tool_choice ----------------------------------------------------------------------------------

Word: TypeAlias = Literal["none", "auto", "required"]
WORDS: tuple[Word, ...] = ("none", "auto", "required")
"""They may be the type of an object, too."""


class AllowedTools(Struct, kw_only=True, omit_defaults=True):
    """The tools that may be called, in the form of chats."""

    mode: Literal["auto", "required"]
    tools: list[ToolChoiceParam]


class ToolChoiceParam(Struct, kw_only=True, omit_defaults=True):
    """A tool that is named, or those that are allowed, in the form of either API."""

    type: str
    name: str | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolChoiceParam] | None = None

    def tool_name(self) -> str:
        """Returns the named tool. Raises `HttpError`."""
        inner = self.custom if self.type == "custom" else self.function
        name = inner.name if inner is not None else self.name
        if self.type not in ("function", "custom") or not name:
            raise HttpError(400, "tool_choice: only functions and custom tools can be named, got "
                            f"{self.type[:40]!r}", "tool_choice")
        return name


def selected(offer: ToolOffer, choice: Word | ToolChoiceParam | None,
             parallel: bool) -> ToolSelection:
    """Returns the tools that the model is shown, and what it has to do with them. parallel: several
    calls may be made at once. Raises `HttpError`."""
    if not isinstance(choice, ToolChoiceParam):
        return ToolSelection(offer.tools, choice, parallel)
    for word in WORDS:
        if choice.type == word:
            return ToolSelection(offer.tools, word, parallel)
    if choice.type != "allowed_tools":
        named = NamedTool("function", NamedFunction(choice.tool_name()))
        return ToolSelection(offer.tools, named, parallel)
    given = choice.allowed_tools or choice
    if given.mode is None:
        raise HttpError(400, "tool_choice.mode: is required", "tool_choice")
    allowed = {one.tool_name() for one in given.tools or () if not is_built_in(one.type)}
    unknown = sorted(allowed.difference(tool.function.name for tool in offer.tools))
    if unknown:
        raise HttpError(400, f"tool_choice: {unknown[0][:100]!r} is none of the tools",
                        "tool_choice")
    # The others are not shown: nothing else would keep the model from calling them.
    return ToolSelection([tool for tool in offer.tools if tool.function.name in allowed],
                         given.mode, parallel)
