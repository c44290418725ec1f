#!/usr/bin/env bash
# One node, one rank per GPU (or NPROC): bash launch/torchrun.sh tiny run.steps=20
# Uses the python on PATH, or PYTHON; megatron-core must be importable (PYTHONPATH=.venv/megatron-0.19.2).
set -euo pipefail
nproc=${NPROC:-$(nvidia-smi -L 2>/dev/null | wc -l)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$((nproc > 0 ? nproc : 2))" \
    "$(dirname "$0")/pretrain_gpt.py" "$@"
