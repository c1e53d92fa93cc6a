#!/usr/bin/env bash
# Build the documentation into .cache/site/html. Any warning, such as a link that leads nowhere, ends it with an error.
# Usage: scripts/site.sh PROPERDOCS
set -euo pipefail
cd "$(dirname "$0")/.."
pages=.cache/site/pages

rm -rf .cache/site && mkdir -p "$pages"
for each in docs benchmarks packs proof *.md LICENSE; do
    ln -s "$PWD/$each" "$pages/$each"
done
# Not --quiet: it also silences the count of warnings, by which --strict fails.
"$1" build --strict --clean 2>.cache/site/log || { cat .cache/site/log; exit 1; }
echo "   .cache/site/html/index.html"
