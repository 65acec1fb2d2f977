#!/usr/bin/env bash
# The clients that the gateway is tried with, in an environment of their own (litellm wants an older
# openai than the tests): tests/conformance/setup.sh [FOLDER]. What the engine needs, torch above
# all, is taken from the environment given by VENV (.venv) and not installed again.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$here/build/clients}
venv=${VENV:-$here/.venv}

[ -x "$folder/bin/python" ] || "$venv/bin/python" -m venv "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
engine=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
# Before the engine's packages can be seen, so that its openai does not count.
"${pip[@]}" "openai<3" litellm mcp langchain-openai anthropic schemathesis
printf '%s\n' "$engine" "$here" > "$site/zz_engine.pth"
"${pip[@]}" --no-deps lm_eval guidellm
"${pip[@]}" evaluate dill sqlitedict word2number sacrebleu rouge_score pytablewriter tqdm tenacity \
    aiohttp requests scikit-learn "datasets>=5.0.1" more-itertools "culsans~=0.10.0" faker ftfy \
    "httpx[http2]<1" loguru msgpack protobuf pydantic-settings pyyaml sanic tabulate websockets \
    eval_type_backport "click~=8.4.0"
