"""Tools and late system messages in conversations whose chat template has no place for them.

What a template shows is found out by rendering small conversations. What it would leave out is
written into the texts of the turns that it does show, in the form of Hermes: the tools into the
system message, calls as `<tool_call>{...}</tool_call>` into the model's turns, and their results as
`<tool_response>...</tool_response>` into turns of the user. System messages behind the first turn,
which coding agents send and many templates refuse, become turns of the user, where they stand.

Arguments of a history's calls are read here, too: models and clients write them less well than JSON
asks. What cannot be read does not refuse the conversation: each later turn would bring it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from msgspec import Struct

from actorium.actors.messages import ChatMessage

Turns: TypeAlias = list[dict[str, Any]]
"""A conversation as templates get it."""
Tools: TypeAlias = Sequence[dict[str, Any]]
Rendered: TypeAlias = Callable[[Turns, Tools | None], str]
"""What a template makes of a conversation; "" = it refuses it."""

INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Those of Hermes' and Qwen's own templates."""


class TemplateTraits(Struct, frozen=True):
    """What a template shows, and how it wants it."""

    tools: bool = True
    calls: bool = True
    results: bool = True
    """Of calls, in turns of the role "tool"."""
    system: bool = True
    """Turns of the role "system"."""
    late_system: bool = True
    """Those that are not the first turn."""
    text_arguments: bool = False
    """It prints a call's arguments as they are, so they must be JSON text; else they are an object,
    which most templates write in the model's own way."""

    one_call: bool = False
    """Of a turn's calls it shows the first alone, or refuses the turn."""
    thinking: bool = False
    """It shows the reasoning before a call as `thinking`, which has no text beside it."""
    responses: bool = False
    """It wants results as `tool_responses` of the turn with their calls (Gemma 4's first ones)."""

    def described(self, turns: Turns, tools: Tools | None) -> Turns:
        """Returns the conversation with all that the template would leave out in its texts."""
        turns = turns if self.late_system else _without_late_system(turns)
        turns = _one_call_each(turns) if self.one_call else turns
        turns = [_with_thinking(turn) for turn in turns] if self.thinking else turns
        turns = _with_responses(turns) if self.responses else turns
        lacks_tools = bool(tools) and not self.tools
        out: Turns = []
        has_results = False
        """The last turn holds results."""
        for turn in turns:
            # In one prompt all calls are written alike.
            if turn["role"] == "tool" and (lacks_tools or not self.results):
                content = _joined(_joined("<tool_response>\n", turn["content"]),
                                  "\n</tool_response>")
                turn, between, result = {"role": "user", "content": content}, "\n", True
            else:
                between, result = "\n\n", False
                if turn.get("tool_calls") and (lacks_tools or not self.calls):
                    turn = _with_calls(turn)
            if has_results and turn["role"] == "user":
                # Results of several calls are one turn, and so are they and what the user says
                # then: many templates want the user and the model to alternate.
                before = _joined(out.pop()["content"], between)
                turn = turn | {"content": _joined(before, turn["content"])}
            has_results = result
            out.append(turn)
        if tools and lacks_tools:
            _instruct(out, INSTRUCTIONS.format("\n".join(map(_json, tools))), self.system)
        return out


def _one_call_each(turns: Turns) -> Turns:
    """Returns the conversation with a turn for each call, and its result behind it."""
    out: Turns = []
    moved: set[int] = set()
    """Places of the results that stand behind their calls already."""
    for at, turn in enumerate(turns):
        calls = turn.get("tool_calls") or []
        if at in moved:
            continue
        if len(calls) < 2:
            out.append(turn)
            continue
        results = list(takewhile(lambda i: turns[i]["role"] == "tool", range(at + 1, len(turns))))
        for call in calls:
            out.append(turn | {"tool_calls": [call]})
            turn = {"role": turn["role"], "content": ""}
            own = [i for i in results if turns[i].get("tool_call_id") == call["id"]]
            out += [turns[i] for i in own if i not in moved]
            moved |= set(own)
    return out


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    thought = turn.get("reasoning_content")
    if not thought or not turn.get("tool_calls"):
        return turn
    said = turn["content"] if isinstance(turn["content"], str) else ""
    return turn | {"content": "" if said else turn["content"],
                   "thinking": f"{thought}\n\n{said}" if said else thought}


