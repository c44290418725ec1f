#!/usr/bin/env bash
# Pretrains the same small GPTModel twice over two tensor-parallel ranks, with vpcce's loss and with Megatron's own,
# and shows both side by side. Safe to repeat; makes .venv when there is none. Arguments override settings of both
# runs: bash launch/demo.sh run.steps=20
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
make_environment

PYTHONPATH=$(megatron_folder 0.19.2)
export PYTHONPATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Two ranks need two GPUs; with fewer the runs stay on the CPU.
"$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)' || export CUDA_VISIBLE_DEVICES=
begin=$SECONDS
for loss in vpcce megatron; do
    rm -rf "runs/demo-$loss"
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 launch/pretrain_gpt.py tiny \
        run.name=demo-$loss loss.implementation=$loss "$@"
done
echo "Both runs took $((SECONDS - begin)) s"
"$python" launch/report.py runs/demo-vpcce runs/demo-megatron
