#!/usr/bin/env bash
# The one step of the action: forecast or record, check, and report the verdict to GitHub.
# action.yml sets its variables. Exit codes: 0 passes, 1 a regression, 2 cannot be judged or failed.
set -euo pipefail

refuse() {
    echo "::error title=FSDP Inspect::$1"
    exit 2
}

# Split a text into words as a shell does, without any other effect of a shell.
split() {
    "$FSDP_CHECK_PYTHON" -P -c 'import shlex, sys
for word in shlex.split(sys.argv[1]):
    sys.stdout.write(word + "\0")' "$1"
}

given=0
for one in "$FSDP_CHECK_FORECAST" "$FSDP_CHECK_RECORD" "$FSDP_CHECK_RUNS"; do
    if [ -n "$one" ]; then given=$((given + 1)); fi
done
[ "$given" -eq 1 ] || refuse "$given of the inputs forecast, record and runs are given. Expected exactly one. Set one and remove the others."
[[ $FSDP_CHECK_JUNIT != *$'\n'* && -n $FSDP_CHECK_JUNIT ]] || refuse "The input junit is not a valid path. Expected a path on one line."
"$FSDP_CHECK_PYTHON" -P -c 'import fsdp_inspect' ||
    refuse "The input python names an interpreter without fsdp-inspect. Install fsdp-inspect[record] before this step."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# -P: Python imports no file of the working directory, which a pull request may have written. Only a
# forecast imports the model from there.
fsdp_inspect=("$FSDP_CHECK_PYTHON" -P -m fsdp_inspect)
arguments=(check --format=github "--format=markdown=$GITHUB_STEP_SUMMARY" "--format=junit=$FSDP_CHECK_JUNIT")
if [ -n "$FSDP_CHECK_BASELINE" ]; then arguments+=("--baseline=$FSDP_CHECK_BASELINE"); fi
if [ -n "$FSDP_CHECK_BUDGET" ]; then arguments+=("--budget=$FSDP_CHECK_BUDGET"); fi

if [ -n "$FSDP_CHECK_FORECAST" ]; then
    split "$FSDP_CHECK_FORECAST" > "$scratch/words" || refuse "The input forecast has an unclosed quote. Close it."
    mapfile -d '' -t words < "$scratch/words"
    "$FSDP_CHECK_PYTHON" -m fsdp_inspect plan memory "${words[@]}" --out "$scratch/forecasts" ||
        refuse "The forecast failed. The log of this step shows the reason."
    made=("$scratch"/forecasts/*)
    [ "${#made[@]}" -eq 1 ] || refuse "The input forecast makes ${#made[@]} forecasts. Expected one, because a baseline has one world size. Set one --world-size."
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
# Without a verdict, nothing was checked (no baseline, an invalid option), so the job must not pass.
[ -s "$FSDP_CHECK_JUNIT" ] || refuse "The check ended without a verdict. The log of this step shows the reason."
if [ "$code" -eq 2 ] && [ "$FSDP_CHECK_ALLOW_UNJUDGED" = true ]; then
    exit 0
fi
exit "$code"
