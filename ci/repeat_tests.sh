#!/usr/bin/env bash
# Runs `make test` N times in a row, to find tests that fail now and then. Shows the log of the first failure and stops.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: '${1:-}' is no number of runs: ci/repeat_tests.sh 20" >&2
  exit 2
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
for ((run = 1; run <= $1; run++)); do
  if ! make --no-print-directory test >"$log" 2>&1; then
    cat "$log"
    echo "error: run $run of $1 failed; its log is above" >&2
    exit 1
  fi
  echo "run $run of $1: $(tail -n 1 "$log")"
done
