"""GPTModel with vpcce against Megatron's own loss: values, gradients, collectives. All ranks check."""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())
PARALLEL = pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True)])


def _pair(cfg, **kwargs):
    """The same model twice, the second with vpcce."""
    return models.gpt(cfg, **kwargs), megatron.install(models.gpt(cfg, **kwargs), **EXACT)


def _equals_native(rank: int, tp: int, sequence_parallel: bool, tied: bool, changes: dict):
    models.start(tp)
    cfg = models.config(tp, sequence_parallel=sequence_parallel, **changes)
    native, ours = _pair(cfg, tied=tied)
    assert list(ours.state_dict()) == list(native.state_dict())
    with models.counted_real_logits() as real:
        result = models.step(ours, models.batch())
    assert real == []
    models.assert_same(result, models.step(native, models.batch()))
    return result[0].tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
def test_loss_and_gradients_equal_megatrons(tp, sequence_parallel, tied):
    losses = run_ranks(tp, _equals_native, tp, sequence_parallel, tied, {})
    for loss in losses[1:]:
        assert loss == losses[0]  # bitwise: every rank merges the same numbers in the same order


def test_tensor_parallel_size_changes_nothing_but_rounding():
    one, two, four = (torch.tensor(run_ranks(tp, _equals_native, tp, False, False, {})[0]) for tp in (1, 2, 4))
    torch.testing.assert_close(two, one, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(four, one, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        dict(cross_entropy_loss_fusion=False, calculate_per_token_loss=True),
        dict(use_mup=True, mup_base_hidden_size=8),
        dict(params_dtype=torch.bfloat16),
    ],
    ids=["recompute", "per-token-loss", "mup", "bf16-parameters"],
)
def test_configurations(changes):
    if "use_mup" in changes and not models.has_option("use_mup"):
        pytest.skip("this megatron-core has no MuP")
    if "params_dtype" in changes:
        run_ranks(2, _close_in_bf16, changes)
    else:
        run_ranks(2, _equals_native, 2, True, False, changes)


def _close_in_bf16(rank: int, changes: dict):
    """Megatron rounds logits to bf16, we do not: ours must be the closer one to the same model in fp32."""
    models.start(2)
    native, ours = _pair(models.config(2, bf16=True, **changes))
    wide = models.gpt(models.config(2))
    half = {name: value for name, value in native.state_dict().items() if isinstance(value, torch.Tensor)}
    arguments = models.batch()
    hidden = {}
    native.output_layer.register_forward_pre_hook(lambda module, args: hidden.update(x=args[0].detach()))
    native_loss, our_loss = (models.step(model.bfloat16(), arguments)[0] for model in (native, ours))
    wide.output_layer.weight.data.copy_(half["output_layer.weight"])
    logits = wide.output_layer(hidden["x"].float())[0]
    truth = wide.compute_language_model_loss(arguments["labels"], logits).detach() * arguments["loss_mask"]
    assert our_loss.dtype == torch.float32
    assert (our_loss - truth).abs().max() <= 1e-5
    assert (our_loss - truth).abs().max() <= (native_loss - truth).abs().max()


def _without_labels(rank: int, tp: int, sequence_parallel: bool):
    models.start(tp)
    native, ours = _pair(models.config(tp, sequence_parallel=sequence_parallel))
    arguments = {key: value for key, value in models.batch().items() if key not in ("labels", "loss_mask")}
    for train in (True, False):
        for gather in (None, True):
            native.train(train), ours.train(train)
            expected = native(**arguments, runtime_gather_output=gather)
            logits = ours(**arguments, runtime_gather_output=gather)
            assert type(logits) is torch.Tensor
            assert torch.equal(logits, expected)  # bitwise: Megatron's own code
            assert logits.shape[-1] == models.VOCAB // (1 if gather else tp)


@PARALLEL
def test_without_labels_the_model_returns_logits(tp, sequence_parallel):
    run_ranks(tp, _without_labels, tp, sequence_parallel)


