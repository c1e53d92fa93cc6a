#!/usr/bin/env bash
# An upgrade from one lane to another, as a person does it: triage, retire, commit, triage again.
# Usage: examples/upgrade.sh FROM TO ID..., such as `summer-2026 newest liger-flce-none-backward`.
# It works in a clone that it throws away: this checkout stays as it is. The environments of both lanes must be there.
set -euo pipefail
cd "$(dirname "$0")/.."
from=locks/$1.txt to=locks/$2.txt
shift 2
home=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

git clone --quiet "file://$home" "$scratch/megacpp_overlays"
cd "$scratch/megacpp_overlays"
git config user.name 'A Maintainer'
git config user.email maintainer@example.org
# The code is the clone's; environments and released archives are the checkout's.
ln -s "$home/.envs" "$home/.cache" .
export PYTHONPATH=$PWD MEGACPP_OVERLAYS_LOG=logging

# Run a command as typed, show it, and stop unless it ends with the code that is expected here.
expect() {
    local wanted=$1 code=0
    shift
    printf '\n$ megacpp-overlays %s\n' "$*"
    "$home/.venv/bin/python" -m megacpp_overlays "$@" 2>"$scratch/progress" || code=$?
    [[ $code == "$wanted" ]] || { tail -n 20 "$scratch/progress" >&2; exit 1; }
    printf '(exit code %s)\n' "$code"
}

# Take the printed step that begins so.
step() {
    local command
    command=$(sed -n "s/^  \($1\)$/\1/p" "$scratch/steps")
    printf '\n$ %s\n' "$command"
    eval "$command"
}

expect 1 triage --from "$from" --to "$to" --brief

for id in "$@"; do
    # Lanes that stay behind go on with a release that has the defect; each one has to be named.
    behind=()
    for lane in $("$home/.venv/bin/python" - "$id" "$to" <<'END'
import sys
from pathlib import Path

from megacpp_overlays.loader import session
from megacpp_overlays.upkeep import locks

overlay = next(each for each in session.current().overlays if each.id == sys.argv[1])
name = overlay.target.distribution
repaired = locks.read(Path(sys.argv[2])).version(name)
for path in sorted(Path("locks").glob("*.in")):
    version = locks.read(path.with_suffix(".txt")).version(name)
    if version and version != repaired:
        print(path.stem)
END
    ); do behind+=(--leave "$lane"); done
    expect 0 retire "$id" --lock "$to" "${behind[@]}" | tee "$scratch/steps"
    # The printed steps, as a person takes them; the texts that name the overlay are left out here.
    step 'git rm .*'
    notes=$(sed -n 's/^  \(packs\/[^:]*\): the pack becomes .*/\1/p' "$scratch/steps")
    [[ -z $notes ]] || sed -i -e 's/^| Class |.*/| Class | regression guard |/' \
        -e 's/^| Lifecycle state |.*/| Lifecycle state | retired |/' "$notes"
    "$home/.venv/bin/python" scripts/list_overlays.py
    expect 0 ledger --write RETIREMENT.md
    expect 0 receipts --sync
    expect 0 matrix --offline --archives .cache/wheels --write packs
    expect 0 reference --write docs
    step 'git add -A && git commit .*'
done

printf '\n$ git show --stat\n'
git show --stat --format='%s%n'
expect 0 triage --from "$from" --to "$to" --brief
