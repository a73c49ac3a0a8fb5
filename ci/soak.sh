#!/usr/bin/env bash
# What takes too long for the suite: tens of thousands of random steps, thousands of damaged files, and hundreds of random
# orders of calls.
#
#   ci/soak.sh                 20,000 steps on 4 ranks, 500 shufflers; the fuzz tests, 2,000 files of each kind and 200 orders
#                              of calls; and 200 faults with each store host
#   ci/soak.sh --steps 5000    fewer steps
#   ci/soak.sh --trials 50     fewer faults
#
# About an hour on two cores. Status 1 where a row was lost, something grew, or a test failed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3
steps=20000 trials=200
while [ $# -gt 0 ]; do
  case $1 in
    --steps | --trials)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "error: $1 is '${2:-}'; it needs a number from 1 on" >&2; exit 2; }
      if [ "$1" = --steps ]; then steps=$2; else trials=$2; fi
      shift 2
      ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: $1 is no option; --steps N and --trials N are" >&2; exit 2 ;;
  esac
done

failed=()
step() {
  echo "== $*"
  "$python" -m "$@" || failed+=("$*")
}
step tests.soak --steps "$steps" --ranks 4 --seed 0
step pytest -q --hypothesis-profile soak tests/unit/test_damaged_files.py
step pytest -q --hypothesis-profile soak tests/distributed/test_stateful.py
step tests.faults --trials "$trials" --store agent
step tests.faults --trials "$trials" --store rank0
if [ ${#failed[@]} -gt 0 ]; then
  printf 'error: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
