#!/usr/bin/env bash
# Record the CPU samples again with the trainer of this checkout. Run it on an idle machine.
#
#   samples/record.sh            record all samples
#   samples/record.sh NAME...    record only these
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
samples=$PWD
bin=$PWD/../.venv/bin
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo

# The keys of `summary --json` that the tests compare with `expected.json`.
keys='["run_id", "world_size", "backend", "num_steps", "num_timed_steps", "step_time_ns",
"communication_ns", "exposed_ns", "overlap_ratio", "peak_allocated_bytes", "peak_reserved_bytes"]'

record() { # NAME RANKS TRAINER-OPTIONS...
    local name=$1 ranks=$2
    shift 2
    local work
    work=$(mktemp -d)
    (
        cd "$work"
        "$bin/python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
            -m instrumented_trainer --steps 25 --runs-dir . --name "$name" "$@"
    )
    mkdir -p "$samples/$name"
    find "$samples/$name" -mindepth 1 -not -name README.md -delete
    mv "$work"/*"$name"*/* "$samples/$name/"
    rmdir "$work"/*"$name"*
    rmdir "$work"
    # The black box (260 KiB a rank) explains runs that hang or die; these ended normally.
    rm -f "$samples/$name"/attempt-*/rank-*/black_box.bin
    "$bin/fsdp-inspect" summary "$samples/$name" --json | "$bin/python" -c "
import json, sys
summary = json.load(sys.stdin)
print(json.dumps({key: summary[key] for key in $keys}, indent=2))" > "$samples/$name/expected.json"
}

wanted=${*:-tiny-2-ranks async-prefetch-2-ranks hsdp-4-ranks}
for name in $wanted; do
    case $name in
        tiny-2-ranks) record "$name" 2 ;;
        async-prefetch-2-ranks)
            record "$name" 2 --unshard-async-op --forward-prefetch 1 --backward-prefetch 1
            ;;
        hsdp-4-ranks) record "$name" 4 --mesh 2x2 --microbatches 2 ;;
        *)
            echo "unknown sample '$name': expected tiny-2-ranks, async-prefetch-2-ranks," \
                "hsdp-4-ranks" >&2
            exit 2
            ;;
    esac
done
