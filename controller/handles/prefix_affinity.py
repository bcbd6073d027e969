"""Remembers which replica has computed the beginning of which prompts: its prefix cache may still hold them."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

_BLOCK_TOKENS = 32  # vLLM shares whole blocks only: of 16 tokens on a GPU, of 32 here on the CPU
_NUM_REMEMBERED = 65_536  # blocks; 2 million tokens


class PrefixAffinity:
    """The blocks of tokens that each replica has seen, each with all the tokens before it.

    `weights` tells under which weights tokens were computed: a prefix under others is of no use.
    """

    def __init__(self, num_replicas: int) -> None:
        """Starts without blocks. Of one replica there is nothing to remember."""
        self._is_useful = num_replicas > 1
        self._owners: OrderedDict[int, set[int]] = OrderedDict()  # replicas of a block, least recently used first

    def remember(self, tokens: Sequence[int], replica: int, weights: Hashable = None) -> None:
        """Notes that a replica computes these tokens."""
        if not self._is_useful:
            return
        for block in _blocks(tokens, weights):
            self._owners.setdefault(block, set()).add(replica)
            self._owners.move_to_end(block)
        while len(self._owners) > _NUM_REMEMBERED:
            self._owners.popitem(last=False)

    def owners(self, tokens: Sequence[int], weights: Hashable = None) -> set[int]:
        """The replicas that know the longest beginning of `tokens`, if that is at least half of its blocks.

        A shorter match, such as a system prompt that all prompts begin with, saves too little to say where to go.
        """
        longest: set[int] = set()
        num_blocks = num_known = 0
        for num_blocks, block in enumerate(_blocks(tokens, weights), start=1):
            known = self._owners.get(block)
            if known and num_known == num_blocks - 1:
                longest, num_known = known, num_blocks
        return set(longest) if 2 * num_known >= num_blocks else set()

    def forget(self, replica: int) -> None:
        """Notes that a replica has lost its cache."""
        for owners in self._owners.values():
            owners.discard(replica)

    def clear(self) -> None:
        """Notes that all replicas have lost their caches."""
        self._owners.clear()


def _blocks(tokens: Sequence[int], weights: Hashable) -> Iterator[int]:
    """For each whole block of tokens, a hash of it and of all blocks before it."""
    block = hash(weights)
    for start in range(0, len(tokens) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        block = hash((block, tuple(tokens[start : start + _BLOCK_TOKENS])))
        yield block
