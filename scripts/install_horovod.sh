#!/usr/bin/env bash
# Compile Horovod 0.28.1 for the TensorFlow of one Python environment.
#
#   scripts/install_horovod.sh [python]     # default: python3
#
# TensorFlow 2.16 to 2.18 must be installed there first: the wheels of 2.19
# and later lack the XLA headers that Horovod includes. A C++ compiler is
# needed; CMake is installed from a wheel, below 4, which Horovod's bundled
# Gloo asks for. Takes two to four minutes on two cores, and nothing when
# Horovod is there already.
#
# Builds with Gloo (TCP) by default. For GPUs and MPI set Horovod's own
# variables, e.g.
#   HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_WITHOUT_MPI= HOROVOD_WITH_MPI=1
set -euo pipefail

VERSION=0.28.1
# Of the source archive on PyPI.
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

fail() {
  printf 'install_horovod.sh: %s\n' "$@" >&2
  exit 1
}

python="${1:-python3}"
python="$(command -v "$python")" || fail "no such Python: ${1:-python3}"

# By metadata: importing TensorFlow takes seconds.
tensorflow="$("$python" - <<'EOF'
from importlib import metadata

for name in ("tensorflow", "tensorflow-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
EOF
)"
wanted="'tensorflow-cpu>=2.16,<2.19' (or 'tensorflow[and-cuda]>=2.16,<2.19')"
case "$tensorflow" in
  2.16.* | 2.17.* | 2.18.*) ;;
  "") fail "$python has no TensorFlow, which must be there first." \
    "Fix: $python -m pip install $wanted" ;;
  *) fail "Horovod $VERSION compiles with TensorFlow 2.16 to 2.18;" \
    "received TensorFlow $tensorflow in $python." \
    "Fix: $python -m pip install $wanted" ;;
esac

works() {
  "$python" - "$VERSION" "$tensorflow" >/dev/null 2>&1 <<'EOF'
import sys

import horovod
import horovod.tensorflow  # loads the extension compiled for this TensorFlow
import tensorflow

sys.exit((horovod.__version__, tensorflow.__version__) != tuple(sys.argv[1:]))
EOF
}

if works; then
  echo "Horovod $VERSION for TensorFlow $tensorflow is already installed."
  exit
fi

compiler="${CXX:-c++}"
command -v "$compiler" >/dev/null || fail "no C++ compiler ($compiler)." \
  "Fix: apt-get install g++ make, or set CXX."
command -v make >/dev/null || fail "no make. Fix: apt-get install make"

"$python" -m pip install --quiet --only-binary :all: \
  "cmake<4" "setuptools<81" wheel cffi cloudpickle packaging psutil pyyaml

# The build calls `cmake` by name: this environment's has to come first.
scripts="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
PATH="$scripts:$PATH"
export PATH

: "${HOROVOD_WITH_TENSORFLOW=1}" "${HOROVOD_WITHOUT_PYTORCH=1}"
: "${HOROVOD_WITHOUT_MXNET=1}" "${HOROVOD_WITH_GLOO=1}"
: "${HOROVOD_WITHOUT_MPI=1}"
export HOROVOD_WITH_TENSORFLOW HOROVOD_WITHOUT_PYTORCH HOROVOD_WITHOUT_MXNET
export HOROVOD_WITH_GLOO HOROVOD_WITHOUT_MPI
# An outer make's flags (its job server) are not for the build's make.
unset MAKEFLAGS MFLAGS MAKELEVEL

echo "Compiling Horovod $VERSION for TensorFlow $tensorflow: two to four" \
  "minutes on two cores ..."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
log="$scratch/log"

# Horovod's build asks for debugging symbols: a sixth of its time, and 57 MB in
# place of 2. HOROVOD_DEBUG=1 has them all the same.
if [ -z "${CMAKE_TOOLCHAIN_FILE:-}" ]; then
  export CMAKE_TOOLCHAIN_FILE="$scratch/flags.cmake"
  echo 'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG" CACHE STRING "")' \
    >"$CMAKE_TOOLCHAIN_FILE"
fi

# Puts the third text in place of the second, which the file must have once.
replace_in() {
  "$python" - "$@" <<'EOF'
import sys

path, old, new = sys.argv[1:]
with open(path) as file:
    text = file.read()
if text.count(old) != 1:
    sys.exit(f"{path} is not as expected")
with open(path, "w") as file:
    file.write(text.replace(old, new))
EOF
}

# Gloo's all-to-all begins to send to one process before it has told others
# that they may send: what it tells them then waits behind its own data. Told
# first, machines that all send to each other fill their links
# (benchmarks/tried.md has figures).
all_told_first() {
  replace_in "$1/alltoallv.cc" \
    '    int sendRank = (myRank + i) % worldSize;
    int recvRank = (myRank + worldSize - i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
' \
    '    int rank = (myRank + worldSize - i) % worldSize;
    out->recv(rank, slot, outOffsetPerRank[rank], outLengthPerRank[rank]);
  }
  for (int i = 1; i < worldSize; i++) {
    int rank = (myRank + i) % worldSize;
    in->send(rank, slot, inOffsetPerRank[rank], inLengthPerRank[rank]);
'
}

# The thread that receives for Gloo's pairs asks the kernel again and again, as
# fast as it can, while another thread sends to one of them: it took 16 % of two
# processors from those that compute (benchmarks/tried.md). It sleeps now.
none_spins() {
  local held='std::try_to_lock);
  if (!lock) {
'
  local sleep='    std::this_thread::sleep_for(std::chrono::microseconds(50));
'
  replace_in "$1/transport/tcp/pair.cc" "$held" "$held$sleep" &&
    sed -i '1i #include <chrono>\n#include <thread>' "$1/transport/tcp/pair.cc"
}

# pip compares the hash before it runs the archive's own code.
download() {
  echo "horovod==$VERSION --hash=sha256:$SHA256" >"$scratch/requirements.txt"
  "$python" -m pip download --no-deps --no-binary horovod \
    --no-build-isolation --dest "$scratch" --require-hashes \
    --requirement "$scratch/requirements.txt"
}

# Not from a wheel that pip keeps: it does so by Horovod's version alone, and
# one that was compiled for another TensorFlow does not load.
build() {
  tar -xzf "$scratch/horovod-$VERSION.tar.gz" -C "$scratch" &&
    all_told_first "$scratch/horovod-$VERSION/third_party/gloo/gloo" &&
    none_spins "$scratch/horovod-$VERSION/third_party/gloo/gloo" &&
    "$python" -m pip install --no-build-isolation --no-cache-dir --no-deps \
      --force-reinstall --verbose "$scratch/horovod-$VERSION"
}

if ! download >"$log" 2>&1; then
  cat "$log" >&2
  if grep -q "DO NOT MATCH THE HASHES" "$log"; then
    fail "the downloaded horovod-$VERSION.tar.gz is not the one that was" \
      "released: its sha256 should be $SHA256." \
      "Nothing of it was run. Fix: see where pip downloads from" \
      "($python -m pip config list), and take Horovod from PyPI."
  fi
  fail "Horovod $VERSION could not be downloaded; pip's reason stands above."
fi

if ! build >"$log" 2>&1; then
  grep -nE '(error|Error|ERROR)' "$log" | tail -n 20 >&2 || true
  tail -n 40 "$log" >&2
  fail "Horovod did not compile; the end of its log stands above."
fi

works || fail "Horovod was compiled but does not load:" \
  "$("$python" -c 'import horovod.tensorflow' 2>&1 | tail -n 5)"
echo "Horovod $VERSION for TensorFlow $tensorflow is installed."
