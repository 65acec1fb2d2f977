#!/usr/bin/env bash
# Fetch into .whl/ what a GPU machine without a network may lack: tools/gpu_wheels.sh [DIR]
# For Python 3.12 on x86-64 Linux. torch, triton and transformers must be there already.
set -euo pipefail

dir=${1:-.whl}
packages=(pyzmq msgspec uvloop tokenizers jinja2 safetensors rich pytest pytest-timeout
          hypothesis psutil prometheus_client starlette uvicorn httptools llguidance)
platforms=()
for glibc in 39 35 34 31 28 27 24 17; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
rm -rf "$dir"
# Peers: what can be had as Triton source. flashinfer cannot: see benchmarks/README.md.
sources=(fla-core einops)
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$dir" "${packages[@]}"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" --no-deps -d "$dir" "${sources[@]}"
size=$(du -sm "$dir" | cut -f1)
echo "$(ls "$dir" | wc -l) wheels, $size MiB in $dir" >&2
[ "$size" -lt 60 ] || { echo "gpu_wheels: more than 60 MiB" >&2; exit 1; }
