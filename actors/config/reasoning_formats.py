"""The formats in which models write their reasoning before an answer (their *thoughts*), as a
table. `auto` chooses a format by the texts that occur in the chat template; `--reasoning-parser`
names one, also by its name in vLLM or SGLang.

Read by the gateway's parsers, which separate thoughts from answers; by grammars, which begin behind
a thought; and by the tokenizer and the scheduler, which end a thought at its budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

AUTO, NONE, HARMONY, GEMMA4 = "auto", "none", "harmony", "gemma4"
OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")
"""Variables of most templates that switch thoughts off and on."""


class ReasoningFormat(NamedTuple):
    """How a model writes its thoughts."""

    begin: tuple[str, ...] = (OPEN,)
    """Texts of which one begins a thought."""
    end: tuple[str, ...] = (CLOSE,)
    """Texts of which any ends it. A thought without one lasts to the end of the completion."""
    names: tuple[str, ...] = ()
    """Names of the same format in vLLM and SGLang."""
    shown: tuple[str, ...] = ()
    """Texts that all occur in the chat templates of this format; none = it must be named."""
    opened: bool = False
    """A completion begins within a thought unless the prompt ends one or the request switches them
    off. Otherwise only where the prompt has begun one; else the model may begin one."""
    on_request: bool = False
    """Completions have thoughts only where the request switches them on."""
    answer: tuple[str, ...] = ()
    """The mark before the answer, and those behind it, which are dropped."""
    special: bool = False
    """The marks may be special tokens, so that these are sent with the output."""
    kept: bool = False
    """The thought stays a part of the answer, with its marks."""
    switches: tuple[tuple[str, Any, Any], ...] = (("enable_thinking", False, True),
                                                  ("thinking", False, True))
    """(template variable, its value for no thoughts, its value for thoughts)."""
    close: tuple[str, ...] = ()
    """The texts by which a budget ends a thought; default: the first of `end`."""
    barred: str = ""
    """A text that must not follow these: it would begin the next thought."""
    repeats: bool = False
    """A completion may have several thoughts, which begin anywhere."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns the texts that end a thought: the mark before the answer, too, where that is a
        special token, which no model quotes."""
        return (*self.end, *self.answer[:1]) if self.special else self.end

    @property
    def closing(self) -> tuple[str, ...]:
        """Returns the texts by which a budget ends a thought."""
        return self.close or self.end[:1]

    def switched(self, args: Mapping[str, Any], on: bool) -> bool:
        """Returns whether template variables switch thoughts on, or off."""
        return any(name in args and args[name] == (yes if on else no)
                   and type(args[name]) is type(yes) for name, no, yes in self.switches)

    def ends_open(self, text: str) -> bool | None:
        """Returns whether a prompt's end has begun a thought; False where it has ended one, None
        where it has done neither."""
        text = text.rstrip()
        if any(text.endswith(mark) for mark in self.begin):
            return True
        return False if any(text.endswith(mark) for mark in self.end) else None

    def begins(self, args: Mapping[str, Any]) -> bool | None:
        """Returns whether a completion begins within a thought where the prompt's end does not
        tell; None = the model may begin one. args: the request's template variables."""
        off = self.switched(args, on=False)
        if off or (self.on_request and not self.switched(args, on=True)):
            return False
        return True if self.opened else None

    def left_open(self, text: str) -> bool:
        """Returns whether the text of a message, from its beginning, ends within a thought."""
        return max(map(text.rfind, self.begin)) > max(map(text.rfind, self.end))


THINK = ReasoningFormat(
    names=("glm45", "glm47", "mimo", "ling3", "minicpmv", "nemotron", "nemotron_v3", "nemotron_3",
           "granite_thinking_parser", "poolside_v1", "intern_s1", "interns1", "exaone4", "phi4",
           "dots", "nanbeige", "iquest_q1", "kimi_k2"), shown=(CLOSE,))
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(
        ("<|channel|>analysis<|message|>",), ("<|end|>",), ("openai_gptoss", "gpt-oss"),
        ("<|channel|>",), special=True, repeats=True,
        close=("<|end|>", "<|start|>", "assistant", "<|channel|>"), barred="analysis"),
    GEMMA4: ReasoningFormat(("<|channel>thought", "<|channel>"), ("<channel|>",),
                            shown=("<|channel>",), special=True),
    "kimi_k3": ReasoningFormat(
        ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), shown=("<|open|>think<|sep|>",),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        special=True),
    "k2_horizon": ReasoningFormat(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"), shown=("</ifm|think",),
        opened=True, special=True),
    "cohere_command": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",),
        ("cohere_command3", "cohere_command4"), ("<|START_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), special=True),
    "mistral": ReasoningFormat(("[THINK]", OPEN), ("[/THINK]", CLOSE), shown=("[THINK]",),
                               special=True),
    "minimax_m3": ReasoningFormat(
        ("<mm:think>",), ("</mm:think>",), ("minimax-m3",), ("<mm:think>",),
        switches=(("thinking_mode", "disabled", "enabled"),)),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), shown=("<seed:think>",)),
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",), ("apertus2509",),
                               ("<|inner_prefix|>",), special=True),
    "plamo3": ReasoningFormat(
        ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",),
        shown=("<|plamo:begin_think:plamo|>",), special=True),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",), shown=("◁think▷",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"), shown=("Here is my thought process:",),
        switches=(("thinking", False, True),)),
    "hunyuan_a13b": ReasoningFormat(shown=("<answer>", CLOSE), answer=("<answer>", "</answer>")),
    "ernie45": ReasoningFormat(shown=("<response>", CLOSE), opened=True,
                               answer=("<response>", "</response>")),
    "hy_v3": ReasoningFormat(
        ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"),
        ("hy_v4", "hunyuan"), special=True,
        switches=(("reasoning_effort", "no_think", "high"),)),
    "qwen3": THINK,
    "deepseek_r1": ReasoningFormat(opened=True, switches=(), names=(
        "deepseek-r1", "qwen3-thinking", "step3", "step3p5", "gigachat35", "olmo3", "minimax_m2",
        "minimax")),
    "holo2": ReasoningFormat(opened=True),
    "deepseek_v3": ReasoningFormat(opened=True, on_request=True, names=(
        "deepseek-v3", "deepseek_v4", "deepseek-v4", "deepseek_v41", "deepseek-v41")),
    "minimax_m2_append_think": ReasoningFormat(names=("minimax-append-think",), opened=True,
                                               switches=(), kept=True),
}
"""By the name of the format. Of several that a template shows, the first is chosen."""

ALIASES = {"identity": NONE} | {
    alias: name for name, row in REASONING_FORMATS.items() for alias in row.names}
"""Other name -> ours."""
NAMES = (AUTO, NONE, *REASONING_FORMATS)
"""The values of `--reasoning-parser`, aliases left out."""


def format_shown(template: str) -> str:
    """Returns the name of the format that a chat template's texts show; none = no thoughts."""
    found = (name for name, row in REASONING_FORMATS.items()
             if row.shown and all(text in template for text in row.shown))
    return next(found, "qwen3" if OPEN in template else NONE)


def format_chosen(reasoning_parser: str, tool_parser: str, template: str) -> str:
    """Returns the name of the format of a model's thoughts. The parsers: values of the flags, of
    which that of tools decides, too, where its format has thoughts of its own; template: the
    sources of the model's chat templates."""
    if reasoning_parser == AUTO:
        both = tool_parser in (HARMONY, GEMMA4)
        return tool_parser if both else format_shown(template)
    return ALIASES.get(reasoning_parser, reasoning_parser)
