"""llama-server's own API: its tests, a published client of it, and what editors send."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import infill
import pytest
from conftest import BUILD, HERE, MODELS, serving
from wire import STORY, Server

pytestmark = [pytest.mark.conformance, pytest.mark.models("demo")]
TESTS = BUILD / "llamacpp" / "tools" / "server" / "tests"
FILES = ("completion", "infill", "tokenize", "basic", "ctx_shift", "ignore_eos")
"""Those that need no model and no flags of their own."""
LINE = re.compile(r"^(PASSED|FAILED|ERROR) unit/(test_\w+)\.py::(test_\w+)", re.M)
MODEL, FLAG = "its model's tokens", "a flag of its server's"
DIFFERENT = {
    "completion": MODEL, "completion_stream": MODEL, "completion_unified": MODEL,
    "completion_parallel_slots": MODEL, "completion_response_fields": MODEL,
    "completion_prompt_cache": MODEL, "tokenize_with_bos": MODEL, "ctx_shift_enabled": MODEL,
    "ctx_shift_disabled_short_prompt": MODEL, "ctx_shift_disabled_long_prompt": MODEL,
    "ctx_shift_disabled_stream": MODEL, "server_props": "its model is a GGUF file",
    "completion_with_openai_library": "a name of another model is a 404 here",
    "completion_stream_with_openai_library": "the same",
    "n_probs_post_sampling": "post_sampling_probs is refused",
    "n_probs_post_backend_sampling": "the same", "server_multiple_addresses": FLAG,
    "server_slots": FLAG, "no_ui": FLAG, "server_model_aliases_and_tags": FLAG,
    "ignore_eos_populates_logit_bias": "end tokens are held back, not biased"}
"""Tests, some of whose cases do not pass here, and why."""
PASSED = {
    "completion_stream_vs_non_stream", "consistent_result_same_seed",
    "different_result_different_seed", "consistent_result_different_batch_size",
    "nocache_long_input_prompt", "json_prompt_no_mtmd",
    "json_prompt_mtm_error_when_not_supported", "completion_with_tokens_input", "n_probs",
    "n_probs_stream", "logit_bias", "cancel_request", "infill_without_input_extra",
    "infill_with_input_extra", "invalid_input_extra_req", "tokenize_detokenize",
    "tokenize_with_pieces", "server_start_simple", "server_models", "load_split_model",
    "ignore_eos_false_no_logit_bias"}
"""Tests, all of whose cases pass."""


@pytest.fixture(scope="module")
def infill_server() -> Iterator[Server]:
    """A model with tokens for filling in, as llama.cpp's tests start theirs."""
    infill.make(Path(MODELS["infill"]))
    with serving("infill", "-c", "256", "-np", "2", "-a", "tinyllama-2",
                 "--override-generation-config", "temperature=0") as served:
        yield served


def test_llama_cpps_own_tests(infill_server: Server) -> None:
    place = urlsplit(infill_server.url)
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "any_text", "-p", "no:cacheprovider",
         "-o", "addopts=", "-m", "not slow", *(f"unit/test_{name}.py" for name in FILES)],
        cwd=TESTS, capture_output=True, text=True, timeout=600, env=os.environ | {
            "DEBUG_EXTERNAL": "1", "PORT": str(place.port), "PYTHONPATH": f".:{HERE}"})
    outcomes: dict[str, set[str]] = {}
    for outcome, _, name in LINE.findall(found.stdout):
        outcomes.setdefault(name.removeprefix("test_"), set()).add(outcome)
    assert set(outcomes) == PASSED | set(DIFFERENT), found.stdout[-2000:]
    assert {name for name in PASSED if outcomes[name] != {"PASSED"}} == set(), found.stdout[-9000:]


def test_llamacpp_client(server: Server) -> None:
    from llamacpp_client import LlamaCppClient, LlamaCppServerAddress

    place = urlsplit(server.url)
    client = LlamaCppClient([LlamaCppServerAddress(str(place.hostname), place.port or 0)])
    whole = client.new_completion(STORY, temperature=0, n_predict=8)
    assert whole.content and whole.stop_type == "limit" and whole.tokens_predicted == 8
    parts = list(client.new_stream_completion(STORY, temperature=0, n_predict=8))
    assert "".join(one.content or "" for one in parts) == whole.content


FIELDS = ["content", *(f"timings/{name}_{what}" for name in ("prompt", "predicted")
                       for what in ("n", "ms", "per_token_ms", "per_second")),
          "truncated", "tokens_cached"]
EDITOR = {
    "input_prefix": "def f():\n", "input_suffix": "\n", "prompt": "    ", "n_predict": 16,
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}], "n_indent": 4,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
"""A request of llama.vim; that of llama.vscode has no `response_fields`."""


def test_editors(infill_server: Server) -> None:
    answer = infill_server.post("/infill", EDITOR | {"response_fields": FIELDS}).ok()
    assert list(answer) == FIELDS and isinstance(answer["content"], str)
    whole = infill_server.post("/infill", EDITOR)
    assert whole.headers["x-actorium-passed-over"] == "samplers.infill"
    assert whole.ok()["tokens_evaluated"] > 10
    ahead = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [],
             "input_extra": EDITOR["input_extra"], "t_max_predict_ms": 1, "cache_prompt": True}
    assert infill_server.post("/infill", ahead).ok()["content"] == ""
