"""Names of the settings' flags: our own, and those of vLLM, SGLang and llama.cpp.

A setting's main flag is its field's name with dashes. `ALIASES` and `INVERSES` are data;
`spellings` returns every flag that sets a field, with both vLLM's and SGLang's forms of switches.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model-path", "hf-repo"),
    "pooler_config": ("override-pooler-config",),
    "max_model_len": ("context-length", "ctx-size"),
    "language_model_only": ("language-only",),
    "skip_tokenizer": ("skip-tokenizer-init",),
    "served_model_name": ("alias",),
    "default_chat_template_kwargs": ("chat-template-kwargs",),
    "memory_fraction": ("gpu-memory-utilization", "mem-fraction-static"),
    "kv_cache_bytes": ("kv-cache-memory-bytes",),
    "state_dtype": ("mamba-ssm-cache-dtype", "mamba-ssm-dtype"),
    "page_size": ("block-size",),
    "prefix_cache": ("prefix-caching", "radix-cache"),
    "eviction_policy": ("radix-eviction-policy",),
    "schedule_policy": ("scheduling-policy",),
    "max_num_seqs": ("max-running-requests", "parallel"),
    "max_num_batched_tokens": ("chunked-prefill-size",),
    "max_num_queued_reqs": ("max-queued-requests",),
    "sleep_after": ("sleep-idle-seconds",),
    "overlap": ("overlap-schedule", "async-scheduling"),
    "seed": ("random-seed",),
    "tensor_parallel_size": ("tp", "tp-size"),
    "trace_dir": ("trace",),
    "access_log": ("uvicorn-access-log", "log-requests"),
    "graph_batch_sizes": ("cuda-graph-bs", "cuda-graph-bs-decode"),
    "graph_max_batch_size": ("cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
    "graph_token_counts": ("piecewise-cuda-graph-tokens", "cuda-graph-bs-prefill"),
    "graph_max_tokens": ("piecewise-cuda-graph-max-tokens", "cuda-graph-max-bs-prefill"),
    "gateways": ("api-server-count",),
    "drain_timeout": ("shutdown-timeout",),
    "admin_key": ("admin-api-key",),
    "cors_origins": ("allowed-origins",),
    "ssl_certfile": ("ssl-cert-file",),
    "ssl_keyfile": ("ssl-key-file",),
    "replicas": ("data-parallel-size", "dp-size", "dp"),
    "limit_mm_per_prompt": ("limit-mm-data-per-request",),
    "lora_modules": ("lora-paths",),
    "max_loras": ("max-loras-per-batch",),
    "max_cpu_loras": ("max-loaded-loras",),
}
"""Field -> other names of its flag, without the dashes (and without the enable- of a switch)."""

INVERSES: dict[str, str] = {"cuda-graph": "enforce_eager"}
"""Switches of other tools -> the switch here that means the opposite."""

ELSEWHERE = frozenset(("lora",))
"""Forms of a switch that are not taken: llama-server's --lora names a file."""

OF_TESTS = frozenset(("force_preempt_every", "force_acceptance", "null_worker", "replica_of",
                      "exact_costs", "upgrade_fault", "engine_of"))
"""Fields whose flags tests and other processes of ours write: taken, and not shown to users."""

SHORT: dict[str, str] = {
    "-m": "model", "-hf": "hf-repo", "-hfr": "hf-repo",
    "-a": "alias", "-c": "ctx-size", "-np": "parallel", "-t": "threads",
    "-tp": "tp", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel", "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size", "-n": "nnodes", "-r": "node-rank",
    "-q": "quantization", "-sc": "speculative-config", "-cc": "compilation-config",
    "-ac": "attention-config", "-O": "optimization-level", "-ngl": "n-gpu-layers",
    "-fa": "flash-attn", "-cram": "cache-ram", "-b": "batch-size", "-ub": "ubatch-size",
    "-i": "input-file", "-o": "output-file",
    "-md": "model-draft", "-ngld": "n-gpu-layers-draft", "-devd": "device-draft",
    "-cd": "ctx-size-draft", "-lcs": "lookup-cache-static", "-lcd": "lookup-cache-dynamic",
}
"""Flags with one dash -> the flag that they stand for."""


def flag_names(field: str) -> tuple[str, ...]:
    """The names of a field's flag without the dashes, the main one first."""
    return (field.replace("_", "-"), *ALIASES.get(field, ()))


def spellings(field: str, switch: bool, names: Sequence[str] = ()) -> list[tuple[str, bool]]:
    """Every name of a field's flag, with whether it means the opposite. `names`: those that it has
    besides `flag_names`, as the options of a command may.

    >>> dict(spellings("overlap", switch=True))["disable-overlap-schedule"]
    True
    """
    names = tuple(dict.fromkeys((*flag_names(field), *names)))
    if not switch:
        return [(name, False) for name in names]
    return [*(form for name in names for form in switch_forms(name) if form[0] not in ELSEWHERE),
            *((name, not off) for inverse, dest in INVERSES.items() if dest == field
              for name, off in switch_forms(inverse))]


def switch_forms(name: str) -> list[tuple[str, bool]]:
    """The six forms of a switch: (name, whether it means the opposite of `name`, which is one of
    them). vLLM writes --X and --no-X, SGLang --enable-X and --disable-X.
    """
    stem, off = name, False
    for prefix, turns in (("no-", True), ("enable-", False), ("disable-", True)):
        if stem.startswith(prefix):
            stem, off = stem.removeprefix(prefix), off != turns
    return [(f"{prefix}{stem}", turns != off) for prefix, turns in (
        ("", False), ("enable-", False), ("no-disable-", False),
        ("no-", True), ("no-enable-", True), ("disable-", True))]
