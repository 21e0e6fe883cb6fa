"""A self-contained HTML page: headings, tables and embedded pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .8rem .2rem 0;text-align:left;
border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}img{max-width:100%}code{background:#f3f3f3}"""


@dataclass
class Page:
    """A page under construction."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def rows(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows
        )
        self.parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def picture(self, image: bytes, caption: str, kind: str = "png") -> None:
        data = base64.b64encode(image).decode()
        self.parts.append(f'<img alt="{html.escape(caption)}" src="data:image/{kind};base64,{data}">')
        self.text(caption)

    def render(self) -> str:
        title = html.escape(self.title)
        head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        return (
            f"{head}<style>{STYLE}</style></head><body><h1>{title}</h1>{''.join(self.parts)}</body></html>\n"
        )
