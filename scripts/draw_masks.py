"""Draw who reads whom in each decoder, from the masks that the code uses: docs/masks.png.

python scripts/draw_masks.py
"""

from pathlib import Path

import numpy as np
import tyro

from robotattn.attention.masks import Causal, Everything, Mask, Window
from robotattn.experiments.drawing import matrix, panels, png
from robotattn.policies.blocks import causal, joined

PREFIX, ACTIONS = 10, 6  # tokens: small enough to count. The last two of the prefix: proprioception and target
GROUPS = (("scene + text", 8), ("arm", 1), ("target", 1), ("actions", ACTIONS))


def masks() -> dict[str, tuple[Mask, int, int]]:
    """Title → mask, first query slot, number of keys."""
    whole = PREFIX + ACTIONS
    return {
        "act: encoder": (Everything(), 0, PREFIX),
        "act: action queries": (Everything(), PREFIX, PREFIX),
        "autoregressive,\nblockwise autoregressive": (causal(PREFIX, ACTIONS), 0, whole),
        "blockwise flow": (joined(PREFIX, ACTIONS), 0, whole),
        "causal": (Causal(), 0, whole),
        "causal window of 5": (Causal() & Window(5), 0, whole),
    }


def main(out: Path = Path("docs/masks.png")) -> None:
    """Write the picture.

    Args:
        out: The PNG file.
    """
    shown = masks()
    figure, axes = panels([1.0] * len(shown), height=2.9, total=14.0)
    for one, (title, (mask, first, keys)) in zip(axes, shown.items(), strict=True):
        last = PREFIX + ACTIONS if first or keys > PREFIX else PREFIX
        matrix(one, mask.picture(last, keys).numpy()[first:], 0, 1.6)
        one.set_title(title)
        _edges(one, first, last, keys)
    out.write_bytes(png(figure))
    print(out)


def _edges(axes, first: int, last: int, keys: int) -> None:  # type: ignore[no-untyped-def]
    """Draw the borders of the token groups; queries down, keys across."""
    ends = np.cumsum([size for _, size in GROUPS])
    for end in ends[:-1]:
        if end < keys:
            axes.axvline(end - 0.5, color="white", linewidth=1.2)
        if first < end < last:
            axes.axhline(end - first - 0.5, color="white", linewidth=1.2)
    starts = ends - [size for _, size in GROUPS]
    named = [(name, start, end) for (name, _), start, end in zip(GROUPS, starts, ends, strict=True)]
    inside = [(name, (start + end - 1) / 2) for name, start, end in named if end <= keys]
    axes.set_xticks([middle for _, middle in inside], [name for name, _ in inside], rotation=90, fontsize=7)
    inside = [(name, (start + end - 1) / 2 - first) for name, start, end in named if first <= start and end <= last]
    axes.set_yticks([middle for _, middle in inside], [name for name, _ in inside], fontsize=7)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
