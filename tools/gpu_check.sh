#!/usr/bin/env bash
# One of three calls on a CUDA device, each within nine minutes from a cold start:
#   tools/gpu_check.sh contact|kernels|tests [--toy] [options of benchmarks/gpu.py]
# contact: whether it is right, decode, the whole engine, FP8, a profile; kernels: each beside
# its peers, speculation; tests: all that are marked gpu. --toy walks through it on a CPU.
# Into $OUT, at most five files: gpu-PART.json and .md (whole after every row), gpu-PART.log,
# gpu-timeline.json, triton-cache.tar.gz. CACHE=that file: its kernels need not be
# compiled again. Packages that are missing come from .whl/ where that is there (gpu_wheels.sh), and
# so do kernels, where CACHE says nothing else.
set -uo pipefail

part=${1:-contact}
shift || true
case $part in
    contact | kernels | tests) ;;
    *) echo "gpu-check: PART is contact, kernels or tests, not $part" >&2; exit 2 ;;
esac
toy=""
for word in "$@"; do [ "$word" = --toy ] && toy=1; done
out=${OUT:-benchmarks/results}
limit=${LIMIT:-520} # seconds, of all
ending=15           # of them, for the cache
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The shell's own output and that of all it starts; what is shown of it may be its end alone.
exec > >(exec tee "$out/gpu-$part.log") 2>&1
tee=$!

sees='import sys, torch; sys.exit(not torch.cuda.is_available())'
[ -n "$toy" ] && sees='import torch'
python=""
for candidate in "${PYTHON:-python3}" "${VENV:-.venv}/bin/python"; do
    if "$candidate" -c "$sees" 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "gpu-check: no interpreter here sees a CUDA device; TOY=1 (--toy) needs none"
    exit 1
fi

# Only what is not there: a second tokenizers, say, might not be the one that transformers wants.
missing='
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
for name in sys.argv[1:]:
    try:
        version(Path(name).name.split("-")[0] if name.endswith(".whl") else name)
    except PackageNotFoundError:
        print(name)
'
pip=("$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile)
wanted=()
if [ -n "$toy" ]; then
    : # the environment's own
elif compgen -G '.whl/*.whl' >/dev/null; then
    mapfile -t wanted < <("$python" -c "$missing" .whl/*.whl)
    pip+=(--no-index --no-deps)
else
    mapfile -t wanted < <("$python" -c "$missing" pyzmq msgspec uvloop tokenizers jinja2 \
        safetensors rich pytest pytest-timeout hypothesis psutil prometheus_client starlette \
        uvicorn httptools llguidance)
fi
site=""
if [ "${#wanted[@]}" -gt 0 ]; then
    # Beside the interpreter's own packages, which may not be ours to change.
    site=$scratch/site
    "${pip[@]}" --target "$site" "${wanted[@]}" || exit 1
fi
export PYTHONPATH=$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$scratch/triton
mkdir -p "$TRITON_CACHE_DIR" "$scratch/tests"
carried=() cache=${CACHE:-}
[ -z "$cache$toy" ] && [ -f .whl/triton-cache.tar.gz ] && cache=.whl/triton-cache.tar.gz
if [ -n "$cache" ]; then
    if "$python" benchmarks/gpucheck/cache.py unpack "$cache" "$TRITON_CACHE_DIR"; then
        carried=(--carried)
    fi
fi

# The battery ends by itself; if it does not, what it has written so far is whole.
seconds=$((limit - ending - SECONDS))
timeout -s TERM -k 5 "$((seconds + 5))" "$python" benchmarks/gpu.py "$part" --out "$out" \
    --seconds "$seconds" --scratch "$scratch/tests" "${carried[@]}" "$@"
code=$?
case $code in
    124 | 137) echo "gpu-check: $part was stopped after $seconds s" ;;
esac
for said in "$scratch"/tests/*.log; do # of tests that were under way
    [ -f "$said" ] && tail -n 60 "$said"
done
[ -n "$toy" ] || "$python" benchmarks/gpucheck/cache.py pack "$TRITON_CACHE_DIR" \
    "$out/triton-cache.tar.gz"
echo "gpu-check: $part, $SECONDS s, exit code $code"
exec >&- 2>&- # the log is whole before this ends, unless somebody else still holds it
for _ in $(seq 50); do kill -0 "$tee" || break; sleep 0.1; done
exit "$code"
