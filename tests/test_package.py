"""The package from outside: what imports what, what a wheel and an sdist contain, and their types."""

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Who may import what of ours, by import name; the longest matching name decides.
ALLOWED = {
    "vpcce": ("vpcce",),
    "vpcce.reference": ("vpcce.sampling", "vpcce.kernels.problem"),
    "vpcce.sampling": ("vpcce.kernels.problem",),
    "vpcce.policy": (),
    "vpcce.kernels": ("vpcce.kernels",),
    "vpcce.parallel.shard": ("vpcce.parallel.collectives",),
    "vpcce.parallel.collectives": (),
}
OPTIONAL = ("megatron", "mpi4py", "numpy", "transformer_engine")  # never needed by `import vpcce`


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in (("vpcce", "vpcce"), ("kernels", "vpcce.kernels"), ("parallel", "vpcce.parallel")):
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it; `from a import b` counts as a.b where that is a module."""
    known, seen = set(modules()), set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            seen |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: package.count(".") + 2 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            seen |= {n if n in known else module for n in (f"{module}.{alias.name}" for alias in node.names)}
    return seen


@pytest.mark.parametrize("name", modules())
def test_data_goes_one_way(name):
    rule = max((r for r in ALLOWED if name == r or name.startswith(f"{r}.")), key=len)
    for imported in imports(name, modules()[name]):
        assert imported.split(".")[0] not in ("kernels", "parallel"), "a package of that name may be another's"
        if imported.split(".")[0] == "vpcce":
            is_allowed = any(imported == a or imported.startswith(f"{a}.") for a in ALLOWED[rule])
            assert is_allowed, f"{name} imports {imported}, but may import only {ALLOWED[rule]}"
        if rule == "vpcce.kernels":
            top = imported.split(".")[0]
            assert top in {"torch", "triton", "vpcce"} | sys.stdlib_module_names, f"{name} imports {imported}"


def python(code: str, cwd: Path, executable: str = sys.executable) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_nothing_optional(tmp_path):
    code = f"""
import sys
for name in {(*OPTIONAL, "triton")!r}: sys.modules[name] = None
import torch, vpcce
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
vpcce.linear_cross_entropy(hidden, weight, torch.arange(4)).backward()
print(weight.grad.abs().sum() > 0)
"""
    # numpy is torch's own optional companion: hidden too, and torch says so once.
    assert "True" in python(f"import warnings; warnings.simplefilter('ignore'){code}", tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, Path]:
    """{"wheel": folder, "sdist": folder}: what installing each of them puts into an empty folder."""
    base = tmp_path_factory.mktemp("package")
    source = base / "source"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    folders = {}
    for kind in ("wheel", "sdist"):
        made = subprocess.run(
            [sys.executable, "-c", build, kind, str(base)], cwd=source, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        archive = next(base.glob("*.whl" if kind == "wheel" else "*.tar.gz"))
        folders[kind] = base / kind
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
        done = subprocess.run([*pip, str(folders[kind]), str(archive)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_package_imports_from_an_empty_folder(installed, kind, tmp_path):
    files = {p.relative_to(installed[kind]).as_posix() for p in installed[kind].rglob("*") if p.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in modules().values()}
    expected = {f if f.startswith("vpcce/") else f"vpcce/{f}" for f in expected} | {"vpcce/py.typed"}
    packaged = {f for f in files if f.startswith("vpcce/") and "__pycache__" not in f}
    assert packaged == expected
    assert any(f.endswith("LICENSE") for f in files)
    code = f"""
import sys; sys.path.insert(0, {str(installed[kind])!r})
import vpcce, vpcce.parallel.shard, vpcce.kernels.problem
print(vpcce.__file__, vpcce.linear_cross_entropy.__module__, vpcce.VocabShard.__module__)
"""
    assert python(code, tmp_path).startswith(str(installed[kind] / "vpcce"))


def test_types_of_the_installed_wheel(installed, tmp_path):
    (tmp_path / "user.py").write_text(
        "import torch\nimport vpcce\n"
        "loss: torch.Tensor = vpcce.linear_cross_entropy(torch.ones(2, 4), torch.ones(8, 4), torch.ones(2).long())\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [*mypy, "-p", "vpcce", "-m", "user"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(installed["wheel"])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernel_tests_are_marked_for_one_of_the_runs():
    """launch/test.sh runs pytest by marker: an unmarked interpreter test would be skipped or fail in the plain run."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        text = path.read_text()
        if path.name.startswith("test_kernel"):
            assert "mark.interpreter" in text, f"{path.name}: say pytestmark = pytest.mark.interpreter"
        if path.name.startswith("test_aot"):
            assert "mark.interpreter" not in text, f"{path.name}: Triton cannot compile while it interprets"


def test_scripts_say_what_is_missing(tmp_path):
    """A python without venv, and none at all, end with advice and leave no half-made .venv."""
    script = f"cd {tmp_path}; source {ROOT}/launch/environment.sh; make_environment"

    def said(python_command: str) -> str:
        environment = os.environ | {"PYTHON": python_command}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        return done.stderr

    assert "Install Python 3.10 or later" in said("no-such-python")
    broken = tmp_path / "python-without-venv"
    broken.write_text('#!/bin/sh\n[ "$2" = venv ] && { mkdir -p "$3/bin"; exit 1; }\nexit 0\n')
    broken.chmod(0o755)
    assert "apt-get install python3-venv" in said(str(broken))
    assert not (tmp_path / ".venv").exists()
    venv.create(tmp_path / ".venv", with_pip=False)
    assert "has no pip" in said(sys.executable)
