#!/usr/bin/env bash
# Get the browser that the tests look at TensorBoard with: Chromium or Chrome,
# and the chromedriver of the same version.
#
#   scripts/install_browser.sh           # install it, unless it is there
#   scripts/install_browser.sh --find    # print both paths; installs nothing
#
# Installs Debian's packages as root where there is apt-get. Elsewhere it says
# what to install, and ends with an error, as it does when a --find fails.
set -euo pipefail

first_of() {
  local name
  for name in "$@"; do
    command -v "$name" && return
  done
  return 1
}

find_both() {
  first_of chromium chromium-browser google-chrome google-chrome-stable \
    && first_of chromedriver
}

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

if both="$(find_both)"; then
  echo "$both"
  exit
fi

missing="No browser for the tests: chromium (or google-chrome) and chromedriver
must be in PATH. Found: ${both:-neither}."
if [ "${1:-}" = "--find" ]; then
  fail "$missing" "Fix: scripts/install_browser.sh"
fi
packages=(chromium chromium-driver)
if [ "$EUID" -ne 0 ] || ! command -v apt-get >/dev/null; then
  fail "$missing" "Debian: apt-get install ${packages[*]}, as root." \
    "Elsewhere: Chrome and its chromedriver, of the same version."
fi

echo "Installing ${packages[*]} ..."
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends \
  "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 10 "$log" >&2
  fail "apt-get could not install ${packages[*]}; its last lines stand above."
fi
find_both || fail "$missing" "apt-get has installed ${packages[*]}."
