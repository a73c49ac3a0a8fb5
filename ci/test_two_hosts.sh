#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces, joined by a pair of virtual interfaces, with two ranks in each.
#
#   ci/test_two_hosts.sh                   as root, or where users may make namespaces; else with sudo
#   ci/test_two_hosts.sh --timeout 30      seconds after which a rank that does not answer is missing (10)
#   ci/test_two_hosts.sh --keep runs/two   keep there what the ranks print and log
#
# HSTU trains balanced under torchrun, on two ranks of each host and, beside it, on four ranks of one host: the losses
# are the same. Then the link is cut: each host ends with an error that names the other's ranks.
#
# Status 0 if all is well; 1 if not; 2 for a mistake in the arguments; 77, and a line that begins with "skipped:", where
# namespaces cannot be made. The kernel removes processes and namespaces with this script, however it ends.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
first_host=10.213.77.1 second_host=10.213.77.2 link=link0 port=29500
steps=8 start_seconds=300
# What an error may take beyond the timeout: a collective of the model ends five seconds later, and names take five.
grace_seconds=20
# And its ranks to end.
end_seconds=30

fail() {
  echo "error: $1" >&2
  exit "${2:-1}"
}

timeout=10 keep=''
while [ $# -gt 0 ]; do
  case $1 in
    --timeout)
      [[ ${2:-} =~ ^[1-9][0-9]{0,3}$ ]] || fail "--timeout is '${2:-}'; it needs seconds from 1 to 9999" 2
      timeout=$2
      shift 2
      ;;
    --keep) keep=${2:-} && [ -n "$keep" ] || fail "--keep needs a folder" 2; shift 2 ;;
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --inside) break ;;
    *) fail "$1 is no option; --timeout SECONDS and --keep FOLDER are" 2 ;;
  esac
done

# Once more, in namespaces for processes and for the network; a process that becomes number 1 there takes all along.
if [ "${1:-}" != --inside ]; then
  isolate=(setpriv --pdeathsig KILL unshare --net --pid --fork --kill-child --mount-proc)
  [ "$(id -u)" = 0 ] || isolate+=(--user --map-root-user)
  for tool in setpriv unshare nsenter ip pgrep; do
    command -v "$tool" >/dev/null || { echo "skipped: there is no $tool here (util-linux, iproute2, procps)"; exit 77; }
  done
  try="ip link add $link type veth peer name ${link}b"
  if ! refused=$("${isolate[@]}" sh -c "$try" 2>&1); then
    echo "skipped: namespaces with a network cannot be made here (${refused//$'\n'/ }); root may: sudo $0"
    exit 77
  fi
  folder=${keep:-$(mktemp -d)}
  mkdir -p "$folder"
  [ -n "$keep" ] || trap 'rm -rf "$folder"' EXIT
  "${isolate[@]}" bash "ci/${0##*/}" --timeout "$timeout" --keep "$folder" --inside &
  wait "$!" && exit 0 || exit "$?"  # which, unlike a command in front, ends at once with a signal
fi

