"""Checkpoints: written with vpcce and read without, the reverse, and into another tensor-parallel size."""

import multiprocessing
import queue

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())


def _model(tp: int, tied: bool, with_vpcce: bool, seed: int):
    models.start(tp)
    model = models.gpt(models.config(tp), tied=tied, seed=seed)
    return megatron.install(model, **EXACT) if with_vpcce else model


def _save(rank: int, tp: int, tied: bool, with_vpcce: bool, folder: str):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # synchronous writing needs no manager process
    multiprocessing.current_process()._config["daemon"] = False  # 0.16 writes from processes of its own
    model = _model(tp, tied, with_vpcce, seed=11)
    state = model.sharded_state_dict()
    dist_checkpointing.save({"model": state}, folder)
    loss, _ = models.step(model, models.batch())
    return sorted(state), loss.tolist()


def _load(rank: int, tp: int, tied: bool, with_vpcce: bool, folder: str):
    from megatron.core import dist_checkpointing

    model = _model(tp, tied, with_vpcce, seed=12)
    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load({"model": state}, folder)
    model.load_state_dict(loaded["model"])
    loss, _ = models.step(model, models.batch())
    return sorted(state), loss.tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("writer_has_vpcce", [True, False], ids=["vpcce-to-megatron", "megatron-to-vpcce"])
@pytest.mark.parametrize("tp_writer, tp_reader", [(2, 2), (2, 1), (1, 4)])
def test_distributed_checkpoints(tmp_path, tp_writer, tp_reader, writer_has_vpcce, tied):
    written = run_ranks(tp_writer, _save, tp_writer, tied, writer_has_vpcce, str(tmp_path))
    read = run_ranks(tp_reader, _load, tp_reader, tied, not writer_has_vpcce, str(tmp_path))
    assert written[0][0] == read[0][0]
    torch.testing.assert_close(torch.tensor(read[0][1]), torch.tensor(written[0][1]), rtol=5e-6, atol=5e-6)
