#!/usr/bin/env bash
# Build the PyTorch part of Transformer Engine into the environment FOLDER, from the hashed source in LOCK.
# Usage: scripts/transformer_engine.sh FOLDER LOCK
# The environment holds torch, the CUDA headers and the compiler tools; the machine must have a C++ compiler, and needs
# no CUDA toolkit and no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 lock=$2

packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
join() { local IFS=:; echo "$*"; }
export CPATH LIBRARY_PATH
CPATH=$(join "$packages"/nvidia/*/include "$packages"/nvidia/cu13/include/cccl)
LIBRARY_PATH=$(join "$packages"/nvidia/*/lib)
export NVTE_FRAMEWORK=pytorch PATH="$PWD/$folder/bin:$PATH"

echo "== transformer_engine_torch from $lock into $folder: about 20 minutes on two cores"
"$(scripts/uv.sh)" pip install --python "$folder/bin/python" --no-deps --no-build-isolation --require-hashes \
    --requirement "$lock"
