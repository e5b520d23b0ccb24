#!/usr/bin/env bash
# Run all GPU tests on an offline machine with GPUs and its own Python and torch, in at most 8 minutes.
#
#   make wheelhouse PYTHON_VERSION=3.12 TORCH=torch==2.11.0    on a machine with a network; copy this folder
#   tests/gpu.sh wheelhouse gpu-report.txt                     on the GPU machine; further arguments go to tests/gpu_report.py
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=${1:-wheelhouse} report=${2:-gpu-report.txt}
shift $(($# < 2 ? $# : 2))
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
  --target "$site" "$wheels"/*.whl
if test -e "$wheels/libnccl.so.2.xz"; then
  python3 -c 'import lzma, sys; open(sys.argv[2], "wb").write(lzma.open(sys.argv[1]).read())' \
    "$wheels/libnccl.so.2.xz" "$site/libnccl.so.2"
  export LD_PRELOAD="$site/libnccl.so.2${LD_PRELOAD:+:$LD_PRELOAD}"  # instead of torch's
fi
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" python3 -m tests.gpu_report --report "$report" "$@"
