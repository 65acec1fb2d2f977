"""What people reported of other engines' parsers of tool calls and thoughts: what the model wrote,
and what a client must get, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from helpers_parsing import Told, cuttings, hermes, in_parts

from actorium.actors.gateway.parsers.json_calls import CallListParser
from actorium.actors.gateway.parsers.parser_factory import call_beginning, call_parser
from actorium.actors.gateway.parsers.parts import ChainedParser, OutputParser
from actorium.actors.gateway.parsers.thoughts import ThinkParser

STRING, NULL = {"type": "string"}, {"type": "null"}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}}


def tool(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TOOLS = {
    "bash": tool(command=STRING, description=STRING),
    "edit": tool(path=STRING, old_string=STRING, new_string=STRING,
                 edits={"type": "array", "items": {"type": "object"}}),
    "update_record": tool(id={"type": "integer"}, metadata={"anyOf": [{"type": "object"}, NULL]},
                          label={"anyOf": [STRING, NULL]}, ratio={"type": "number"}),
    "get_weather": tool(location={"anyOf": [tool(city=STRING), tool(lat={"type": "number"})]},
                        city=STRING, days={"anyOf": [{"type": "integer"}, NULL]},
                        place={"$ref": "#/$defs/Point"}) | {"$defs": {"Point": POINT}},
    "get_time": tool(timezone=STRING), "list_tables": tool(), "search": tool(query=STRING),
}


def coder() -> OutputParser:
    return call_parser("qwen3_coder", TOOLS)


def llama() -> OutputParser:
    return call_parser("llama3_json", TOOLS)


def thinking(name: str, reader: Callable[[], OutputParser],
             inside: bool = True) -> Callable[[], OutputParser]:
    return lambda: ChainedParser(ThinkParser(inside, call_beginning(name)), reader())


HERMES, CODER = thinking("hermes", hermes), thinking("qwen3_coder", coder)
END = "\n</function>\n</tool_call>"


class Report(NamedTuple):
    repository: str
    number: int
    what: str
    parser: Callable[[], OutputParser]
    written: str
    """What the model wrote."""
    text: str = ""
    """What comes as the answer's text."""
    calls: tuple[tuple[str, Any], ...] = ()
    """Names and arguments; a string = arguments that were cut."""
    reasoning: str = ""
    cut: bool = False


VLLM, SGLANG, LLAMA_CPP, OLLAMA = ("vllm-project/vllm", "sgl-project/sglang", "ggml-org/llama.cpp",
                                   "ollama/ollama")
WEATHER, CLOCK = ("get_weather", {"city": "NYC"}), ("get_time", {"timezone": "EST"})

