"""The other implementations, each as an adapter of a few lines: `build()` imports it and returns
`loss(hidden, weight, target) -> scalar`, the mean over all tokens.

A package that is missing or fails raises its own error, which the benchmark records in its row. Packages are
optional; the versions measured are in the results. All adapters are for bf16 on one GPU.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    build: Callable[[], Loss]
    policy: str  # what its backward computes
    package: str = "torch"

    def version(self) -> str:
        try:
            return f"{self.package} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            return self.package


def plain(hidden, weight, target):
    return F.cross_entropy((hidden @ weight.T).float(), target)


def torch_compile() -> Loss:
    torch.compiler.reset()  # one compilation per shape: a process that measures many would meet the limit of 8
    return torch.compile(plain, fullgraph=True, dynamic=False)


def torch_chunked() -> Loss:
    """torch's own fused head (2.12 and later), with its default chunking."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


def apple(**options) -> Callable[[], Loss]:
    """`cce_exact` and `cce_kahan_full_c` are on its main branch; the package of that name, 25.1.1, lacks them."""

    def build():
        from cut_cross_entropy import linear_cross_entropy

        return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, **options)

    return build


def liger_triton() -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def liger_cute() -> Loss:
    """Keeps the logits."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        LigerFusedLinearCrossEntropySM90Function,
    )

    return LigerFusedLinearCrossEntropySM90Function.apply


def liger_scaled() -> Loss:
    """Keeps no logits; loss per token."""
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # its check synchronises with the host
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    return lambda hidden, weight, target: LigerFusedScaledCrossEntropySM90Function.apply(hidden, weight, target).mean()


def verl() -> Loss:
    """The package's __init__ files import a whole trainer: stand-ins let the kernels load alone."""
    spec = None if "verl" in sys.modules else importlib.util.find_spec("verl")
    if spec is None and "verl" not in sys.modules:
        raise ImportError("No module named 'verl'")
    for name in () if spec is None else ("verl", "verl.utils"):  # a worker loads it once
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(os.path.dirname(os.path.dirname(spec.origin)), *name.split("."))]
        sys.modules[name] = module
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: -linear_cross_entropy(hidden, weight, target, 1.0, "none")[0].mean()


PEERS = {
    "PyTorch eager": Peer(lambda: plain, "exact"),
    "torch.compile": Peer(torch_compile, "exact"),
    "torch F.linear_cross_entropy": Peer(torch_chunked, "exact"),
    "Apple CCE": Peer(apple(impl="cce"), "tile filter", "cut-cross-entropy"),
    "Apple CCE exact": Peer(apple(impl="cce_exact"), "exact", "cut-cross-entropy"),
    "Apple CCE FullC": Peer(apple(impl="cce_kahan_full_c"), "dE tile filter, dC exact", "cut-cross-entropy"),
    "Apple torch_compile": Peer(apple(impl="torch_compile"), "exact", "cut-cross-entropy"),
    "Liger Triton": Peer(liger_triton, "exact", "liger-kernel"),
    "Liger CuTe": Peer(liger_cute, "exact", "liger-kernel"),
    "Liger scaled": Peer(liger_scaled, "exact", "liger-kernel"),
    "verl": Peer(verl, "exact", "verl"),
}
