"""What a call asks for beyond its tensors, as a value and as text, and the comparison of it over ranks.

Custom operators take tensors, numbers and strings. `Settings` goes through them as a string, so that torch.compile,
which traces the encoding too, and the ranks that compare their settings see one constant.
"""

import ast
import functools
from dataclasses import replace
from typing import NamedTuple

from vpcce.parallel import collectives
from vpcce.policy import BackwardPolicy


class Settings(NamedTuple):
    """What a call asks for beyond its tensors; travels through the operators as text."""

    start: int
    stop: int
    vocab_size: int
    group: str  # name of the process group, "" for a single rank
    check: bool
    sequence_parallel: bool
    ignore_index: int | None  # None: every token counts
    entropy: bool
    argmax: bool
    logit_sum: bool
    marks: bool  # a sampled or filtered backward will follow
    reduce_hidden_grad: bool
    upstream: str  # what the loss does with the statistics
    deterministic: bool  # torch.use_deterministic_algorithms
    hidden_policy: str  # `BackwardPolicy.text`
    weight_policy: str

    @property
    def n_valid(self) -> int:
        return max(0, min(self.stop, self.vocab_size) - self.start)

    @property
    def policies(self) -> tuple[BackwardPolicy, BackwardPolicy]:
        """Of dE and dC."""
        made = (BackwardPolicy.from_text(self.hidden_policy), BackwardPolicy.from_text(self.weight_policy))
        if self.deterministic:
            made = (replace(made[0], deterministic=True), replace(made[1], deterministic=True))
        return made

    def encode(self) -> str:
        return repr(tuple(self))


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> Settings:
    return Settings(*ast.literal_eval(text))


# What a user would call a field.
NAMES = {
    "marks": "whether a sampled gradient is wanted",
    "hidden_policy": "the policy of dE",
    "weight_policy": "the policy of dC",
    "upstream": "(reduction, label_smoothing, z_loss, shift)",
}


def check_agreement(group, how: Settings, hidden, weight, target, bias, options, lora=None) -> None:
    """Every rank must ask the same question of the same tokens; only the rows of the weight differ."""
    same = how._replace(start=0, stop=0, group="")
    fields = [
        ("the number of tokens", target.shape[0]),
        ("the number of ids per token", target.shape[1:].numel()),
        ("hidden's shape", tuple(hidden.shape)),
        ("hidden's dtype", str(hidden.dtype)),
        ("weight's dtype", str(weight.dtype)),
        ("the bias' dtype", None if bias is None else str(bias.dtype)),
        ("vocab_size", how.vocab_size),
        ("logit_scale and softcap", options),
        ("lora's rank, scale and dtypes", lora),
        *((NAMES.get(name, name), value) for name, value in same._asdict().items() if name != "vocab_size"),
    ]
    config = repr((fields, how.start, how.stop))
    collectives.agree(group, config, fields, (how.start, how.start + how.n_valid))
