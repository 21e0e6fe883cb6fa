"""Extension of mkdocstrings: docstrings as the Markdown of the site shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    """Adapts the docstring of every object before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """Rename the section `Example:` to the one that mkdocstrings knows, and escape `<name>` outside of code.

    HTML would take such a name for a tag, and show nothing.
    """
    lines: list[str] = []
    code, last = -1, 0  # indentation of the line before a block of code, and of the last line of text
    for line in re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE).splitlines():
        indent = len(line) - len(line.lstrip())
        if line and lines and not lines[-1] and indent >= last + 4:
            code = last
        elif line and indent <= code:
            code = -1
        if line and code < 0:
            code, last = (indent if line.endswith("Examples:") else -1), indent
            parts = re.split(r"(`[^`]*`)", line)
            parts[::2] = [re.sub(r"<(?=[a-z/])", "&lt;", part) for part in parts[::2]]
            line = "".join(parts)
        lines.append(line)
    return "\n".join(lines)
