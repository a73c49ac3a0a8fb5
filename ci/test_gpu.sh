#!/usr/bin/env bash
# The multi-GPU job: tests/gpu on every rank of a torchrun job, one rank per GPU.
#
#   ci/test_gpu.sh              all GPUs of this machine (NCCL)
#   ci/test_gpu.sh --gpus 4     four of them
#   ci/test_gpu.sh --share      on a machine with one GPU two ranks on it; with several, one on each
#   ci/test_gpu.sh --cpu 2      the same cases on two CPU ranks (gloo), to exercise the job where there is no GPU
#
# Further arguments go to pytest: ci/test_gpu.sh --cpu 2 -k transports
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3
cpus='' gpus='' share=''
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) cpus=${2:?"--cpu needs the number of ranks"}; shift 2 ;;
    --gpus) gpus=${2:?"--gpus needs the number of GPUs"}; shift 2 ;;
    --share) share=yes; shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
if [ -n "${cpus:+x}${gpus:+x}${share:+x}" ] && [ "${cpus:+x}${gpus:+x}${share:+x}" != x ]; then
  echo "error: --cpu, --gpus and --share each say what the ranks run on; give one of them" >&2
  exit 2
fi
device=cuda ranks=$gpus
if [ -n "$cpus" ]; then
  device=cpu ranks=$cpus
else
  visible=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
  if [ "$visible" = 0 ]; then
    echo "error: no CUDA device is visible; the job needs one GPU per rank: use --cpu N to run its cases over gloo" >&2
    exit 2
  fi
  ranks=${ranks:-$visible}
fi
on_one_gpu=''
if [ -n "$share" ] && [ "$visible" = 1 ]; then on_one_gpu=yes ranks=2; fi

run() {
  local launch=("$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks")
  if [ -n "$on_one_gpu" ]; then
    "${launch[@]}" --no-python ci/share_gpu.sh "$python" "$@"
  else
    "${launch[@]}" "$@"
  fi
}
echo "== tests/gpu on $ranks rank(s), $device${on_one_gpu:+, sharing one GPU}"
failed=0  # of one section, which does not keep the others from running
run -m pytest tests/gpu --device "$device" -p no:cacheprovider "$@" || failed=1
if [ "$device" = cuda ]; then
  echo "== concurrent communicators with one hardware queue"
  CUDA_DEVICE_MAX_CONNECTIONS=1 run -m pytest tests/gpu --device cuda -p no:cacheprovider -k "take_turns or sparse" || failed=1
  # As many ranks as there are GPUs for, on their own: a benchmark starts its ranks itself.
  count=${gpus:-$visible}
  echo "== what the stage costs, on $count rank(s)"
  "$python" -m benchmarks.pipeline_overhead --device cuda --ranks "$count" --quick || failed=1
fi
exit "$failed"
