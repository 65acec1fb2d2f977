"""The formats of tool calls, one row each: how a model writes its calls. The parsers, the grammars
that force calls, and the choice of a format by the chat template are all made from these rows.

Rows are in the order in which templates are looked through: `<tool_call>` is part of many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from actorium.actors.gateway.parsers.gemma4_values import (
    FUNCTION_GEMMA_FORM,
    GEMMA4_FORM,
    GemmaForm,
)
from actorium.actors.gateway.parsers.harmony import CHANNEL
from actorium.actors.gateway.parsers.json_calls import HERMES, CallForm
from actorium.actors.gateway.parsers.parameter_form import ParameterForm
from actorium.actors.gateway.parsers.parts import OutputParser
from actorium.actors.gateway.parsers.python_calls import PythonForm

_MARK = re.compile(r"<[^<>\s{}]+>|\[[A-Z_]+\]")


class ParserForm(NamedTuple):
    """Calls that a plug-in's own parser finds, where no other form describes them. No grammar
    holds them: demanded calls are JSON."""

    parser: Callable[[Mapping[str, Any]], OutputParser]
    """Makes a parser for one choice. It is called with the tools' schemas by name."""
    begin: str
    """What calls begin with, for readers."""


class CallFormat(NamedTuple):
    """A row."""

    models: str
    """Models that use it."""
    form: CallForm | ParameterForm | PythonForm | GemmaForm | ParserForm | None
    """How calls are marked; its type selects the parser. None = harmony, which has but one form."""
    template: tuple[str, ...] = ()
    """Strings that a template in this format has, all of them; none = it cannot be told by that."""
    special: bool = False
    """Marks may be special tokens, which must be sent with the output."""
    call_id: str = "call_{digest:.24}"
    """The form of a call's id, where the model writes none; `digest` is unique to the call."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Returns what calls begin with, for readers."""
        match self.form:
            case CallForm() as form:
                marks = (form.section,) if form.section else form.marks
                return (*marks, '{"name":') if form.bare else marks
            case ParameterForm() as form:
                return (form.open or form.function,)
            case GemmaForm() as form:
                return (form.call,)
            case PythonForm() as form:
                return (*form.marks, "[NAME(") if form.bare else form.marks
            case ParserForm() as form:
                return (form.begin,)
        return (f"{CHANNEL}commentary to=functions.NAME",)


# --- one parameter after the other ---

_BRACKETED = ParameterForm(
    open="<tool_call>", close="</tool_call>", function="<function=", name_end=">",
    function_end="</function>", parameter="<parameter=", parameter_name=r"([^>\n]*)(?:>|(?=\n))",
    parameter_end="</parameter>", lines=True, written=(
        "{open}\n{function}{name}>\n", "{parameter}{name}>\n", "\n{parameter_end}\n",
        "{function_end}\n{close}"))
_QUOTED_NAME = r"""["']?([^"'>\n]*)["']?[^>\n]*(?:>|(?=\n))"""
_INVOKED = _BRACKETED._replace(
    function="<invoke name=", function_end="</invoke>", parameter="<parameter name=",
    parameter_name=_QUOTED_NAME, lines=False, shared=True, written=(
        '{function}"{name}">\n', '{parameter}"{name}">', "{parameter_end}\n", "{function_end}"))
_ARG_KEYS = ParameterForm(
    function="<tool_call>", name_end=r"\n|(?=<arg_key>|</tool_call>)", function_end="</tool_call>",
    parameter="<arg_key>", parameter_name=r"([^<]*)</arg_key>\s*<arg_value>",
    parameter_end="</arg_value>", written=(
        "{function}{name}\n", "{parameter}{name}</arg_key>\n<arg_value>", "{parameter_end}\n",
        "{function_end}"))


def _dsml(calls: str, space: str = "") -> ParameterForm:
    """Returns DeepSeek's form, whose versions name the outer mark differently."""
    mark = f"｜DSML｜{space}"
    return ParameterForm(
        open=f"<{mark}{calls}>", close=f"</{mark}{calls}>", function=f"<{mark}invoke name=",
        name_end=">", function_end=f"</{mark}invoke>", parameter=f"<{mark}parameter name=",
        parameter_name=r"""["']?([^"'>\n]*)["']?(?:\s+string="(?P<string>true|false)")?[^>\n]*"""
                       r"(?:>|(?=\n))",
        parameter_end=f"</{mark}parameter>", shared=True,
        typed=True, written=('{function}"{name}">\n', '{parameter}"{name}" string="{string}">',
                             "{parameter_end}\n", "{function_end}"))


