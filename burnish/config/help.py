"""Help pages of commands, kept as text: `burnish <command> --help` imports nothing of what it describes.

`python -m burnish.commands.keys` writes them.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from pathlib import Path

from policies.registry import PLUGIN_GROUP, PLUGIN_VARIABLE

KEPT = Path(__file__).with_name("help.json")


def kept_help(command: str) -> str | None:
    """Return the help page of a command; None if it is not kept, or plug-ins add options to it."""
    if os.environ.get(PLUGIN_VARIABLE) or entry_points(group=PLUGIN_GROUP):
        return None
    text: str | None = json.loads(KEPT.read_text(encoding="utf-8")).get(command)
    return text
