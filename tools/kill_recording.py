"""Records an engine whose actors are killed under streams, as an animated SVG of 15 seconds.

    python -m actorium.tools.kill_recording [--model smollm2] [--out docs/kills.svg]

The run is real: clients of the openai package, without retries, ask an engine over HTTP, first
undisturbed, then while its actors get SIGKILL one after the other. Nothing is drawn unless every
answer is equal to the undisturbed one. All times of the picture are those of the run, multiplied by
one number, which the picture gives. What does not animate shows the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from time import monotonic
from typing import Any, NamedTuple

from actorium.actors.gateway.actor import where
from actorium.actors.launcher.engine import Engine
from actorium.tools.chaos.faults import actors, send

ASKED = ("Tell me a long story about a fox and a crow.", "Explain black holes to a child.",
         "How do I bake bread?", "Describe a walk through an old town by the sea.")
KILLED = ("gateway-0", "worker-0", "tokenizer", "scheduler", "detokenizer", "watchdog", "gateway-0",
          "worker-0")
TOKENS = 260
"""At the most."""
PLAYED, HELD = 13.0, 2.0
"""Seconds in which the run is shown, and for which its end stays."""
WARM = 8.0
"""Seconds after which an engine has its fork servers."""
FRAME = 0.1
"""Seconds of the picture: what comes within one is shown together."""
PAUSED = 0.4
"""Seconds of the run without a token after which a stream is shown as waiting."""
WIDTH, HEIGHT, PAD = 980, 560, 18
PANE = 640
"""Width of the streams."""
LINE = 17
COLUMNS, ROWS = 85, 5
TOP = PAD + 40
STEP = (HEIGHT - TOP - 42) / len(ASKED)
"""Height of a stream."""
STYLE = """text{font:12px ui-monospace,'SFMono-Regular',Menlo,Consolas,'DejaVu Sans Mono',monospace;
fill:#e6edf3;white-space:pre}.dim{fill:#8b949e}.red{fill:#ff7b72}.green{fill:#7ee787}
.head{fill:#79c0ff}"""


class Piece(NamedTuple):
    """Something that is seen from a moment on."""

    at: float
    """Seconds since the first request."""
    text: str


class Death(NamedTuple):
    role: str
    pid: int
    at: float
    next_pid: int
    back: float


class RecordedRun(NamedTuple):
    """A run."""

    streams: list[list[Piece]]
    """By question: pieces of the answer."""
    deaths: list[Death]
    seconds: float


# --- the run ---

async def _ask(url: str, question: str, begun: float, into: list[Piece]) -> None:
    async with import_module("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="-",
                                                   max_retries=0) as client:
        stream: Any = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}], stream=True,
            max_tokens=TOKENS, temperature=0.6, seed=1)
        async for chunk in stream:
            into.append(Piece(monotonic() - begun, chunk.choices[0].delta.content or ""))


def _chars(streams: list[list[Piece]]) -> int:
    return sum(len(piece.text) for stream in streams for piece in stream)


async def _kill(run_dir: Path, begun: float, streams: list[list[Piece]], chars: int
                ) -> list[Death]:
    """Kills each role in turn, evenly over so much text, the next when the last is back."""
    deaths = []
    for number, role in enumerate(KILLED if chars else ()):
        while _chars(streams) < chars * (number + 0.5) / (len(KILLED) + 0.5):
            await asyncio.sleep(0.005)
        pid, at = actors(run_dir)[role].pid, monotonic() - begun
        send([pid], signal.SIGKILL)
        while (after := actors(run_dir).get(role)) is None or after.pid == pid:
            await asyncio.sleep(0.01)
        deaths.append(Death(role, pid, at, after.pid, monotonic() - begun))
    return deaths