REPORTS = [
    # --- Qwen3-Coder: where a value ends ---
    Report(VLLM, 57699, "no </parameter> before </function>", coder,
           "<tool_call>\n<function=update_record>\n<parameter=id>\n1\n</parameter>\n"
           '<parameter=metadata>\n{"mode": "AIR_CLEAN", "on": true}' + END,
           calls=(("update_record", {"id": 1, "metadata": {"mode": "AIR_CLEAN", "on": True}}),)),
    Report(OLLAMA, 17914, "no </parameter> before the next parameter", coder,
           "<tool_call>\n<function=bash>\n<parameter=command>\nls\n<parameter=description>\nList\n"
           "</parameter>" + END, calls=(("bash", {"command": "ls", "description": "List"}),)),
    Report(OLLAMA, 17914, "the model stops within the last parameter", coder,
           "<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n",
           calls=(("bash", {"command": "ls -la"}),)),
    Report(OLLAMA, 18563, "a long file whose </parameter> is missing", coder,
           "<tool_call>\n<function=edit>\n<parameter=path>\n/a.html\n</parameter>\n"
           "<parameter=new_string>\n<ul>\n  <li>a & b</li>\n</ul>" + END, calls=(
               ("edit", {"path": "/a.html", "new_string": "<ul>\n  <li>a & b</li>\n</ul>"}),)),
    Report("raullenchai/Rapid-MLX", 1515, "an argument that quotes </tool_call>", coder,
           "<tool_call>\n<function=edit>\n<parameter=new_string>\nA tool call block ends with "
           "</tool_call> on its own.\n</parameter>" + END,
           calls=(("edit", {"new_string": "A tool call block ends with </tool_call> on its "
                            "own."}),)),
    Report("raullenchai/Rapid-MLX", 1515, "an argument that quotes </parameter>", coder,
           "<tool_call>\n<function=edit>\n<parameter=new_string>\nA parameter block ends with "
           "</parameter> here.\n</parameter>" + END,
           calls=(("edit", {"new_string": "A parameter block ends with </parameter> here."}),)),
    Report(SGLANG, 39836, "a parameter that is begun again within its list", coder,
           '<tool_call>\n<function=edit>\n<parameter=edits>\n[{"old": "a"},\n<parameter=edits>\n'
           '{"old": "b"}]\n</parameter>' + END,
           calls=(("edit", {"edits": [{"old": "a"}, {"old": "b"}]}),)),
    *[Report(SGLANG, 27336, f"a broken </parameter>: {end}", coder,
             f"<tool_call>\n<function=bash>\n<parameter=command>\n上海\n{end}" + END,
             calls=(("bash", {"command": "上海"}),))
      for end in ("</parameter/>", "</parameter1>", "</parameter", "</parameter_function>")],
    Report(VLLM, 48753, "white space around a value", coder,
           "<tool_call>\n<function=edit>\n<parameter=old_string>\n    if x:\n        return 1\n\n"
           "</parameter>" + END,
           calls=(("edit", {"old_string": "    if x:\n        return 1\n"}),)),
    Report(OLLAMA, 12357, "a value with & and <", coder,
           "<tool_call>\n<function=bash>\n<parameter=command>\npwd && ls -la < x > y &amp; 2\n"
           "</parameter>" + END, calls=(("bash", {"command": "pwd && ls -la < x > y &amp; 2"}),)),
    Report(LLAMA_CPP, 27363, "parameters in another order than the schema's", coder,
           "<tool_call>\n<function=bash>\n<parameter=description>\nb\n</parameter>\n"
           "<parameter=command>\na\n</parameter>" + END,
           calls=(("bash", {"description": "b", "command": "a"}),)),
    # --- Qwen3-Coder: types ---
    Report(VLLM, 38885, "None, as the template itself writes it", coder,
           "<tool_call>\n<function=update_record>\n<parameter=id>42</parameter>\n"
           "<parameter=metadata>None</parameter>\n<parameter=label>x</parameter>\n</function>\n"
           "</tool_call>", calls=(("update_record", {"id": 42, "metadata": None, "label": "x"}),)),
    Report(VLLM, 43984, "inf is no JSON", coder,
           "<tool_call>\n<function=update_record>\n<parameter=ratio>\n1e999\n</parameter>\n"
           "<parameter=metadata>\n[Infinity]\n</parameter>" + END,
           calls=(("update_record", {"ratio": "1e999", "metadata": ["Infinity"]}),)),
    Report(VLLM, 36032, "an object under anyOf", coder,
           '<tool_call>\n<function=get_weather>\n<parameter=location>\n{"city": "Paris"}\n'
           "</parameter>" + END, calls=(("get_weather", {"location": {"city": "Paris"}}),)),
    Report(VLLM, 37831, "anyOf with null, and $ref", coder,
           "<tool_call>\n<function=get_weather>\n<parameter=days>\n5\n</parameter>\n"
           '<parameter=place>\n{"x": 1.5}\n</parameter>' + END,
           calls=(("get_weather", {"days": 5, "place": {"x": 1.5}}),)),
    Report(VLLM, 37831, "a text that looks like a number under anyOf with null", coder,
           "<tool_call>\n<function=update_record>\n<parameter=label>\n007\n</parameter>\n"
           "<parameter=metadata>\nnull\n</parameter>" + END,
           calls=(("update_record", {"label": "007", "metadata": None}),)),
    Report("ml-explore/mlx-lm", 1236, "a date where a number belongs", coder,
           "<tool_call><function=update_record><parameter=id>2026-01-15</parameter></function>",
           calls=(("update_record", {"id": "2026-01-15"}),)),
    Report(SGLANG, 36835, "an empty value where no text is allowed", coder,
           "<tool_call>\n<function=get_weather>\n<parameter=days></parameter>\n<parameter=city>"
           "</parameter>" + END, calls=(("get_weather", {"days": None, "city": ""}),)),
    # --- Qwen3-Coder: marks that are missing, and text ---
    Report(OLLAMA, 16686, "no <tool_call>", coder,
           "I'll use the tool to list all files.\n\n<function=bash>\n<parameter=command>\n*.md\n"
           "</parameter>" + END, "I'll use the tool to list all files.",
           (("bash", {"command": "*.md"}),)),
    Report(OLLAMA, 17742, "prose that names a function that is no tool", coder,
           "Models write <function=bash> or\n<function=exec>\n<parameter=a>\nb\n</parameter>\n"
           "</function>",
           "Models write <function=bash> or\n<function=exec>\n<parameter=a>\nb\n</parameter>\n"
           "</function>"),
    Report(SGLANG, 40739, "text behind a call", coder,
           "So:\n<tool_call>\n<function=list_tables>" + END + "\nThat was it.",
           "So:\nThat was it.", (("list_tables", {}),)),
    Report(SGLANG, 24387, "a line end between two calls is no text", coder,
           "\n\n<tool_call>\n<function=list_tables>" + END + "\n<tool_call>\n<function=bash>\n"
           "<parameter=command>\nls\n</parameter>" + END + "\n",
           "", (("list_tables", {}), ("bash", {"command": "ls"}))),
    Report("noonghunna/club-3090", 1191, "prose about the mark itself", coder,
           'The literal token "<tool_call>" begins a call, </tool_call> ends it.',
           'The literal token "<tool_call>" begins a call, </tool_call> ends it.'),
    Report(VLLM, 47903, "a call that max_tokens cut", coder,
           "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<parameter=descr",
           calls=(("bash", '{"command": "ls"'),), cut=True),
    Report(VLLM, 47137, "a beginning that was cut", hermes, "So <tool_ca", "So <tool_ca",
           cut=True),
    Report("ml-explore/mlx-swift-lm", 529, "the older form within the mark", coder,
           '<tool_call>{"name": "get_weather", "arguments": {"city": "NYC"}}</tool_call>',
           calls=(WEATHER,)),
    Report("waybarrios/vllm-mlx", 63, "Python's quotes in an object", coder,
           "<tool_call>\n<function=update_record>\n<parameter=metadata>{'theme': 'dark', 'n': 14, "
           "'on': True}</parameter>" + END,
           calls=(("update_record", {"metadata": {"theme": "dark", "n": 14, "on": True}}),)),
    Report(VLLM, 33965, "two calls of one tool, and </parameter> in a text", coder,
           "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>" + END + "\n"
           "<tool_call>\n<function=edit>\n<parameter=new_string>\nx\n</parameter>\ny\n"
           "</parameter>" + END, calls=(("edit", {"path": "/a"}),
                                        ("edit", {"new_string": "x\n</parameter>\ny"}))),
    # --- thoughts ---
    Report(VLLM, 39056, "a call within a thought that is not closed", CODER,
           "I need the files.\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>"
           + END, calls=(("bash", {"command": "ls"}),), reasoning="I need the files."),
    Report(OLLAMA, 14745, "the same, with a thought that the model opened",
           thinking("qwen3_coder", coder, inside=False),
           "<think>Let me check.\n<tool_call>\n<function=bash>\n<parameter=command>\ngrep x | head"
           "\n</parameter>\n<parameter=description>\nFind\n</parameter>" + END,
           calls=(("bash", {"command": "grep x | head", "description": "Find"}),),
           reasoning="Let me check."),
    Report(LLAMA_CPP, 21118, "the same as Hermes writes, and the thought closed behind it", HERMES,
           'Look.\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>\n'
           "</think>\n\n", calls=(("search", {"query": "x"}),), reasoning="Look."),
    Report(LLAMA_CPP, 20260, "text between the thought and the call", CODER,
           "Hm.\n</think>\n\nI run it.\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n"
           "</parameter>" + END, "I run it.", (("bash", {"command": "ls"}),), "Hm."),
    Report("lmstudio-ai/lmstudio-bug-tracker", 1592, "a thought about the marks", CODER,
           "Some use `<function=...>`, others `<tool_call>`.\n</think>\n\nBoth.", "Both.",
           reasoning="Some use `<function=...>`, others `<tool_call>`."),
    Report(VLLM, 13125, "no <think>, since the prompt has it", thinking("hermes", hermes),
           "Okay, 9.11\n</think>\n\n9.9 is larger.", "9.9 is larger.", reasoning="Okay, 9.11"),
    # --- Hermes ---
    Report(VLLM, 45167, "an argument that quotes </tool_call>", hermes,
           '<tool_call>\n{"name": "bash", "arguments": {"command": "echo </tool_call> test"}}\n'
           "</tool_call>", calls=(("bash", {"command": "echo </tool_call> test"}),)),
    Report(VLLM, 28806, "a tool without parameters", hermes,
           '<tool_call>\n{"name": "list_tables", "arguments": {}}\n</tool_call>',
           calls=(("list_tables", {}),)),
    Report(VLLM, 21544, "an open brace within an argument", hermes,
           '<tool_call>\n{"name": "bash", "arguments": {"command": "mkdir -p test/{test1,test2"}}\n'
           "</tool_call>", calls=(("bash", {"command": "mkdir -p test/{test1,test2"}),)),
    Report(LLAMA_CPP, 18183, "JSON without the mark is sample code", hermes,
           'So:\n```json\n{"name": "search", "arguments": {"query": "x"}}\n```',
           'So:\n```json\n{"name": "search", "arguments": {"query": "x"}}\n```'),
    Report(SGLANG, 35169, "text right before the mark", hermes,
           'Sure, let me check. <tool_call>{"name": "list_tables", "arguments": {}}</tool_call>',
           "Sure, let me check.", (("list_tables", {}),)),
    Report("NousResearch/hermes-agent", 110436, "escapes that JSON does not know", hermes,
           '<tool_call>\n{"name": "search", "arguments": {"query": "\\d+ C:\\path \\u12 \\n"}}\n'
           "</tool_call>", calls=(("search", {"query": "\\d+ C:\\path \\u12 \n"}),)),
    # --- Llama 3 ---
    Report(VLLM, 49923, "parallel calls behind `;` alone, and behind a line end", llama,
           '{"name": "get_weather", "parameters": {"city": "NYC"}};{"name": "get_time", '
           '"parameters": {"timezone": "EST"}}\n{"name": "list_tables", "parameters": {}}',
           calls=(WEATHER, CLOCK, ("list_tables", {}))),
    Report(VLLM, 49923, "prose with braces behind a call", llama,
           '{"name": "search", "parameters": {"query": "x"}} I used {searchTool}, the args '
           'were {"query": "x"}.', 'I used {searchTool}, the args were {"query": "x"}.',
           (("search", {"query": "x"}),)),
    Report(VLLM, 19024, "a question behind a call", llama,
           '{"type": "function", "name": "list_tables", "parameters": {}} \n\nWould you like more?',
           "Would you like more?", (("list_tables", {}),)),
    Report("ai-dynamo/dynamo", 8732, "`;` between calls behind the tag", llama,
           '<|python_tag|>{"name":"get_weather","arguments":{"city":"NYC"}};'
           '{"name":"get_time","arguments":{"timezone":"EST"}}', calls=(WEATHER, CLOCK)),
    Report(SGLANG, 35562, "JSON that is no call", llama, '{"a": 1} is a dict',
           '{"a": 1} is a dict'),
    Report(SGLANG, 35562, "an empty object", llama, "{}", "{}"),
    Report(SGLANG, 28845, "text right behind a call", llama,
           '{"name": "get_weather", "parameters": {"city": "NYC"}}Some follow-up text',
           "Some follow-up text", (WEATHER,)),
    Report(SGLANG, 32088, "the same behind the tag", llama,
           '<|python_tag|>{"name": "list_tables", "arguments": {}}Some note', "Some note",
           (("list_tables", {}),)),
    # --- forced ---
    Report("raullenchai/Rapid-MLX", 1508, "a forced call that was cut is shown as text",
           CallListParser, '[{"name": "get_weather", "argu', cut=True),
]


@pytest.mark.parametrize("report", REPORTS, ids=[f"{one.repository}-{one.number}-{one.what}"
                                                 for one in REPORTS])
def test_what_was_reported_of_others_does_not_happen_here(report: Report) -> None:
    for parts in cuttings(report.written):
        told = Told(in_parts(report.parser(), parts, report.cut))
        assert (told.text, told.reasoning) == (report.text, report.reasoning)
        assert [name for name, _ in told.calls] == [name for name, _ in report.calls]
        for (_, found), (_, wanted) in zip(told.calls, report.calls, strict=True):
            if isinstance(wanted, str):
                assert found == wanted
            else:
                assert json.loads(found, parse_constant=pytest.fail) == wanted
