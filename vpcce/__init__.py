"""Vocabulary-parallel Cut Cross-Entropy: the loss of a language-model head without its logits."""

from vpcce.loss import LinearStats, linear_cross_entropy, linear_logprobs, linear_stats
from vpcce.module import LinearCrossEntropy
from vpcce.parallel.shard import VocabShard
from vpcce.policy import exact, filtered, sampled

__all__ = [
    "LinearCrossEntropy",
    "LinearStats",
    "VocabShard",
    "exact",
    "filtered",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_stats",
    "sampled",
]
