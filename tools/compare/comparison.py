"""How far apart the answers of two models to the same prompts are. Of each position the likeliest
tokens alone are known. Pure.

Three parts of an engine are looked at apart, since attention has a way of its own in each:
`decode`, the tokens of an answer, one at a time, as far as both answers are the same; `extend`, the
prompt and the first model's answer, read as one prompt; `cached`, what comes next when the same
text is sent once more, of which all but the end is in the prefix cache by then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from actorium.tools.evaluation.report_pages import line_chart, page, table

TINY = 1e-9
"""Below it a probability is what rounding has left."""
Likeliest = Mapping[str, float]
"""Token -> log-probability in nats; no token that is not there is likelier than one that is."""


class Distance(NamedTuple):
    kl: float
    """Allowed KL divergence in nats, of the first to the second."""
    largest: float
    """Largest difference of a token's log-probabilities, in nats; of a token that one side alone
    names at least."""
    same_first: bool
    """The likeliest token is the same."""
    overlap: float
    """Share of the likeliest tokens that both name."""


def distance(one: Likeliest, other: Likeliest) -> Distance:
    """Both not empty. Where one names more tokens than the other, the likeliest of as many."""
    count = min(len(one), len(other))
    a, b = _first(one, count), _first(other, count)
    least_a, least_b = min(a.values()), min(b.values())
    apart = max(
        abs(a[token] - b[token]) if token in a and token in b else
        max(0.0, a[token] - least_b) if token in a else max(0.0, b[token] - least_a)
        for token in {*a, *b})
    same = max(a, key=a.__getitem__) == max(b, key=b.__getitem__)
    return Distance(_divergence(a, b), apart, same, len(a.keys() & b.keys()) / count)


def _first(told: Likeliest, count: int) -> dict[str, float]:
    return dict(sorted(told.items(), key=lambda item: -item[1])[:count])


def _divergence(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """A lower bound of the Kullback-Leibler divergence: that of the distributions with tokens put
    together (which never adds to it) - those that both name alone, those that `a` alone names, and
    all others. What `b` gives to the second kind is not known but to be no more than its least
    token's each; of what may be, that counts which makes the divergence least."""
    common = a.keys() & b.keys()
    total = sum(math.exp(a[token]) * (a[token] - b[token]) for token in common)
    rest_a = max(0.0, 1.0 - math.fsum(math.exp(a[token]) for token in common))
    rest_b = max(0.0, 1.0 - math.fsum(math.exp(b[token]) for token in common))
    alone = [token for token in a if token not in b]
    if rest_a <= TINY:
        return max(0.0, total)
    rest_b = max(rest_b, TINY)
    mine = min(rest_a, math.fsum(math.exp(a[token]) for token in alone))
    most = min(rest_b, len(alone) * math.exp(min(b.values())))
    share = min(rest_b * mine / rest_a, most)
    total += _term(mine, share) + _term(rest_a - mine, rest_b - share)
    return max(0.0, total)


def _term(p: float, q: float) -> float:
    return 0.0 if p <= TINY else p * math.log(p / max(q, TINY))


def first_divergence(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first position at which they differ; None where they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


PARTS = ("decode", "extend", "cached")


class Reading(NamedTuple):
    """What a model said of tokens that follow one another."""

    tokens: Sequence[str]
    likeliest: Sequence[Likeliest | None]
    """Log-probabilities at each token; None if not reported, as for a prompt's first."""


class ModelAnswer(NamedTuple):
    prompt: str
    text: str
    """Text of its answer."""
    decode: Reading
    extend: Reading
    cached: Reading
    finish: str = ""
    """Why its answer ended."""


class Bars(NamedTuple):
    """What must hold in each part; None: anything."""

    max_kl: float | None = None
    """Mean KL in nats."""
    min_agreement: float | None = None
    """Share of positions with the same likeliest token."""


def compared(one: Sequence[ModelAnswer], other: Sequence[ModelAnswer], bars: Bars
             ) -> dict[str, Any]:
    """Returns the comparison, for JSON. Both were given the same prompts and read the texts of
    `one`."""
    prompts = [_prompt(a, b) for a, b in zip(one, other, strict=True)]
    parts = {name: _summary([own["parts"][name] for own in prompts]) for name in PARTS}
    faults = [fault for name, own in parts.items() for fault in _faults(name, own, bars)]
    return {"parts": parts, "equal_answers": sum(
                own["first_divergence"] is None and len({*own["finish"]}) == 1 for own in prompts),
            "count": len(prompts), "bars": bars._asdict(), "faults": faults, "prompts": prompts}


def _prompt(a: ModelAnswer, b: ModelAnswer) -> dict[str, Any]:
    split = first_divergence(a.decode.tokens, b.decode.tokens)
    # At the first token that differs both still stand behind the same ones.
    common = len(a.decode.tokens) if split is None else split + 1
    lengths = {"decode": common, "extend": None, "cached": None}
    return {"prompt": a.prompt, "answers": [a.text, b.text], "finish": [a.finish, b.finish],
            "first_divergence": split,
            "tokens": len(a.decode.tokens),
            "parts": {name: _positions(getattr(a, name), getattr(b, name), length)
                      for name, length in lengths.items()}}


def _positions(a: Reading, b: Reading, length: int | None) -> dict[str, Any]:
    """A column for each figure. Readings of one text must have the same tokens."""
    alike = length is not None or list(a.tokens) == list(b.tokens)
    pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a.likeliest, b.likeliest, strict=False))
             if x and y and alike and (length is None or i < length)]
    found = [distance(x, y) for _, x, y in pairs]
    return {"same_tokens": alike, "position": [i for i, _, _ in pairs],
            **{field: [getattr(own, field) for own in found] for field in Distance._fields}}


