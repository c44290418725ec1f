"""What a user did wrong is said with the function, what was expected and what came."""

import pytest
import torch

import vpcce

HIDDEN, WEIGHT = torch.randn(6, 4), torch.randn(10, 4)
TARGET = torch.arange(6)


def loss(hidden=HIDDEN, weight=WEIGHT, target=TARGET, **options):
    return vpcce.linear_cross_entropy(hidden, weight, target, **options)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(hidden=[1.0]), TypeError, "hidden must be a torch.Tensor, got list"),
        (dict(hidden=HIDDEN.long()), TypeError, "hidden must be bfloat16, .* or float64, got torch.int64"),
        (dict(target=TARGET.float()), TypeError, "target must hold int64 or int32 vocabulary ids, got torch.float32"),
        (dict(hidden=HIDDEN[:, :3]), ValueError, r"and weight \[V_local, D\], got \[6, 3\] and \[10, 4\]"),
        (dict(target=TARGET[:5]), ValueError, r"holds 6 tokens, expected a target of 6 ids, got \[5\]"),
        (dict(hidden=HIDDEN.view(2, 3, 4), target=TARGET.view(3, 2)), ValueError, r"a target of shape \[2, 3\]"),
        (dict(bias=torch.zeros(9)), ValueError, r"expected a bias of shape \[10\], got \[9\]"),
        (dict(weight=WEIGHT.to("meta")), ValueError, "weight is on meta, expected hidden's device cpu"),
        (dict(target=torch.tensor([0, 1, 10, 3, 4, 5])), ValueError, r"target 10 at position 2 is outside \[0, 10\)"),
        (dict(target=torch.tensor([0, 1, -1, 3, 4, 5])), ValueError, r"target -1 at position 2 is outside \[0, 10\)"),
        (dict(target=torch.tensor([-100, 1, 2, 3, 4, 5]), ignore_index=None), ValueError, "target -100 at position 0"),
        (dict(reduction="avg"), ValueError, "reduction must be one of .*, got 'avg'"),
        (dict(label_smoothing=1.5), ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        (dict(softcap="30"), TypeError, "softcap must be a float or None, got str"),
        (dict(softcap=0.0), ValueError, "softcap must be positive or None, got 0.0"),
        (dict(logit_scale="2"), TypeError, "logit_scale must be a float or a 0-dim tensor, got str"),
        (dict(logit_scale=torch.ones(2)), ValueError, r"a 0-dim tensor on cpu, got shape \[2\]"),
        (dict(ignore_index=1.5), TypeError, "ignore_index must be an int or None, got float"),
        (dict(backward="fast"), TypeError, "expected \"auto\", vpcce.exact\\(\\), .* got 'fast'"),
        (dict(backward=(vpcce.exact(),)), ValueError, r"policy of dC\), got a tuple of 1"),
        (dict(shard=(0, 10)), TypeError, "shard must be a vpcce.VocabShard, got tuple"),
        (dict(shard=vpcce.VocabShard(0, 12, 12)), ValueError, r"shard \[0, 12\) owns 12 rows, got a weight of 10 rows"),
        (dict(shard=vpcce.VocabShard(0, 10, 20)), ValueError, "expected an initialised process group, got none"),
        (dict(main_grad=torch.zeros(9, 4)), ValueError, r"main_grad of shape \[10, 4\] on cpu, got \[9, 4\]"),
        (dict(main_grad=3), TypeError, "main_grad must be a torch.Tensor, got int"),
        (dict(smoothing=0.1), TypeError, "unexpected keyword argument 'smoothing'"),
    ],
)  # fmt: skip
def test_message(arguments, error, message):
    with pytest.raises(error, match=message):
        loss(**arguments)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: vpcce.VocabShard(5, 3, 10), ValueError, "expected 0 <= start <= stop, got start=5, stop=3"),
        (lambda: vpcce.VocabShard(0, 3.0, 10), TypeError, "stop must be an int, got float"),
        (lambda: vpcce.VocabShard(0, 0, 0), ValueError, "vocab_size must be at least 1, got 0"),
        (lambda: vpcce.VocabShard.split(10), ValueError, "expected an initialised process group, got none"),
        (lambda: vpcce.sampled(eps=0.0), ValueError, "sampled: expected 0 < eps <= 1, got 0.0"),
        (lambda: vpcce.filtered(eps="1"), TypeError, "filtered: eps must be a float, got str"),
        (lambda: vpcce.LinearCrossEntropy(reduction="avg"), ValueError, "reduction must be one of"),
    ],
)
def test_message_of_constructors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_function_that_was_called_is_named():
    with pytest.raises(ValueError, match=r"^linear_stats: .* expected a target of 6 ids"):
        vpcce.linear_stats(HIDDEN, WEIGHT, TARGET[:5])
