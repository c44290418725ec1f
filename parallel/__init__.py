"""What happens between ranks: shards of the vocabulary, the few collectives, and the frameworks that own the ranks."""

from vpcce.parallel.shard import VocabShard

__all__ = ["VocabShard"]
