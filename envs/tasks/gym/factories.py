"""Functions and objects of a Python process as environments: `Gym.factory` names them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

from policies.errors import ConfigError

HERE = "<this process>"
"""Module name of factories that exist in this process only."""
_FACTORIES: dict[str, Callable[[], Any]] = {}


def local_factory(make: Callable[[], Any]) -> str:
    """Return the name of a factory for `Gym.factory`: its import path, or an entry for this process."""
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", "")
    if module and module != "__main__" and name.isidentifier():
        with contextlib.suppress(ImportError):
            if getattr(importlib.import_module(module), name, None) is make:
                return f"{module}:{name}"
    entry = next((key for key, known in _FACTORIES.items() if known is make), "")
    if not entry:
        entry = f"{_identity(make)}-{len(_FACTORIES)}"
        _FACTORIES[entry] = make
    return f"{HERE}:{entry}"


def _identity(make: Any) -> str:
    """Return what an object or function makes: gymnasium's id, else the class, and a digest of its spaces."""
    try:
        made = make() if callable(make) else make
    except Exception:  # it needs arguments, or its error is reported where the task is described
        return str(getattr(make, "__qualname__", type(make).__name__))
    try:
        id_ = getattr(getattr(made, "spec", None), "id", None)
        name = id_ or type(getattr(made, "unwrapped", made)).__name__
        spaces = [repr(getattr(made, space, None)) for space in ("observation_space", "action_space")]
    finally:
        if made is not make and hasattr(made, "close"):
            made.close()
    return f"{name}-{hashlib.sha256(''.join(spaces).encode()).hexdigest()[:6]}"


def factory_at(path: str) -> Callable[..., Any]:
    """Return a factory by its path; an environment object is copied for every call.

    For an object of another process, the last one that was passed for the same task is taken.

    Raises:
        ConfigError: If there is none.
    """
    module, _, name = path.rpartition(":")
    if module == HERE:
        alike = [key for key in _FACTORIES if without_number(key) == without_number(name)]
        if not alike:
            raise ConfigError(
                f"env.factory={path} was an object of another Python process. Pass it again, as "
                "env=<environment or function>, or use a function of a module that can be imported."
            )
        made = _FACTORIES[name if name in alike else alike[-1]]
        return made if callable(made) else lambda **_: copy.deepcopy(made)
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def without_number(entry: str) -> str:
    """Return an entry for this process without the number that tells it from equal ones."""
    return entry.rpartition("-")[0]
