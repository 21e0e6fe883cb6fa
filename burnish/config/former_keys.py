"""Former names of keys (`was=` on a field): accepted for one version where they are typed, with a warning.

A former name is met as an unknown key while composing. Then the present one takes its place, in what was
typed and in the files that are composed, and the composition is done again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import is_dataclass
from typing import Any, TypeVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from burnish.config.overrides import Overrides
from policies.bounds import former_names

T = TypeVar("T")

_log = logging.getLogger(__name__)
_renamed: ContextVar[Mapping[str, str]] = ContextVar("renamed")
"""Present names by former ones, both from the top of the configuration, of this composition."""


def compose_renamed(overrides: Overrides, compose: Callable[[Overrides], T]) -> T:
    """Return what `compose` makes of overrides in which present names stand for former ones.

    Warns once of every former name.
    """
    renamed: dict[str, str] = {}
    token = _renamed.set(renamed)
    try:
        while True:
            try:
                return compose(overrides)
            except (HydraException, OmegaConfBaseException) as error:
                found = _former_key(error)
                if found is None or found[0] in renamed:
                    raise
                warn_of_former_key(*found)
                overrides = overrides.renamed(*found)
                renamed[found[0]] = found[1]
    finally:
        _renamed.reset(token)


def warn_of_former_key(former: str, present: str) -> None:
    """Log the present name of a key."""
    _log.warning("%s is called %s now; the former name goes with the next version.", former, present)


def _former_key(error: BaseException) -> tuple[str, str] | None:
    """Return the former and the present name of the key that is unknown; None for any other error."""
    for one in _chain(error):
        owner = getattr(one, "object_type", None)
        if isinstance(one, (ConfigKeyError, ConfigAttributeError)) and is_dataclass(owner):
            key = str(one.full_key or one.key)
            above, dot, name = key.rpartition(".")
            present = former_names(owner).get(name)  # type: ignore[arg-type]
            return None if present is None else (key, f"{above}{dot}{present}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class _Renaming:
    """A source of files in which present names stand for former ones."""

    def load_config(self, config_path: str) -> ConfigResult:
        result: ConfigResult = super().load_config(config_path)  # type: ignore[misc]
        if renamed := _renamed.get({}):
            package = result.header.get("package")
            group = config_path.rpartition("/")[0].replace("/", ".")
            above = {None: group, "_global_": "", "_group_": group}.get(package, package)
            content: Any = OmegaConf.to_container(result.config, resolve=False)
            for former, present in renamed.items():
                _rename(content, above, former, present)
            result.config = OmegaConf.create(content)
        return result


class _Files(_Renaming, FileConfigSource):
    pass


class _Package(_Renaming, ImportlibResourcesConfigSource):
    pass


def register_sources() -> None:
    """Let Hydra read files by way of the sources above."""
    SourcesRegistry.instance().types.update(file=_Files, pkg=_Package)


def _rename(content: Any, above: str, former: str, present: str) -> None:
    """Rename a key in the content of a file that stands below `above`."""
    prefix = f"{above}." if above else ""
    if not former.startswith(prefix):
        return
    *way, last = former.removeprefix(prefix).split(".")
    for name in way:
        content = content.get(name) if isinstance(content, dict) else None
    if isinstance(content, dict) and last in content:
        content[present.rpartition(".")[2]] = content.pop(last)
