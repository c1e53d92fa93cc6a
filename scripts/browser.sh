#!/usr/bin/env bash
# Print the path of a headless Chromium for the tests of the kept page, and nothing when there is none.
#
# Having none is a failure only where MEGACPP_REQUIRE_BROWSER is set; an archive that is not the published one is a failure
# everywhere.
#
#   browser.sh            one that is here: of this machine, or fetched before
#   browser.sh --fetch    else fetch one with npm into .cache/browser: one hashed archive, no install, no root
#
# The browsers that Playwright fetches itself come from a host that many networks close; an npm registry is nearer.
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGE='@sparticuz/chromium@153.0.0'
INTEGRITY='sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=='
HOME_OF_IT="$PWD/.cache/browser"

runs() { "$1" --version >/dev/null 2>&1; }

for candidate in "${MEGACPP_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable chrome \
    "$HOME_OF_IT/chromium"; do
    found=$(command -v "${candidate:-/nonexistent}" || true)
    if [[ -n $found ]] && runs "$found"; then
        echo "$found"
        exit 0
    fi
done

required=${MEGACPP_REQUIRE_BROWSER:-}
skip() {
    if [[ -n $required ]]; then
        echo "== no browser: $1, and it is required (MEGACPP_REQUIRE_BROWSER is set). Install chromium, or node and npm" >&2
        exit 1
    fi
    echo "== no browser: $1; the tests of the kept page in a browser are skipped. Install chromium, or node and npm" >&2
    exit 0
}
if [[ ${1:-} != --fetch ]]; then
    [[ -z $required ]] || skip 'none is on this machine, and none was fetched with --fetch'
    exit 0
fi
command -v node >/dev/null && command -v npm >/dev/null || skip 'neither chromium nor npm is here'
[[ $(uname -sm) == 'Linux x86_64' ]] || skip "the archive that npm has is for Linux x86_64, this is $(uname -sm)"

echo "== chromium into .cache/browser ($PACKAGE, 70 MB)" >&2
mkdir -p .cache
draft=$(mktemp -d .cache/browser.XXXXXX)
trap 'rm -rf "$draft"' EXIT
(cd "$draft" && npm pack --silent "$PACKAGE" >/dev/null) || skip 'npm could not fetch it'
archive=$(echo "$draft"/*.tgz)
came=$(node -p '"sha512-" + crypto.createHash("sha512").update(fs.readFileSync(process.argv[1])).digest("base64")' \
    "$archive")
if [[ $came != "$INTEGRITY" ]]; then
    echo "== what npm fetched is not $PACKAGE as it was published: it has $came" >&2
    exit 1
fi
tar -xzf "$archive" -C "$draft" package/bin
inflate() { node -e 'process.stdin.pipe(zlib.createBrotliDecompress()).pipe(process.stdout)' <"$draft/package/bin/$1"; }
mkdir "$draft/browser"
inflate chromium.br >"$draft/browser/chromium-shell"
inflate fonts.tar.br | tar -xf - -C "$draft/browser"
inflate al2023.tar.br | tar -xf - -C "$draft/browser" # the libraries that a bare machine lacks
inflate swiftshader.tar.br | tar -xf - -C "$draft/browser"
chmod 755 "$draft/browser/chromium-shell"
cat >"$draft/browser/chromium" <<'END'
#!/usr/bin/env bash
# The libraries of this machine come first; those of the archive fill in what it lacks.
here=$(dirname "$(readlink -f "$0")")
if ! "$here/chromium-shell" --version >/dev/null 2>&1; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib"
fi
[[ -e /etc/fonts/fonts.conf ]] || export FONTCONFIG_FILE="${FONTCONFIG_FILE:-$here/own-fonts.conf}"
exec "$here/chromium-shell" "$@"
END
chmod 755 "$draft/browser/chromium"
cat >"$draft/browser/own-fonts.conf" <<'END'
<?xml version="1.0"?>
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
END
rm -rf "$HOME_OF_IT"
mv "$draft/browser" "$HOME_OF_IT"
runs "$HOME_OF_IT/chromium" || skip 'the one that npm has does not run here'
echo "$HOME_OF_IT/chromium"