# --- JSON behind a name ---

def _deepseek(before: str, behind: str) -> CallForm:
    """Returns DeepSeek's older form. before, behind: around the name."""
    return CallForm(
        ("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁end｜>",), "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", header=rf"{before}\s*(?P<name>[^\s<]+)\s*{behind}",
        separator="")


FORMATS: dict[str, CallFormat] = {
    "harmony": CallFormat("gpt-oss", None, (CHANNEL,), special=True),
    "gemma4": CallFormat("Gemma 4", GEMMA4_FORM, ("<|tool_call>",), special=True),
    "functiongemma": CallFormat("FunctionGemma", FUNCTION_GEMMA_FORM,
                                ("<start_function_call>",), special=True),
    "deepseek_v41": CallFormat("DeepSeek V4.1", _dsml("calls", " "), ("<｜DSML｜ calls>",), True),
    "deepseek_v4": CallFormat("DeepSeek V4", _dsml("tool_calls"), ("<｜DSML｜tool_calls>",), True),
    "deepseek_v32": CallFormat("DeepSeek V3.2", _dsml("function_calls"),
                               ("<｜DSML｜function_calls>",), True),
    "deepseek_v3": CallFormat(
        "DeepSeek V3, R1", _deepseek("function<｜tool▁sep｜>", r"\n```json\s*")._replace(
            written=("function<｜tool▁sep｜>{name}\n```json\n", "\n```")),
        ("<｜tool▁calls▁begin｜>", "```json"), True),
    "deepseek_v31": CallFormat(
        "DeepSeek V3.1", _deepseek("", "<｜tool▁sep｜>\\s*")._replace(
            written=("{name}<｜tool▁sep｜>", "")), ("<｜tool▁calls▁begin｜>",), True),
    "kimi_k2": CallFormat(
        "Kimi K2", CallForm(
            ("<|tool_call_begin|>",), ("<|tool_call_end|>",), "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>", separator="", header=r"\s*(?P<id>(?:functions\.)?"
            r"(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
            written=("functions.{name}:{number}<|tool_call_argument_begin|>", "")),
        ("<|tool_calls_section_begin|>",), True, "functions.{name}:{call}"),
    "mistral": CallFormat(
        "Mistral, Ministral, Magistral", CallForm(
            ("[TOOL_CALLS]",), header=r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\[\]{}]*))?"
            r"\s*(?:\[ARGS\])?\s*", written=("{name}[ARGS]", ""), separator=""),
        ("[TOOL_CALLS]",), True, "{digest:.9}"),
    "minimax_m2": CallFormat(
        "MiniMax M2", _INVOKED._replace(open="<minimax:tool_call>", close="</minimax:tool_call>"),
        ("<minimax:tool_call>",), True),
    "seed_oss": CallFormat(
        "Seed-OSS", _BRACKETED._replace(open="<seed:tool_call>", close="</seed:tool_call>"),
        ("<seed:tool_call>",), True),
    "step3": CallFormat(
        "Step 3", _INVOKED._replace(
            open="<｜tool_calls_begin｜>", close="<｜tool_calls_end｜>",
            function="<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
            function_end="</steptml:invoke>", closers=("<｜tool_call_end｜>",),
            parameter="<steptml:parameter name=", parameter_end="</steptml:parameter>",
            written=(*_INVOKED.written[:3], "{function_end}<｜tool_call_end｜>")),
        ("<steptml:",), True),
    "hy_v3": CallFormat(
        "Hunyuan 3", _ARG_KEYS._replace(
            open="<tool_calls>", close="</tool_calls>",
            name_end=r"<tool_sep>|\n|(?=<arg_key>|</tool_call>)",
            shared=True, written=("{function}{name}<tool_sep>\n", *_ARG_KEYS.written[1:])),
        ("<tool_sep>", "<arg_key>"), True),
    "iquest_q1": CallFormat(
        "IQuest Q1", _ARG_KEYS._replace(
            function="<iquest_tool_call>", function_end="</iquest_tool_call>",
            name_end=r"\n|(?=<arg_key>|</iquest_tool_call>)", written=(
                "{function}{name}", "{parameter}{name}</arg_key><arg_value>", "{parameter_end}",
                "{function_end}")), ("<iquest_tool_call>",), True),
    "glm45": CallFormat("GLM-4.5 to GLM-5, Ling 3, Laguna", _ARG_KEYS, ("<arg_key>",), True),
    "dots": CallFormat(
        "dots", _INVOKED._replace(open="<dots_function_call>", close="</dots_function_call>"),
        ("<dots_function_call>",), True),
    # --- JSON between marks ---
    "longcat": CallFormat("LongCat", CallForm(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
                          ("<longcat_tool_call>",), True),
    "apertus": CallFormat(
        "Apertus", CallForm(("<|tools_prefix|>",), ("<|tools_suffix|>",), name_key="", listed=True),
        ("<|tools_prefix|>",), True),
    "cohere_command3": CallFormat(
        "Command A, R7B", CallForm(
            ("<|START_ACTION|>",), ("<|END_ACTION|>",), name_key="tool_name", listed=True,
            arguments="parameters", dropped=(
                "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
        ("<|START_ACTION|>",), True),
    "gigachat3": CallFormat(
        "GigaChat 3", CallForm(("<|function_call|>", "function call<|role_sep|>\n"),
                               dropped=("<|message_sep|>",)),
        ("function call<|role_sep|>",), True),
    "lfm2": CallFormat("LFM2", PythonForm(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
                       ("<|tool_call_start|>",), True),
    "olmo3": CallFormat(
        "OLMo 3", PythonForm(("<function_calls>",), ("</function_calls>",), listed=False),
        ("<function_calls>",), True),
    "llama4_pythonic": CallFormat(
        "Llama 4", PythonForm(("<|python_start|>",), ("<|python_end|>",), bare=True),
        ("<|python_start|>",), True),
    "internlm": CallFormat(
        "InternLM 2.5, 3, Intern-S1", CallForm(
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",),
            arguments="parameters"),
        ("<|plugin|>",), True),
    "granite": CallFormat("Granite 3", CallForm(("<|tool_call|>", "<tool_call>"), listed=True),
                          ("<|tool_call|>",), True),
    "granite-20b-fc": CallFormat("Granite 20B function calling", CallForm(("<function_call>",)),
                                 ("<function_call>",), True),
    "phi4_mini_json": CallFormat("Phi-4-mini", CallForm(("functools",), listed=True),
                                 ("functools[",)),
    "ernie45": CallFormat(
        "ERNIE 4.5", HERMES._replace(dropped=("<response>", "</response>")),
        ("<tool_call>", "<response>"), True),
    "jamba": CallFormat("Jamba, Hunyuan A13B, MiniMax M1", CallForm(
        ("<tool_calls>",), ("</tool_calls>",), listed=True), ("<tool_calls>",), True),
    "qwen3_coder": CallFormat("Qwen3-Coder, Qwen3.5, Step 3.5", _BRACKETED, ("<function=",)),
    "mimo": CallFormat("MiMo", _BRACKETED._replace(lines=False, written=(
        _BRACKETED.written[0], "{parameter}{name}>", "{parameter_end}\n",
        _BRACKETED.written[3]))),
    "hermes": CallFormat("Hermes, Qwen2.5, Qwen3, Granite 4, and all templates without a form of "
                         "their own", HERMES, ("<tool_call>",)),
    "llama3_json": CallFormat(
        "Llama 3.1 and later", CallForm(("<|python_tag|>",), separator="; ", separators=",;",
                                        arguments="parameters", bare=True), ("<|python_tag|>",)),
    "xlam": CallFormat("xLAM", CallForm(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>",),
                                        listed=True, bare=True)),
    "pythonic": CallFormat("Llama 3.2, ToolACE", PythonForm(("<|python_tag|>",), bare=True))}


def detect_call_format(template: str) -> str | None:
    """Returns the name of the format of a chat template's calls; None where it shows none."""
    if not template:
        return None
    found = (name for name, row in FORMATS.items()
             if row.template and all(mark in template for mark in row.template))
    return next(found, "llama3_json" if "ipython" in template else None)


def call_marks() -> frozenset[str]:
    """Returns the marks of calls that grammars write as text, though they are special tokens of
    some models."""
    texts: list[str] = []
    for row in FORMATS.values():
        match row.form:
            case CallForm(bare=False) as form:
                texts += [*form.marks, *form.closers, form.section, form.section_end, *form.written]
            case ParameterForm() as form:
                texts += [form.open, form.close, form.function, form.function_end, form.parameter,
                          form.parameter_end, *form.closers, *form.written]
            case PythonForm(bare=False) as form:
                texts += [*form.marks, *form.closers]
            case GemmaForm() as form if form is not GEMMA4_FORM:
                texts += [form.call, form.call_end, form.quote]
    return frozenset(mark for text in texts for mark in _MARK.findall(text))
