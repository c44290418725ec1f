#!/usr/bin/env bash
# Two emulated nodes on one Linux machine: bash launch/two_nodes.sh tiny parallelism.tensor=2 run.global_batch=8
#
# Each node is a network namespace with its own torchrun and NPROC ranks; a virtual cable joins them, and nothing
# else does, so all traffic between ranks of different nodes is real network traffic over gloo. Needs root.
# It ends by saying how many bytes crossed the cable.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null; then
    echo "two_nodes.sh: needs root and the command 'ip' (Debian: apt-get install iproute2)" >&2
    exit 1
fi
nodes=("vpcce0-$$" "vpcce1-$$")
addresses=(10.213.0.1 10.213.0.2)
pids=()
cleanup() {
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    for node in "${nodes[@]}"; do ip netns delete "$node" 2>/dev/null || true; done
}
trap cleanup EXIT

for node in "${nodes[@]}"; do ip netns add "$node"; done
ip link add cable netns "${nodes[0]}" type veth peer name cable netns "${nodes[1]}"
for i in 0 1; do
    ip -n "${nodes[i]}" address add "${addresses[i]}/24" dev cable
    ip -n "${nodes[i]}" link set lo up
    ip -n "${nodes[i]}" link set cable up
done

for i in 0 1; do
    # is_host: torchrun cannot tell by itself which of the two emulated hosts the rendezvous address belongs to.
    ip netns exec "${nodes[i]}" env GLOO_SOCKET_IFNAME=cable OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --node-rank "$i" --nproc-per-node "${NPROC:-1}" \
        --rdzv-backend c10d --rdzv-id "vpcce-$$" --rdzv-endpoint "${addresses[0]}:29400" \
        --rdzv-conf "is_host=$((1 - i)),join_timeout=60" --local-addr "${addresses[i]}" \
        "$here/pretrain_gpt.py" "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
ip netns exec "${nodes[0]}" cat /proc/net/dev |
    awk '$1 == "cable:" { print "bytes over the cable, node 0: received " $2 ", sent " $10 }'
exit $status