def _summary(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns = {field: [value for own in parts for value in own[field]]
               for field in Distance._fields}
    count = len(columns["kl"])
    mean = {field: math.fsum(values) / count if count else None
            for field, values in columns.items()}
    by_position: dict[int, list[float]] = {}
    for own in parts:
        for place, kl in zip(own["position"], own["kl"], strict=True):
            by_position.setdefault(place, []).append(kl)
    return {"positions": count, "mean_kl": mean["kl"],
            "largest_kl": max(columns["kl"], default=None),
            "largest_difference": max(columns["largest"], default=None),
            "agreement": mean["same_first"], "overlap": mean["overlap"],
            "texts_cut_otherwise": sum(not own["same_tokens"] for own in parts),
            "kl_by_position": [math.fsum(own) / len(own) for _, own in sorted(by_position.items())]}


def _faults(name: str, part: Mapping[str, Any], bars: Bars) -> list[str]:
    """What does not hold. Where nothing could be compared, no bar holds."""
    if bars == Bars():
        return []
    if not part["positions"]:
        return [f"{name}: nothing could be compared"]
    found = []
    if bars.max_kl is not None and not part["mean_kl"] <= bars.max_kl:
        found.append(f"{name}: mean KL {part['mean_kl']:.3g} nats, {bars.max_kl:g} at most")
    if bars.min_agreement is not None and not part["agreement"] >= bars.min_agreement:
        found.append(f"{name}: {100 * part['agreement']:.2f} % of likeliest tokens agree, "
                     f"{100 * bars.min_agreement:g} % at least")
    return found


def comparison_table(result: Mapping[str, Any]) -> str:
    lines = [f"{'part':<8}{'positions':>10}{'mean KL':>10}{'largest':>10}{'difference':>12}"
             f"{'agreement':>11}{'overlap':>9}"]
    lines += ["".join((f"{name:<8}", f"{own['positions']:>10}", *_cells(own)))
              for name, own in result["parts"].items()]
    first = [own["first_divergence"] for own in result["prompts"]
             if own["first_divergence"] is not None]
    lines.append(f"equal answers: {result['equal_answers']} of {result['count']}"
                 + (f"; the earliest difference is at token {min(first)}" if first else ""))
    return "\n".join([*lines, *(f"fails: {fault}" for fault in result["faults"])])


def _cells(own: Mapping[str, Any]) -> list[str]:
    if not own["positions"]:
        return [f"{'-':>{width}}" for width in (10, 10, 12, 11, 9)]
    return [f"{own['mean_kl']:>10.2g}", f"{own['largest_kl']:>10.2g}",
            f"{own['largest_difference']:>12.3g}", f"{100 * own['agreement']:>10.2f}%",
            f"{100 * own['overlap']:>8.1f}%"]


# --- one HTML file, with a picture ----------------------------------------------------------------

WORDS = {"decode": "Decodes: KL by token of the answers",
         "extend": "Prompts: KL by token of prompts with answers",
         "cached": "Behind a cached prefix"}


def comparison_page(result: Mapping[str, Any]) -> str:
    """Returns the page of a result of `compared` with `a` and `b`."""
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
    body += ["<h2>Prompts</h2>", *(_prompt_shown(own) for own in result["prompts"])]
    return page("Two ways to serve a model", body)


def _figures(own: Mapping[str, Any]) -> list[str]:
    names = ("mean_kl", "largest_kl", "largest_difference", "agreement", "overlap")
    return ["-" if own[name] is None else f"{own[name]:.4g}" for name in names]


def _prompt_shown(own: Mapping[str, Any]) -> str:
    split, (a, b) = own["first_divergence"], own["answers"]
    said = "equal" if split is None else f"differ from token {split} on"
    kind = "right" if split is None else "wrong"
    return (f'<details><summary class="{kind}">{escape(own["prompt"][:100])}: {said}</summary>'
            f"<p>{escape(own['prompt'])}</p><pre>{escape(a)}</pre>"
            + ("" if split is None else f"<pre>{escape(b)}</pre>") + "</details>")
