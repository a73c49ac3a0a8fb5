#!/usr/bin/env bash
# Runs tests with the native core built for the address and undefined-behaviour sanitizers, which end a test that reads
# outside an array or overflows an integer. Needs g++ and .venv; the core is put back afterwards.
#
#   ci/test_sanitized.sh                     the planner's tests
#   ci/test_sanitized.sh tests/unit/dispatch these
set -euo pipefail
cd "$(dirname "$0")/.."
command -v g++ >/dev/null || { echo "error: the sanitizers are those of g++, which is not installed: install it" >&2; exit 2; }
[[ -x .venv/bin/python ]] || { echo "error: there is no .venv: run make install first" >&2; exit 2; }
tests=("$@")
[[ ${#tests[@]} -gt 0 ]] || tests=(tests/golden tests/unit/perf_model tests/unit/distributed tests/unit/micro_batching)
folder=commons/perf_model/partitioner
core="$folder/libevenrank.so"
kept="$(mktemp -d)"
cp "$core" "$kept"
put_back() {
  cp "$kept/libevenrank.so" "$core"
  # A process that a sanitizer ends shows nothing of what pytest has captured: the reports are files.
  for report in "$kept"/report*; do [[ ! -e "$report" ]] || cat "$report" >&2; done
  rm -rf "$kept"
}
trap put_back EXIT
# As setup.py does: the package itself cannot be imported while its core is of other sources.
sources="$(.venv/bin/python -c "import runpy; print(runpy.run_path('$folder/sources.py')['hash_of_sources']())")"
rm "$core" # a process that has loaded it keeps the file that it has
g++ -O1 -g -std=c++17 -shared -fPIC -fsanitize=address,undefined -fno-sanitize-recover=undefined \
  -DEVENRANK_SOURCES="\"$sources\"" -DEVENRANK_COMPILER='"g++"' "$folder/native/core.cpp" -o "$core"
# Python itself is built without them, so that their libraries have to be loaded before it; it leaks at exit.
libraries="$(for name in libasan.so libubsan.so libstdc++.so.6; do g++ -print-file-name="$name"; done | xargs)"
export ASAN_OPTIONS="detect_leaks=0:log_path=$kept/report" UBSAN_OPTIONS="print_stacktrace=1:log_path=$kept/report"
LD_PRELOAD="$libraries" .venv/bin/python -m pytest -q -m "not slow" -p no:cacheprovider "${tests[@]}"
