"""Flags of vLLM, SGLang and llama-server that are no settings here, as data.

`ACCEPTED` are taken with one line that says why they change nothing; `REFUSED` end the command with
the reason, unless their value asks for nothing; `VALUES` are other names of values. What means
something here under another name or form is in `actors/config/flag_names.py` and `translate.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.call_format_names import ALIASES as CALL_FORMAT_ALIASES
from actorium.actors.config.reasoning_formats import ALIASES as REASONING_NAMES


class Group(NamedTuple):
    """Flags that are treated alike; their names less the dashes, with spaces between."""

    reason: str
    switches: str = ""
    """Without a value, in any form: --X, --no-X, --enable-X, --disable-X."""
    valued: str = ""
    """With one value."""
    lists: str = ""
    """With one or more values."""
    unless: str = ""
    """Values that ask for nothing, where others are refused."""


MASKS = "llguidance makes the masks of structured output"

ACCEPTED = (
    Group("a model's own code is never run", "trust-remote-code"),
    Group("kernels are chosen by --kernels, those of attention by --attention-backend",
          "flashinfer-autotune flashinfer-mla-disable-ragged triton-attention-reduce-in-fp32 "
          "cascade-attn shared-experts-fusion fused-qk-norm-rope tf32-matmul "
          "flashinfer-cutlass-moe-fp4-allgather flashinfer flashinfer-sampling flashinfer-mla mla",
          "linear-attn-backend linear-attn-prefill-backend linear-attn-decode-backend "
          "mamba-backend gdn-prefill-backend sampling-backend moe-backend moe-runner-backend "
          "linear-backend fp8-gemm-backend fp8-gemm-runner-backend fp4-gemm-backend "
          "bf16-gemm-backend kernel-config nsa-prefill-backend nsa-decode-backend "
          "dsa-prefill-backend dsa-decode-backend speculative-attention-mode flash-attn "
          "triton-attention-num-kv-splits speculative-moe-runner-backend"),
    Group("images and videos are prepared as the model's own preprocessor says, once for all "
          "processes; audio is not served",
          "skip-mm-profiling chunked-mm-input "
          "fast-image-processor keep-mm-feature-on-device mm-enable-dp-encoder "
          "interleave-mm-strings multimodal",
          "mm-attention-backend mm-encoder-attn-backend mm-encoder-tp-mode "
          "mm-processor-cache-gb mm-processor-cache-type"),
    Group("nothing is compiled by torch: graphs are captured as --graph-batch-sizes and "
          "--graph-token-counts say",
          "torch-compile-debug-mode cuda-graph-padding profile-cuda-graph cudagraph-gc",
          "piecewise-cuda-graph-compiler cuda-graph-tc-compiler torch-compile-max-bs "
          "max-seq-len-to-capture performance-mode"),
    Group("requests ask for them (return_routed_experts)", "return-routed-experts"),
    Group("usage tells the cached tokens anyway", "cache-report prompt-tokens-details"),
    Group("any engine sleeps when it is asked to (/sleep, /release_memory_occupation)",
          "sleep-mode memory-saver"),
    Group("tool calls are found anyway (--tool-call-parser)", "auto-tool-choice"),
    Group("reasoning is found anyway (--reasoning-parser)", "reasoning"),
    Group("--log-level, --log-interval and --access-log say what is logged, never prompts",
          "request-time-stats-logging log-error-stack show-time-cost",
          "log-requests-format max-log-len uvicorn-log-level log-level-http "
          "decode-log-interval disable-access-log-for-endpoints",
          "uvicorn-access-log-exclude-prefixes"),
    Group("/metrics and /load are served anyway",
          "metrics metrics-for-all-schedulers cudagraph-metrics server-load-tracking"),
    Group("/v1/rerank and /v1/score are served anyway", "reranking"),
    Group("/slots is served anyway", "slots"),
    Group("safetensors are read in one way",
          "multithread-load use-tqdm-on-load weight-loader-disable-mmap "
          "weight-loader-prefetch-checkpoints "
          "weight-loader-drop-cache-after-load mmap mlock",
          "model-loader-extra-config safetensors-load-strategy max-parallel-loading-workers "
          "weight-loader-prefetch-num-threads pt-load-map-location config-format "
          "modelexpress-config", "ignore-patterns"),
    Group("the memory plan shares out pages and states (actorium plan)",
          "hybrid-kv-cache-manager hybrid-swa-memory kv-sharing-fast-prefill unified-memory "
          "page-major-kv-layout kv-unified",
          "mamba-full-memory-ratio max-mamba-cache-size swa-full-tokens-ratio mamba-cache-mode "
          "mamba-block-size mamba-radix-cache-strategy mamba-scheduler-strategy "
          "mamba-track-interval num-lookahead-slots"),
    Group("what is preempted is computed again, or found in the prefix cache; nothing is swapped",
          valued="swap-space preemption-mode retraction-policy"),
    Group("pages that the pool has no room for go to --host-cache and --disk-cache, in one way",
          valued="hicache-storage-backend-extra-config hicache-write-policy hicache-io-backend "
          "hicache-mem-layout hicache-storage-prefetch-policy"),
    Group("prefixes are compared token by token", "chunked-prefix-cache",
          "prefix-caching-hash-algo radix-cache-backend"),
    Group("a request is admitted when its pages are there",
          "scheduler-reserve-full-isl",
          "schedule-conservativeness scheduler-delay-factor priority-scheduling-preemption-"
          "threshold"),
    Group("prompts are computed in chunks, beside decodes, of --max-num-batched-tokens a step",
          "chunked-prefill mixed-chunk dynamic-chunking cont-batching",
          "max-prefill-tokens prefill-max-requests long-prefill-token-threshold "
          "max-num-partial-prefills max-long-partial-prefills num-continuous-decode-steps "
          "num-scheduler-steps scheduler-recv-interval batch-size ubatch-size"),
    Group("actors are processes, linked in one way",
          "frontend-multiprocessing async-output-proc v2-block-manager use-v2-block-manager "
          "shm-tensor-arena"),
    Group("each step's tokens are sent at once", valued="stream-interval"),
    Group("an engine is one group of ranks (--tp) on one machine, which meet as it knows",
          "engine-use-ray worker-use-ray numa-bind p2p-check symm-mem torch-symm-mem nccl-nvls "
          "mscclpp ray-workers-use-nsight flashinfer-allreduce-fusion two-batch-overlap "
          "single-batch-overlap dbo use-ray nccl-for-dp-synchronization",
          "distributed-executor-backend nccl-port dist-init-addr nccl-init-addr dist-timeout "
          "master-addr master-port all2all-backend deepep-mode load-balance-method "
          "data-parallel-backend data-parallel-address data-parallel-rpc-port "
          "init-expert-location ep-dispatch-algorithm eplb-algorithm deepep-config eplb-config "
          "moe-dense-tp-size distributed-timeout-seconds dcp-comm-backend",
          "numa-node numa-bind-nodes"),
    Group("--silence says when an actor counts as hung",
          valued="watchdog-timeout soft-watchdog-timeout engine-iteration-timeout-s"),
    Group("actors sleep while there is nothing to do", "sleep-on-idle", "gc-threshold"),
    Group("an engine is warm before it is ready", "skip-server-warmup warmup", "warmups"),
    Group("routes have no prefix: let the proxy strip it",
          valued="root-path fastapi-root-path"),
    Group("the HTTP server bounds heads and bodies itself (--max-body-bytes)",
          valued="h11-max-incomplete-event-size h11-max-header-count http-process-num threads-http "
          "timeout-keep-alive"),
    Group("the documentation is there without a network, and each answer has a request id",
          "offline-docs request-id-headers"),
    Group(MASKS, "outlines-disk-cache", "grammar-backend guided-decoding-backend"),
    Group("the template of the chat decides", "jinja strip-thinking-cache",
          "chat-template-content-format"),
    Group("one tokenizer and one detokenizer serve all gateways",
          "tokenizer-batch-encode dynamic-batch-tokenizer tokenizer-batch-decode",
          "tokenizer-worker-num detokenizer-worker-num renderer-num-workers tokenizer-pool-size "
          "tokenizer-backend"),
    Group("what makes drafts is run as the model is",
          "multi-layer-eagle",
          "speculative-draft-attention-backend speculative-draft-model-quantization "
          "speculative-draft-load-format speculative-draft-kv-cache-dtype "
          "speculative-draft-model-revision speculative-draft-tensor-parallel-size "
          "speculative-moe-a2a-backend speculative-disable-by-batch-size gpu-layers-draft "
          "n-gpu-layers-draft device-draft ctx-size-draft threads-draft cache-type-k-draft "
          "cache-type-v-draft"),
    Group("a draft counts where it equals the model's own sample",
          "speculative-use-rejection-sampling",
          "speculative-accept-threshold-single speculative-accept-threshold-acc"),
    Group("--device says where layers lie: all on one device",
          valued="n-gpu-layers gpu-layers split-mode"),
    Group("pages are stored as --kv-cache-dtype says, in fp8 with the scales of the checkpoint",
          "calculate-kv-scales"),
    Group("an adapter (LoRA) says which modules it has; --kernels chooses how it is computed",
          valued="lora-backend max-lora-chunk-size lora-extra-vocab-size",
          lists="lora-target-modules"),
    Group("it is for another engine's plug-ins", valued="additional-config"),
)
"""Flags that change nothing here: how another engine computes what this one computes as well, or
bounds for what is not there. What would be missed (an answer, a route, a file, an event, a place or
a limit) stands in `REFUSED`."""

WHITESPACE = "the grammar of a JSON schema decides about white space"

REFUSED = (
    Group("drafts are made of each sequence's own text, not of files",
          valued="lookup-cache-static lookup-cache-dynamic"),
    Group("an engine is one group of ranks (--tp) on one machine", unless="1",
          valued="pipeline-parallel-size pp-size "
          "data-parallel-size-local decode-context-parallel-size "
          "dcp-size prefill-context-parallel-size expert-parallel-size ep-size ep nnodes "
          "attn-dp-size attn-cp-size moe-dp-size gpu-id-step"),
    Group("an engine is one group of ranks (--tp) on one machine", unless="0",
          valued="node-rank data-parallel-rank data-parallel-start-rank"),
    Group("ranks (--tp) share out every layer and expert alike; --replicas are whole copies",
          "expert-parallel ep-moe deepep-moe eplb dp-attention dp-lm-head "
          "data-parallel-hybrid-lb data-parallel-external-lb"),
    Group("ranks (--tp) share out every layer and expert alike; --replicas are whole copies",
          unless="none 0", valued="moe-a2a-backend elastic-ep-backend ep-num-redundant-experts"),
    Group("the device is chosen by CUDA_VISIBLE_DEVICES", unless="0",
          valued="base-gpu-id device-ids main-gpu"),
    Group("steps have no spans: --trace DIR writes a timeline of them, and "
          "--otlp-traces-endpoint sends those of requests",
          "trace-replay layerwise-nvtx-tracing layerwise-nvtx-marker logging-iteration-details",
          "collect-detailed-traces trace-modules"),
    Group("events are not sent anywhere: --trace DIR writes a timeline", unless="{}",
          valued="profiler-config"),
    Group("crash reports lie in `crashes` beside the run directories", valued="crash-dump-folder"),
    Group("there are no such metrics (docs/operations.md has those that are)",
          "mfu-metrics kv-cache-metrics per-request-metrics",
          "show-hidden-metrics-for-version kv-cache-metrics-sample"),
    Group("histograms have the buckets of vLLM", lists="bucket-time-to-first-token "
          "bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets "
          "generation-tokens-buckets custom-histogram-buckets"),
    Group("prompts and answers are never logged", "log-outputs log-deltas"),
    Group("prompts and answers are never logged", unless="0 1", valued="log-requests-level"),
    Group("lines go to stderr and to files in the run directory, as --log-format says",
          unless="stderr stdout", valued="log-config-file logging-config",
          lists="log-requests-target"),
    Group("there is no such route", "tokenizer-info-endpoint"),
    Group("properties cannot be changed while the engine runs (/props shows them)", "props"),
    Group("the documentation and the page are always there", "disable-fastapi-docs no-webui"),
    Group("a request's own template is always taken", "no-trust-request-chat-template"),
    Group("a request of a higher priority may take the pages of another",
          "disable-priority-preemption"),
    Group("a flag's value is seen in process lists: set HF_TOKEN, or run `hf auth login`",
          unless="true", valued="hf-token"),
    Group("files of models are never deleted", "delete-ckpt-after-loading"),
    Group("--max-total-tokens and --kv-cache-bytes say how many pages there are",
          valued="num-gpu-blocks-override"),
    Group("--state-dtype says how recurrent states are held", unless="auto",
          valued="mamba-cache-dtype"),
    Group("--kv-cache-dtype says how pages are stored", unless="f16 bf16 auto",
          valued="cache-type-k cache-type-v"),
    Group("pages that the pool has no room for go to --host-cache and --disk-cache alone",
          "lmcache", "lmcache-config-file"),
    Group("images and videos are prepared as the model's own preprocessor says", unless="{}",
          valued="mm-processor-kwargs media-io-kwargs mm-process-config"),
    Group("every token of a video is kept", unless="0 0.0", valued="video-pruning-rate"),
    Group("the head is computed in --dtype", "fp32-lm-head"),
    Group("there is no such check", "nan-detection"),
    Group("a stream of /generate has the whole text so far in each piece",
          "incremental-streaming-output stream-output"),
    Group("reasoning is answered apart (--reasoning-parser none leaves it in the text)",
          unless="auto deepseek", valued="reasoning-format"),
    Group("routes have no prefix: let the proxy strip it", valued="api-prefix"),
    Group("--cors-origins opens every route to a page, without cookies", "allow-credentials"),
    Group("--cors-origins opens every route to a page", unless='* ["*"]',
          lists="allowed-methods allowed-headers"),
    Group("weights lie on the devices alone", unless="0",
          valued="cpu-offload-gb offload-group-size"),
    Group("HTTP/1.1 is served", "http2"),
    Group("HTTP is served, at --port or --uds", "grpc-mode smg-grpc-mode grpc", "grpc-port"),
    Group("an adapter (LoRA) is served beside the model: --enable-lora --lora-modules NAME=PATH",
          "lora-init-without-apply", lists="lora lora-scaled"),
    Group("adapters (LoRA) are computed in --dtype", valued="lora-dtype", unless="auto"),
    Group("adapters (LoRA) are split among ranks as the weights are", "fully-sharded-loras"),
    Group("adapters (LoRA) are of the language model", "tower-connector-lora",
          "default-mm-loras"),
    Group("the adapters (LoRA) that were used longest ago give way", valued="lora-eviction-policy",
          unless="lru"),
    Group("the tokenizer is the model's, at the same --revision; no code is fetched",
          valued="tokenizer-revision code-revision", unless="main"),
    Group("config.json counts as it is (edit a copy of it)", unless="{}",
          valued="hf-overrides json-model-override-args rope-scaling hf-config-path "
          "quantization-param-path model-class-overrides"),
    Group("config.json counts as it is (edit a copy of it)", "disable-sliding-window",
          "rope-theta"),
    Group("prompts and pages are computed in one engine", unless="null none",
          valued="disaggregation-mode"),
    Group("prompts and pages are computed in one engine",
          valued="kv-transfer-config ec-transfer-config"),
    Group("code comes from installed packages alone (docs/plugins.md)", "custom-logit-processor",
          "tool-parser-plugin reasoning-parser-plugin io-processor-plugin scheduler-cls "
          "worker-extension-cls custom-weight-loader", "middleware logits-processors"),
    Group("code comes from installed packages alone (docs/plugins.md)", unless="auto",
          valued="worker-cls"),
    Group("tokenizer.json is read", unless="auto fast slow hf", valued="tokenizer-mode"),
    Group("images and videos are files: vLLM's tensors are a pickle, which runs code as it is "
          "read", "mm-embeds"),
    Group("ask for it in the request",
          "return-tokens-as-token-ids force-include-usage return-input-ids return-output-ids "
          "stream-response-default-include-usage"),
    Group("too long a prompt is refused (truncate_prompt_tokens of a request cuts it)",
          "auto-truncate"),
    Group("weights are served as the checkpoint has them, or by --quantization fp8, int8 or int4",
          "quantize-and-serve",
          "torchao-config modelopt-quant quantization-config rl-quant-profile"),
    Group(WHITESPACE, "constrained-json-disable-any-whitespace",
          "constrained-json-whitespace-pattern"),
    Group("the assistant answers", unless="assistant", valued="response-role"),
    Group("the template called default is used", unless="default", valued="hf-chat-template-name"),
    Group("/v1/completions takes prompts as they are", valued="completion-template"),
    Group("tools are run by clients", unless="none", valued="tool-server"),
    Group("log-probabilities are those of the model's logits", unless="raw_logprobs",
          valued="logprobs-mode"),
    Group("a GGUF file of a repository is named ORG/NAME:FILE", valued="hf-file"),
    Group("models are fetched by name from the Hugging Face hub alone: fetch the file, and name it",
          valued="model-url docker-repo"),
    Group("models that take images are safetensors: a GGUF file has no tower", valued="mmproj"),
)
"""Flags that ask for what is not here."""

BUILTIN_TEMPLATES = (
    "llama-2", "mistral", "devstral", "llama-4", "phi-4-mm", "chatml", "chatml-llava",
    "vicuna_v1.1", "llama_3_vision", "llava_llama_3", "internlm2-chat", "internvl-2-5",
    "qwen2-vl", "deepseek-ocr", "deepseek-vl2", "gemma-it", "gme-qwen2-vl", "minicpmv",
    "janus-pro", "minicpmo", "kimi-vl", "qwen2-audio", "default", "claude", "qwen",
    "llama-2-chat", "llama-3-instruct", "llama-3-instruct-llava", "yi-1.5", "yi-vl",
    "dbrx-instruct", "c4ai-command-r", "interns1", "granite-3-instruct", "deepseek-v3", "glm-4v",
    "llama2", "llama3", "llama4", "mistral-v1", "mistral-v3", "mistral-v7", "phi3", "phi4",
    "gemma", "zephyr", "deepseek", "deepseek2", "deepseek3", "command-r", "vicuna", "granite",
    "chatglm4", "falcon3")
"""Names by which other engines know chat templates of their own."""

_READER = "safetensors are read in one way"
_BY_ROW = "weights in fp8 have a scale for each row here"
_OWN_TEMPLATE = "a template of another engine; the model's own is used"
VALUES: dict[str, dict[str, tuple[str | None, str]]] = {
    "load_format": {"hf": ("auto", ""), **{
        name: ("auto", _READER) for name in (
            "instanttensor", "runai_streamer", "fastsafetensors", "layered", "local_cached",
            "modelexpress")}},
    "model_impl": {"vllm": ("actorium", ""), "sglang": ("actorium", "")},
    "quantization": {"null": ("auto", ""), "awq_marlin": ("awq", ""), "gptq_marlin": ("gptq", ""),
                     "modelopt_fp4": ("modelopt", ""),
                     "w8a8_int8": ("compressed-tensors", ""),
                     "experts_int8": ("int8", "of all projections, not of experts alone"),
                     "unquant": ("none", ""), "ptpc_fp8": ("fp8", ""), "w8a8_fp8": ("fp8", ""),
                     "fp8_per_tensor": ("fp8", _BY_ROW), "fp8_per_block": ("fp8", _BY_ROW)},
    "chat_template": {name: (None, _OWN_TEMPLATE) for name in BUILTIN_TEMPLATES},
    "tool_call_parser": {name: (own, "") for name, own in CALL_FORMAT_ALIASES.items()},
    "reasoning_parser": {alias: (name, "") for alias, name in REASONING_NAMES.items()},
    "log_level": {**{name: (name, "") for name in ("debug", "info", "warning", "error")},
                  "critical": ("error", ""), "fatal": ("error", ""), "warn": ("warning", ""),
                  "trace": ("debug", "")},
    "state_dtype": {"auto": (None, "")},
    "max_model_len": {"auto": (None, ""), "-1": (None, "")},
    "device": {"cuda:0": ("cuda", ""), "gpu:0": ("cuda", "")},
}
"""Field -> another tool's value, in lower case -> (ours, or None for the default; what to say)."""
