"""Read the configuration of a run, which anybody may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from policies.errors import CheckpointError
from policies.storage.strict_json import MAX_DEPTH, depth_of, own_file, read_small

_MOST_BYTES = 2**18


class _PlainLoader(get_yaml_loader()):  # type: ignore[misc]
    """YAML of scalars, lists and mappings; aliases are refused, as they can expand a short text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read", mark)
        return super().compose_node(parent, index)


def read_config(path: Path) -> dict[str, Any]:
    """Read a mapping of plain values without resolving or building anything.

    Raises:
        CheckpointError: If the file is damaged or not a mapping.
    """
    try:
        found = yaml.load(read_small(own_file(path), _MOST_BYTES), Loader=_PlainLoader)
        if not isinstance(found, dict):
            raise ValueError(f"it must hold keys with values; got {type(found).__name__}")
        if depth_of(found) > MAX_DEPTH:
            raise ValueError("it is nested too deep")
        _require_plain(found)
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{path} is damaged ({' '.join(reason.split())}). Restore it.") from None
    return found


def _require_plain(value: Any) -> None:
    """Refuse values outside JSON, such as dates, sets and non-string keys."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys must be text; got {odd[0]!r}")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _require_plain(item)
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(f"values must be text or numbers; got {type(value).__name__}")
