#!/usr/bin/env bash
# What README's Install section says works: the sdist and from it the wheel are built and installed in a clean
# environment outside the checkout; the evenrank command and the example script run there, in an empty folder.
#
#   ci/test_wheel.sh                    with the Python of .venv; the packages come from the index
#   ci/test_wheel.sh --packages .venv   the packages are those of this environment: nothing is downloaded
set -euo pipefail
cd "$(dirname "$0")/.."

packages=
case "${1:-}" in
  --packages) packages=$(cd "${2:?"--packages needs the folder of an environment"}" && pwd) ;;
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
checkout=$PWD
python=$checkout/.venv/bin/python
script=$checkout/examples/torchrec_dlrm.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() {
  "$1/bin/python" -m pip --disable-pip-version-check -q "${@:2}"
}

echo "== build"
# From the sdist, in a folder of its own: what an old build left in build/ is not in the wheel.
PYTHONPATH=ci/build_backend "$python" -c 'import sys, evenrank_build; evenrank_build.build_sdist(sys.argv[1])' "$work" > "$work/log" 2>&1 ||
  { cat "$work/log" >&2; exit 1; }
grep -q "/CHANGELOG.md$" <<< "$(tar tzf "$work"/evenrank-*.tar.gz)" || { echo "error: the sdist lacks CHANGELOG.md" >&2; exit 1; }
pip .venv wheel --no-deps --no-build-isolation -w "$work" "$work"/evenrank-*.tar.gz
wheel=$(echo "$work"/evenrank-*.whl)

echo "== install $(basename "$wheel")"
"$python" -m venv "$work/venv"
if [ -n "$packages" ]; then
  pip "$work/venv" install --no-deps "$wheel"
  # Looked into after the new environment's own packages; the checkout that is installed there is not seen.
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$packages/bin/python" -c "$site" > "$("$work/venv/bin/python" -c "$site")/packages.pth"
else
  pip "$work/venv" install "${wheel}[cpu]"
  pip "$work/venv" install --no-deps torchrec==1.8.0
fi

mkdir "$work/empty"
cd "$work/empty"
bin=$work/venv/bin
echo "== contents"
"$bin/python" "$checkout/ci/check_installed.py" "$checkout"
echo "== evenrank"
grep -q simulate <<< "$("$bin/evenrank" --help)"
"$bin/evenrank" simulate --config hstu/configs/random.toml --ranks 2 8 --steps 3
# From nothing but a csv of lengths to the page.
seq 1 7 1800 | shuf --random-source=<(yes) > lengths.csv
"$bin/evenrank" simulate --lengths lengths.csv --ranks 2 8 --batch-size 4 --html gain.html
grep -q "</html>" gain.html
echo "== $(basename "$script")"
"$bin/python" -m torch.distributed.run --standalone --nproc_per_node=2 "$script"
echo "the installed wheel works"
