#!/usr/bin/env bash
# Runs a program across two hosts, as a test: two network namespaces with hostnames of their own,
# joined by a pair of virtual Ethernet devices, and Open MPI over TCP between them.
#
# two_hosts.sh [--slots A,B] [--least BYTES] [--verdicts RANK,…] [--cut] MPIEXEC PROGRAM [ARGUMENT…]
#   --slots     ranks on the first host, where mpiexec runs, and on the second; 2,2
#   --least     so many bytes must have gone over the link, each way
#   --verdicts  these ranks must write "ok" into rank.RANK of the working directory, whatever mpiexec
#               returns; without it, mpiexec must return 0
#   --cut       the link goes down for good when a rank has made the file "started"
# Exits with 77, and says why, where hosts can't be made.
set -euo pipefail

slots=2,2 least=0 verdicts='' cut=''
while [[ ${1-} == --* ]]; do
  case $1 in
    --slots) slots=$2 && shift ;;
    --least) least=$2 && shift ;;
    --verdicts) verdicts=$2 && shift ;;
    --cut) cut=yes ;;
    *) echo "no such option: $1" >&2 && exit 2 ;;
  esac
  shift
done
mpiexec=$1 && shift

skip() { echo "SKIPPED: $1" && exit 77; }
((EUID == 0)) || skip 'two hosts are network namespaces, which only root makes'
for tool in ip unshare timeout; do
  command -v $tool >/dev/null || skip "no command $tool (Debian: iproute2, util-linux, coreutils)"
done

prefix=zero-test-
first=$prefix$$-a second=$prefix$$-b
scratch=${TMPDIR:-/tmp}/$prefix
work=$(mktemp -d "$scratch$$-XXXXXX")

remove_host() {  # with all that runs there
  local pids
  pids=$(ip netns pids "$1" 2>/dev/null) && [[ -n $pids ]] && kill -9 $pids 2>/dev/null
  ip netns delete "$1" 2>/dev/null || true
}
clean_up() {
  remove_host "$first"
  remove_host "$second"
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 1' INT TERM HUP

# What runs that were killed have left.
for host in $(ip netns list 2>/dev/null | sed -n "s/^\($prefix[0-9]*-[ab]\).*/\1/p"); do
  owner=${host#"$prefix"} owner=${owner%-*}
  [[ -d /proc/$owner ]] || { remove_host "$host" && rm -rf "$scratch$owner"-*; }
done

why=$({ ip netns add "$first" && ip netns add "$second" &&
  ip link add link0 netns "$first" type veth peer name link0 netns "$second" &&
  ip netns exec "$first" unshare --uts true; } 2>&1) || skip "no network namespaces here: $why"
for host in "$first" "$second"; do
  [[ $host == "$first" ]] && address=192.0.2.1 || address=192.0.2.2  # for documentation: nobody's
  ip -n "$host" address add $address/24 dev link0
  ip -n "$host" link set lo up
  ip -n "$host" link set link0 up
done

# How mpiexec starts its daemon on a host, in place of ssh, and how it is started itself.
cat >"$work/agent" <<END
#!/bin/sh
case \$1 in 192.0.2.1) host=$first ;; *) host=$second ;; esac
shift
export host command="\$*"
exec ip netns exec \$host unshare --uts sh -c 'echo "\$host" >/proc/sys/kernel/hostname; exec sh -c "\$command"'
END
chmod +x "$work/agent"

bytes() {  # that the first host has received, or sent
  ip netns exec "$first" cat "/sys/class/net/link0/statistics/$1_bytes"
}
received=$(bytes rx) sent=$(bytes tx)

# Open MPI 4.1's mpiexec may crash while it passes on what a rank says of a dead peer, and ends all.
export PMIX_MCA_plog=^default

cd "$work"
arguments=(--enable-recovery --mca plm_rsh_agent "$work/agent" --mca btl tcp,vader,self
  --mca btl_tcp_if_include link0 --mca oob_tcp_if_include link0
  --host "192.0.2.1:${slots%,*},192.0.2.2:${slots#*,}" -n $((${slots%,*} + ${slots#*,})) "$@")
timeout 90 "$work/agent" 192.0.2.1 "exec $(printf '%q ' "$mpiexec" "${arguments[@]}")" \
  >"$work/output" 2>&1 &
job=$!

complete() {
  local rank
  for rank in ${verdicts//,/ }; do [[ -s rank.$rank ]] || return 1; done
}
status=0
if [[ -n $cut ]]; then
  until [[ -e started ]] || ! kill -0 $job 2>/dev/null; do sleep 0.05; done
  ip -n "$first" link set link0 down
  echo 'the link is down'
fi
if [[ -n $verdicts ]]; then
  disown $job
  # mpiexec may wait for ever for news of ranks that were lost (measured: after a kill).
  until complete || ! kill -0 $job 2>/dev/null; do sleep 0.1; done
else
  wait $job || status=$?
fi
cat output

failed=0
if [[ -n $verdicts ]]; then
  for rank in ${verdicts//,/ }; do
    verdict=$(cat "rank.$rank" 2>/dev/null || echo none)
    echo "rank $rank says: $verdict"
    [[ $verdict == ok ]] || failed=1
  done
elif ((status != 0)); then
  echo "mpiexec returned $status"
  failed=1
fi
if [[ -z $cut ]]; then
  received=$(($(bytes rx) - received)) sent=$(($(bytes tx) - sent))
  echo "bytes over the link: $received one way, $sent the other"
  ((received >= least && sent >= least)) || { echo "that is less than $least" && failed=1; }
fi
exit $failed
