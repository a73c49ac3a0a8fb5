#!/usr/bin/env bash
# What is known of the pinned packages: vulnerabilities (pip-audit, the OSV database) and licences.
#
#   ci/audit.sh                              both, with the Python of .venv; 1 if something is wrong
#   ci/audit.sh --database URL               another server of OSV's answers, such as a mirror
#   ci/audit.sh --ignore-vuln PYSEC-2026-1   further arguments go to pip-audit, which has a --help
#
# All files of requirements/ are looked up, for all Pythons. pip-audit is installed in an environment of its own, from
# requirements/audit.txt. Without a network the vulnerabilities are not checked, which is said, and is no failure.
set -euo pipefail
cd "$(dirname "$0")/.."

database=https://api.osv.dev/v1/query
case "${1:-}" in
  --database)
    [ $# -gt 1 ] || { echo "error: --database needs a URL; see ci/audit.sh --help" >&2; exit 2; }
    database=$2
    shift 2
    ;;
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
python=$PWD/.venv/bin/python
[ -x "$python" ] || { echo "error: there is no .venv; make it: make install" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

echo "== licences"
"$python" ci/licences.py || status=1

echo "== known vulnerabilities"
# Any answer will do: it is the network that is asked after.
reach='import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=15)
except urllib.error.HTTPError:
    pass'
if ! "$python" -c "$reach" "$database" 2> "$work/log"; then
  echo "no network: not checked ($database: $(tail -n 1 "$work/log"))"
  exit "$status"
fi
"$python" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check -q)
if ! "${pip[@]}" install --no-deps -r requirements/audit.txt 2> "$work/log"; then
  echo "error: pip-audit cannot be installed: $(tail -n 1 "$work/log")" >&2
  exit 1
fi
# A package may have several pins, one for each Python or set; pip-audit takes one of each at a time: so many files.
grep -hv '^#' requirements/*.txt | sed -nE 's/^([A-Za-z0-9._-]+==[^ ;]+).*/\1/p' | sort -fu |
  awk -F== -v folder="$work" '{ print > (folder "/pins" ++pins[tolower($1)] ".txt") }'
for pins in "$work"/pins*.txt; do
  "$work/venv/bin/pip-audit" -r "$pins" --no-deps --disable-pip -s osv --osv-url "$database" --progress-spinner off "$@" ||
    status=1
done
exit "$status"
