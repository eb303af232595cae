#!/usr/bin/env bash
# Install with pip, from wheels alone, and say meanwhile how far it is:
#
#   scripts/pip_install.sh PYTHON WHAT [pip's arguments ...]
#
# A line for each step; between them a counter on a terminal, elsewhere a line
# every ten seconds. All that pip itself says, its warnings of places without
# a wheel among it, comes only if it fails.
set -euo pipefail
python="$1" what="$2"
shift 2
environment="$(dirname "$(dirname "$python")")"
log="$(mktemp)"
pid=
trap 'rm -f "$log"; [ -z "$pid" ] || kill "$pid" 2>/dev/null || true' EXIT

say() { printf '  %s, %3d s: %s\n' "$environment" "$SECONDS" "$1"; }
# On a terminal: in place of the line before, until the next step.
count() {
  if [ -t 1 ]; then
    printf '\r  %s, %3d s: %s\033[K' "$environment" "$SECONDS" "$1"
  elif [ $((SECONDS - counted)) -ge 10 ]; then
    say "$1"
    counted=$SECONDS
  fi
}
end_line() { if [ -t 1 ]; then printf '\r\033[K'; fi; }

# pip does not say how much of its longest step is left.
state() {
  local found
  if grep -q '^Installing collected' "$log"; then
    echo "unpacking, $(du -sm "$environment" 2>/dev/null | cut -f 1) MB so far"
  else
    found="$(grep -c '^Collecting\|^Requirement already' "$log")" || true
    echo "looking for wheels, $found found"
  fi
}

SECONDS=0 counted=0 step=
echo "Installing $what into $environment ..."
# pip would compile one file after the other.
"$python" -m pip install --no-compile --disable-pip-version-check \
  --only-binary :all: "$@" >"$log" 2>&1 &
pid=$!
while kill -0 "$pid" 2>/dev/null; do
  now="$(state)"
  if [ "${now%%,*}" != "$step" ]; then
    end_line
    step="${now%%,*}"
    say "$step"
  else
    count "$now"
  fi
  sleep 1
done
end_line
if ! wait "$pid"; then
  pid=
  cat "$log" >&2
  echo "pip could not install $what into $environment: see above." >&2
  exit 1
fi
pid=
say "compiling to .pyc files"
# Some packages bring templates that are no Python yet.
"$python" -m compileall -q -j 0 "$environment"/lib/python*/site-packages \
  >/dev/null 2>&1 || true
say "done"
