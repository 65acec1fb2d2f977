"""Draws docs/peers.svg: tokens a second beside vLLM and llama.cpp, as they were measured.

    python -m actorium.tools.peers_picture [RESULTS.json] [PICTURE.svg]

RESULTS is what `benchmarks/run.py peers --json` writes. Bars of a work are as long as their share
of its fastest engine; the number behind each bar is the measured one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers-smollm2.json"
PICTURE = ROOT / "docs" / "peers.svg"
MODELS = {"smollm2": "SmolLM2-135M-Instruct"}
"""Names of results that say too little -> of the picture."""
BESIDE = "actorium and vLLM behind HTTP, llama.cpp in a process without a server"
WORKS = {"one stream, tok/s": "one stream", "32 streams, tok/s": "32 streams together",
         "prompt of 2,048, tok/s": "prompt of 2,048 tokens"}
"""Figure of the results -> its title."""
ENGINES = {"actorium": ("actorium, bf16", "#1f6feb"), "vllm": ("vLLM, bf16", "#8c959f"),
           "actorium Q4_1": ("actorium, GGUF Q4_1", "#1a7f37"),
           "llama.cpp": ("llama.cpp, GGUF Q4_1", "#8c959f")}
"""Engine of the results -> its name and colour, those of one weight format together."""
WIDTH, LEFT, BAR, STEP, GROUP, TOP = 860, 172, 560, 22, 122, 62
"""Pixels: the picture, where bars begin, the longest of them, from bar to bar, from work to work,
and the first work."""


def draw(results: dict[str, Any]) -> str:
    """Returns the SVG. Raises `KeyError` where a figure is missing."""
    height = TOP + GROUP * len(WORKS) + 36
    model = MODELS.get(results["model"], results["model"])
    lines = [text(24, 34, f"{model}: tokens a second, more is better", "head")]
    for number, (work, title) in enumerate(WORKS.items()):
        y = TOP + number * GROUP
        lines.append(text(24, y + 12, title, "work"))
        rates = {engine: results["median"][engine][work] for engine in ENGINES}
        for row, (engine, rate) in enumerate(rates.items()):
            name, colour = ENGINES[engine]
            top, width = y + 20 + row * STEP, max(2, BAR * rate / max(rates.values()))
            lines += [text(LEFT - 10, top + 12, name, "name"),
                      f'<rect x="{LEFT}" y="{top}" width="{width:.0f}" height="16" rx="3" '
                      f'fill="{colour}"/>',
                      text(round(LEFT + width) + 8, top + 13, f"{rate:,.0f}", "rate")]
    lines += [text(24, height - 32, versions(results), "note"),
              text(24, height - 14, BESIDE, "note")]
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Tokens a second beside vLLM and llama.cpp" '
        """font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">""",
        "<style>text { fill: #1f2328; font-size: 13px } .head { font-size: 17px; font-weight: 600 }"
        " .work { font-weight: 600 } .name { text-anchor: end } .note { fill: #57606a; "
        "font-size: 12px }</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="14" fill="#f6f8fa"/>', *lines, "</svg>", ""))


def versions(results: dict[str, Any]) -> str:
    """What was measured: the processor and whose which version."""
    whose = {ENGINES[engine][0].partition(",")[0]: version
             for engine, version in results["versions"].items()}
    rounds = min(len(measured) for measured in results["rounds"].values())
    return (f"{results['cores']} cores of an {results['processor']}; "
            f"{', '.join(map(' '.join, whose.items()))}; medians of {rounds} rounds")


def text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


if __name__ == "__main__":
    source, picture = [*map(Path, sys.argv[1:]), *(RESULTS, PICTURE)[len(sys.argv) - 1:]]
    picture.write_text(draw(json.loads(source.read_text())))
