"""Training loops around the head: DDP, gradients added to main_grad, pipelines, micro-batches, context parallelism.

Every test runs two optimiser steps natively and with vpcce and compares losses, `main_grad`s and parameters.
"""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = pytest.mark.megatron
EXACT = dict(backward=vpcce.exact())
FUSED = dict(gradient_accumulation_fusion=True, **EXACT)
MICRO_BATCHES = 2


def _chunks(cfg, tied: bool, options: dict | None, vpp: int | None):
    """This rank's model chunks, as `megatron.training` builds them: hooks run before the wrapping."""
    from megatron.core import parallel_state as ps

    chunks = []
    for stage in range(vpp or 1):
        where = dict(ignore_virtual=False, vp_stage=stage) if vpp else {}
        chunk = models.gpt(
            cfg,
            tied=tied,
            pre_process=ps.is_pipeline_first_stage(**where),
            post_process=ps.is_pipeline_last_stage(**where),
            **(dict(vp_stage=stage) if vpp else {}),
        )
        chunk.model_type = models.encoder_or_decoder()
        chunks.append(chunk)
    return chunks if options is None else megatron.install(chunks, **options)


def _train(cfg, *, tied, options, ddp=None, vpp=None, cp=1, steps=2):
    """(losses, gradients of the first step, parameters at the end)."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = _chunks(cfg, tied, options, vpp)
    wrapped = [
        DistributedDataParallel(
            cfg,
            DistributedDataParallelConfig(**(dict(grad_reduce_in_fp32=True) | (ddp or {}))),
            chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if ddp and ddp.get("overlap_grad_reduce"):
        cfg.no_sync_func = [chunk.no_sync for chunk in wrapped]
        cfg.no_sync_func = cfg.no_sync_func if vpp else cfg.no_sync_func[0]
    cfg.finalize_model_grads_func = finalize_model_grads

    def forward_step(iterator, model):
        arguments = next(iterator)
        loss_mask = arguments["loss_mask"]
        output = model(**arguments)
        return output, lambda out: ((out * loss_mask).sum() / loss_mask.sum(), {"loss": (out * loss_mask).detach()})

    def data(step: int):
        rank = ps.get_data_parallel_rank()
        for micro in range(MICRO_BATCHES):
            arguments = models.batch(seed=100 * step + 10 * rank + micro)
            yield models.context_parallel_part(arguments, cp)

    losses, gradients = [], {}
    for step in range(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        iterators = [data(step) for _ in chunks]
        done = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if vpp else iterators[0], model=wrapped,
            num_microbatches=MICRO_BATCHES, seq_length=models.SEQ, micro_batch_size=models.BATCH, forward_only=False,
        )  # fmt: skip
        losses += [entry["loss"] for entry in done]
        for index, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                if step == 0:
                    gradients[f"{index}.{name}"] = parameter.main_grad.float().clone()
                parameter.data.sub_(parameter.main_grad.to(parameter.dtype), alpha=0.3)
    parameters = {f"{i}.{n}": p.detach().clone() for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
    return losses, gradients, parameters


def _same(ours, theirs, k: float = 1.0):
    for our_loss, their_loss in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(our_loss, their_loss, rtol=5e-6 * k, atol=5e-6 * k)
    for mine, native in zip(ours[1:], theirs[1:], strict=True):
        assert mine.keys() == native.keys()
        for name, value in native.items():
            assert (mine[name] - value).abs().max() <= 1e-5 * k * value.abs().max(), name


def _compare(rank: int, tp: int, parallel: dict, changes: dict, tied: bool, ddp: dict, vpp: int | None):
    models.start(tp, **parallel)
    pp, cp = parallel.get("pipeline_model_parallel_size", 1), parallel.get("context_parallel_size", 1)

    def cfg():
        return models.config(
            tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=torch.float32, **changes,
        )  # fmt: skip

    arguments = dict(tied=tied, ddp=ddp, vpp=vpp, cp=cp)
    native = _train(cfg(), options=None, **arguments)
    _same(_train(cfg(), options=EXACT, **arguments), native)
    _same(_train(cfg(), options=FUSED, **arguments), native)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "ddp",
    [
        dict(),
        dict(overlap_grad_reduce=True),
        dict(use_distributed_optimizer=True),
        dict(use_distributed_optimizer=True, overlap_grad_reduce=True),
    ],
    ids=["plain", "overlap-reduce", "sharded-gradients", "sharded-overlap"],
)
def test_data_parallel(ddp, tied):
    run_ranks(4, _compare, 2, {}, dict(sequence_parallel=True), tied, ddp, None)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pipeline(tied):
    run_ranks(4, _compare, 2, dict(pipeline_model_parallel_size=2), {}, tied, {}, None)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_interleaved_pipeline(tied):
    parallel = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    run_ranks(2, _compare, 1, parallel, dict(num_layers=4), tied, {}, 2)


def test_context_parallel():
    """Each rank's loss is that of its own tokens; the TP group is the only one the head talks to."""
    run_ranks(4, _compare, 2, dict(context_parallel_size=2), dict(sequence_parallel=True), False, {}, None)


