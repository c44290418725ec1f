#!/usr/bin/env bash
# Ranks started by MPI instead of torchrun: NPROC=2 bash launch/mpirun.sh tiny run.steps=20
# Works with MPICH, Open MPI and Intel MPI; over several nodes set MASTER_ADDR to the first one and pass your
# launcher with its host list: MPIEXEC="mpirun --hostfile hosts" NPROC=16 ...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29511} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHON=${PYTHON:-python}
exec ${MPIEXEC:-mpiexec} -n "${NPROC:-2}" bash -c '
    export RANK=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-}} WORLD_SIZE=${PMI_SIZE:-${OMPI_COMM_WORLD_SIZE:-}}
    export LOCAL_RANK=${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}
    if [ -z "$RANK" ]; then echo "mpirun.sh: no rank in the environment of this MPI" >&2; exit 1; fi
    exec "$PYTHON" "$@"' mpirun.sh "$here/pretrain_gpt.py" "$@"
