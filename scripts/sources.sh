#!/usr/bin/env bash
# Build what is published as source alone into the environment FOLDER, from the hashed sources in LOCK.
# Usage: scripts/sources.sh FOLDER LOCK
# The environment holds torch, the CUDA headers where they are wanted, and the build tools; the machine must have a C++
# compiler for Transformer Engine, and needs no CUDA toolkit and no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 lock=$2

packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
join() { local IFS=:; echo "$*"; }
export CPATH LIBRARY_PATH
CPATH=$(join "$packages"/nvidia/*/include "$packages"/nvidia/cu13/include/cccl)
LIBRARY_PATH=$(join "$packages"/nvidia/*/lib)
export PATH="$PWD/$folder/bin:$PATH"
export NVTE_FRAMEWORK=pytorch
# The Python sources and the TileLang kernels are all there; the compiled kernels need a CUDA toolkit.
export MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE

echo "== building from $lock into $folder; Transformer Engine takes about 20 minutes on two cores"
"$(scripts/uv.sh)" pip install --python "$folder/bin/python" --no-deps --no-build-isolation --require-hashes \
    --requirement "$lock"
