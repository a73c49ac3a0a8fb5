#!/usr/bin/env bash
# The demo: HSTU on generated data, trained as batches are loaded and balanced, side by side; about two minutes.
#
#   ci/demo.sh                        with the Python of .venv
#   ci/demo.sh --model sid_gr         SID-GR instead of HSTU
#   ci/demo.sh .venv/bin cpu          with this one, on the CPU; "cuda" takes the GPUs if there are two or more
#   ci/demo.sh .venv/bin cpu --quick  further arguments go to python -m hstu.demo, which has a --help
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
model=hstu
if [ "${1:-}" = --model ]; then model=${2:?"--model needs the name of a package"}; shift 2; fi
bin=${1:-.venv/bin} device=${2:-auto}
shift $(($# < 2 ? $# : 2))
# The CUDA set of packages also serves a machine with one GPU, where the demo stays on the CPU.
[ "$device" = cuda ] && device=auto
exec "$bin/python" -m "$model.demo" --device "$device" "$@"
