"""The settings of a pretraining run: a YAML file, then `section.key=value` from the command line on top.

The dataclasses below are the whole schema. OmegaConf merges and converts; a key that does not exist, or a value of
the wrong type, is an error that names the valid ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"


def _one_of(who: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{who}: expected one of {', '.join(valid)}, got {value!r}")


def _at_least(lowest: int, section: str, settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < lowest:
            raise ValueError(f"{section}.{name}: expected at least {lowest}, got {value}")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN is not
        raise ValueError(f"{name}: expected {low:g} to {high:g}, got {value}")


def _multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if value % unit:
        raise ValueError(f"{name}: expected a multiple of {unit_name} = {unit}, got {value}")


@dataclass
class Model:
    vocab_size: int = 131072  # a multiple of parallelism.tensor
    hidden_size: int = 64
    ffn_hidden_size: int = 256
    num_layers: int = 2
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    head_dim: int | None = None
    activation: str = "swiglu"  # swiglu | geglu | gelu
    sequence_length: int = 256
    tied: bool = True  # the head is the embedding's weight
    final_softcap: float | None = None

    def __post_init__(self) -> None:
        _one_of("model.activation", self.activation, ("swiglu", "geglu", "gelu"))
        sizes = ("vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "sequence_length")
        _at_least(1, "model", self, *sizes, "num_query_groups", "head_dim")
        heads = self.num_attention_heads
        if self.head_dim is None:
            _multiple("model.hidden_size", self.hidden_size, "model.num_attention_heads", heads)
        # Rotary embeddings turn pairs.
        _multiple("model.head_dim", self.head_dim or self.hidden_size // heads, "the size of a pair", 2)
        _within("model.final_softcap", self.final_softcap, 1e-6, 1e6)
        if self.num_query_groups is not None:
            _multiple("model.num_attention_heads", heads, "model.num_query_groups", self.num_query_groups)


@dataclass
class Parallelism:
    tensor: int = 1  # the remaining ranks are data parallel
    sequence: bool = False

    def __post_init__(self) -> None:
        _at_least(1, "parallelism", self, "tensor")


@dataclass
class Data:
    source: str = "stdlib"  # or a folder with .txt and .jsonl files (each line an object with "text")
    tokenizer: str = "tekken"  # tekken | bytes
    validation_percent: int = 5
    cache: str = "runs/data"

    def __post_init__(self) -> None:
        _one_of("data.tokenizer", self.tokenizer, ("tekken", "bytes"))
        _within("data.validation_percent", self.validation_percent, 1, 99)


@dataclass
class Optimiser:
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        _within("optimiser.learning_rate", self.learning_rate, 0, 1e3)
        _within("optimiser.min_learning_rate", self.min_learning_rate, 0, self.learning_rate)
        _at_least(0, "optimiser", self, "warmup_steps")
        for name in ("beta1", "beta2"):
            _within(f"optimiser.{name}", getattr(self, name), 0, 0.999999)
        for name in ("weight_decay", "clip_grad"):
            _within(f"optimiser.{name}", getattr(self, name), 0, 1e6)


@dataclass
class Loss:
    implementation: str = "vpcce"  # vpcce | megatron
    backward: str = "auto"  # auto | exact | filtered | sampled
    backward_weight: str | None = None  # another policy for the weight's gradient
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _one_of("loss.implementation", self.implementation, ("vpcce", "megatron"))
        for name in ("backward", "backward_weight"):
            if getattr(self, name) is not None:
                _one_of(f"loss.{name}", getattr(self, name), ("auto", "exact", "filtered", "sampled"))
        _within("loss.z_loss", self.z_loss, 0, 1e6)
        _within("loss.label_smoothing", self.label_smoothing, 0, 1)


@dataclass
class Run:
    name: str = "run"  # results go to runs/<name>
    steps: int = 100
    stop_after: int | None = None  # end early with a checkpoint, as before a job's time limit
    micro_batch: int = 2  # sequences per rank and forward
    global_batch: int = 2  # sequences per step, over all ranks
    validate_every: int = 50
    validation_batches: int = 4
    save_every: int = 0  # 0: only at the end
    precision: str = "fp32"  # fp32 | bf16 (needs CUDA)
    seed: int = 1234
    timeout_seconds: int = 300  # a collective that waits longer fails; Megatron's groups count whole minutes

    def __post_init__(self) -> None:
        _one_of("run.precision", self.precision, ("fp32", "bf16"))
        if Path(self.name).name != self.name or self.name in ("", ".."):
            raise ValueError(f"run.name: expected the name of a folder in runs/, got {self.name!r}")
        _within("run.seed", self.seed, 0, 2**32 - 1)
        _within("run.timeout_seconds", self.timeout_seconds, 1, 10**7)
        counts = ("steps", "stop_after", "micro_batch", "global_batch", "validation_batches")
        _at_least(1, "run", self, *counts)
        _at_least(0, "run", self, "validate_every", "save_every")


@dataclass
class Settings:
    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    data: Data = field(default_factory=Data)
    optimiser: Optimiser = field(default_factory=Optimiser)
    loss: Loss = field(default_factory=Loss)
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        split = ["vocab_size", "num_attention_heads", "ffn_hidden_size"]
        if self.parallelism.sequence:
            split.append("sequence_length")
        for name in split:
            _multiple(f"model.{name}", getattr(self.model, name), "parallelism.tensor", self.parallelism.tensor)
        if self.loss.implementation == "megatron":
            changed = [
                name
                for name, value in {
                    "model.final_softcap": self.model.final_softcap,
                    "loss.z_loss": self.loss.z_loss,
                    "loss.label_smoothing": self.loss.label_smoothing,
                }.items()
                if value
            ]
            if changed:
                raise ValueError(f"loss.implementation=megatron does not know {', '.join(changed)}")


def load(config: str, overrides: list[str]) -> Settings:
    """Settings of the file `config` (a path, or a name in configs/) with `section.key=value` on top.

    Raises:
        ValueError: an unknown config or key (with the valid ones), or a value that does not fit.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    path = next((p for p in (Path(config), CONFIGS / f"{config}.yaml") if p.is_file()), None)
    if path is None:
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise ValueError(f"config: expected a YAML file or one of {names}, got {config!r}")
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"{override}: expected section.key=value")
    try:
        read = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config: expected a YAML file, got {config!r}: {_line(error)}") from None
    if not isinstance(read, DictConfig):
        raise ValueError(f"config: expected sections with settings, got a list in {config!r}")
    try:
        given = OmegaConf.from_dotlist(overrides)
    except yaml.YAMLError as error:
        raise ValueError(
            f"overrides: expected section.key=value, got {' '.join(overrides)!r}: {_line(error)}"
        ) from None
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Settings), read, given)
        settings: Any = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        owner = error.object_type if dataclasses.is_dataclass(error.object_type) else Settings
        valid = ", ".join(f.name for f in dataclasses.fields(owner))
        raise ValueError(f"{error.full_key}: no such setting; valid here: {valid}") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or config}: {str(error).splitlines()[0]}") from None
    return settings


def _line(error: Exception) -> str:
    """What YAML's errors spread over several lines."""
    return " ".join(str(error).split())
