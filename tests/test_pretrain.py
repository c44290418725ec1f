"""launch/pretrain_gpt.py as a user starts it: torchrun, a small head, text from a folder, two ranks on CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

LAUNCH = Path(__file__).parents[1] / "launch"
sys.path.insert(0, str(LAUNCH))

SMALL = """
model: {vocab_size: 258, hidden_size: 32, ffn_hidden_size: 64, num_layers: 1, num_attention_heads: 2,
        sequence_length: 16, tied: true}
data: {source: text, tokenizer: bytes, validation_percent: 30}
run: {name: small, steps: 6, micro_batch: 2, global_batch: 4, validate_every: 3, validation_batches: 1}
"""


@pytest.fixture
def folder(tmp_path):
    """An empty working folder with a config and a corpus of both kinds of file."""
    (tmp_path / "small.yaml").write_text(SMALL)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text("".join(f"{number} times {i} is {number * i}. " for i in range(40)))
    lines = [json.dumps({"text": f"line {i}: " + "abc" * i}) for i in range(20)]
    (text / "more.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(*arguments: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(LAUNCH / "pretrain_gpt.py"), "small.yaml", *arguments]


def pretrain(folder: Path, *arguments: str) -> str:
    done = subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(folder: Path, name: str, kind: str = "train") -> dict[int, float]:
    import report

    return {r["step"]: r["loss"] for r in report.read(folder / "runs" / name) if r["kind"] == kind}


@pytest.mark.megatron
def test_resumed_run_repeats_the_losses_bit_for_bit(folder):
    """Bitwise: same data, parameters, optimiser and order of sums, whether the run stopped or not."""
    common = ["parallelism.tensor=2", "parallelism.sequence=true"]
    pretrain(folder, *common, "run.name=straight")
    pretrain(folder, *common, "run.name=stopped", "run.stop_after=3")
    assert list(losses(folder, "stopped")) == [1, 2, 3]
    pretrain(folder, *common, "run.name=stopped", "--resume")
    straight = losses(folder, "straight")
    assert list(straight) == [1, 2, 3, 4, 5, 6] and len(set(straight.values())) == 6
    assert losses(folder, "stopped") == straight
    assert losses(folder, "stopped", "validation") == losses(folder, "straight", "validation")
    assert (folder / "runs/stopped/loss.png").stat().st_size > 1000


@pytest.mark.megatron
def test_both_losses_train_alike_on_data_parallel_replicas(folder, capsys):
    """Approximate: fp32 sums in another order. A loss that ignored its gradient would part at the second step."""
    import report

    for loss in ("vpcce", "megatron"):
        pretrain(folder, f"loss.implementation={loss}", f"run.name={loss}", "model.tied=false")
    ours, theirs = (losses(folder, name) for name in ("vpcce", "megatron"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[6] < ours[1] - 0.05, "six steps must teach it something"
    assert report.compare([folder / "runs/vpcce", folder / "runs/megatron"])
    shown = capsys.readouterr().out
    assert "logits per rank (computed)" in shown and "head, peak per rank (measured)" in shown
    metrics = folder / "runs/megatron/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 5', '"loss": 6'))
    assert not report.compare([folder / "runs/vpcce", folder / "runs/megatron"])


@pytest.mark.megatron
def test_a_dead_rank_ends_the_run_with_its_name(folder):
    import psutil

    run = command("parallelism.tensor=2", "run.steps=5000", "run.validate_every=0")
    with subprocess.Popen(run, cwd=folder, stderr=subprocess.PIPE, text=True) as started:
        try:
            metrics, deadline = folder / "runs/small/metrics.jsonl", time.monotonic() + 90
            while not (metrics.exists() and metrics.read_text().count("\n") > 2):
                assert started.poll() is None and time.monotonic() < deadline, "the run never began to train"
                time.sleep(0.1)
            ranks = psutil.Process(started.pid).children()
            victim = next(p for p in ranks if p.environ().get("RANK") == "1")
            os.kill(victim.pid, signal.SIGKILL)
            said = started.communicate(timeout=60)[1]
        finally:
            started.kill()
    assert started.returncode != 0
    assert f"rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: {victim.pid})" in said


def test_settings_name_the_valid_ones():
    import settings

    for name in (path.stem for path in settings.CONFIGS.glob("*.yaml")):
        assert settings.load(name, []).model.vocab_size > 30000
    assert settings.load("tiny", ["loss.backward=sampled", "optimiser.beta2=0.99"]).optimiser.beta2 == 0.99
    for override, message in {
        "run.stepz=3": "run.stepz: no such setting; valid here: name, steps,",
        "runs.steps=3": "runs: no such setting; valid here: model, parallelism, data, optimiser, loss, run",
        "run.steps=many": "run.steps: Value 'many' of type 'str' could not be converted to Integer",
        "loss.backward=half": "loss.backward: expected one of auto, exact, filtered, sampled, got 'half'",
        "run.steps": "run.steps: expected section.key=value",
        "run.steps=[1": "overrides: expected section.key=value, got 'run.steps=[1': while parsing",
        "parallelism.tensor=3": "model.vocab_size: expected a multiple of parallelism.tensor = 3, got 131072",
        "parallelism.tensor=0": "parallelism.tensor: expected at least 1, got 0",
        "parallelism.tensor=8": "model.num_attention_heads: expected a multiple of parallelism.tensor = 8, got 4",
        "model.hidden_size=66": "model.hidden_size: expected a multiple of model.num_attention_heads = 4, got 66",
        "run.micro_batch=0": "run.micro_batch: expected at least 1, got 0",
        "run.steps=0": "run.steps: expected at least 1, got 0",
        "data.validation_percent=0": "data.validation_percent: expected 1 to 99, got 0",
    }.items():
        with pytest.raises(ValueError) as caught:
            settings.load("tiny", [override])
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="does not know model.final_softcap"):
        settings.load("gemma2_2b", ["loss.implementation=megatron"])
    with pytest.raises(ValueError, match="one of gemma2_2b, llama3_8b, .*, tiny, got 'huge'"):
        settings.load("huge", [])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"model: {a: [1\n", "expected a YAML file, got 'some.yaml': while parsing a flow sequence"),
        (b"- 1\n- 2\n", "expected sections with settings, got a list in 'some.yaml'"),
        (b"\x7fELF\xd0\x00", "expected a YAML file, got 'some.yaml': 'utf-8' codec can't decode byte 0xd0"),
    ],
)
def test_files_that_are_no_settings(content, message, tmp_path, monkeypatch):
    import settings

    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.yaml").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        settings.load("some.yaml", [])
    assert str(caught.value).startswith(f"config: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override, message",
    [
        ("optimiser.min_learning_rate=1", "optimiser.min_learning_rate: expected 0 to 0.004, got 1.0"),
        ("optimiser.learning_rate=.nan", "optimiser.learning_rate: expected 0 to 1000, got nan"),
        ("optimiser.beta1=2", "optimiser.beta1: expected 0 to 0.999999, got 2.0"),
        ("optimiser.warmup_steps=-5", "optimiser.warmup_steps: expected at least 0, got -5"),
        ("model.head_dim=3", "model.head_dim: expected a multiple of the size of a pair = 2, got 3"),
        ("model.final_softcap=-1", "model.final_softcap: expected 1e-06 to 1e+06, got -1.0"),
        ("loss.label_smoothing=2", "loss.label_smoothing: expected 0 to 1, got 2.0"),
        ("run.timeout_seconds=99999999999999", "run.timeout_seconds: expected 1 to 1e+07, got 99999999999999"),
        ("run.seed=-1", "run.seed: expected 0 to 4.29497e+09, got -1"),
        ("run.name=../x", "run.name: expected the name of a folder in runs/, got '../x'"),
    ],
)
def test_values_that_would_fail_later(override, message):
    import settings

    with pytest.raises(ValueError) as caught:
        settings.load("tiny", [override])
    assert message in str(caught.value)


def test_a_resumed_run_goes_on_as_it_began():
    import dataclasses

    import pretrain_gpt
    import settings

    began = dataclasses.asdict(settings.load("tiny", [])) | {"ranks": 2}
    same = dataclasses.asdict(settings.load("tiny", ["run.steps=70", "loss.implementation=megatron"])) | {"ranks": 2}
    pretrain_gpt.check_resumed(began, same)
    for changed, message in (
        (dataclasses.asdict(settings.load("tiny", ["run.seed=7"])) | {"ranks": 2}, "run.seed was 1234 .*, got 7"),
        (same | {"ranks": 1}, "--resume: ranks was 2 when the run began, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrain_gpt.check_resumed(began, changed)


@pytest.mark.parametrize("line", ["{'text': 1", '{"txt": "a"}', '["text"]', '{"text": 3}', "7"])
def test_lines_without_text(line, tmp_path):
    import corpus

    (tmp_path / "a.jsonl").write_text('{"text": "x\u2028y"}\n' + line)
    with pytest.raises(ValueError, match='^data.source: expected an object with a string "text", .* in line 2 of a'):
        list(corpus.documents(str(tmp_path)))


@pytest.mark.megatron
def test_every_rank_ends_with_one_sentence(folder):
    """One rank of a node reads the text; the others are told what it refused, and nothing unfinished stays."""
    (folder / "text/more.jsonl").write_text("no json")
    done = subprocess.run(command("parallelism.tensor=2"), cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "pretrain_gpt: data.source: expected an object with a string \"text\", got 'no json'" in done.stderr
    assert "pretrain_gpt.py" not in done.stderr.partition("pretrain_gpt: ")[0], "no traceback"
    assert not list((folder / "runs/data").glob("*"))


@pytest.mark.megatron
def test_a_cache_that_cannot_be_written(folder):
    done = subprocess.run(command("data.cache=/proc/x"), cwd=folder, capture_output=True, text=True, timeout=200)
    assert "pretrain_gpt: data.cache: expected a folder to write to, got '/proc/x': " in done.stderr
    assert "pretrain_gpt.py" not in done.stderr.partition("pretrain_gpt: ")[0], "no traceback"


def test_documents_and_tokenizers(folder):
    import corpus

    texts = dict(corpus.documents(str(folder / "text")))
    assert texts["more.jsonl:2"] == "line 2: abcabc" and len(texts) == 24
    assert next(iter(corpus.documents("stdlib")))[0] < "b"
    assert corpus.make_tokenizer("bytes", 257).encode("é") == [195, 169]
    text = "def test_tokenizers(): return 'naïve 北京'"
    whole, first = corpus.make_tokenizer("tekken", 200000), corpus.make_tokenizer("tekken", 32064)
    assert whole.vocab_size == 131072 and first.vocab_size == 32064
    assert len(whole.encode(text)) <= len(first.encode(text)) and max(first.encode(text)) < 32064
    with pytest.raises(ValueError, match="tokenizer=bytes needs model.vocab_size >= 257, got 256"):
        corpus.make_tokenizer("bytes", 256)
    with pytest.raises(ValueError, match="data.source: expected 'stdlib' or a folder"):
        next(corpus.documents("nowhere"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
def test_head_memory_sees_what_the_head_allocates():
    """Approximate, for pages and buffers of BLAS: the output, its square and their gradients, 64 MiB each."""
    import report

    head = torch.nn.Linear(16, 16384, bias=False)
    memory = report.HeadMemory(head)
    hidden = torch.randn(1024, 16, requires_grad=True)
    head(hidden).sum().backward()
    assert memory.peak is None, "not armed"
    memory.armed = True
    head(hidden).square().sum().backward()
    assert 240 * 2**20 < memory.peak < 320 * 2**20
