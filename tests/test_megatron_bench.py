"""The two-GPU benchmark's workers on two gloo ranks, at sizes that prove nothing about speed."""

import argparse
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
import torch._dynamo
from spawn import run_ranks

pytestmark = pytest.mark.megatron
BENCH = Path(__file__).parents[1] / "launch" / "bench"


def _prepare() -> None:
    sys.path.insert(0, str(BENCH))
    torch._dynamo.config.disable = True  # Megatron compiles its fused loss, which takes longer than all else here


def _train(rank: int, loss: str, out: str):
    models.start(2)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _prepare()
    import megatron_train

    rows = []
    arguments = argparse.Namespace(
        loss=loss, corpus=None, vocabulary=512, layers=1, width=64, sequence=32, micro_batch=2, grow=[4], steps=3,
        learning_rate=1e-3,
    )  # fmt: skip
    megatron_train.train(arguments, lambda **values: rows.append(values))
    return rows


def test_both_losses_train_alike():
    """fp32 on CPU with the exact gradient: the curves agree to rounding, which Adam magnifies a little."""
    (ours, larger), (theirs, _) = (run_ranks(2, _train, loss, "")[0] for loss in ("vpcce", "megatron"))
    assert larger["micro_batch"] == 2 * ours["micro_batch"] and len(larger["losses"]) == 3
    assert larger["part"] == "grow" and len(ours["losses"]) == 3 and ours["losses"][2] < ours["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
    assert ours["logits_mb"] == 2 * 32 * 512 // 2 * 4 / 2**20


def _head(rank: int, out: str):
    _prepare()
    import megatron_head as head

    sys.argv = ["megatron_head.py", "--out", out, "--shapes", "tiny", "--repeats", "1"]
    head.dist.init_process_group = head.dist.destroy_process_group = lambda *args, **kwargs: None
    head.main()


def test_every_method_gets_a_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    run_ranks(2, _head, str(out))
    rows = {row["method"]: row for row in map(json.loads, out.read_text().splitlines())}
    for method in ("vpcce", "vpcce exact"):
        assert rows[method]["error_dE"] < 1e-5 and rows[method]["error_dC"] < 1e-5
        assert rows[method]["total_ms"] > 0 and rows[method]["one_gpu_ms"] > 0
    if "error" not in rows["Megatron"]:  # its loss takes no group before 0.19
        assert rows["Megatron"]["error_dC"] < 1e-5
    assert set(rows) >= {"vpcce, main_grad", "Megatron fused", "Apple CCE"}


def test_results_replace_older_ones(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import megatron_h200x2 as driver

    monkeypatch.setattr(driver, "RESULTS", tmp_path / "results.json")
    row = dict(part="train", loss="vpcce", vocabulary=512, micro_batch=4)
    driver.save([row | dict(step_ms=2.0), row | dict(micro_batch=8)])
    driver.save([row | dict(step_ms=1.0)])
    stored = json.loads(driver.RESULTS.read_text())
    assert sorted((r["micro_batch"], r.get("step_ms")) for r in stored) == [(4, 1.0), (8, None)]
