"""The page: tables and figures of the experiments in one HTML file that needs nothing beside it."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from robotattn import assets


def render(found: Sequence[tuple[Mapping[str, Any], bytes]]) -> str:
    """Return the page as HTML text. found: for each experiment what its JSON file holds, and its figure as PNG."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(assets.path("experiments.html.j2").read_text(encoding="utf-8"))
    shown = [
        {**told, "picture": f"data:image/png;base64,{base64.b64encode(picture).decode()}"} for told, picture in found
    ]
    rows = [row for told, _ in found for row in told["rows"]]
    return template.render(experiments=shown, agreeing=sum(row["verdict"] == "agrees" for row in rows), total=len(rows))
