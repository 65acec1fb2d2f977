"""Tools in requests: those of OpenAI's APIs, in the forms of chats and of responses, become the
functions that the model is shown; what `tool_choice` requires of them; and calls in answers. Tools
that nobody here can run are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET, Struct, UnsetType, to_builtins

from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.parsers.custom_calls import INPUT
from actorium.actors.gateway.parsers.parameter_calls import Schemas

MAX_CALLS = 128
"""The most calls of one answer; later ones are dropped."""
MAX_NAME = 256
BUILT_INS = (
    "web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "computer",
    "image_generation", "mcp", "local_shell", "shell", "apply_patch", "tool_search", "bash_",
    "text_editor_", "memory_", "advisor_", "builtin_function")
"""How their types begin; some end with a date."""


class Function(Struct, omit_defaults=True):
    """A function that can be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(Struct):
    """A call in an answer; in a stream's delta the name comes first, then the arguments in parts.
    """

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomInput(Struct):
    """A call of a custom tool in an answer."""

    name: str
    input: str


class FunctionToolCall(Struct, kw_only=True):
    """A call in an answer, or a delta's part of it."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


def is_built_in(kind: str) -> bool:
    """Returns whether a tool of this type is one of those that OpenAI's or Anthropic's servers run,
    or whose form only their models know. They are passed over: coding agents always send some."""
    return kind.startswith(BUILT_INS)


class ToolSelection:
    """The result of a request's `tools` and `tool_choice`."""

    def __init__(self, tools: list[Tool] | None,
                 choice: Literal["none", "auto", "required"] | NamedTool | None,
                 parallel: bool) -> None:
        """Raises `HttpError` naming the field."""
        self._tools = tools or []
        self.parallel = parallel
        """Several calls may be made at once."""
        self._choice = choice if choice is not None else "auto"
        if not tools and self._choice == "auto":
            self._choice = "none"  # many clients always send it
        names = [tool.function.name for tool in self._tools]
        if len(set(names)) < len(names):
            raise bad_field("tools", "each needs a name of its own")
        if not all(0 < len(name) <= MAX_NAME for name in names):
            raise bad_field("tools", f"a name has 1 to {MAX_NAME} characters")
        if not names and self._choice != "none":
            raise bad_field("tool_choice", "there are no tools to choose from")
        if isinstance(self._choice, NamedTool) and self._choice.function.name not in names:
            raise bad_field("tool_choice", f"{self._choice.function.name[:100]!r} is none of the "
                            "tools")

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Returns the tools that the template sees."""
        return [] if self._choice == "none" else [to_builtins(tool) for tool in self._tools]

    @property
    def callable(self) -> list[Function]:
        """Returns the functions that the model may call."""
        return [] if self._choice == "none" else [tool.function for tool in self._tools]

    @property
    def schemas(self) -> Schemas | None:
        """Returns schemas of the parameters by name; None = calls are text."""
        if self._choice == "none":
            return None
        return {tool.function.name: tool.function.parameters or {} for tool in self._tools}

    @property
    def forced(self) -> str | None:
        """Returns the function whose arguments the completion is; "" = a list of calls; None = not
        forced."""
        if isinstance(self._choice, NamedTool):
            return self._choice.function.name
        return "" if self._choice == "required" else None


# --- tools of OpenAI's APIs ---

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
    """The functions of a namespace."""
    format: dict[str, Any] | UnsetType = UNSET
    """The grammar of a custom tool's input."""
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
    """Tools that the model is shown."""
    customs: frozenset[str]
    """Names of those whose input is text."""
    namespaces: dict[str, NamespacedName]
    """Functions of namespaces, by the names that the model sees."""
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


# --- tool_choice ---

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
            raise bad_field("tool_choice", "only functions and custom tools can be named, got "
                            f"{self.type[:40]!r}")
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
        raise bad_field("tool_choice.mode", "is required")
    allowed = {one.tool_name() for one in given.tools or () if not is_built_in(one.type)}
    unknown = sorted(allowed.difference(tool.function.name for tool in offer.tools))
    if unknown:
        raise bad_field("tool_choice", f"{unknown[0][:100]!r} is none of the tools")
    # The others are not shown: nothing else would keep the model from calling them.
    return ToolSelection([tool for tool in offer.tools if tool.function.name in allowed],
                         given.mode, parallel)
