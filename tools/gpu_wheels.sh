#!/usr/bin/env bash
# Fetch into .whl/ what a GPU machine without a network may lack: tools/gpu_wheels.sh [DIR]
# For Python 3.12 on x86-64 Linux. torch, triton and transformers must be there already.
# And compile what gpu-check launches, for an H100 and that machine's Triton (TRITON, 3.6.0 unless
# said): DIR/triton-cache.tar.gz. KERNELS=0: do not.
set -euo pipefail

dir=${1:-.whl}
python=${PYTHON:-python3}
packages=(pyzmq msgspec uvloop tokenizers jinja2 safetensors rich pytest pytest-timeout
          hypothesis psutil prometheus_client starlette uvicorn httptools llguidance)
platforms=()
for glibc in 39 35 34 31 28 27 24 17; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
fetch=("$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all:
       --python-version 3.12 --implementation cp "${platforms[@]}")
rm -rf "$dir"
# Peers: what can be had as Triton source. FlashInfer cannot: see docs/gpu.md.
sources=(fla-core einops)
"${fetch[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$dir" \
    "${packages[@]}"
"${fetch[@]}" --no-deps -d "$dir" "${sources[@]}"

if [ "${KERNELS:-1}" = 1 ]; then
    version=${TRITON:-3.6.0} build=build/gpu-cache here=${VENV:-.venv}/bin/python
    rm -rf "$build"
    "${fetch[@]}" --no-deps -d "$build" "triton==$version"
    "$python" -m zipfile -e "$build"/triton-*.whl "$build/theirs"
    "$here" -m pip install --quiet --disable-pip-version-check --no-deps --target "$build/ours" \
        "triton==$version"
    launchers=()
    if python3.12 -c 'import os, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
        launchers=(--python python3.12)
    else
        echo "gpu_wheels: no python3.12 with headers: what launches kernels is not made" >&2
    fi
    PYTHONPATH=$build/ours "$here" benchmarks/ptxas_cache.py "$build/kernels" \
        --wheel "$build/theirs" "${launchers[@]}" --archive "$dir/triton-cache.tar.gz"
fi
size=$(du -sm "$dir" | cut -f1)
echo "$(ls "$dir"/*.whl | wc -l) wheels, $size MiB in $dir" >&2
[ "$size" -lt 60 ] || { echo "gpu_wheels: more than 60 MiB" >&2; exit 1; }
