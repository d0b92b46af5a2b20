"""Episode seeds: streams that never share a seed, whatever the base seed, the batch size or the order of use.

In go the name of a split and a base seed; out come Python integers for ``env.reset(seed=...)``. Seed i is a hash
(numpy's SeedSequence) of (split, base, i), so neighbouring base seeds share nothing: ``base + i`` would make two
"independent" evaluations run mostly the same episodes.
"""

from zlib import crc32

import numpy as np

LIMIT = 2**32  # of base and index: SeedSequence reads an integer as 32-bit words, one word each keeps them apart


def stream(split: str, base: int, count: int, start: int = 0) -> list[int]:
    """Return seeds `start` to ``start + count - 1`` of a split, each in [0, 2**63).

    Raises ValueError when base or an index is outside [0, 2**32), count is negative or the split has no name.
    """
    if not split:
        raise ValueError(f"split={split!r}: a stream of seeds needs a name, such as 'record' or 'evaluate'")
    if not 0 <= base < LIMIT:
        raise ValueError(f"base={base}: a base seed is in [0, 2**32)")
    if count < 0 or start < 0 or start + count > LIMIT:
        raise ValueError(f"count={count}, start={start}: neither is negative, and their sum is at most 2**32")
    name = crc32(split.encode("utf-8"))
    return [_seed(name, base, index) for index in range(start, start + count)]


def _seed(name: int, base: int, index: int) -> int:
    word = np.random.SeedSequence((name, int(base), index)).generate_state(1, np.uint64)[0]
    return int(word) >> 1  # file formats and C libraries want it signed
