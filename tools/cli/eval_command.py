"""`actorium eval`: what a model gets right, each kind of evaluation in a module of its own."""

from __future__ import annotations

from importlib import import_module

from actorium.actors.errors import BadConfig

KINDS = {
    "mmlu": ("choices", "[MODEL] --data DIR: MMLU, or any multiple-choice questions"),
    "questions": ("choices", "[MODEL]: the 400 questions that come with actorium, for small "
                  "models"),
    "needle": ("needle", "[MODEL]: finds a sentence in a long text, by depth and length"),
    "perplexity": ("perplexity", "[MODEL] --data FILE: how well it predicts a text"),
    "demo": ("demo", "[MODEL]: exact match on the demo model's tasks"),
    "pictures": ("pictures", "[MODEL]: questions about small drawn pictures"),
}
"""Evaluation -> (which `eval_...` module runs it, what it does)."""


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    if argv and argv[0] in KINDS:
        module = import_module(f"actorium.tools.cli.eval_{KINDS[argv[0]][0]}")
        code: int = module.run(argv[0], argv[1:])
        return code
    if {"-h", "--help"} & set(argv):
        print("\n".join(f"actorium eval {kind} {about}" for kind, (_, about) in KINDS.items()))
        return 0
    raise BadConfig(f"eval: which evaluation? {', '.join(KINDS)}", "eval")
