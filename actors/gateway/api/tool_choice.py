"""Tools in a chat's request: what the template sees, and what `tool_choice` requires."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, to_builtins

from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.qwen3_coder import Schemas

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
            raise HttpError(400, "tools: each needs a name of its own", "tools")
        if not all(0 < len(name) <= MAX_NAME for name in names):
            raise HttpError(400, f"tools: a name has 1 to {MAX_NAME} characters", "tools")
        if not names and self._choice != "none":
            raise HttpError(400, "tool_choice: there are no tools to choose from", "tool_choice")
        if isinstance(self._choice, NamedTool) and self._choice.function.name not in names:
            raise HttpError(400, f"tool_choice: {self._choice.function.name[:100]!r} is none of "
                            "the tools", "tool_choice")

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