# The second host is the network of a process that does nothing.
unshare --net sleep infinity &
second_network=(nsenter --net="/proc/$!/ns/net")
until [ "$(readlink "/proc/$!/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add "$link" type veth peer name "$link" netns "$!"
connect() {
  "$@" ip link set lo up
  "$@" ip link set "$link" up
}
ip address add "$first_host/24" dev "$link"
"${second_network[@]}" ip address add "$second_host/24" dev "$link"
connect env
connect "${second_network[@]}"
export GLOO_SOCKET_IFNAME=$link

# What the ranks do; they print to RUN-host.txt and log to RUN-host or RUN-hosts.
recipe=(-m hstu.train --config hstu/configs/random.toml --trainer.device cpu --trainer.train-batch-size 4
  --dataset.max-history-seqlen 64 --model.hidden-size 16 --model.num-layers 1 --model.kv-channels 4
  --model.prediction-head-arch 1 --optimizer.sharding row_wise --trainer.log-interval 1 --trainer.sinks
  --trainer.eval-interval 1000000 --trainer.max-eval-iters 1 --trainer.enable-balanced-shuffler
  --trainer.shuffler.timeout "$timeout" --trainer.overwrite)
launch=("$python" -m torch.distributed.run)

start_host() { # NAME ADDRESS IS_HOST COMMAND...: torchrun, in the network that the command enters
  local name=$1 address=$2 is_host=$3
  shift 3
  "$@" "${launch[@]}" --nnodes 2 --nproc-per-node 2 --local-addr "$address" --rdzv-backend c10d --rdzv-id two-hosts \
    --rdzv-endpoint "$first_host:$port" --rdzv-conf "is_host=$is_host" "${recipe[@]}" \
    --trainer.run-dir "$keep/two-hosts" --trainer.max-train-iters 1000000 >"$keep/$name-host.txt" 2>&1 &
}
logged() { # RUN: how many steps it has logged
  local lines=0
  [ ! -e "$keep/$1/log.jsonl" ] || lines=$(wc -l <"$keep/$1/log.jsonl")
  echo "$lines"
}
runs() { kill -0 "$1" 2>/dev/null; }
last_lines() { tail -n 5 "$keep"/*-host.txt >&2; }

echo "== $steps steps on two hosts with two ranks each, and on four ranks of one host"
rm -rf "$keep/one-host" "$keep/two-hosts" "$keep"/*-host.txt
start_host first "$first_host" true env
first=$!
start_host second "$second_host" false "${second_network[@]}"
second=$!
GLOO_SOCKET_IFNAME=lo "${launch[@]}" --standalone --nproc-per-node 4 "${recipe[@]}" \
  --trainer.run-dir "$keep/one-host" --trainer.max-train-iters "$steps" >"$keep/one-host.txt" 2>&1 ||
  { last_lines; fail "the run on one host failed"; }
started=$SECONDS
until [ "$(logged two-hosts)" -ge "$steps" ]; do
  if ! runs "$first" || ! runs "$second"; then last_lines; fail "a host ended before the link was cut"; fi
  [ $((SECONDS - started)) -lt "$start_seconds" ] || { last_lines; fail "no $steps steps in $start_seconds s"; }
  sleep 0.2
done
ip link set "$link" down
cut=$SECONDS
"$python" - "$keep" "$steps" <<'PYTHON' || fail "the losses differ, or no row has moved"
import json, math, sys
folder, steps = sys.argv[1], int(sys.argv[2])
def losses(run):
    with open(f"{folder}/{run}/log.jsonl") as log:
        lines = [json.loads(line) for _, line in zip(range(steps), log)]
    return [line["loss"] for line in lines], sum(line["moved"] for line in lines)
(one, _), (two, moved) = losses("one-host"), losses("two-hosts")
print("one host: ", *(f"{loss:.6f}" for loss in one))
print("two hosts:", *(f"{loss:.6f}" for loss in two), flush=True)
sys.exit(not (moved > 0 and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(one, two))))
PYTHON

echo "== the link is cut after step $(logged two-hosts)"
awaits_error() { # NAME PATTERN: how a host ends
  local line
  until line=$(grep -m 1 -o -E 'error: rank .*' "$keep/$1-host.txt"); do  # in the line of the progress, perhaps
    [ $((SECONDS - cut)) -le $((timeout + grace_seconds)) ] ||
      { last_lines; fail "the $1 host says no error within the timeout of $timeout s and $grace_seconds s more"; }
    sleep 0.2
  done
  echo "$1 host, after $((SECONDS - cut)) s: $line"
  grep -q -E "$2" <<<"$line" || fail "the $1 host does not name the other's ranks"
}
# A rank of this host that waits in a collective of the model takes no part in the shuffler's, and is named too.
awaits_error first 'rank [01]: RankMissingError: .*ranks ([01], )?2, 3 did not (take part in the|report the failure)'
awaits_error second 'rank [23]: RankMissingError: .*; ranks 0, 1 run on that host, which may be out of reach'
while runs "$first" || pgrep -f '[p]ython -u -m hstu.train' >/dev/null; do
  [ $((SECONDS - cut)) -lt $((timeout + grace_seconds + end_seconds)) ] || { last_lines; fail "a rank has not ended"; }
  sleep 0.2
done
# The second torchrun waits for its store, which is beyond the cut, until TCP gives up: it ends with this script.
echo "all ranks have ended after $((SECONDS - cut)) s"
