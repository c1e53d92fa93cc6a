#!/usr/bin/env bash
# Print the path of a uv that runs: one on PATH, else one of our own from a hashed lock. Messages go to stderr.
set -euo pipefail
cd "$(dirname "$0")/.."

runs() { "$1" --version >/dev/null 2>&1; }

# A shim of a version manager can lie on PATH and still refuse to run, so each candidate is tried.
for candidate in "$(command -v uv || true)" "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do
    if [[ -n $candidate ]] && runs "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

echo "== uv is not on PATH: installing it into .cache/uv from locks/uv.txt" >&2
rm -rf .cache/uv
for python in "$(command -v python3 || true)" /usr/bin/python3; do
    [[ -n $python ]] && runs "$python" || continue
    # Some distributions ship python3 without venv, others without pip: either one will do.
    if "$python" -m venv .cache/uv >/dev/null 2>&1; then
        .cache/uv/bin/python -m pip install --quiet --require-hashes -r locks/uv.txt >&2 || true
    else
        rm -rf .cache/uv
        "$python" -m pip install --quiet --require-hashes --target .cache/uv -r locks/uv.txt >&2 || true
    fi
    if runs .cache/uv/bin/uv; then
        echo "$PWD/.cache/uv/bin/uv"
        exit 0
    fi
done
echo "error: found no uv and could not install one; see https://docs.astral.sh/uv/ and put it on PATH" >&2
exit 1
