#!/usr/bin/env bash
# Print the path of a Python of one version, such as 3.12. With --fetch, let uv download it if there is none.
# Usage: scripts/python.sh VERSION [--fetch]
set -euo pipefail
version=$1
here=$(dirname "$0")

is_it() {
    [[ -n $1 ]] && [[ $("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$version" ]]
}

# Shims of a version manager are on PATH for versions that they then refuse to run, and uv stops at the first such
# shim. So every candidate is run once, and the folder of the version manager is searched as well.
shopt -s nullglob
for candidate in "$(command -v "python$version" || true)" "$(command -v python3 || true)" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python "/usr/bin/python$version" "/usr/local/bin/python$version"; do
    if is_it "$candidate"; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

uv=$("$here/uv.sh")
if "$uv" python find --managed-python "$version" 2>/dev/null; then
    exit 0
fi
if [[ ${2:-} == --fetch ]]; then
    echo "== no Python $version on this machine: uv fetches one" >&2
    "$uv" python install "$version" >&2
    exec "$uv" python find --managed-python "$version"
fi
exit 1
