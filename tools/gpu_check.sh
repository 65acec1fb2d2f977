#!/usr/bin/env bash
# Run what needs a CUDA device, within nine minutes: the tests marked gpu, then benchmarks/gpu.py.
# Into $OUT: gpu-tests.xml and gpu-tests-worker.xml, gpu.json, gpu.md, two plots, and a timeline as
# .json and .png.
# Packages that are missing come from .whl/ where that is there (see tools/gpu_wheels.sh).
set -uo pipefail

out=${OUT:-benchmarks/results}
limit=${LIMIT:-520}   # seconds, of all
testing=${TESTING:-220} # of them, for the tests
mkdir -p "$out"
sees='import sys, torch; sys.exit(not torch.cuda.is_available())'
python=""
for candidate in "${PYTHON:-python3}" "${VENV:-.venv}/bin/python"; do
    if "$candidate" -c "$sees" 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "gpu-check: no interpreter here sees a CUDA device" >&2
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
if compgen -G '.whl/*.whl' >/dev/null; then
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
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "${pip[@]}" --target "$site" "${wanted[@]}" || exit 1
fi
export PYTHONPATH=$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

alone=tests/test_worker_gpu.py
mapfile -t files < <(grep -l 'pytest\.mark\.gpu' tests/test_*.py | grep -vx "$alone")
# Most of the time goes into compiling kernels, on one core each.
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 8)
# Alone, and first: they read how much of the whole device is free.
timeout -s INT -k 20 "$testing" "$python" -m pytest "$alone" -m gpu \
    --junitxml "$out/gpu-tests-worker.xml"
first=$?
timeout -s INT -k 20 $((testing > SECONDS + 30 ? testing - SECONDS : 30)) "$python" -m pytest \
    "${files[@]}" -m gpu "${workers[@]}" --junitxml "$out/gpu-tests.xml"
code=$?
case $first in
    0 | 5) ;;
    *) echo "gpu-check: $alone failed" >&2; code=1 ;;
esac
case $code in
    5) code=0 ;; # no such test is no failure
    2 | 124 | 137) echo "gpu-check: the tests were stopped after $testing s" >&2; code=1 ;;
esac
"$python" benchmarks/gpu.py --out "$out" --seconds $((limit - SECONDS)) || code=1
echo "gpu-check: $SECONDS s, exit code $code"
exit "$code"
