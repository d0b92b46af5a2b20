"""Mask blocks of a policy's sequence: each block reads itself and the blocks before it.

Scene and instruction are one block, proprioception the next, the fused target token the last of the prefix; actions
come after. Were proprioception in the first block, the net would read the target off the arm's motion (late in a
demonstration the arm stands at it), and at the start, where that tells nothing, it would fail (the order is that of
pi0, Black et al. 2024).
"""

from torch import Tensor

from robotattn.attention import PrefixKV, row_positions
from robotattn.attention.masks import Blocks, Causal, Mask
from robotattn.attention.masks import Prefix as Begin
from robotattn.policies.base import Memory
from robotattn.tokens.sequence import Tokens

OWN = ("proprioception", "target")  # one token each, at the end of a grounded prefix


def joined(prefix: int, actions: int) -> Mask:
    """Return the mask of a prefix and one block of actions after it, which read one another."""
    return Blocks((prefix - len(OWN), *(1 for _ in OWN), actions))


def causal(prefix: int, actions: int) -> Mask:
    """Return the mask of a prefix and of actions after it, each a block of its own."""
    return joined(prefix, actions) & (Begin(prefix) | Causal())


def check_order(tokens: Tokens) -> None:
    """Raise ValueError if the prefix does not end in the tokens that have blocks of their own."""
    end = tokens.values.shape[1]
    for place, name in enumerate(OWN, start=end - len(OWN)):
        if tokens.slices.get(name) != slice(place, place + 1):
            raise ValueError(f"the prefix must end in {list(OWN)}, one token each, got {dict(tokens.slices)}")


def remember(kv: PrefixKV, tokens: Tokens, condition: Tensor) -> Memory:
    """Keep the keys and values of an encoded prefix."""
    return Memory(tuple(zip(kv.keys, kv.values, strict=True)), tokens.mask, condition, tokens.state)


def recall(memory: Memory) -> PrefixKV:
    """Return the prefix that `remember` kept, as the cache that action tokens read."""
    keys, values = zip(*memory.context, strict=True)
    padded = memory.mask.device.type != "cpu" or not bool(memory.mask.all())  # elsewhere a look would have to wait
    return PrefixKV(keys, values, memory.mask, row_positions(memory.mask), padded)
