#!/usr/bin/env bash
# Run the GPU checks on a machine without a network, within a time budget.
#
#   OUT=DIR tests/gpu/offline.sh BUDGET_S [PART...]       in the root of the checkout
#
# Parts, in the order of importance: smoke core tests costs forecast clock emulated sample trainer
# two_ranks overhead. A part that fails or reaches its limit does not stop the others, and its results
# are in DIR when it ends. DIR gets at most 8 files: report.txt figures.json figures.md steps.log
# tests.log smoke.tar.gz and the sample.
#
# The results of each part stay in build/gpu, and a later call with other parts adds to them.
# `python -m tests.gpu.merge DIR DIR --out DIR` merges the results of calls on different machines.
#
# Packages that the machine lacks come as wheels in .whl/: see README.md. Exit code 0: every row that
# can run here holds. DEVICE=cpu QUICK=1 tries the script on any machine.
set -u
if [[ ! "${1:-}" =~ ^[0-9]+$ ]] || [ -z "${OUT:-}" ]; then
    echo "usage: OUT=DIR tests/gpu/offline.sh BUDGET_S [PART...]" >&2
    exit 2
fi
BUDGET=$1
shift
if [ $# -eq 0 ]; then
    set -- smoke core tests costs forecast clock emulated sample trainer two_ranks overhead
fi
DEVICE=${DEVICE:-cuda}
PY=${PY:-python3}
ROOT=$PWD
KEPT=${KEPT:-$ROOT/build/gpu}
SITE=${SITE:-$KEPT/site}
RESULT=0
mkdir -p "$OUT" "$KEPT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FSDP_INSPECT_CACHE= FSDP_INSPECT_DATA=
if [ "$DEVICE" = cpu ]; then
    export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
fi

say() { echo "[$SECONDS s] $*" | tee -a "$KEPT/report.txt"; }

# limit WANTED: the seconds for a part, at most what is left; fails if less than 10 s are left.
limit() {
    local rest=$((BUDGET - SECONDS - 5))
    [ "$rest" -ge 10 ] || return 1
    echo $((rest < $1 ? rest : $1))
}

publish() { "$PY" -m tests.gpu.merge "$KEPT" --out "$OUT" >> "$KEPT/report.txt" 2>&1; }

install() {
    if compgen -G ".whl/*.whl" > /dev/null; then
        "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$SITE" .whl/*.whl >> "$KEPT/report.txt" 2>&1 || say "the wheels cannot be installed"
    fi
    export PYTHONPATH=$SITE:$ROOT
    if command -v nvidia-smi > /dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >> "$KEPT/report.txt"
    fi
    "$PY" -c "import tests.gpu.__main__, tests.gpu.emulated, tests.gpu.merge, tests.gpu.sample" \
        >> "$KEPT/report.txt" 2>&1
}

# A recorded run and its summary: shows at once whether the recorder works here.
smoke() {
    local seconds code run
    seconds=$(limit 60) || return 9
    rm -rf "$KEPT/smoke"
    mkdir -p "$KEPT/smoke"
    timeout --kill-after=5 "$seconds" "$PY" -m instrumented_trainer --emulate h100-nvlink,world_size=8 \
        --preset tiny --num-layers 4 --steps 12 --runs-dir "$KEPT/smoke/runs" >> "$KEPT/report.txt" 2>&1
    code=$?
    for run in "$KEPT"/smoke/runs/*/; do
        "$PY" -m fsdp_inspect summary "$run" >> "$KEPT/report.txt" 2>&1 || code=1
    done
    tar -czf "$KEPT/smoke/smoke.tar.gz" -C "$KEPT/smoke" runs && rm -rf "$KEPT/smoke/runs"
    return $code
}

# script NAME SECONDS STEP...: steps of tests.gpu, which write their figures after each step.
script() {
    local name=$1 seconds child code
    seconds=$(limit "$2") || return 9
    shift 2
    rm -rf "${KEPT:?}/$name"
    mkdir -p "$KEPT/$name"
    timeout --kill-after=5 $((seconds + 4)) "$PY" -m tests.gpu --device "$DEVICE" ${QUICK:+--quick} \
        --limit-s $((seconds > 12 ? seconds - 8 : 4)) --out "$KEPT/$name" --only "$@" \
        > "$KEPT/$name/output" 2>&1 &
    child=$!
    while kill -0 $child 2> /dev/null; do
        sleep 2
        publish
    done
    wait $child
    code=$?
    grep '^\[' "$KEPT/$name/output" >> "$KEPT/report.txt"
    return $code
}

# run_tests NAME SECONDS FILE...: GPU tests. A warning is no error on a machine of others.
run_tests() {
    local name=$1 seconds marker=gpu code
    seconds=$(limit "$2") || return 9
    shift 2
    mkdir -p "$KEPT/$name"
    if [ "$DEVICE" = cpu ]; then
        marker="not study and not slow"
    fi
    local plugin=()
    "$PY" -c "import pytest_timeout" 2> /dev/null && plugin=(-p pytest_timeout --timeout 120)
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout --kill-after=5 "$seconds" "$PY" -m pytest \
        "${plugin[@]}" -p no:cacheprovider -o addopts= -o filterwarnings=default -m "$marker" -rA \
        --tb=short "$@" > "$KEPT/$name/tests.log" 2>&1
    code=$?
    tail -n 1 "$KEPT/$name/tests.log" >> "$KEPT/report.txt"
    [ $code -eq 5 ] && code=0 # no test is for this device
    return $code
}

say "budget $BUDGET s, device $DEVICE, parts: $*"
if ! install; then
    say "the script cannot be imported: $(tail -n 1 "$KEPT/report.txt")"
    set --
    RESULT=1
fi
for part in "$@"; do
    say "$part ..."
    case $part in
        smoke) smoke ;;
        core) script core 200 timing paths memory ;;
        tests) run_tests tests 150 tests/gpu/test_recorder_gpu.py tests/gpu/test_emulation_gpu.py tests/gpu/test_snapshot_gpu.py ;;
        trainer) run_tests trainer 150 tests/gpu/test_trainer_gpu.py ;;
        overhead) script overhead 190 overhead ;;
        costs | forecast | clock | emulated | sample | two_ranks) script "$part" 130 "$part" ;;
        *) say "unknown part $part; the parts are in the head of this script" && false ;;
    esac
    code=$?
    case $code in
        0) say "$part: ok" ;;
        9) say "$part: not started, $((BUDGET - SECONDS)) s are left" ;;
        124 | 137) say "$part: stopped at its limit" ;;
        *) say "$part: ended with $code" ;;
    esac
    [ $code -eq 0 ] || RESULT=1
    publish
done
say "done"
publish
cp "$KEPT/report.txt" "$OUT/report.txt"
exit $RESULT