async def _run(run_dir: Path, chars: int = 0) -> RecordedRun:
    """Asks all at once. chars: of all answers, while which come actors are killed; 0 = none is."""
    address, begun = where(run_dir), monotonic()
    assert address is not None
    streams: list[list[Piece]] = [[] for _ in ASKED]
    killing = asyncio.create_task(_kill(run_dir, begun, streams, chars))
    await asyncio.gather(*(_ask(address.url, question, begun, stream)
                           for question, stream in zip(ASKED, streams, strict=True)))
    return RecordedRun(streams, await killing, monotonic() - begun)


def record(model: str) -> RecordedRun:
    """Raises `SystemExit` where an answer differs."""
    with tempfile.TemporaryDirectory(prefix="ac-", dir="/tmp") as base, Engine(
            model, port=0, exact="on", max_num_seqs=8, device="cpu", run_dir=base,
            crash_reports=False) as engine:
        run_dir = Path(base) / engine.name
        calm = asyncio.run(_run(run_dir))
        time.sleep(WARM)
        killed = asyncio.run(_run(run_dir, _chars(calm.streams)))
    texts = [["".join(piece.text for piece in stream) for stream in run.streams]
             for run in (calm, killed)]
    if texts[0] != texts[1]:
        raise SystemExit("an answer is not what it is undisturbed")
    return killed


# --- the picture ---

class Canvas:
    """Elements of an SVG, and the clock by which they appear."""

    def __init__(self, scale: float) -> None:
        """scale: seconds of the picture for one of the run."""
        self._scale, self.out = scale, list[str]()

    def at(self, seconds: float) -> float:
        """Returns the moment of the picture, on a frame."""
        return round(round(seconds * self._scale / FRAME) * FRAME, 2)

    def hidden_until(self, seconds: float) -> str:
        """Returns what is inside an element that is not seen before."""
        return (f'<set attributeName="visibility" to="hidden" begin="r.begin" '
                f'dur="{max(self.at(seconds), 0.01):g}s"/>')

    def during(self, name: str, value: str, begin: float, end: float) -> str:
        """Returns what is inside an element that has another attribute for a while."""
        begin, end = self.at(begin), self.at(end)
        return (f'<set attributeName="{name}" to="{value}" begin="r.begin+{begin:g}s" '
                f'dur="{end - begin:g}s"/>' if end > begin else "")

    def text(self, x: float, y: float, text: str, kind: str = "", inside: str = "") -> None:
        shown = f' class="{kind}"' if kind else ""
        self.out.append(f'<text x="{x:g}" y="{y:g}"{shown}>{escape(text)}{inside}</text>')


