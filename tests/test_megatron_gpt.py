"""GPTModel with vpcce against Megatron's own loss: values, gradients, collectives. All ranks check."""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

EXACT = dict(backward=vpcce.exact())


def _equals_native(rank: int, tp: int, sequence_parallel: bool, tied: bool):
    models.start(tp)
    cfg = models.config(tp, sequence_parallel=sequence_parallel)
    arguments = models.batch()
    native = models.step(models.gpt(cfg, tied=tied), arguments)
    model = models.gpt(cfg, tied=tied)
    keys = list(model.state_dict())
    assert megatron.install(model, **EXACT) is model
    ours = models.step(model, arguments)
    models.assert_same(ours, native)
    assert list(model.state_dict()) == keys
    return ours[0].tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
def test_loss_and_gradients_equal_megatrons(tp, sequence_parallel, tied):
    losses = run_ranks(tp, _equals_native, tp, sequence_parallel, tied)
    for loss in losses[1:]:
        assert loss == losses[0]  # bitwise: every rank merges the same numbers in the same order
