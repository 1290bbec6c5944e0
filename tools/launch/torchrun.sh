#!/usr/bin/env bash
# Continual pretraining on several nodes without Slurm. The same line on every node, from a folder that all of them share:
#
#   NNODES=8 HEAD=node0 bash tools/launch/torchrun.sh CONF [key=value ...]
#
# HEAD is a node's name or address, the same everywhere; GPUS (8) are those of a node. PORT (29400) must be free on HEAD,
# and RUN_ID (lengthgen) tells this run from others that meet there. When a rank fails, torchrun starts all of them again,
# RESTARTS times (10), and waits for a node that was lost to come back. SIGTERM to torchrun on every node saves and ends
# the run; LEAD (600) seconds later it is killed.
set -euo pipefail
if [ $# -eq 0 ] || [ -z "${NNODES:-}" ] || [ -z "${HEAD:-}" ]; then
    echo "usage: NNODES=N HEAD=HOST bash tools/launch/torchrun.sh CONF [key=value ...]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-$root/.venv/bin/python}
# torchrun would compare names, and give its own, which not every network resolves: the address that leads to HEAD.
read -r address is_host < <("$python" -c '
import socket, sys
head = socket.gethostbyname(sys.argv[1])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((head, 1))
    address = probe.getsockname()[0]
print(address, int(address == head))' "$HEAD") || {
    echo "error: no way to HEAD $HEAD from $(hostname): give a name or an address that every node reaches" >&2
    exit 2
}
# A new store for the ranks at each restart. In the agents' one they would meet under their agent's count of failures,
# which differs between nodes where one lost its rank and the other only started again with it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$python" -m torch.distributed.run \
    --nnodes "$NNODES" \
    --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29400}" \
    --rdzv-id "${RUN_ID:-lengthgen}" \
    --rdzv-conf "is_host=$is_host" \
    --local-addr "$address" \
    --max-restarts "${RESTARTS:-10}" \
    --shutdown-timeout "${LEAD:-600}" \
    "$root/tools/continual_pretrain.py" "$@"
