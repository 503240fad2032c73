#!/usr/bin/env bash
# The one step of the action: forecast or record, check, and say it where GitHub shows it.
# Its settings are the variables that action.yml sets. Ends with 0 holds, 1 a regression,
# 2 cannot be judged or could not be run.
set -euo pipefail

refuse() {
    echo "::error title=FSDP Inspect::$1"
    exit 2
}

# Words as a shell would split them, and nothing else that a shell would do with them.
split() {
    "$FSDP_CHECK_PYTHON" -c 'import shlex, sys
for word in shlex.split(sys.argv[1]):
    sys.stdout.write(word + "\0")' "$1"
}

given=0
for one in "$FSDP_CHECK_FORECAST" "$FSDP_CHECK_RECORD" "$FSDP_CHECK_RUNS"; do
    if [ -n "$one" ]; then given=$((given + 1)); fi
done
[ "$given" -eq 1 ] || refuse "$given of the inputs forecast, record and runs are given. Expected one of them."
[[ $FSDP_CHECK_JUNIT != *$'\n'* && -n $FSDP_CHECK_JUNIT ]] || refuse "The input junit is no path. Expected one line."
"$FSDP_CHECK_PYTHON" -c 'import fsdp_inspect' ||
    refuse "The input python names an interpreter without fsdp-inspect. Install fsdp-inspect[record] before this step."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fsdp_inspect=("$FSDP_CHECK_PYTHON" -m fsdp_inspect)
arguments=(check --format=github "--markdown=$GITHUB_STEP_SUMMARY" "--junit=$FSDP_CHECK_JUNIT")
if [ -n "$FSDP_CHECK_BASELINE" ]; then arguments+=("--baseline=$FSDP_CHECK_BASELINE"); fi
if [ -n "$FSDP_CHECK_BUDGET" ]; then arguments+=("--budget=$FSDP_CHECK_BUDGET"); fi

if [ -n "$FSDP_CHECK_FORECAST" ]; then
    split "$FSDP_CHECK_FORECAST" > "$scratch/words" || refuse "The input forecast cannot be split into words: a quote is open."
    mapfile -d '' -t words < "$scratch/words"
    "${fsdp_inspect[@]}" forecast "${words[@]}" --out "$scratch/forecasts" ||
        refuse "The forecast could not be made: see the log of this step."
    made=("$scratch"/forecasts/*)
    [ "${#made[@]}" -eq 1 ] || refuse "The input forecast makes ${#made[@]} forecasts. Expected one: a baseline is of one world size."
    arguments+=(-- "${made[0]}")
elif [ -n "$FSDP_CHECK_RECORD" ]; then
    arguments+=("--record=$FSDP_CHECK_RECORD" "--repeat=$FSDP_CHECK_REPEAT")
else
    mapfile -t runs < <(sed '/^[[:space:]]*$/d' <<< "$FSDP_CHECK_RUNS")
    arguments+=(-- "${runs[@]}")
fi

rm -f -- "$FSDP_CHECK_JUNIT"
code=0
"${fsdp_inspect[@]}" "${arguments[@]}" || code=$?
printf '%s\n' "exit-code=$code" "junit=$FSDP_CHECK_JUNIT" >> "$GITHUB_OUTPUT"
# Without a verdict nothing was checked (no baseline, a wrong option): never a pass.
[ -s "$FSDP_CHECK_JUNIT" ] || refuse "The check ended without a verdict: see the log of this step."
if [ "$code" -eq 2 ] && [ "$FSDP_CHECK_ALLOW_UNJUDGED" = true ]; then
    exit 0
fi
exit "$code"