def _evaluation(rank: int):
    models.start(2)
    native, ours = _pair(models.config(2, sequence_parallel=True))
    native.eval(), ours.eval()
    arguments = models.batch()
    with torch.no_grad(), models.counted_real_logits() as real:
        loss = ours(**arguments)
        assert real == []
    with torch.no_grad():
        expected = native(**arguments)
    kept = arguments["loss_mask"].bool()
    torch.testing.assert_close(loss[kept], expected[kept], rtol=2e-6, atol=2e-6)


def test_validation_loss_needs_no_logits():
    run_ranks(2, _evaluation)


def _labels_outside(rank: int):
    """-100, another negative number, and ids beyond the vocabulary: loss 0, no gradient, whatever the mask says."""
    models.start(2)
    arguments = models.batch()
    arguments["labels"][0, 3], arguments["labels"][1, 0], arguments["labels"][1, 1] = -100, -1, models.VOCAB
    outside = (arguments["labels"] < 0) | (arguments["labels"] >= models.VOCAB)
    arguments["loss_mask"] = torch.ones_like(arguments["loss_mask"])
    clean = arguments | dict(
        labels=arguments["labels"].masked_fill(outside, 0),
        loss_mask=arguments["loss_mask"].masked_fill(outside, 0),
    )
    cfg = models.config(2)
    expected = models.step(models.gpt(cfg), clean)
    for options in ({}, dict(ignore_index=-100)):
        result = models.step(megatron.install(models.gpt(cfg), **EXACT, **options), arguments)
        assert (result[0][outside] == 0).all()
        models.assert_same(result, expected)


def test_labels_outside_the_vocabulary_have_no_loss():
    run_ranks(2, _labels_outside)


def _gathered(rank: int):
    """Megatron adds log(T) to the loss of gathered logits; the loss here does not depend on gathering."""
    models.start(2)
    native, ours = _pair(models.config(2))
    arguments = models.batch()
    expected = models.step(native, arguments)[0]
    gathered = models.step(native, arguments | dict(runtime_gather_output=True))[0]
    kept = arguments["loss_mask"].bool()
    assert (gathered - expected)[kept].min() > 0.69
    result = models.step(ours, arguments | dict(runtime_gather_output=True))[0]
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=2e-6)


def test_gathering_does_not_change_the_loss():
    run_ranks(2, _gathered)


def _hidden_states(model, arguments: dict) -> torch.Tensor:
    """What the model hands to its output layer."""
    seen = []
    handle = model.output_layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(**arguments)
    handle.remove()
    return seen[0]


def _collectives(rank: int, sequence_parallel: bool):
    models.start(2)
    cfg = models.config(2, sequence_parallel=sequence_parallel)
    model = megatron.install(models.gpt(cfg), **EXACT)
    arguments = models.batch()
    models.step(model, arguments)
    return models.collectives_of_head(model, _hidden_states(model, arguments), arguments["labels"])


