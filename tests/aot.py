"""Compiles every kernel that a call would launch, for hardware that is not there.

The host code runs on CPU tensors with `JITFunction.run` replaced by a recorder, so signatures, constexprs and launch
parameters are those of the real call. The results of such a run are meaningless; only the launches count.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vpcce.kernels import launch_table, tiles

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What one block may use on the chip.
SHARED_LIMIT = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "gfx942": 65536}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "waves_per_eu")


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs."""

    name: str
    shared: int
    registers: int | None = None  # NVIDIA only
    spills: int | None = None  # bytes stored and loaded
    serialized: bool = False  # the assembler made sm_90's asynchronous products wait for each other


@contextmanager
def recorded_launches(target: str):
    """Collects (kernel, arguments) of all launches inside, as if the current device were `target`."""
    launches: list[tuple[JITFunction, tuple, dict]] = []

    def record(self, *args, **kwargs):
        launches.append((self, args, kwargs))

    gpu = TARGETS[target]
    major = gpu.arch // 10 if gpu.backend == "cuda" else 0
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(launch_table, "capability", lambda device: major),
        mock.patch.object(tiles, "has_tma", lambda device: major >= 9),
    ):
        yield launches


def compile_launches(launches, target: str) -> list[Usage]:
    """Compiles each distinct launch once."""
    usages, seen = [], set()
    for kernel, args, kwargs in launches:
        source, options = _source(kernel, args, kwargs)
        key = (kernel.__name__, repr(sorted(source.signature.items())), repr(source.constants), repr(options))
        if key in seen:
            continue
        seen.add(key)
        compiled = triton.compile(source, target=TARGETS[target], options=options)
        usages.append(_usage(compiled, kernel.__name__, target))
    return usages


def _source(kernel: JITFunction, args: tuple, kwargs: dict):
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound.update({name: value for name, value in kwargs.items() if name not in options})
    for parameter in kernel.params:
        if parameter.name not in bound and parameter.has_default:
            bound[parameter.name] = parameter.default
    constexpr_names = {p.name for p in kernel.params if p.is_constexpr}
    not_special = {p.num for p in kernel.params if p.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = bound[name]
        if name in constexpr_names or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            shape = ",".join(str(size) for size in value.block_shape)
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{shape}]>"
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if index in not_special:
                pass
            elif value == 1:
                signature[name], constants[(index,)] = "constexpr", 1
            elif value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def _usage(compiled, name: str, target: str) -> Usage:
    if target == "gfx942":
        return Usage(name, compiled.metadata.shared)
    ptx = compiled.asm["ptx"]
    chip = re.search(r"\.target\s+([a-z0-9_]+)", ptx).group(1)
    assembler = nvidia.get_ptxas(int(re.search(r"\d+", chip).group()))
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [getattr(assembler, "path", assembler), "-v", f"--gpu-name={chip}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    return Usage(name, compiled.metadata.shared, registers, spills, "instructions are serialized" in report)
