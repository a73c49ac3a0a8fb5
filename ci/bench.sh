#!/usr/bin/env bash
# Run the benchmarks one after the other; each writes its own result to benchmarks/results.
#
#   ci/bench.sh                     with the Python of .venv
#   ci/bench.sh .venv/bin --quick   with this one; arguments go to every benchmark, --quick for short runs
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
bin=${1:-.venv/bin}
shift $(($# < 1 ? $# : 1))
failed=()
for file in benchmarks/*.py benchmarks/models/*.py; do
  # Programs have a main; the others are what they share.
  grep -q '^if __name__ == "__main__":' "$file" || continue
  name=$(tr / . <<<"${file%.py}")
  case $name in *.on_device | *.attention_*) continue ;; esac  # commands of their own, which need a GPU or Triton
  echo "== $name"
  status=0
  "$bin/python" -m "$name" "$@" || status=$?
  # 77: a package is missing, which the program has named.
  case $status in 0 | 77) ;; *) failed+=("$name") ;; esac
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "error: failed: ${failed[*]}" >&2
  exit 1
fi
