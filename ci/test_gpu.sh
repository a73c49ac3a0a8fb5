#!/usr/bin/env bash
# The multi-GPU job: tests/gpu on every rank of a torchrun job, one rank per GPU.
#
#   ci/test_gpu.sh              all GPUs of this machine (NCCL)
#   ci/test_gpu.sh --gpus 4     four of them
#   ci/test_gpu.sh --cpu 2      the same cases on two CPU ranks (gloo), to exercise the job where there is no GPU
#
# Further arguments go to pytest: ci/test_gpu.sh --cpu 2 -k transports
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3
ranks=gpu device=cuda
case "${1:-}" in
  --cpu) ranks=${2:?"--cpu needs the number of ranks"} device=cpu; shift 2 ;;
  --gpus) ranks=${2:?"--gpus needs the number of GPUs"}; shift 2 ;;
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: no CUDA device is visible; the job needs one GPU per rank: use --cpu N to run its cases over gloo" >&2
  exit 2
fi

run() {
  "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$@"
}
echo "== tests/gpu on $ranks rank(s), $device"
run -m pytest tests/gpu --device "$device" -p no:cacheprovider "$@"
if [ "$device" = cuda ]; then
  echo "== concurrent communicators with one hardware queue"
  CUDA_DEVICE_MAX_CONNECTIONS=1 run -m pytest tests/gpu --device cuda -p no:cacheprovider -k "take_turns or sparse"
  # As many ranks as the job has, on their own: a benchmark starts its ranks itself.
  count=$ranks
  [ "$count" != gpu ] || count=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  echo "== what the stage costs, on $count rank(s)"
  "$python" -m benchmarks.pipeline_overhead --device cuda --ranks "$count" --quick --trace runs/trace.json
fi
