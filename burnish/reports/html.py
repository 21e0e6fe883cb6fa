"""HTML pages from the templates beside this module and those of the laboratory; every value is escaped."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from burnish.reports.curves import short_value
from burnish.reports.facts import duration


@cache
def _templates() -> Environment:
    made = Environment(
        loader=ChoiceLoader([PackageLoader("burnish.reports"), PackageLoader("burnish.lab")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"data_uri": data_uri, "duration": duration, "short_value": short_value}
    return made


def data_uri(image: bytes, kind: str) -> str:
    """Return an image, or a video of kind mp4, as an address that holds its bytes."""
    medium = "video" if kind == "mp4" else "image"
    return f"data:{medium}/{kind};base64,{base64.b64encode(image).decode()}"


def render(template: str, **values: Any) -> str:
    """Fill a template; an undefined name is an error."""
    return _templates().get_template(template).render(**values)