def _with_responses(turns: Turns) -> Turns:
    """Returns the conversation with results in the turns of their calls, and so the answer behind
    them: all that is one turn of the model."""
    out: Turns = []
    for turn in turns:
        last = out[-1] if out else {}
        if turn["role"] == "tool" and last.get("tool_calls"):
            names = {call["id"]: call["function"]["name"] for call in last["tool_calls"]}
            said = turn["content"] if isinstance(turn["content"], str) else "".join(
                part.get("text", "") for part in turn["content"])
            value = _decoded(said)
            own = {"name": names.get(turn.get("tool_call_id"), turn.get("name", "unknown")),
                   "response": value if isinstance(value, dict) else said}
            out[-1] = last | {"tool_responses": [*last.get("tool_responses", ()), own]}
        elif turn["role"] == "assistant" and not turn.get("tool_calls") \
                and last.get("tool_responses") and not last["content"]:
            out[-1] = last | {"content": turn["content"]}
        else:
            out.append(turn)
    return out


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_calls(turn: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else _json(arguments)
        calls.append(f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {written}}}'
                     "\n</tool_call>")
    content = turn["content"]
    kept = {name: value for name, value in turn.items() if name != "tool_calls"}
    return kept | {"content": _joined(content, ("\n" if content else "") + "\n".join(calls))}


def _instruct(out: Turns, text: str, system: bool) -> None:
    """Puts the instructions into the system message, or, where the template shows none, before the
    user's first words."""
    first = next((i for i, turn in enumerate(out) if turn["role"] == "user"), None)
    if system and out[0]["role"] == "system":
        out[0] = out[0] | {"content": _joined(out[0]["content"], "\n\n" + text)}
    elif system:
        out.insert(0, {"role": "system", "content": text})
    elif first is None:
        out.insert(0, {"role": "user", "content": text})
    else:
        out[first] = out[first] | {"content": _joined(text + "\n\n", out[first]["content"])}


def _without_late_system(turns: Turns) -> Turns:
    """Returns the conversation with what it says as the system in its first turn, and then in turns
    of the user."""
    out: Turns = []
    has_system = False
    """The last turn ends with what the system says."""
    for turn in turns:
        late = turn["role"] == "system" and bool(out)
        before = out[-1]["role"] if late or has_system else ""
        # Many templates want the user and the model to alternate.
        if before in (("system", "user") if late else (turn["role"],)):
            out[-1] = out[-1] | {"content": _joined(_joined(out[-1]["content"], "\n\n"),
                                                    turn["content"])}
        else:
            out.append({"role": "user", "content": turn["content"]} if late else turn)
        has_system = late and out[-1]["role"] == "user"
    return out


