"""Whether a policy, a dataset and a task are made for each other: the only place that compares widths."""

from __future__ import annotations

from typing import Any

from policies.errors import ConfigError


def require_fit(name: str, thing: Any, other_name: str, other: Any, *, advice: str) -> None:
    """Refuse two things whose observations, actions or goals differ in width, before any work starts.

    A width that one of them does not have (the goals of a dataset) is not compared.

    Args:
        name: What messages call `thing`, e.g. `env=hopper`.
        thing: A task's specification, a policy, or a dataset.
        other_name: What messages call `other`.
        other: Another of these.
        advice: What to do.

    Raises:
        ConfigError: If they do not fit; names both, and what is how wide.
    """
    for what in ("observation", "action", "goal"):
        width, other_width = _width(thing, what), _width(other, what)
        if None not in (width, other_width) and width != other_width:
            raise ConfigError(
                f"{name} has {what} width {width}, but {other_name} has {what} width {other_width}. {advice}"
            )
    _require_images(name, thing, other_name, other, advice)


def _require_images(name: str, policy: Any, dataset_name: str, dataset: Any, advice: str) -> None:
    """Refuse a dataset without the images that a policy looks at."""
    shown: dict[str, Any] | None = getattr(dataset, "image_shapes", None)
    if shown is None:
        return
    for camera, shape in getattr(policy, "images", {}).items():
        if tuple(shape) != shown.get(camera):
            raise ConfigError(
                f"{name} looks at images {tuple(shape)} of camera '{camera}', but {dataset_name} has "
                f"{shown.get(camera, 'none')}. {advice}"
            )


def _width(thing: Any, what: str) -> int | None:
    """Return a width, None where there is none; a policy keeps that of its actions in its chunk."""
    if what == "action":
        thing = getattr(thing, "chunk", thing)
    width: int | None = getattr(thing, {"observation": "obs_dim"}.get(what, f"{what}_dim"), None)
    return width