def test_collectives_are_counted():
    tokens = models.BATCH * models.SEQ
    hidden, stats = ("all_gather", tokens * models.HIDDEN // 2), ("all_gather", 3 * tokens)
    compared = ("all_gather", 4)  # over gloo
    assert run_ranks(2, _collectives, False)[0] == [compared, stats, ("all_reduce", tokens * models.HIDDEN)]
    assert run_ranks(2, _collectives, True)[0] == [
        compared, hidden, stats, hidden, ("reduce_scatter", tokens * models.HIDDEN)
    ]  # fmt: skip


def _toggled(rank: int):
    """Inference and some recipes turn the layer's sequence_parallel off between calls."""
    models.start(2)
    cfg = models.config(2, sequence_parallel=True)
    arguments = models.batch()
    results = []
    for model in _pair(cfg):
        shard = _hidden_states(model, arguments)
        whole = [torch.empty_like(shard) for _ in range(2)]
        torch.distributed.all_gather(whole, shard)
        model.output_layer.sequence_parallel = False
        results.append(models.head_step(model, torch.cat(whole), arguments["labels"]))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # Back on, the model runs as it did.
    model.output_layer.sequence_parallel = True
    models.assert_same(models.step(model, arguments), models.step(models.gpt(cfg), arguments))


def test_sequence_parallel_is_read_at_every_call():
    run_ranks(2, _toggled)


def _not_reduced(rank: int):
    """With disable_grad_reduce each rank keeps its own part of dE, as an adapter that reduces later expects."""
    models.start(2)
    arguments = models.batch()
    results = []
    for model in _pair(models.config(2)):
        model.output_layer.disable_grad_reduce = True
        model.output_layer.allreduce_dgrad = False
        torch.manual_seed(3)
        results.append(models.head_step(model, torch.randn(models.SEQ, models.BATCH, 32), arguments["labels"]))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return results[1][1].tolist()


def test_disable_grad_reduce_leaves_each_ranks_part():
    parts = run_ranks(2, _not_reduced)
    assert parts[0] != parts[1]


def _frozen(rank: int, frozen: str):
    models.start(2)
    native, ours = _pair(models.config(2, sequence_parallel=True))
    for model in (native, ours):
        for name, parameter in model.named_parameters():
            if name.startswith("output_layer") == (frozen == "head"):
                parameter.requires_grad = False
    models.assert_same(models.step(ours, models.batch()), models.step(native, models.batch()))


@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_frozen_parameters_get_no_gradient(frozen):
    run_ranks(2, _frozen, frozen)


def _output_processor(rank: int):
    """A processor of the user's gets real logits, and may call Megatron's loss."""
    models.start(2)
    native, ours = _pair(models.config(2))

    def process(*, hidden_states, output_layer, output_weight, labels, compute_language_model_loss, **_):
        logits, _ = output_layer(hidden_states, weight=output_weight)
        assert type(logits) is torch.Tensor
        return compute_language_model_loss(labels, 0.5 * logits)

    arguments = models.batch() | dict(output_processor=process)
    models.assert_same(models.step(ours, arguments), models.step(native, arguments))


def test_output_processor_sees_logits():
    if not models.has_output_processor():
        pytest.skip("this megatron-core has no output_processor")
    run_ranks(2, _output_processor)


def _anything_else(rank: int):
    """Code between the layer and the loss that wants a tensor gets one, with its gradient."""
    models.start(2)
    native, ours = _pair(models.config(2, sequence_parallel=True))
    for model in (native, ours):
        model._scale_logits = lambda logits: torch.tanh(logits.float() / 3) * 3 + 0 * logits[..., :1]
    models.assert_same(models.step(ours, models.batch()), models.step(native, models.batch()))


def test_unknown_uses_of_the_logits_get_real_ones():
    if not models.has_option("use_mup"):
        pytest.skip("this megatron-core does nothing between layer and loss")
    run_ranks(2, _anything_else)


def _compiled(rank: int):
    models.start(2)
    native, ours = _pair(models.config(2, sequence_parallel=True))
    expected = models.step(native, models.batch())
    ours.forward = torch.compile(ours.forward, backend="aot_eager")
    models.assert_same(models.step(ours, models.batch()), expected)


def test_torch_compile():
    run_ranks(2, _compiled)


def _postprocess_alone(rank: int):
    """The schedule plan of overlapped expert parallelism calls `_postprocess` and never `forward`."""
    models.start(2)
    native, ours = _pair(models.config(2, sequence_parallel=True))
    arguments = models.batch()
    hidden = _hidden_states(native, arguments)
    losses = []
    for model in (native, ours):
        with models.counted_real_logits() as real:
            loss = model._postprocess(
                hidden, arguments["input_ids"], arguments["position_ids"], arguments["labels"], None, None, None,
                loss_mask=arguments["loss_mask"],
            )  # fmt: skip
        assert len(real) == (model is native)
        losses.append(loss * arguments["loss_mask"])
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-6, atol=2e-6)


def test_postprocess_called_on_its_own():
    run_ranks(2, _postprocess_alone)


def _inference(rank: int):
    """Static batching: the model slices the last token off before the layer, and gathers the vocabulary."""
    from megatron.core.inference.contexts import StaticInferenceContext

    models.start(2)
    native, ours = _pair(models.config(2))
    arguments = {key: value for key, value in models.batch().items() if key not in ("labels", "loss_mask")}
    results = []
    for model in (native, ours):
        model.eval()
        context = StaticInferenceContext(models.BATCH, models.SEQ)
        with torch.no_grad(), models.inference_mode():
            results.append(model(**arguments, inference_context=context, runtime_gather_output=True))
    assert type(results[1]) is torch.Tensor and results[1].shape == (models.BATCH, 1, models.VOCAB)
    assert torch.equal(results[1], results[0])  # bitwise: Megatron's own code