def _lines(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yields the lines of an answer, each as the pieces that it was received in."""
    text = "".join(piece.text for piece in pieces)
    times = [piece.at for piece in pieces for _ in piece.text]
    at = 0
    for line in (line for part in text.split("\n") if part.strip() for line in wrap(part, COLUMNS)):
        start = text.index(line.split()[0], at)
        at, words = start, []
        for word in line.split():
            at = text.index(word, at)
            words.append(Piece(times[at], word + " "))
            at += len(word)
        yield words


def _stream(canvas: Canvas, number: int, question: str, pieces: Sequence[Piece]) -> None:
    top = TOP + number * STEP
    gaps = [(a.at, b.at) for a, b in zip(pieces, pieces[1:], strict=False) if b.at - a.at > PAUSED]
    waits = "".join(canvas.during("fill", "#d29922", a + PAUSED / 2, b) for a, b in gaps)
    canvas.out.append(f'<circle cx="{PAD + 10}" cy="{top - 4:g}" r="4" fill="#3fb950">{waits}'
                      '</circle>')
    canvas.text(PAD + 22, top, f"POST /v1/chat/completions  {question}", "head")
    lines = [*_lines(pieces)]
    last = max(len(lines) - ROWS, 0)
    scrolls = [(0.0, 0), *((canvas.at(lines[n + ROWS - 1][0].at), n) for n in range(1, last + 1))]
    canvas.out.append(
        f'<g clip-path="url(#c{number})"><g transform="translate(0 {-last * LINE})">'
        '<animateTransform attributeName="transform" type="translate" calcMode="discrete" '
        f'values="{";".join(f"0 {-n * LINE}" for _, n in scrolls)}" '
        f'keyTimes="{";".join(f"{at / PLAYED:.4f}" for at, _ in scrolls)}" '
        f'begin="r.begin" dur="{PLAYED:g}s"/>')
    for n, line in enumerate(lines):
        spans, frames = [], dict[float, str]()
        for piece in line:
            frames[canvas.at(piece.at)] = frames.get(canvas.at(piece.at), "") + piece.text
        for moment, text in frames.items():
            spans.append(f'<tspan>{escape(text)}<set attributeName="visibility" to="hidden" '
                         f'begin="r.begin" dur="{max(moment, 0.01):g}s"/></tspan>')
        canvas.out.append(f'<text x="{PAD + 8}" y="{top + LINE * (n + 1):g}">{"".join(spans)}'
                          '</text>')
    canvas.out.append("</g></g>")


def draw(recording: RecordedRun, model: str) -> str:
    """Returns the SVG."""
    scale = PLAYED / recording.seconds
    canvas = Canvas(scale)
    clips = "".join(f'<clipPath id="c{n}"><rect x="{PAD}" y="{TOP + 3 + n * STEP:g}" '
                    f'width="{PANE}" height="{ROWS * LINE + 2}"/></clipPath>'
                    for n in range(len(ASKED)))
    for number, (question, pieces) in enumerate(zip(ASKED, recording.streams, strict=True)):
        _stream(canvas, number, question, pieces)
    x = PAD + PANE + 20
    canvas.text(PAD + 8, PAD + 10, "openai.AsyncOpenAI(max_retries=0), four times", "dim")
    canvas.text(x, PAD + 10, "meanwhile", "dim")
    for number, death in enumerate(recording.deaths):
        y = TOP + number * 54
        canvas.text(x, y, f"$ kill -9 {death.pid:<9}", "red", canvas.hidden_until(death.at))
        canvas.text(x + 160, y, f"# {death.role}", "dim", canvas.hidden_until(death.at))
        canvas.text(x, y + LINE, f"started again as {death.next_pid}, "
                    f"{death.back - death.at:.1f} s later", "green",
                    canvas.hidden_until(death.back))
    foot = HEIGHT - PAD - 4
    canvas.text(PAD + 8, foot - LINE, f"{len(ASKED)} plain openai clients, {len(KILLED)} kills, "
                "no error: each answer is what it is undisturbed",
                "green", canvas.hidden_until(recording.seconds))
    canvas.text(PAD + 8, foot, f"{model}, --exact on; a real run of "
                f"{recording.seconds:.1f} s on {os.cpu_count()} processors, shown in {PLAYED:g} s",
                "dim")
    bar = (f'<rect x="0" y="{HEIGHT - 3}" width="{WIDTH}" height="3" fill="#3fb950">'
           f'<animate attributeName="width" from="0" to="{WIDTH}" begin="r.begin" '
           f'dur="{PLAYED:g}s"/></rect>')
    title = f"{len(ASKED)} streams go on while the actors of their engine are killed"
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}"><style>{STYLE}</style><defs>{clips}<clipPath id="card">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10"/></clipPath></defs>'
        f'<g clip-path="url(#card)"><rect width="{WIDTH}" height="{HEIGHT}" fill="#0d1117">'
        f'<animate id="r" attributeName="x" from="0" to="0" begin="0s;r.end" '
        f'dur="{PLAYED + HELD:g}s"/></rect>',
        f'<path d="M{PAD + PANE + 6} 14V{HEIGHT - 14}" stroke="#30363d"/>',
        *canvas.out, bar,
        f'</g><rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="none" '
        'stroke="#30363d"/></svg>', ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/kills.svg"),
                        help="default: %(default)s")
    options = parser.parse_args()
    options.out.write_text(draw(record(options.model), options.model))
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
