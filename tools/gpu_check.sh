#!/usr/bin/env bash
# Run what needs a CUDA device: the tests marked gpu and benchmarks/gpu.py; JSON goes into $OUT.
set -uo pipefail

out=${OUT:-benchmarks/results}
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
if ! "$python" -c 'import zmq, msgspec, uvloop, tokenizers, pytest, pytest_timeout' 2>/dev/null; then
    packages=(pyzmq msgspec uvloop tokenizers jinja2 safetensors tyro rich pytest pytest-timeout
              hypothesis psutil)
    if [ -d .whl ]; then
        "$python" -m pip install --quiet --no-index --find-links .whl "${packages[@]}" || exit 1
    else
        "$python" -m pip install --quiet "${packages[@]}" || exit 1
    fi
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -m pytest tests -m gpu --junitxml "$out/gpu-tests.xml"
code=$?
[ "$code" = 5 ] && code=0 # no such test is no failure
if [ -f benchmarks/gpu.py ]; then
    "$python" benchmarks/gpu.py --json "$out/gpu.json" || code=1
fi
exit "$code"