def _joined(first: Any, second: Any) -> Any:
    """Returns two contents as one: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [part for own in (first, second)
            for part in ([{"type": "text", "text": own}] if isinstance(own, str) else own)]


# --- what a template shows ------------------------------------------------------------------------

_TOOL, _KEY, _OTHER, _WORD = "probe_tool", "probe_key", "probe_other", "probe_word"
_PARAMETERS = {"type": "object", "required": [_KEY],
               "properties": {_KEY: {"type": "string", "description": "A word."}}}
_TOOLS = [{"type": "function", "function": {
    "name": _TOOL, "description": "Probes.", "parameters": _PARAMETERS}}]
_USER = {"role": "user", "content": "?"}
_SYSTEM = {"role": "system", "content": _WORD}
_ANSWER = {"role": "assistant", "content": "!"}
_RESULT = {"role": "tool", "name": _TOOL, "tool_call_id": "probe0001", "content": _WORD}


def _call(*arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": f"probe000{number}",
         "function": {"name": _TOOL, "arguments": own}}
        for number, own in enumerate(arguments, 1)]}


def probe(rendered: Rendered) -> TemplateTraits:
    """Finds out what a template shows; of one that refuses everything, nothing is known."""
    system = _WORD in rendered([_SYSTEM, _USER], None)
    ways = ([_USER], [_SYSTEM, _USER])
    if not any(rendered(turns, None) for turns in ways):
        return TemplateTraits()
    calls = {kind: rendered([_USER, _call(own), _RESULT], None) or rendered([_USER, _call(own)],
                                                                            None)
             for kind, own in (("object", {_KEY: "x"}), ("text", _json({_KEY: "x"})))}
    # Python's own form of an object is what comes of printing one.
    text = f'"{_KEY}":' in calls["text"] and (
        _KEY not in calls["object"] or f"'{_KEY}'" in calls["object"])
    call = _call(_json({_KEY: "x"}) if text else {_KEY: "x"})
    called = calls["text" if text else "object"]
    answered = rendered([_USER, call, _RESULT], None)
    tools = any(_TOOL in rendered(turns, _TOOLS) for turns in ways)
    late = _WORD in rendered([_USER, _ANSWER, _SYSTEM, _USER], None)
    shows_calls = _KEY in called if called else tools
    second: Any = {_OTHER: "x"}
    several = rendered([_USER, _call(*(_json(own) if text else own for own in ({_KEY: "x"}, second))
                                     ), _RESULT, _RESULT | {"tool_call_id": "probe0002"}], None)
    thinking, usual = (_WORD in rendered([_USER, call | {name: _WORD}], None)
                       for name in ("thinking", "reasoning_content"))
    responded = rendered([_USER, call | {"tool_responses": [{"name": _TOOL, "response": _WORD}]}],
                         None)
    # A refusal of one that shows tools is about the conversation, not about what it can show.
    return TemplateTraits(tools=tools, calls=shows_calls,
                          results=_WORD in answered if answered else tools,
                          system=system, late_system=late, text_arguments=text,
                          one_call=bool(called) and shows_calls and _OTHER not in several,
                          thinking=thinking and not usual,
                          responses=_WORD in responded and responded != answered)


# --- arguments of calls ---------------------------------------------------------------------------

def arguments_of(text: str) -> dict[str, Any] | None:
    """Returns the arguments that a call's text stands for; None if it is no JSON object.

    Empty text, null and an empty list mean that there are none; line ends and other control
    characters may stand in strings as they are; an object may be written as a string of JSON.
    """
    found = _decoded(text)
    if isinstance(found, str):
        found = _decoded(found)
    if isinstance(found, dict):
        return _whole(found) if "\\u" in text else found
    return {} if found is None or found == [] else None


def for_template(text: str, as_text: bool) -> dict[str, Any] | str:
    """Returns a call's arguments as an object, which templates write in the model's own way, or as
    text. Text that cannot be read is left as it is; an object is then empty."""
    found = arguments_of(text)
    if not as_text:
        return found or {}
    if found is None or _is_object(text):
        return text
    try:
        return json.dumps(found, ensure_ascii=False)
    except RecursionError:
        return text


def unreadable(messages: Iterable[ChatMessage]) -> list[str]:
    """Returns the calls whose arguments cannot be read, by their place and the function's name."""
    return [f"messages[{i}].tool_calls[{j}] ({call.name})" for i, turn in enumerate(messages)
            for j, call in enumerate(turn.tool_calls) if arguments_of(call.arguments) is None]


def _decoded(text: str) -> Any:
    """Returns what the text is in JSON, None where it is empty; False where it is no JSON."""
    try:
        return json.loads(text, strict=False) if text.strip() else None
    except (ValueError, RecursionError):
        return False


def _whole(found: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments without halves of characters (`\\ud83d`), which no text may hold."""
    try:
        clean: dict[str, Any] = json.loads(json.dumps(found, ensure_ascii=False).encode(
            errors="replace"))
    except (ValueError, RecursionError):
        return None
    return clean


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