def _gathered_parameters(rank: int, tied: bool):
    """overlap_param_gather: parameters arrive while modules are called, the head's in the layer's own pre-hook."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    models.start(1)
    cfg, settings = models.config(), dict(use_distributed_optimizer=True, overlap_grad_reduce=True)
    config = DistributedDataParallelConfig(**settings, overlap_param_gather=True)
    expected = models.step(models.gpt(cfg, tied=tied), models.batch())[0]
    for options in (EXACT, FUSED):
        model = megatron.install(models.gpt(cfg, tied=tied), **options)
        ddp = DistributedDataParallel(cfg, config, model)
        for buffer in ddp.buffers:
            mine = buffer.param_data.chunk(2)[rank].clone()
            buffer.param_data.fill_(torch.nan)  # what the optimiser of another rank has just updated
            buffer.param_data.chunk(2)[rank].copy_(mine)
        loss = ddp(**models.batch()) * models.batch()["loss_mask"]
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
        loss.sum().backward()
        ddp.finish_grad_sync()
        assert all(buffer.grad_data.isfinite().all() for buffer in ddp.buffers)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_parameter_gather_overlap(tied):
    run_ranks(2, _gathered_parameters, tied)


def _masked_rank(rank: int):
    """All tokens of one context parallel rank are padding: zeros, no NaN, and no other rank waits for it."""
    models.start(1, context_parallel_size=2)
    arguments = models.context_parallel_part(models.batch(), 2)
    if rank == 0:
        arguments["labels"] = torch.full_like(arguments["labels"], -100)
        arguments["loss_mask"] = torch.zeros_like(arguments["loss_mask"])
    for options in ({}, dict(ignore_index=-100), dict(skip_masked_tokens=True)):
        model = megatron.install(models.gpt(models.config(context_parallel_size=2)), **EXACT, **options)
        loss, grads = models.step(model, arguments)
        assert all(grad.isfinite().all() for grad in grads.values())
        if rank == 0:
            assert (loss == 0).all() and all((grad == 0).all() for grad in grads.values())


def test_rank_without_tokens():
    run_ranks(2, _masked_rank)


def _protocol(rank: int, dtype: torch.dtype, zero_out: bool):
    """What the DDP hook relies on, seen from the parameter."""
    models.start(2)
    arguments = models.batch()
    _, expected = models.step(models.gpt(models.config(2)), arguments)
    model = megatron.install(models.gpt(models.config(2)), **FUSED)
    weight = model.output_layer.weight
    weight.main_grad = torch.ones(weight.shape, dtype=dtype)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    buffer = weight.main_grad
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad_added_to_main_grad, p.grad.shape)))
    for passes in (1, 2):  # gradients of micro-batches add up, on top of what was there
        _, grads = models.step(model, arguments)
        assert seen.pop() == (True, weight.shape) and not seen
        assert weight.main_grad is buffer
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
        error = (buffer.float() - 1 - passes * expected["output_layer.weight"]).abs().max()
        assert error <= passes * rounding * (1 + passes * expected["output_layer.weight"].abs().max())
        if zero_out:
            assert (grads["output_layer.weight"] == 0).all()
    buffer.zero_()
    models.step(model, arguments)
    scale = expected["output_layer.weight"].abs().max()
    error = (buffer.float() - expected["output_layer.weight"]).abs().max()
    assert error <= (2**-8 if dtype == torch.bfloat16 else 5e-6) * scale


@pytest.mark.parametrize("zero_out", [False, True], ids=["dummy", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradient_goes_to_main_grad(dtype, zero_out):
    run_ranks(2, _protocol, dtype, zero_out)


def _not_fused(rank: int):
    """main_grad is left alone unless the layer or the user asks, and for weights that Megatron-FSDP handles."""
    models.start(1)
    arguments = models.batch()
    _, expected = models.step(models.gpt(models.config()), arguments)
    for options, attributes in ((EXACT, {}), (FUSED, dict(__fsdp_param__=True)), (FUSED, dict(main_grad=None))):
        model = megatron.install(models.gpt(models.config()), **options)
        weight = model.output_layer.weight
        attributes = dict(main_grad=torch.zeros_like(weight), grad_added_to_main_grad=False) | attributes
        for name, value in attributes.items():
            setattr(weight, name, value)
        _, grads = models.step(model, arguments)
        error = (grads["output_layer.weight"] - expected["output_layer.weight"]).abs().max()
        assert error <= 5e-6 * expected["output_layer.weight"].abs().max()
        assert not weight.grad_added_to_main_grad
        assert weight.main_grad is None or (weight.main_grad == 0).all()


def test_without_fusion_the_gradient_is_returned():
    run_ranks(1, _not_fused)


def _layer_flag(rank: int):
    """gradient_accumulation_fusion of the layer itself, as Megatron sets it where Apex or TE is installed."""
    models.start(1)
    model = megatron.install(models.gpt(models.config()), **EXACT)
    model.output_layer.gradient_accumulation_fusion = True
    weight = model.output_layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    models.step(model, models.batch())
    assert weight.grad_added_to_main_grad and weight.main_grad.abs().max() > 0


def test_fusion_follows_the_layer():
    run_ranks(1, _layer_flag)


def _fully_sharded(rank: int, tied: bool):
    """torch's FSDP2, as Megatron uses it: the output layer is a unit, its weight exists during its own call only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    models.start(1)
    mesh = init_device_mesh("cpu", (2,))
    arguments = models.batch(seed=rank)
    results = []
    for options in (None, EXACT):
        model = models.gpt(models.config(), tied=tied)
        if options is not None:
            megatron.install(model, **options)
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh)
        if not tied:
            fully_shard(model.output_layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, grads = models.step(model, arguments)
        results.append((loss, {name: grad.full_tensor() for name, grad in grads.items()}))
    models.assert_same(results[1], results[0])
    with pytest.raises(ValueError, match="was wrapped after install"):
        megatron.uninstall(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fully_sharded_data_parallel(tied):
    run_ranks(2, _fully_sharded, tied)
