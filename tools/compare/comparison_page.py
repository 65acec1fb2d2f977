"""A comparison as one HTML file, with a picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from actorium.tools.evaluation.report_pages import line_chart, page, table

WORDS = {"decode": "Decodes: KL by token of the answers",
         "extend": "Prompts: KL by token of prompts with answers",
         "cached": "Behind a cached prefix"}


def comparison_page(result: Mapping[str, Any]) -> str:
    """Of `comparison.compared`, with `a` and `b`."""
    parts = result["parts"]
    body = [
        f"<p>A: <code>{escape(result['a'])}</code><br>B: <code>{escape(result['b'])}</code></p>",
        f"<p>{result['equal_answers']} of {result['count']} greedy answers are equal.</p>",
        *(f'<p class="wrong">{escape(fault)}</p>' for fault in result["faults"]),
        table(("part", "positions", "mean KL", "largest KL", "largest difference", "agreement",
               "overlap"), [(name, own["positions"], *_figures(own))
                            for name, own in parts.items()])]
    for name, own in parts.items():
        if len(own["kl_by_position"]) > 1:
            body += [f"<h2>{WORDS[name]}</h2>",
                     line_chart(own["kl_by_position"], "position", "mean KL, nats")]
    body += ["<h2>Prompts</h2>", *(_prompt(own) for own in result["prompts"])]
    return page("Two ways to serve a model", body)


def _figures(own: Mapping[str, Any]) -> list[str]:
    names = ("mean_kl", "largest_kl", "largest_difference", "agreement", "overlap")
    return ["-" if own[name] is None else f"{own[name]:.4g}" for name in names]


def _prompt(own: Mapping[str, Any]) -> str:
    split, (a, b) = own["first_divergence"], own["answers"]
    said = "equal" if split is None else f"differ from token {split} on"
    kind = "right" if split is None else "wrong"
    return (f'<details><summary class="{kind}">{escape(own["prompt"][:100])}: {said}</summary>'
            f"<p>{escape(own['prompt'])}</p><pre>{escape(a)}</pre>"
            + ("" if split is None else f"<pre>{escape(b)}</pre>") + "</details>")
