#!/usr/bin/env bash
# Print the Python that can make this project's virtual environments: the one
# given as an argument, else the first of the usual names that is 3.10 to 3.12
# (what TensorFlow 2.16 and later has wheels for) and has venv.
set -euo pipefail

suits() {
  "$1" -c 'import ensurepip, sys, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

if [ "$#" -gt 0 ]; then
  candidates=("$@")
else
  candidates=(python3 python3.12 python3.11 python3.10)
fi

for candidate in "${candidates[@]}"; do
  if suits "$candidate"; then
    command -v "$candidate"
    exit
  fi
done

{
  echo "keras_sparsity needs Python 3.10, 3.11 or 3.12 with venv. Found:"
  for candidate in "${candidates[@]}"; do
    version="$("$candidate" --version 2>/dev/null)" || version="does not run"
    echo "  $candidate: $version"
  done
  echo "Install one of them (Debian, Ubuntu: apt-get install python3-venv) or"
  echo "name one: make PYTHON=/path/to/python3.12 ..."
} >&2
exit 1
