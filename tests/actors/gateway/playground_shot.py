"""Pictures of the playground and of the status page, of a demo engine that others use as well (its
helpers lie in `tests/helpers`, which is to be in PYTHONPATH):

    python tests/actors/gateway/playground_shot.py benchmarks/results/playground.png
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from helpers_browser import NOT_THERE, Browser, Tab, browser_path
from helpers_served import serving
from PIL import Image

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir

SECONDS = 75
MOST = 14
"""Others who ask at once."""


@contextmanager
def others(run_dir: Path) -> Iterator[None]:
    """Requests that swell and ebb, until the context ends."""
    ended = False

    async def one(client: AsyncClient, number: int, draw: random.Random) -> None:
        while not ended:
            await asyncio.sleep(draw.expovariate(0.4))
            animal = draw.choice(("cat", "dog", "hen", "bear", "duck"))
            await client.chat([{"role": "user", "content": f"Tell me a story about a {animal}."}],
                              SamplingParams(max_tokens=120 + 20 * number, ignore_eos=True))

    async def all_of_them() -> None:
        async with AsyncClient(run_dir) as client:
            await asyncio.gather(*(one(client, i, random.Random(i)) for i in range(MOST)))

    thread = Thread(target=lambda: asyncio.run(all_of_them()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()


def ask(tab: Tab, text: str) -> None:
    tab.js("document.getElementById('text').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait("busyNow()")
    tab.wait("!busyNow()", 60)


def shoot(tab: Tab, path: Path) -> None:
    """A picture of 256 colours."""
    tab.shot(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main(path: Path) -> None:
    """The playground, light at `path`, dark and on a phone beside it; the status page as
    `status.png`."""
    browser = browser_path()
    if browser is None:
        sys.exit(NOT_THERE)
    with serving(max_num_seqs=8) as served:
        run_dir = engine_dir(served.engine.name)
        with Browser(browser) as chrome, others(run_dir):
            status = chrome.open(f"{served.url}/status", 1360, 1020)
            tab = chrome.open(served.url, 1360, 1020)
            for text in ("Tell me a story about a hen.", "What is 12 + 30?"):
                ask(tab, text)
                tab.click("#new")
            ask(tab, "Tell me a story about a fox.")
            ask(tab, "Tell me a story about a dog.")
            tab.js("[...document.querySelectorAll('.turn:last-child .acts button')].at(-1).click()")
            tab.wait("document.querySelector('.tok')", 30)
            tab.hover(".turn:last-child .tok:nth-child(9)")
            shoot(tab, path)
            tab.click("#theme")
            tab.hover(".turn:last-child .tok:nth-child(9)")
            shoot(tab, path.with_name(f"{path.stem}-dark.png"))
            tab.size(375, 812)
            tab.wait("atEnd()")
            shoot(tab, path.with_name(f"{path.stem}-phone.png"))
            tab.close()
            status.wait(f"seen.length >= {SECONDS}", SECONDS * 2)
            shoot(status, path.with_name("status.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
