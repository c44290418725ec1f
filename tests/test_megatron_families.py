"""HybridModel (Mamba), T5, BERT and a GPTModel nested in LLaVA against Megatron's own loss."""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())


def _compare(build, arguments: dict, loss_mask: torch.Tensor):
    native, ours = build(), megatron.install(build(), **EXACT)
    with models.counted_real_logits() as real:
        result = models.step(ours, arguments, loss_mask)
    assert real == []
    models.assert_same(result, models.step(native, arguments, loss_mask))


def _hybrid(rank: int, tp: int, sequence_parallel: bool, tied: bool):
    models.start(tp)
    cfg = models.config(tp, sequence_parallel=sequence_parallel)
    arguments = models.batch()
    loss_mask = arguments.pop("loss_mask")
    _compare(lambda: models.hybrid(cfg, tied=tied), arguments, loss_mask)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_hybrid(tp, sequence_parallel, tied):
    run_ranks(tp, _hybrid, tp, sequence_parallel, tied)


def _t5(rank: int, tp: int, tied: bool):
    models.start(tp)
    cfg = models.config(tp)
    arguments = models.batch()
    visible = torch.zeros(models.BATCH, 1, models.SEQ, models.SEQ, dtype=torch.bool)
    given = dict(
        encoder_input_ids=arguments["input_ids"].flip(0),
        decoder_input_ids=arguments["input_ids"],
        encoder_attn_mask=visible,
        decoder_attn_mask=arguments["attention_mask"],
        encoder_decoder_attn_mask=visible,
        lm_labels=arguments["labels"],
    )
    _compare(lambda: models.t5(cfg, tied=tied), given, arguments["loss_mask"])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied-with-bias"])
@pytest.mark.parametrize("tp", [1, 2])
def test_t5(tp, tied):
    run_ranks(tp, _t5, tp, tied)


def _bert(rank: int, tp: int, sequence_parallel: bool, tied: bool):
    models.start(tp)
    cfg = models.config(tp, sequence_parallel=sequence_parallel)
    arguments = models.batch()
    given = dict(
        input_ids=arguments["input_ids"],
        attention_mask=torch.ones(models.BATCH, models.SEQ, dtype=torch.int64),
        lm_labels=arguments["labels"],
    )
    _compare(lambda: models.bert(cfg, tied=tied), given, arguments["loss_mask"])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_bert_with_bias(tp, sequence_parallel, tied):
    run_ranks(tp, _bert, tp, sequence_parallel, tied)


def _llava(rank: int):
    """LLaVA hands embeddings and labels to a GPTModel of its own."""
    models.start(2)
    cfg = models.config(2)
    arguments = models.batch()
    given = dict(
        images=torch.zeros(0, 3, 28, 28),
        input_ids=arguments["input_ids"],
        position_ids=arguments["position_ids"],
        attention_mask=arguments["attention_mask"],
        labels=arguments["labels"],
        loss_mask=arguments["loss_mask"],
    )
    _compare(lambda: models.llava(cfg), given, arguments["loss_mask"])


def test_gpt_inside_llava():
    run_ranks(2, _llava)
