#!/usr/bin/env bash
# Get the ssh server that the tests of `keras-sparsity run --hosts` start on
# loopback for themselves: OpenSSH's sshd, with its client and ssh-keygen.
#
#   scripts/install_sshd.sh           # install them, unless they are there
#   scripts/install_sshd.sh --find    # print their paths; installs nothing
#
# Installs Debian's packages as root where there is apt-get, and has no service
# started. Elsewhere it says what to install, and ends with an error, as it does
# when a --find fails.
set -euo pipefail
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

find_all() {
  command -v sshd && command -v ssh && command -v ssh-keygen
}

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

if all="$(find_all)"; then
  echo "$all"
  exit
fi

missing="No ssh server for the tests: sshd, ssh and ssh-keygen must be there.
Found: ${all:-none of them}."
if [ "${1:-}" = "--find" ]; then
  fail "$missing" "Fix: scripts/install_sshd.sh"
fi
packages=(openssh-server openssh-client)
if [ "$EUID" -ne 0 ] || ! command -v apt-get >/dev/null; then
  fail "$missing" "Debian: apt-get install ${packages[*]}, as root."
fi
# Debian's package would let anyone in who has a password, from then on.
if [ -d /run/systemd/system ]; then
  fail "$missing" "Here it would become a service of the machine. If that may" \
    "be: apt-get install ${packages[*]}"
fi

echo "Installing ${packages[*]} ..."
log="$(mktemp)"
policy=/usr/sbin/policy-rc.d
[ -e "$policy" ] && policy=""
trap 'rm -f "$log" $policy' EXIT
if [ -n "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install --yes --no-install-recommends \
  "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 10 "$log" >&2
  fail "apt-get could not install ${packages[*]}; its last lines stand above."
fi
find_all || fail "$missing" "apt-get has installed ${packages[*]}."
