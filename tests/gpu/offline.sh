#!/bin/bash
# Run the GPU script on a machine without a network, within a time budget. Run it in the root of the
# checkout; OUT is the folder for the results.
#
#   OUT=DIR bash tests/gpu/offline.sh BUDGET_S [STEP...]      for example 480, or 200 timing paths
#   DEVICE=cpu QUICK=1 OUT=DIR bash tests/gpu/offline.sh 480  tries the script without a GPU
#
# The wheels of .whl/ are installed into a temporary folder. The steps, their order and their limits
# are those of `python -m tests.gpu`. Results are in $OUT after each step, in at most eight files.
set -uo pipefail
BUDGET=${1:?usage: OUT=DIR offline.sh BUDGET_S [STEP...]}
shift
: "${OUT:?set OUT to the folder for the results}"
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
WHEELS=${WHEELS:-.whl}
RESERVE_S=6
SECONDS=0
mkdir -p "$OUT"
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
export PYTHONUNBUFFERED=1 FSDP_INSPECT_CACHE= FSDP_INSPECT_DATA=
[ "$DEVICE" = cpu ] && export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo

run() {
    echo "=== offline.sh $BUDGET $*, device $DEVICE"
    if compgen -G "$WHEELS/*.whl" > /dev/null; then
        "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$SITE" "$WHEELS"/*.whl || return 1
    fi
    export PYTHONPATH=$SITE:$PWD
    command -v nvidia-smi > /dev/null &&
        nvidia-smi --query-gpu=name,driver_version,memory.total,mig.mode.current --format=csv,noheader
    "$PY" -m tests.gpu.packages || return 1
    local steps=()
    [ $# -gt 0 ] && steps=(--only "$@")
    "$PY" -m tests.gpu --device "$DEVICE" ${QUICK:+--quick} --out "$OUT" \
        --limit-s $((BUDGET - SECONDS - RESERVE_S)) "${steps[@]}"
}

run "$@" 2>&1 | tee -a "$OUT/report.txt"
