"""What a user did wrong is said with the function, what was expected and what came."""

import pickle

import pytest
import torch

import vpcce

HIDDEN, WEIGHT = torch.randn(6, 4), torch.randn(10, 4)
TARGET = torch.arange(6)
META = dict(hidden=HIDDEN.to("meta"), weight=WEIGHT.to("meta"), target=TARGET.to("meta"))


def packed(bounds):
    return dict(shift=True, cu_seqlens=torch.tensor(bounds))


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
        (dict(softcap=0.0), ValueError, "softcap must lie between 1e-30 and 1e30, or be None, got 0.0"),
        (dict(softcap=float("inf")), ValueError, "softcap must lie between 1e-30 and 1e30, or be None, got inf"),
        (dict(softcap=float("nan")), ValueError, "softcap must lie between 1e-30 and 1e30, or be None, got nan"),
        (dict(logit_scale=float("nan")), ValueError, "logit_scale must be finite, got nan"),
        (dict(logit_scale=torch.tensor(2)), ValueError, r"a 0-dim tensor of floats, got shape \[\] of torch.int64"),
        (dict(label_smoothing="0.1"), TypeError, "label_smoothing must be a float, got str"),
        (dict(label_smoothing=torch.tensor(0.1)), TypeError, "label_smoothing must be a float, got Tensor"),
        (dict(z_loss="1e-4"), TypeError, "z_loss must be a float, got str"),
        (dict(z_loss=float("inf")), ValueError, "z_loss must be finite, got inf"),
        (dict(ignore_index=2**70), ValueError, "ignore_index must fit into int64, got 1180591620717411303424"),
        (dict(hidden=HIDDEN[:, :0], weight=WEIGHT[:, :0]), ValueError, r"expected D of at least 1, got .* \[6, 0\]"),
        (META, ValueError, "expected tensors with data, got hidden on meta"),
        (packed([0, 3, 7]), ValueError, r"ascend from 0 to the 6 tokens, got \[0, 3, 7\], ending at 7"),
        (packed([0, 4, 3, 6]), ValueError, r"ascend from 0 to the 6 tokens, got \[0, 4, 3, 6\], ending at 6"),
        (packed([1, 6]), ValueError, r"ascend from 0 to the 6 tokens, got \[1, 6\], ending at 6"),
        (dict(hidden=[1.0], shift=True), TypeError, "hidden must be a torch.Tensor, got list"),
        (dict(main_grad=WEIGHT), ValueError, "main_grad must have memory of its own, got weight's"),
        (dict(main_grad=WEIGHT.half()), TypeError, "float32, bfloat16 or weight's torch.float32, got torch.float16"),
        (dict(logit_scale="2"), TypeError, "logit_scale must be a float or a 0-dim tensor, got str"),
        (dict(logit_scale=torch.ones(2)), ValueError, r"a 0-dim tensor of floats, got shape \[2\]"),
        (dict(ignore_index=1.5), TypeError, "ignore_index must be an int or None, got float"),
        (dict(backward="fast"), TypeError, "^linear_.*: backward must be \"auto\", vpcce.exact\\(\\), .* got 'fast'"),
        (dict(backward=(vpcce.exact(),)), ValueError, r"^linear_cross_entropy: .* policy of dC\), got a tuple of 1"),
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
        (lambda: vpcce.VocabShard(0, 4, 4, check="no"), TypeError, "check must be a bool, got str"),
        (lambda: vpcce.VocabShard(0, 4, 4, "tp"), TypeError, "group must be a torch.distributed.ProcessGroup or None"),
        (lambda: vpcce.VocabShard.split("a"), TypeError, "VocabShard.split: vocab_size must be an int, got str"),
        (lambda: vpcce.VocabShard.split(4.0), TypeError, "VocabShard.split: vocab_size must be an int, got float"),
        (lambda: vpcce.VocabShard.split(4, "tp"), TypeError, "VocabShard.split: group must be a .*, got str"),
        (lambda: vpcce.LinearCrossEntropy(reduction="avg"), ValueError, "LinearCrossEntropy: reduction must be one of"),
        (lambda: vpcce.LinearCrossEntropy(softcap=-1), ValueError, "LinearCrossEntropy: softcap must lie between"),
        (lambda: vpcce.LinearCrossEntropy(backward="x"), TypeError, "LinearCrossEntropy: backward must be"),
        (lambda: vpcce.LinearCrossEntropy(z_loss="1"), TypeError, "LinearCrossEntropy: z_loss must be a float"),
    ],
)
def test_message_of_constructors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_function_that_was_called_is_named():
    with pytest.raises(ValueError, match=r"^linear_stats: .* expected a target of 6 ids"):
        vpcce.linear_stats(HIDDEN, WEIGHT, TARGET[:5])
    with pytest.raises(ValueError, match="^linear_logprobs: target 10 at position 0"):
        vpcce.linear_logprobs(HIDDEN, WEIGHT, TARGET + 10)
    with pytest.raises(ValueError, match=r"^linear_soft_cross_entropy: target 10 at position \[0, 0\]"):
        vpcce.linear_soft_cross_entropy(HIDDEN, WEIGHT, TARGET[:, None] + 10, torch.ones(6, 1))
    with pytest.raises(ValueError, match="^linear_topk: expected k of at most the vocabulary's 10 ids, got 11"):
        vpcce.linear_topk(HIDDEN, WEIGHT, 11)
    with pytest.raises(TypeError, match="^linear_topk: hidden must be a torch.Tensor, got list"):
        vpcce.linear_topk([1.0], WEIGHT, 1)


def test_shard_without_a_group_is_pickled():
    shard = vpcce.VocabShard(2, 4, 8, check=False)
    assert pickle.loads(pickle.dumps(shard)) == shard


def test_functional_transforms_are_refused():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(HIDDEN)
