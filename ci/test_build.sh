#!/usr/bin/env bash
# A machine without a compiler can build and install evenrank, and any machine can build the wheels of both architectures:
# in a fresh clone, with g++ and clang++ hidden, `make install` and `pip wheel`; then the wheel of aarch64.
# The core that was built must give the golden answers. Takes five minutes; needs the package index.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v "${PYTHON:-python3}")
git clone -q . "$work/evenrank"
mkdir "$work/bin"
IFS=: read -ra folders <<< "$PATH"
for ((at = ${#folders[@]} - 1; at >= 0; at--)); do
  for tool in "${folders[at]}"/*; do
    case "${tool##*/}" in *g++* | *gcc* | *clang* | c++* | cc | c89* | c99*) ;; *) ln -sf "$tool" "$work/bin/" ;; esac
  done
done
export PATH=$work/bin
if command -v g++ || command -v clang++ || command -v cc; then
  echo "error: a compiler can still be found" >&2
  exit 1
fi
cd "$work/evenrank"

echo "== make install"
make install DEVICE=cpu PYTHON="$python"
.venv/bin/python -m pytest -q tests/golden
.venv/bin/python -c 'from commons.perf_model.partitioner import core; assert core.COMPILER == "zig", core.COMPILER'
echo "== pip wheel"
.venv/bin/pip --disable-pip-version-check wheel -q --no-deps -w "$work" .
.venv/bin/pip --disable-pip-version-check wheel -q --no-deps -w "$work" -C target=aarch64 .
.venv/bin/python - "$work" << 'CHECK'
import pathlib, sys, zipfile

# Of an ELF file, bytes 18 and 19 name the machine.
for wheel, machine in (("linux_*", None), ("manylinux_2_17_aarch64", 183)):
    (path,) = pathlib.Path(sys.argv[1]).glob(f"evenrank-*-py3-none-{wheel}.whl")
    library = zipfile.ZipFile(path).read("commons/perf_model/partitioner/libevenrank.so")
    assert library[:4] == b"\x7fELF" and machine in (None, int.from_bytes(library[18:20], "little")), path
    print(path.name)
CHECK
echo "the core builds without a compiler"
