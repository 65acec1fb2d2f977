"""The setting `passes`: which rewritings of the layers' graphs are used."""

from __future__ import annotations

from actorium.actors.errors import BadConfig

PASSES = ("reduce_norm", "product_add", "norm_add", "add_norm", "qk_rope_kv", "gated_product",
          "gate_add", "norm_quant", "act_quant", "norm_product")
"""Their names, in the order in which they run."""


def parse_passes(text: str) -> tuple[str, ...]:
    """The names of those that are on, in order. `auto`, `all` or `none`, then names to add, or to
    take away with a `-` before them; names alone are those and no others. Raises `BadConfig`."""
    words = _words(text)
    if not words:
        raise BadConfig(f"passes: {_want()}, got {text!r}", "device.passes")
    on = set(PASSES) if words[0] in ("auto", "all") or words[0].startswith("-") else set()
    for place, word in enumerate(words):
        if word in ("auto", "all", "none") and place == 0:
            continue
        name = word.removeprefix("-")
        if name not in PASSES:
            raise BadConfig(f"passes: no pass is called {name!r}: {_want()}", "device.passes")
        if word.startswith("-"):
            on.discard(name)
        else:
            on.add(name)
    return tuple(name for name in PASSES if name in on)


def chooses(text: str) -> bool:
    """Whether those of them are left out that are measured to lose: `auto`, or a `-` before the
    first name."""
    return _words(text)[:1] == ["auto"] or text.strip().startswith("-")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _want() -> str:
    return ("must be auto, all, none, or names, each taken away by a - before it, of "
            f"{', '.join(PASSES)}")
