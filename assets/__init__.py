"""Models, checkpoints and templates that ship with the package."""

from importlib.resources import files
from pathlib import Path


def path(name: str) -> Path:
    """The real path of an asset, for example ``path("panda/panda.xml")``; raises FileNotFoundError naming it."""
    found = Path(str(files("robotattn.assets"))) / name
    if not found.exists():
        raise FileNotFoundError(f"{found}: no such asset")
    return found
