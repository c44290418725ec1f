"""`install` itself: what it changes, what it refuses, its options, and the ways in."""

import io
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
import torch.nn.functional as F
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())


def _identity(rank: int):
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel

    models.start(1)
    model = models.gpt(models.config())
    layer, before = model.output_layer, (type(model), type(model.output_layer))
    parameters, attributes = dict(model.named_parameters()), set(vars(layer))
    megatron.install(model, **EXACT)
    assert model.output_layer is layer
    assert isinstance(layer, megatron.VocabParallelCCEOutputLayer)
    assert isinstance(layer, tensor_parallel.ColumnParallelLinear) and isinstance(model, GPTModel)
    # FSDP's and Megatron-Bridge's lookups of the layer go by name.
    assert type(layer).__name__ == "ColumnParallelLinear" and type(model).__name__ == "GPTModel"
    assert type(layer).__module__ == "megatron.core.tensor_parallel.layers"
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())

    classes = type(model), type(layer)
    megatron.install(model, z_loss=1e-4)  # again: only the options change
    assert (type(model), type(layer)) == classes
    assert layer._vpcce.options.z_loss == 1e-4 and layer._vpcce is model._vpcce

    assert megatron.uninstall(model) is model
    assert (type(model), type(layer)) == before and set(vars(layer)) == attributes
    megatron.uninstall(model)  # harmless
    models.assert_same(models.step(model, models.batch()), models.step(models.gpt(models.config()), models.batch()))


def test_classes_change_in_place_and_back():
    run_ranks(1, _identity)


def _hooks(rank: int):
    """The layer's __call__ runs, so that hooks which gather or count parameters do."""
    models.start(1)
    model = megatron.install(models.gpt(models.config()), **EXACT)
    seen = []
    model.output_layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.output_layer.register_forward_hook(lambda module, args, output: seen.append("after"))
    models.step(model, models.batch())
    assert seen == ["before", "after"]


def test_module_hooks_run():
    run_ranks(1, _hooks)


