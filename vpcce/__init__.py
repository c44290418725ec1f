"""Vocabulary-parallel Cut Cross-Entropy: the loss of a language-model head without its logits."""

from vpcce.lora import LoRA
from vpcce.loss import LinearStats, TopK, linear_cross_entropy, linear_logprobs, linear_stats
from vpcce.module import LinearCrossEntropy
from vpcce.parallel.shard import VocabShard
from vpcce.policy import exact, filtered, sampled
from vpcce.soft_targets import linear_soft_cross_entropy
from vpcce.topk import linear_topk

__all__ = [
    "LinearCrossEntropy",
    "LinearStats",
    "LoRA",
    "TopK",
    "VocabShard",
    "exact",
    "filtered",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_soft_cross_entropy",
    "linear_stats",
    "linear_topk",
    "sampled",
]
