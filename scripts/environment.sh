#!/usr/bin/env bash
# Make the environment FOLDER hold exactly what LOCK says, every file checked against its hash.
# Usage: scripts/environment.sh FOLDER LOCK [PYTHON_VERSION]
# Without a version it is the one of the lock; a lock for any platform names the oldest that it is for.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1 lock=$2

# A lock that is no longer its lane's must fail here, not after half an environment was changed.
"$(scripts/python.sh "${3:-3.12}" --fetch)" scripts/lock.py check "$lock"
version=${3:-$(sed -n 's/^# python: //p' "$lock")}

uv=$(scripts/uv.sh)
# Large wheels on a slow line are no error.
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-600}

holds() {
    [[ $("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$version" ]]
}

echo "== environment $folder from $lock"
if ! holds; then
    python=$(scripts/python.sh "$version" --fetch)
    echo "   Python $version: $python"
    rm -rf "$folder"
    "$uv" --quiet venv --no-project --python "$python" "$folder"
fi
# sync also removes what the lock does not name, so a changed lock leaves nothing behind.
"$uv" pip sync --python "$folder/bin/python" --require-hashes "$lock"
