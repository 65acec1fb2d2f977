"""The README: short enough to be read, and its figures are those that were measured."""

from __future__ import annotations

import json
import re
from typing import Any

from helpers_code_facts import ROOT

from actorium.tools import peers_picture

README = (ROOT / "README.md").read_text()
FIGURES = (ROOT / "docs" / "figures.md").read_text()
MOST_LINES, MOST_WORDS = 150, 650
"""Words of prose: four minutes, read aloud."""
FEATURES, PEERS = 14, ["vLLM", "SGLang", "llama-server", "Ollama"]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def table(text: str, title: str) -> list[list[str]]:
    """The rows of the first table below a heading, its head first."""
    below = text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in below.splitlines() if line.startswith("|")]
    return [row for row in rows if set("".join(row)) - set("-")]


def row_of(rows: list[list[str]], words: str) -> str:
    [row] = [" | ".join(row) for row in rows if words in row[0]]
    return row


def test_it_is_read_in_four_minutes() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "#", "!"))]
    assert 300 < len(" ".join(prose).split()) <= MOST_WORDS


def test_the_others_are_beside_it_in_fourteen_rows() -> None:
    head, *rows = table(README, "Beside others")
    assert head[1:] == ["actorium", *PEERS] and len(rows) == FEATURES
    assert all(len(row) == len(head) and all(row[1:]) for row in rows)


def test_claims_have_the_measured_figures() -> None:
    _, *rows = table(README, "Why")
    assert len(rows) == 4 and all(row[-1].startswith("`") for row in rows)
    chaos = results("chaos")["rows"]
    kills = [chaos[f"kills-{number}"] for number in range(1, 5)]
    assert not any(row["wrong"] for row in kills)
    pauses = [row["gaps"]["all"]["p99"] for row in kills]
    survives = row_of(rows, "die")
    for figure in (f"{sum(sum(row['faults'].values()) for row in kills)} kills",
                   f"{kills[0]['streams']} streams",
                   f"{sum(row['requests'] for row in kills):,} requests",
                   f"{sum(row['tokens'] for row in kills):,} tokens",
                   f"{min(pauses):.1f} to {max(pauses):.1f} s at p99"):
        assert figure in survives, figure
        assert figure.removesuffix(" s at p99") in FIGURES, figure
    with_model = sorted(chaos[name]["gaps"]["all"]["p99"] for name in ("model", "model-tp2"))
    assert " to ".join(f"{pause:.1f}" for pause in with_model) + " s" in README

    servers = results("verify-peers")["rows"]
    asked = {name: sum(turn["comparisons"] for turn in row["turns"])
             for name, row in servers.items()}
    other = {name: sum(turn["kinds"].get("text", 0) + turn["kinds"].get("token", 0)
                       for turn in row["turns"]) for name, row in servers.items()}
    ours = [name for name in servers if name.startswith("actorium")]
    assert [other[name] for name in ours] == [0, 0]
    same = row_of(rows, "same alone")
    for figure in (f"{asked[ours[0]]:,} comparisons in bf16, {asked[ours[1]]:,} of Q4_1: 0 differ",
                   f"vLLM: {other['vllm']} of {asked['vllm']:,}",
                   f"llama-server: {other['llama-server']} of {asked['llama-server']}"):
        assert figure in same, figure

    median = results("peers-smollm2")["median"]
    ratios = {(engine, work): median[engine][f"{work}, tok/s"] / median[peer][f"{work}, tok/s"]
              for engine, peer in (("actorium", "vllm"), ("actorium Q4_1", "llama.cpp"))
              for work in ("one stream", "32 streams")}
    assert (f"{ratios['actorium', 'one stream']:.1f} times vLLM on one stream, "
            f"{ratios['actorium', '32 streams']:.2f} on 32; "
            f"{ratios['actorium Q4_1', 'one stream']:.2f} and "
            f"{ratios['actorium Q4_1', '32 streams']:.1f} times llama.cpp") in row_of(rows, "HTTP")
    gains = [row["ratio"] for shape in ("tiny", "s06", "hyb")
             for row in results(f"offline-{shape}")["rows"] if "ratio" in row]
    assert f"{min(gains):.1f} to {max(gains):.1f} times" in row_of(rows, "all its processes")


def test_the_status_says_what_a_gpu_has_shown() -> None:
    contact = (ROOT / "docs" / "gpu.md").read_text()
    shares = [float(share) for share in re.findall(
        r"^\| decode, batch \d+: share of the byte floor \| ([\d.]+)% ", contact, re.MULTILINE)]
    assert f"{min(shares):.0f} to {max(shares):.0f} %" in README
    assert results("gpu-contact")["facts"]["device"].split()[-1] in README


def test_the_picture_is_drawn_of_the_results() -> None:
    drawn = peers_picture.draw(results("peers-smollm2"))
    assert peers_picture.PICTURE.read_text() == drawn  # else: make picture
    assert len(drawn) < 10_000 and "href" not in drawn


def test_bars_are_as_long_as_their_share() -> None:
    made = results("peers-smollm2")
    made["median"]["vllm"]["one stream, tok/s"] = 2 * made["median"]["actorium Q4_1"][
        "one stream, tok/s"]
    bars = [int(width) for width in re.findall(r'width="(\d+)" height="16"',
                                               peers_picture.draw(made))]
    assert bars[1] == peers_picture.BAR and bars[2] == peers_picture.BAR // 2
