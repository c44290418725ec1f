"""How the backward computes the two gradients: every column, only the large ones, or an unbiased sample.

    policy       dE = G @ weight and dC = G.T @ hidden use                    gradient
    exact()      every column of G                                            exact
    filtered()   128x128 tiles of G in which some |p - onehot| >= eps         biased: the rest is dropped
    sampled()    columns of 128 tokens, kept with probability q = min(1, m / eps) and scaled by 1 / q, where m is
                 the largest p of the column, 1 for a target                       exact in expectation

dE and dC may use different policies: pass `backward=(policy of dE, policy of dC)`. Cut Cross-Entropy's FullC
(arXiv 2411.09009, section 5.3) is `(filtered(), exact())`; `(sampled(), exact())` is its unbiased counterpart.
"""

import ast
import functools
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class BackwardPolicy:
    """Made by `exact`, `filtered` and `sampled`; compares by value."""

    kind: str
    eps: float = 0.0
    sort: bool = False
    deterministic: bool = False
    # The fields as text, made once: torch.compile may turn eps into a symbol, which has no digits.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "text", repr((self.kind, self.eps, self.sort, self.deterministic)))

    @classmethod
    @functools.lru_cache(maxsize=256)
    def from_text(cls, text: str) -> "BackwardPolicy":
        return cls(*ast.literal_eval(text))


def exact() -> BackwardPolicy:
    """Every column of G takes part: the gradient of `F.cross_entropy(hidden @ weight.T, target)` itself."""
    return BackwardPolicy("exact")


def filtered(eps: float = 2**-12, *, sort: bool = False, deterministic: bool = False) -> BackwardPolicy:
    """Cut Cross-Entropy's rule: a tile of 128 tokens and 128 ids is dropped when all its |p - onehot| < eps.

    The gradient is biased; it exists so that the paper can be reproduced and compared.

    Args:
        eps: threshold on |softmax - onehot|.
        sort: order the vocabulary by mean logit first, so that large entries share tiles (paper, section 4.3).
        deterministic: bitwise repeatable; may be slower.
    """
    return BackwardPolicy("filtered", _checked_eps("filtered", eps), sort, deterministic)


def sampled(eps: float = 2**-12, *, deterministic: bool = False) -> BackwardPolicy:
    """A column is kept with probability min(1, m / eps) and scaled by the inverse: exact in expectation.

    On a GPU the gradient is computed exactly, at about the cost of `exact()`, where sampling would not pay: where even
    a flat softmax would keep DENSE of its columns, which is below 11,703 ids at the default eps, and in calls that
    turn out to keep too many.

    Args:
        eps: targets, and columns whose largest softmax reaches eps, are always kept; smaller is closer and slower.
        deterministic: bitwise repeatable for a given seed; otherwise only the order of fp32 additions may vary.
    """
    return BackwardPolicy("sampled", _checked_eps("sampled", eps), False, deterministic)


def _checked_eps(who: str, eps: float) -> float:
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"{who}: eps must be a float, got {type(eps).__name__}")
    if not 0 < eps <= 1:
        raise ValueError(f"{who}: expected 0 < eps <= 1, got {eps}")
    return float(eps)


DENSE = 0.35  # of all columns, see `sampled`

# What "auto" stands for. Made here, so that a traced call finds them ready.
_EXACT, _SAMPLED = exact(), sampled()


def resolve(
    who: str, backward, dtype: torch.dtype, device: torch.device, vocab_size: int | None = None
) -> tuple[BackwardPolicy, BackwardPolicy]:
    """The policies of dE and dC that the argument `backward` of `who` stands for, or an error.

    Without a vocabulary yet nothing says what would not pay.
    """
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    if len(pair) != 2:
        raise ValueError(
            f"{who}: backward must be a policy or (policy of dE, policy of dC), got a tuple of {len(pair)}"
        )
    half = dtype in (torch.bfloat16, torch.float16)
    auto = _SAMPLED if half and device.type == "cuda" else _EXACT
    resolved = []
    for policy in pair:
        if isinstance(policy, str) and policy == "auto":
            policy = auto
        if not isinstance(policy, BackwardPolicy):
            raise TypeError(
                f'{who}: backward must be "auto", vpcce.exact(), vpcce.filtered(), vpcce.sampled() or a pair of them, '
                f"got {policy!r}"
            )
        if device.type == "cuda" and policy.kind == "sampled" and vocab_size is not None:
            if DENSE * policy.eps * vocab_size <= 1:  # a flat softmax keeps 1 / (eps * vocab_size) of its columns
                policy = _EXACT
        resolved.append(policy)
    return resolved[0], resolved[1]
