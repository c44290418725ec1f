"""The benchmark harness on the CPU at tiny shapes: that it runs, measures what it says and hides no failure."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "launch" / "bench"))

import head  # noqa: E402
import lm_like  # noqa: E402
import measure  # noqa: E402
import options  # noqa: E402
import table  # noqa: E402
import train_small  # noqa: E402

import vpcce  # noqa: E402

TINY = head.Case("tiny", 128, 300, 32)


def item(case: head.Case, method: str) -> dict:
    return dict(case=asdict(case), method=method, command="test")


def read_rows(path: Path) -> dict[str, dict]:
    return {row["method"]: row for row in json.loads(path.read_text())}


def test_kernels_belong_to_stages():
    names = ["forward_kernel", "_thresholds_kernel", "packed_hidden_grad_kernel", "kept_list_kernel", "void at::fill"]
    times = table.stages({name: 1.0 + i for i, name in enumerate(names)})
    assert times == {"forward": 3.0, "dE": 3.0, "pack": 4.0, "other": 5.0}


@pytest.mark.parametrize("kind", lm_like.KINDS)
def test_synthetic_head_repeats_and_is_sparse(kind):
    first, second = (lm_like.lm_like(128, 4096, 128, kind=kind, device="cpu", seed=3) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    sparsity = lm_like.density(*first)
    if kind == "flat":  # 1 / 4096 is eps
        assert sparsity["kept"] > 0.95
    elif kind == "noise":
        assert sparsity["columns"] > 0.8
    else:
        assert 0 < sparsity["columns"] < sparsity["kept"] < 0.8
        assert sparsity["columns"] < sparsity["tiles"] <= 1


def test_truth_is_autograd_in_float64():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(100, 16, generator=g), torch.randn(70, 16, generator=g)
    target = torch.randint(70, (100,), generator=g)
    target[::3] = -100
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(h @ w.T, target)
    loss.backward()
    truth = measure.truth_of(hidden, weight, target, tokens=32)
    assert truth.loss == pytest.approx(loss.item(), rel=1e-5)
    assert measure.relative_error(truth.hidden, h.grad, rows=7) < 1e-5
    assert measure.relative_error(truth.weight, w.grad, rows=7) < 1e-5
    assert measure.relative_error(1.01 * w.grad, w.grad) == pytest.approx(0.01)


def test_measure_times_and_compares_one_step():
    hidden, weight, target = head.make_head(TINY, "cpu")
    truth = measure.truth_of(hidden, weight, target)
    row = measure.measure(
        lambda: F.cross_entropy(hidden.float() @ weight.float().T, target),
        hidden, weight, budget_s=0.01, truth=truth,
    )  # fmt: skip
    assert 0 < row["forward_ms"] and 0 < row["total_ms"]
    assert row["error_loss"] < 1e-5 and row["error_dE"] < 4e-3 and row["error_dC"] < 4e-3  # one bf16 rounding
    assert hidden.grad is None and weight.grad is None


def test_a_method_that_fails_leaves_its_error_and_the_others_come(tmp_path):
    rows_path = tmp_path / "rows.jsonl"
    methods = ["Liger CuTe", *head.OURS, "PyTorch eager"]
    head.work([item(TINY, m) for m in methods], rows_path, budget_s=0.01, kernels=False)
    out = tmp_path / "out.json"
    head.merge(out, [json.loads(line) for line in rows_path.read_text().splitlines()])
    rows = read_rows(out)
    assert list(rows) == methods
    assert "Error" in rows["Liger CuTe"]["error"] and "total_ms" not in rows["Liger CuTe"]
    for name in methods[1:]:
        assert rows[name]["error"] is None and rows[name]["error_dE"] < 0.02, rows[name]
    gradients = (TINY.n + TINY.v) * TINY.d * 2 / 2**20
    assert rows["vpcce exact"]["lower_bound_mb"] == pytest.approx(gradients)
    assert rows["vpcce exact, main_grad"]["lower_bound_mb"] == pytest.approx(TINY.n * TINY.d * 2 / 2**20)


def test_merge_replaces_the_same_case_and_method_only(tmp_path):
    out = tmp_path / "out.json"
    row = head.describe(item(TINY, "vpcce exact")) | dict(total_ms=1.0, kernels_ms={"a": 1.0})
    other = head.describe(item(head.Case("tiny", 128, 300, 32, ignored=0.5), "vpcce exact")) | dict(total_ms=2.0)
    head.merge(out, [row, other])
    head.merge(out, [{k: v for k, v in row.items() if k != "kernels_ms"} | dict(total_ms=3.0)])
    assert [r["total_ms"] for r in json.loads(out.read_text())] == [3.0, 2.0]
    assert json.loads(out.read_text())[0]["kernels_ms"] == {"a": 1.0}


def test_a_worker_that_dies_costs_one_row(tmp_path):
    """A case whose head cannot be read ends the worker: its method gets the reason, the next case its own worker."""
    out = tmp_path / "out.json"
    missing = head.Case("tiny", 8, 8, 8, head=str(tmp_path / "missing.pt"))
    arguments = argparse.Namespace(deadline=120, patience=60, budget=0.01, kernels=False)
    head.supervise([item(missing, "PyTorch eager"), item(TINY, "vpcce exact")], out, arguments)
    rows = read_rows(out)
    assert "exit code 1" in rows["PyTorch eager"]["error"] and "missing.pt" in rows["PyTorch eager"]["error"]
    assert rows["vpcce exact"]["error"] is None


def test_selection_of_cases_and_methods():
    def chosen(*argv):
        return [(i["case"]["n"], i["method"]) for i in head.items_of(head.parse(list(argv)), "")]

    assert chosen("--cases", "tokens", "--methods", "torch.compile") == [
        (n, "torch.compile") for n in (512, 2048, 32768)
    ]
    assert chosen("--shape", "64", "100", "8", "--methods", "vpcce exact") == [
        (64, "vpcce exact"), (64, "vpcce exact, main_grad"),
    ]  # fmt: skip
    everything = chosen()
    assert len(everything) > 80 and len({m for _, m in everything}) == len(head.OURS) + len(head.PEERS)


def fabricated(method: str, **values) -> dict:
    base = dict(forward_ms=15.0, total_ms=20.0, gemm_ms=15.0, peak_mb=1300.0, lower_bound_mb=1161.0, error_dE=1.0,
                error_dC=1.0)  # fmt: skip
    row = head.describe(item(head.FIRST, "vpcce exact"))
    return row | base | dict(method=method) | values


def test_limits_name_what_missed_and_what_was_not_measured(capsys, tmp_path):
    rows = [
        fabricated("vpcce exact", total_ms=60.0, forward_ms=15.2),
        fabricated("vpcce sampled", total_ms=21.0, forward_ms=16.0, error_dC=3.0),
        fabricated("torch.compile", total_ms=48.0, peak_mb=5162.0),
        fabricated("Liger scaled", total_ms=66.0, peak_mb=1500.0),
        fabricated("Apple CCE", error="RuntimeError: no", total_ms=1.0),
    ]
    limits = {limit.text: limit for limit in table.limits()}
    data = table.Rows(rows)

    def verdict(text):
        return limits[text].verdict(limits[text].value(data))

    assert data.fastest_without_logits(table.FIRST)["method"] == "Liger scaled"
    assert verdict("exact loss + gradient / gemm") == "aim"  # 4.0
    assert verdict("sampled / torch.compile, Gemma 2 2B") == "must"  # 0.4375
    assert verdict("sampled / fastest peer without logits, Gemma 2 2B") == "aim"  # 0.318
    assert verdict("forward with marks / without") == "must"  # 1.053
    assert verdict("error of dC, sampled / exact") == "MISSED"  # 3.0
    assert verdict("Apple FullC / exact") == "not measured"
    out = tmp_path / "rows.json"
    out.write_text(json.dumps(rows))
    assert table.main([str(out)]) == 1
    printed = capsys.readouterr().out
    assert "| Liger scaled" in printed and "RuntimeError: no" in printed and "MISSED" in printed


def test_options_are_timed_next_to_the_plain_loss(tmp_path):
    rows = options.run((64, 200, 16), 0.005, "test", tmp_path / "options.json")
    names = list(options.options(torch.zeros(64, 16), 200, "cpu"))
    sampled = [name for name in names if name not in options.EXACT_ONLY]
    assert [row["option"] for row in rows if row["policy"] == "exact"] == names
    assert [row["option"] for row in rows if row["policy"] == "sampled"] == sampled
    for row in rows:
        assert row["error"] is None and row["total_ratio"] > 0, row
    assert json.loads((tmp_path / "options.json").read_text()) == rows


def test_options_leave_the_distribution_alone():
    """The loss of every option that only transforms logits is the plain one: bitwise with a scale."""
    hidden, weight, target = head.make_head(head.Case("", 64, 200, 16), "cpu")
    plain = vpcce.linear_cross_entropy(hidden, weight, target)
    for name in ("bias", "softcap", "logit_scale", "learned logit_scale"):
        option, own = options.options(hidden, 200, "cpu")[name]
        loss = option(own, weight, target, vpcce.exact())
        torch.testing.assert_close(loss, plain, rtol=1e-4 if name == "softcap" else 1e-6, atol=1e-6)


def test_options_above_their_limit_end_with_1(tmp_path, monkeypatch, capsys):
    def compare(option, plain, tensors, own, budget_s):
        return dict(forward_ms=1.0, total_ms=2.0, forward_ratio=1.0, total_ratio=1.05)

    monkeypatch.setattr(options, "compare", compare)
    given = "--shape 8 20 4 --policies sampled --out".split() + [str(tmp_path / "rows.json"), "--options"]
    assert options.main([*given, "entropy", "topk"]) == 0
    assert options.main([*given, "entropy", "bias"]) == 1
    printed = capsys.readouterr().out
    assert "sampled bias: 1.050 of plain, limit 1.03" in printed and "exact" not in printed

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(options, "compare", broken)
    assert options.main([*given, "entropy"]) == 1
    assert "sampled entropy: RuntimeError: out of memory" in capsys.readouterr().out


def test_small_training_writes_curves_and_a_head(tmp_path):
    pytest.importorskip("matplotlib")
    pattern = np.arange(4000, dtype=np.uint32) % 13
    np.savez_compressed(tmp_path / "corpus.npz", tokens=pattern)
    sizes = "--vocabulary 50 --width 32 --layers 1 --heads 2 --context 32 --batch 4 --steps 40 --warmup 5".split()
    train_small.main(
        [str(tmp_path / "corpus.npz"), *sizes, "--learning-rate", "0.01", "--validate-every", "20"]
        + ["--validation-blocks", "8", "--policies", "exact", "sampled", "--seeds", "2", "--no-compile"]
        + ["--out", str(tmp_path / "train.json"), "--save-head", str(tmp_path / "head.pt")]
    )
    result = json.loads((tmp_path / "train.json").read_text())
    assert [(run["policy"], run["seed"]) for run in result["runs"]] == [
        ("exact", 0), ("sampled", 0), ("exact", 1), ("sampled", 1),
    ]  # fmt: skip
    assert [point["step"] for point in result["runs"][0]["curve"]] == [20, 40]
    for policy in ("exact", "sampled"):
        assert result["summary"][policy]["mean"] < 1.0  # a fixed cycle; a uniform guess is 3.9
    assert (tmp_path / "train.png").stat().st_size > 1000
    saved = torch.load(tmp_path / "head.pt")
    assert saved["hidden"].shape[0] == saved["target"].shape[0] and saved["weight"].shape == (50, 32)
    chosen = head.items_of(head.parse(["--head", str(tmp_path / "head.pt")]), "")
    assert chosen[0]["case"]["v"] == 50 and chosen[0]["case"]["d"] == 32


def test_training_blocks_and_held_out_blocks_are_apart():
    c = train_small.Config(context=9, validation_blocks=10, batch=4, steps=30)
    training, validation = train_small.split_blocks(np.arange(1000), c)
    assert len(training) == 90 and len(validation) == 10
    assert not set(training.flatten()) & set(validation.flatten())
    blocks = torch.arange(10)[:, None]
    seen = torch.cat(list(train_small.batches(blocks, c, seed=0))).flatten()
    assert len(seen) == 120 and torch.equal(seen.bincount(), torch.full((10,), 12))