def test_inference_with_last_token_slicing():
    run_ranks(2, _inference)


def _logged(rank: int, folder: str):
    """Megatron's config logger pickles the logits on their way to the loss."""
    models.start(1)
    model = megatron.install(models.gpt(models.config(config_logger_dir=folder)), **EXACT)
    expected = models.step(models.gpt(models.config()), models.batch())
    models.assert_same(models.step(model, models.batch()), expected)


def test_config_logger(tmp_path):
    run_ranks(1, _logged, str(tmp_path))
    assert any(tmp_path.iterdir())


def _batches_of_other_lengths(rank: int):
    """Without gloo: one comparison at the first call; a new number of tokens costs no more, a new option one."""
    models.start(2)
    model = megatron.install(models.gpt(models.config(2)), **EXACT)
    from vpcce.parallel import agreement

    agreement.blocks_host = lambda group: False
    models.step(model, models.batch())
    exchanges, original = [], agreement._collect
    agreement._collect = lambda *args: exchanges.append(args) or original(*args)
    short = {key: value[:, :6] for key, value in models.batch().items() if key != "attention_mask"}
    models.step(model, short | dict(attention_mask=models.batch()["attention_mask"][..., :6, :6]))
    before = len(exchanges)
    megatron.install(model, **EXACT, z_loss=0.1)
    models.step(model, models.batch())
    return before, len(exchanges) - before


def test_ranks_compare_settings_once():
    assert run_ranks(2, _batches_of_other_lengths) == [(0, 1), (0, 1)]


def _adapter(rank: int):
    """LoRA around an output layer that has vpcce adds a tensor to its logits: right, at the price of the logits."""
    models.start(2)

    class Adapted(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.to_wrap = layer.requires_grad_(False)
            torch.manual_seed(5)
            self.down = torch.nn.Linear(models.HIDDEN, 4, bias=False)
            self.up = torch.nn.Linear(4, layer.output_size_per_partition, bias=False)

        def __getattr__(self, name):
            return super().__getattr__(name) if name in ("to_wrap", "down", "up") else getattr(self.to_wrap, name)

        def forward(self, hidden, *args, **kwargs):
            output, bias = self.to_wrap(hidden, *args, **kwargs)
            return output + self.up(self.down(hidden)), bias

    native, ours = _pair(models.config(2))
    for model in (native, ours):
        model.output_layer = Adapted(model.output_layer)
    models.assert_same(models.step(ours, models.batch()), models.step(native, models.batch()))


def test_adapter_around_the_layer():
    run_ranks(2, _adapter)


def _operators(rank: int):
    """Everything that is not the loss is what it would be of a tensor."""
    models.start(1)
    model = megatron.install(models.gpt(models.config()), **EXACT)
    hidden = torch.randn(models.SEQ, models.BATCH, models.HIDDEN)
    logits, _ = model.output_layer(hidden)
    model._vpcce.labels = models.batch()["labels"]
    deferred, _ = model.output_layer(hidden)
    assert not isinstance(deferred, torch.Tensor) and deferred.shape == logits.shape and deferred.size(-1) == 64
    for use in (
        lambda x: x + 1, lambda x: 1 - x, lambda x: -x, lambda x: x / 2, lambda x: 2.0 * x, lambda x: x * x[:1],
        lambda x: (x * 0.5).float(), lambda x: x[0], lambda x: x.log_softmax(-1), lambda x: torch.softmax(x, -1),
        lambda x: x > 0, lambda x: x.argmax(-1), lambda x: torch.argmax(x, dim=-1), lambda x: x.max(-1).values,
        lambda x: torch.cat([x, x]), lambda x: x.transpose(0, 1).contiguous(), lambda x: x.argmax(), lambda x: x - x,
    ):  # fmt: skip
        assert torch.equal(use(deferred), use(logits))
    assert deferred.dtype == logits.dtype and len(deferred) == len(logits)


def test_deferred_logits_behave_like_logits():
    run_ranks(1, _operators)
