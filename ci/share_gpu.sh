#!/usr/bin/env bash
# One of several NCCL ranks on one GPU: torchrun ... --no-python ci/share_gpu.sh python script.py
#
# NCCL refuses two ranks on one GPU of a host. With a host name each they pass for two hosts, which talk over the loopback
# interface: right, and slow; it says nothing about links. All ranks take the first GPU.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
  "") echo "error: no command; torchrun ... --no-python $0 COMMAND runs it on every rank" >&2; exit 2 ;;
esac
: "${RANK:?"RANK is not set; torchrun sets it: torchrun ... --no-python $0 COMMAND"}"
export NCCL_HOSTID=shared-gpu-$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_NVLS_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 NCCL_MAX_NCHANNELS=2
exec "$@"