def _fsdp_lookup(rank: int):
    adapter = pytest.importorskip("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    models.start(1)
    model = megatron.install(models.gpt(models.config()), **EXACT)
    names = adapter.FullyShardedDataParallel._MODULE_TYPE_REGISTRY["column"]
    assert type(model.output_layer).__name__ in names


def test_fsdp_finds_the_layer_by_name():
    adapter = pytest.importorskip("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if not hasattr(adapter.FullyShardedDataParallel, "_MODULE_TYPE_REGISTRY"):
        pytest.skip("this megatron-core's FSDP has no registry of names")
    run_ranks(1, _fsdp_lookup)


def _ways_in(rank: int):
    from megatron.core.transformer.module import Float16Module

    models.start(1)
    cfg = models.config(bf16=True, params_dtype=torch.bfloat16)
    wrapped = Float16Module(cfg, models.gpt(cfg))
    assert megatron.install(wrapped, **EXACT) is wrapped
    assert isinstance(wrapped.module.output_layer, megatron.VocabParallelCCEOutputLayer)

    chunks = [models.gpt(models.config(), post_process=False), models.gpt(models.config())]
    assert megatron.pre_wrap_hook(**EXACT)(chunks) is chunks
    assert not hasattr(chunks[0], "_vpcce")  # a stage without output layer
    assert isinstance(chunks[1].output_layer, megatron.VocabParallelCCEOutputLayer)

    def provider(pre_process=True, post_process=True):
        """Builds a model."""
        return models.gpt(models.config(), pre_process=pre_process, post_process=post_process)

    provide = megatron.model_provider(provider, **EXACT)
    assert provide.__doc__ == provider.__doc__
    assert isinstance(provide(post_process=True).output_layer, megatron.VocabParallelCCEOutputLayer)


def test_ways_in():
    run_ranks(1, _ways_in)


def _bad(rank: int, kind: str):
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel

    models.start(1)
    model = models.gpt(models.config())
    options = {}
    if kind == "deferred wgrad":
        model.output_layer.config.defer_embedding_wgrad_compute = True
    elif kind == "fp8":
        fp8 = type("TELMHeadColumnParallelLinear", (tensor_parallel.ColumnParallelLinear,), {})
        model.output_layer.__class__ = fp8
    elif kind == "gtp":
        model.output_layer.gtp_remat_size = 2
    elif kind == "adapter":
        model.output_layer = torch.nn.Sequential(model.output_layer)
    elif kind == "own forward":
        capped = type("CappedOutputLayer", (tensor_parallel.ColumnParallelLinear,), {"forward": lambda self, x: x})
        model.output_layer.__class__ = capped
    elif kind == "own loss":
        model.__class__ = type("MyGPT", (GPTModel,), {"compute_language_model_loss": lambda self, *args: 0})
    elif kind == "unknown model":
        model = torch.nn.Linear(2, 2)
    elif kind == "no module":
        model = [model, "model"]
    elif kind == "option":
        options = dict(backwards="auto")
    elif kind == "policy":
        options = dict(backward="fast")
    elif kind == "vocabulary":
        options = dict(vocab_size=models.VOCAB + 1)
    elif kind == "softcap":
        options = dict(softcap=-1.0)
    try:
        megatron.install(model, **options)
    except (TypeError, ValueError) as error:
        assert not any(hasattr(module, "_vpcce") for module in getattr(model, "modules", lambda: [])())
        return type(error).__name__, str(error)
    raise AssertionError("accepted")


@pytest.mark.parametrize(
    "kind, error, words",
    [
        ("deferred wgrad", "ValueError", "defer_embedding_wgrad_compute"),
        ("fp8", "TypeError", "multiplies in fp8; expected a ColumnParallelLinear"),
        ("gtp", "ValueError", "over 2 ranks"),
        ("adapter", "TypeError", "the output layer is a Sequential, expected a ColumnParallelLinear"),
        ("own forward", "TypeError", "CappedOutputLayer has a forward of its own"),
        ("own loss", "TypeError", "MyGPT has its own compute_language_model_loss"),
        ("unknown model", "TypeError", "expected a model that contains one of BertModel, GPTModel"),
        ("no module", "TypeError", "expected a torch.nn.Module or a list of them, got str"),
        ("option", "TypeError", "unknown option backwards; expected some of backward, ignore_index"),
        ("policy", "TypeError", "got 'fast'"),
        ("vocabulary", "ValueError", "vocab_size must be in [1, 64], the rows of the output layer, got 65"),
        ("softcap", "ValueError", "softcap must lie between 1e-30 and 1e30, or be None, got -1.0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(kind, error, words):
    ((got, message),) = run_ranks(1, _bad, kind)
    assert got == error and words in message, message
    assert kind == "policy" or message.startswith("vpcce.parallel.megatron: ")


def _options(rank: int, tp: int):
    """Every option against F.cross_entropy on logits that Megatron made."""
    models.start(tp)
    cfg = models.config(tp)
    arguments = models.batch()
    labels, true_size = arguments["labels"], 61  # 61 ids and 3 rows of padding
    labels.clamp_(max=true_size - 1)

    def expected(smoothing=0.0, z_loss=0.0, softcap=None, scale=1.0, vocab_size=models.VOCAB):
        model = models.gpt(cfg)
        plain = {key: value for key, value in arguments.items() if key not in ("labels", "loss_mask")}
        logits = scale * model(**plain, runtime_gather_output=True)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits[..., :vocab_size].flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
        z = z_loss * logits.logsumexp(-1) ** 2 * (labels.flatten() >= 0)
        loss = (loss + z).view(labels.shape)
        weights = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)
        (loss * arguments["loss_mask"] * weights).sum().backward()
        return (loss * arguments["loss_mask"]).detach(), model.output_layer.weight.grad

    for options, reference in (
        (dict(label_smoothing=0.1), dict(smoothing=0.1)),
        (dict(z_loss=0.01), dict(z_loss=0.01)),
        (dict(softcap=2.0, logit_scale=3.0), dict(softcap=2.0, scale=3.0)),
        (dict(vocab_size=true_size), dict(vocab_size=true_size)),
        (dict(vocab_size=true_size, label_smoothing=0.2), dict(vocab_size=true_size, smoothing=0.2)),
    ):
        model = megatron.install(models.gpt(cfg), **EXACT, **options)
        loss, grads = models.step(model, arguments)
        true_loss, true_grad = expected(**reference)
        torch.testing.assert_close(loss, true_loss, rtol=5e-6, atol=5e-6)
        error = (grads["output_layer.weight"] - true_grad).abs().max()
        assert error <= 1e-5 * true_grad.abs().max(), options
        if "vocab_size" in options and rank == tp - 1:
            assert (grads["output_layer.weight"][true_size - models.VOCAB :] == 0).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_options_against_pytorch(tp):
    run_ranks(tp, _options, tp)


def _softcapped_layer(rank: int):
    """A layer that caps its own logits (Megatron-Bridge's Gemma 2): the loss is capped too, the logits once."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    models.start(2)

    class Gemma2OutputLayer(ColumnParallelLinear):
        def forward(self, *args, **kwargs):
            output, bias = super().forward(*args, **kwargs)
            return 2.0 * torch.tanh(output / 2.0), bias

    native, ours = (models.gpt(models.config(2)) for _ in range(2))
    native.output_layer.__class__ = ours.output_layer.__class__ = Gemma2OutputLayer
    megatron.install(ours, **EXACT, softcap=2.0)
    models.assert_same(models.step(ours, models.batch()), models.step(native, models.batch()))
    plain = {key: value for key, value in models.batch().items() if key not in ("labels", "loss_mask")}
    assert torch.equal(ours(**plain), native(**plain))


def test_a_layer_that_caps_its_logits():
    run_ranks(2, _softcapped_layer)


def _masked(rank: int):
    """skip_masked_tokens: same gradients, and the masked rows of hidden are never looked at."""
    models.start(2)
    arguments = models.batch()
    arguments["labels"][0, 3] = 5
    expected = models.step(models.gpt(models.config(2)), arguments)
    model = megatron.install(models.gpt(models.config(2)), **EXACT, skip_masked_tokens=True)
    labels = arguments["labels"].clone()
    result = models.step(model, arguments)
    models.assert_same(result, expected)
    assert torch.equal(arguments["labels"], labels)  # the caller's labels stay
    with torch.no_grad():
        loss = model(**arguments)
    assert (loss[arguments["loss_mask"] == 0] == 0).all()


def test_masked_tokens_can_be_skipped():
    run_ranks(2, _masked)


def _saved(rank: int):
    models.start(1)
    model = megatron.install(models.gpt(models.config()), **EXACT)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain = models.gpt(models.config(), seed=1)
    plain.load_state_dict(torch.load(buffer))
    models.assert_same(models.step(model, models.batch()), models.step(plain, models.batch()))


def test_state_dicts_load_without_vpcce():
    run_ranks(1, _saved)


def test_importing_needs_no_megatron():
    code = "import sys, vpcce.parallel.megatron; sys.exit(any(name.startswith('megatron') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
