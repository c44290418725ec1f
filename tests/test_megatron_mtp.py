"""Multi-token prediction: the loss of every depth, its gradients, and the accepted tokens that Megatron logs."""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())


def _tracked() -> dict[str, list[float]]:
    """What Megatron logged since the last call: per depth the loss, and since 0.19 correct and counted tokens."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    values = {key: value.tolist() for key, value in tracker.items() if isinstance(value, torch.Tensor)}
    tracker.clear()
    return values


def _labels_that_the_first_depth_predicts(model, arguments: dict, tp: int) -> torch.Tensor:
    """Random labels would all be wrong, and a count that is always 0 would pass for right."""
    logits = []
    handle = model.output_layer.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    model(**arguments)
    handle.remove()
    shards = [torch.empty_like(logits[0]) for _ in range(tp)]
    torch.distributed.all_gather(shards, logits[0].contiguous())
    predicted = torch.cat(shards, dim=-1).argmax(-1).t()  # [b, s]
    labels = predicted.roll(1, dims=-1)
    labels[:, ::3] = arguments["labels"][:, ::3]
    labels[0, 3] = -100
    return labels


def _equals_native(rank: int, tp: int, build: str, changes: dict, tied: bool, options: dict):
    models.start(tp)
    depths = 2
    cfg = models.config(tp, mtp_num_layers=depths, mtp_loss_scaling_factor=0.5, **changes)
    kwargs = dict(tied=tied, mtp_depths=depths) if build == "hybrid" else dict(tied=tied)
    native, ours = (getattr(models, build)(cfg, **kwargs) for _ in range(2))
    megatron.install(ours, **EXACT, **options)
    arguments = models.batch()
    arguments["labels"] = _labels_that_the_first_depth_predicts(native, arguments, tp)
    _tracked()
    expected, logged = models.step(native, arguments), _tracked()
    with models.counted_real_logits() as real:
        result = models.step(ours, arguments)
    assert real == []
    models.assert_same(result, expected, k=2)  # three losses meet in a gradient
    assert any(name.startswith("mtp.") for name in result[1])
    for key, values in _tracked().items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(logged[key]), rtol=1e-5, atol=0)
    if "correct_values" in logged:
        assert logged["correct_values"][0] >= 4
    return logged


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_each_depths_loss_and_acceptance(tp, sequence_parallel, tied):
    changes = dict(sequence_parallel=sequence_parallel)
    logged = run_ranks(tp, _equals_native, tp, "gpt", changes, tied, {})
    assert all(rank == logged[0] for rank in logged)


@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True)])
def test_hybrid(tp, sequence_parallel):
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    run_ranks(tp, _equals_native, tp, "hybrid", dict(sequence_parallel=sequence_parallel), True, {})


@pytest.mark.parametrize(
    "changes",
    [dict(mtp_detach_heads=True), dict(use_mup=True, mup_base_hidden_size=8), dict(calculate_per_token_loss=True)],
    ids=["detached-heads", "mup", "per-token-loss"],
)
def test_configurations(changes):
    missing = [name for name in changes if not models.has_option(name)]
    if missing:
        pytest.skip(f"this megatron-core has no {missing[0]}")
    run_ranks(2, _equals_native, 2, "gpt", changes, True, {})


def test_skipped_tokens_leave_losses_and_counts_alone():
    run_ranks(2, _equals_native, 2, "gpt", {}, False, dict(skip_masked_tokens=True))


def _passes(rank: int):
    """The argmax comes with the loss: two depths and the model's own loss are three passes, not five."""
    models.start(2)
    cfg = models.config(2, mtp_num_layers=2)
    model = megatron.install(models.gpt(cfg), **EXACT)
    arguments = models.batch()
    models.step(model, arguments)
    from vpcce import reference

    calls = []
    original = reference.local_stats
    reference.local_stats = lambda *args, **kwargs: calls.append(kwargs["argmax"]) or original(*args, **kwargs)
    models.step(model, arguments)
    reference.local_stats = original
    return calls


def test_acceptance_needs_no_pass_of_its_own():
    calls = run_ranks(2, _passes)[0]
    assert len(calls) == 3 and calls[2] is False
