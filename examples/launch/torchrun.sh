#!/usr/bin/env bash
# torchrun starts the workers. Offbeat needs nothing but torchrun's environment; its own options come as variables:
# OFFBEAT_PLAN, OFFBEAT_TOTAL, OFFBEAT_SEED, OFFBEAT_OUT, OFFBEAT_WIRE, OFFBEAT_ON_DIVERGE, OFFBEAT_STRAGGLERS.
#
#   examples/launch/torchrun.sh train.py --epochs 30                # one host, a worker per GPU (or per core)
#   OFFBEAT_PLAN="bsp:6.25% asp" examples/launch/torchrun.sh train.py
#   NNODES=2 ENDPOINT=host0:29400 examples/launch/torchrun.sh train.py    # the same on each of two hosts
#
# When a worker dies torchrun starts all of them again, RESTARTS times: the script goes on from its checkpoint.
set -euo pipefail

workers=${WORKERS:-auto}
where=(--standalone)
if [ "${NNODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${JOB:-offbeat}" --rdzv-endpoint "$ENDPOINT")
fi
exec torchrun "${where[@]}" --nproc-per-node "$workers" --max-restarts "${RESTARTS:-3}" "$@"
