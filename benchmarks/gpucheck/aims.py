"""What figures are wanted of one H200, and the rows that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import shapes

Groups = Mapping[str, Any]
NOISE = 0.95
"""Of our time: a peer that takes less is faster."""


class Aim(NamedTuple):
    """A figure to reach."""

    what: str
    group: str
    rows: tuple[str, ...]
    key: str
    least: float | None = None
    most: float | None = None
    form: str = "{:.1%}"

    def reached(self, value: float) -> bool:
        """By this figure."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most)

    @property
    def wanted(self) -> str:
        sign, bound = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {self.form.format(bound)}"


ONE, MANY = shapes.DECODED[0].name, shapes.DECODED[-1].name
RING = tuple(own.name for own in shapes.RING)
REPLAYS = tuple(f"replay {own.name}" for own in shapes.PROFILED)
LARGE = tuple(own.name for own in shapes.DECODES if own.bytes >= 200e6 and own.q_len == 1)
GDN = f"step, 256 x {shapes.DELTA_HEADS[0][0]}/{shapes.DELTA_HEADS[0][1]} heads of 128"
AIMS: Sequence[Aim] = (
    Aim("decode, batch 1: share of the byte floor", "decode", (ONE,), "share", 0.92),
    Aim("decode, batch 256: share of the byte floor", "decode", (MANY,), "share", 0.75),
    Aim("decode, idle by the profiler in gaps over 10 us", "profile", REPLAYS, "long_gaps", None,
        0.015),
    Aim("whole engine, idle share of the device", "ring", RING, "idle_ratio", None, 0.015),
    Aim("seconds to capture, cache of kernels warm", "profile", ("graph capture",), "seconds",
        None, 3.0, "{:.1f}"),
    Aim("seconds to capture 58 sizes of steps with prompts", "profile", ("capture of 58 sizes",),
        "seconds", None, 5.0, "{:.1f}"),
    Aim("paged decode attention, 200 MB and more: share of bandwidth", "paged decode", LARGE,
        "share", 0.85),
    Aim("paged extend, 4,096 causal: TFLOP/s", "paged extend", (shapes.EXTENDS[0].name,), "tflops",
        430.0, None, "{:.0f}"),
    Aim("paged extend, 4 of 4,096: times torch's best SDPA", "paged extend",
        (shapes.EXTENDS[1].name,), "ratio", 1.0, None, "{:.2f}"),
    Aim("GDN step, 256 sequences: share of bandwidth", "gdn", (GDN,), "share", 0.75),
    Aim("two drafts: times the tokens of none", "speculation",
        tuple(f"2 drafts, batch {n}" for n in shapes.DRAFTING), "ratio", 1.9, None, "{:.2f}"))


def too_slow(group: str, row: Mapping[str, Any]) -> str:
    """Why a row is: a peer that is faster by more than what differs from run to run, or the aims
    that it misses. Empty: it is not."""
    if "peer" in row and row["ratio"] < NOISE:
        return f"{row['peer']} takes {row['ratio']:.0%} of its time"
    return "; ".join(f"{aim.what}: {aim.form.format(row[aim.key])}, wanted {aim.wanted}"
                     for aim in AIMS if aim.group == group and row["name"] in aim.rows
                     and aim.key in row and not aim.reached(row[aim.key]))


def table(groups: Groups) -> list[str]:
    """The aims that these groups speak of, in Markdown; of several rows the worst counts."""
    lines = []
    for aim in AIMS:
        if aim.group not in groups:
            continue
        rows = {row["name"]: row for row in groups[aim.group]["rows"]}
        found = [rows[name][aim.key] for name in aim.rows if aim.key in rows.get(name, {})]
        if not found:
            lines.append(f"| {aim.what} | never measured | {aim.wanted} | |")
            continue
        worst = min(found) if aim.least is not None else max(found)
        some = "" if len(found) == len(aim.rows) else f" ({len(found)} of {len(aim.rows)} rows)"
        lines.append(f"| {aim.what} | {aim.form.format(worst)}{some} | {aim.wanted} | "
                     f"{'yes' if aim.reached(worst) else 'no'} |")
    head = ["", "| aim | measured | wanted | reached |", "|---|---|---|---|"]
    return [*head, *lines] if lines else []
