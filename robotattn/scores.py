"""What counts as a success: within the time limit, within 3 s, at the first try. Lateness shows in the latter two."""

from collections.abc import Mapping, Sequence
from typing import Any

SOON = 3.0  # (s)


def outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[bool]]:
    """Name each score that episodes tell of, and whether each one met it; time (s) and tries may be absent."""
    done = [bool(row["success"]) for row in rows]
    if not all("time" in row and "tries" in row for row in rows):
        return {"success": done}
    soon = [row["time"] <= SOON for row in rows]
    first = [row["tries"] <= 1 for row in rows]
    return {
        "success": done,
        f"success_within_{SOON:g}_s": [a and b for a, b in zip(done, soon, strict=True)],
        "success_at_first_try": [a and b for a, b in zip(done, first, strict=True)],
    }
