"""Result files: written under vLLM's names, read whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadConfig

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "tokens_per_event",
           "latencies", "generated_texts", "errors")
"""One value a request: in a file only where asked for."""
_SGLANG = {"total_throughput": "total_token_throughput",
           "accept_length": "spec_decode_acceptance_length",
           **{f"{what}_e2e_latency_ms": f"{what}_e2el_ms"
              for what in ("mean", "median", "std", "p90", "p95", "p99")}}
"""SGLang's name -> vLLM's."""
_OFFLINE = {"successful_requests": "completed", "failed_requests": "failed",
            "total_latency": "duration", "total_throughput": "total_token_throughput"}
"""The same for its offline benchmark."""


def default_name(result: Mapping[str, Any]) -> str:
    """The file name that vLLM would make up: label or backend, rate, concurrency, model, date."""
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2] or "model"
    concurrency = result.get("max_concurrency")
    limit = f"-concurrency{concurrency}" if concurrency else ""
    rate = f"{result['request_rate']}qps"
    if "ramp_up_strategy" in result:
        rate = (f"ramp-up-{result['ramp_up_strategy']}-{result['ramp_up_start_rps']}qps-"
                f"{result['ramp_up_end_rps']}qps")
    return (f"{result.get('label') or result['backend']}-{rate}{limit}-{model}-"
            f"{result['date']}.json")


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures alone."""
    return {name: value for name, value in result.items() if name not in DETAILS}


def write_result(path: Path, result: Mapping[str, Any], append: bool) -> None:
    """One object on one line; `append`: after those that the file holds. Raises `BadConfig`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise BadConfig(f"--result-filename: {path}: {error.strerror}",
                        "result_filename") from None


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a file, under vLLM's names: one JSON object, or several one after the other,
    as vLLM appends them and SGLang writes them. Raises `BadConfig`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise BadConfig(f"{path}: {reason}", "file") from None
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise BadConfig(f"{path}: no JSON: {error}", "file") from None
        named = translated(value) if isinstance(value, dict) else {}
        if "output_throughput" not in named:
            raise BadConfig(f"{path}: no result of a benchmark: output_throughput is missing",
                            "file")
        found.append(named)
    if not found:
        raise BadConfig(f"{path}: holds no result", "file")
    return found


def translated(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result under vLLM's names."""
    names = _OFFLINE if "total_latency" in result and "duration" not in result else _SGLANG
    return {names.get(name, name): value for name, value in result.items() if value is not None}
