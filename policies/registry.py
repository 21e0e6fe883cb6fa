"""Registry of configurable parts.

A part is a dataclass registered under a group and a name::

    @register("process", "flow")
    @dataclass(frozen=True)
    class RectifiedFlow: ...

Names are read from source files without importing them; `lookup` imports the one module it needs. Saved
policies resolve names only here, so a downloaded directory cannot import an arbitrary Python path.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from policies.bounds import Checked, with_present_names
from policies.errors import ConfigError

T = TypeVar("T", bound=type)

PLUGIN_GROUP = "burnish.plugins"
PLUGIN_VARIABLE = "BURNISH_PLUGINS"  # environment variable: names of further plug-in modules
PACKAGES = ("policies", "envs", "algos")  # their modules register parts
_REGISTRATION = re.compile(r'^(?:@register|\w+ = variant)\(\s*"(\w+)",\s+"([^"]+)"', re.MULTILINE)
_NOT_CONFIGURED = ("policy_class", "logger")  # groups whose classes another part chooses: no dataclasses
_PARTS: dict[str, dict[str, type]] = {}


def register(group: str, name: str) -> Callable[[T], T]:
    """Register a dataclass as the part `name` of `group`.

    Raises:
        TypeError: If the decorated object is not a dataclass.
        ConfigError: If the name is already taken by another class.
    """

    def decorate(cls: T) -> T:
        if group not in _NOT_CONFIGURED and not is_dataclass(cls):
            raise TypeError(f"@register needs a dataclass; got {cls!r}. Put @dataclass below it.")
        taken = _PARTS.setdefault(group, {}).get(name)
        owner = sources(group).get(name)
        if owner is not None and cls.__module__ != owner.module and str(owner.path) != _origin(cls)[0]:
            raise ConfigError(f"{group}={name} is already registered by {owner.module}.")
        if taken is not None and _origin(taken) != _origin(cls):
            owner_name = f"{taken.__module__}.{taken.__qualname__}"
            raise ConfigError(f"{group}={name} is already registered by {owner_name}.")
        _PARTS[group][name] = cls
        if issubclass(cls, Checked) and "key" not in vars(cls):
            cls.key = group
        return cls

    return decorate


def variant(group: str, name: str, base: T, text: str, **values: Any) -> T:
    """Register a dataclass that differs from its base in values only.

    The class becomes a module attribute for pickle, in capitalised words: `Puzzle3x3` for `puzzle-3x3`.

    Args:
        group: Group of the part.
        name: Name of the part; also its attribute `name`.
        base: A frozen dataclass.
        text: Docstring.
        **values: Field defaults and other class attributes.
    """
    known = {f.name: f for f in fields(base) if f.name in values}
    changed = {key: field(default=values[key], metadata=f.metadata) for key, f in known.items()}
    body: dict[str, Any] = {"__doc__": text, "__module__": base.__module__, "name": name, **values, **changed}
    body["__annotations__"] = {key: f.type for key, f in known.items()}
    title = "".join(word.capitalize() for word in name.split("-"))
    made: T = dataclass(frozen=True)(type(title, (base,), body))  # type: ignore[assignment]
    return register(group, name)(made)


def _origin(cls: type) -> tuple[str, str]:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file or cls.__module__, cls.__qualname__


class Source(NamedTuple):
    """Location of the definition of one of our parts."""

    module: str
    path: Path

    def definition(self, group: str, name: str) -> tuple[str, str]:
        """Return class name and own docstring (or "") of a part, parsed from source without import."""
        start = f"({group!r}, {name!r}"
        for node in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                if f"register{start})" in map(ast.unparse, node.decorator_list):
                    return node.name, ast.get_docstring(node) or ""
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"variant{start},"):
                return ast.unparse(node.targets[0]), ast.literal_eval(node.value.args[3])  # type: ignore
        raise ConfigError(f"{group}={name} is not registered at the top of {self.path}.")


def sources(group: str) -> dict[str, Source]:
    """Return the definitions of a group's parts in our packages, by name."""
    return _index().get(group, {})


@cache
def _index() -> dict[str, dict[str, Source]]:
    found: dict[str, dict[str, Source]] = {}
    for package in PACKAGES:
        spec = find_spec(package)
        for root in map(Path, (spec.submodule_search_locations if spec else None) or ()):
            for file in root.rglob("*.py"):
                names = _REGISTRATION.findall(file.read_text(encoding="utf-8"))
                module = ".".join((package, *file.relative_to(root).with_suffix("").parts))
                for group, name in names:
                    source = Source(module.removesuffix(".__init__"), file)
                    found.setdefault(group, {})[name] = source
    return found


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of a group; imports plug-ins, and no module of ours."""
    load_plugins()
    return tuple(sorted({*sources(group), *_PARTS.get(group, {})}))


def is_known(group: str, name: str) -> bool:
    """Whether a part exists; plug-ins are imported only for names that are not ours."""
    return name in sources(group) or name in names(group)


def parts(group: str) -> dict[str, type]:
    """Return the classes of a group by name, sorted; imports all of their modules."""
    return {name: lookup(group, name) for name in names(group)}


def lookup(group: str, name: str) -> type:
    """Return the class registered under a name, importing its module; a ConfigError lists the choices."""
    known = _PARTS.setdefault(group, {})
    if name not in known and (source := sources(group).get(name)):
        importlib.import_module(source.module)
    if name not in known:
        load_plugins()
    try:
        return known[name]
    except KeyError:
        choices = ", ".join(names(group)) or "(none)"
        hint = f"If a plug-in registers it, name its module in {PLUGIN_VARIABLE}"
        raise ConfigError(f"unknown {group} '{name}'; choose one of: {choices}. {hint}.") from None


def registered(group: str) -> Mapping[str, type]:
    """Return the classes registered so far by name; imports nothing."""
    return _PARTS.get(group, {})


def name_of(group: str, part: object) -> str:
    """Return the registered name of a part's instance or class."""
    cls = part if isinstance(part, type) else type(part)
    for name, known in registered(group).items():
        if known is cls:
            return name
    raise ConfigError(f"{cls.__qualname__} is not registered as a {group}.")


def to_json(group: str, part: Any) -> dict[str, Any]:
    """Serialise a part to its registered name and field values (JSON types only)."""
    return {"name": name_of(group, part), **asdict(part)}


def from_json(group: str, data: dict[str, Any]) -> Any:
    """Deserialise a part from the output of `to_json`; unknown names and fields are a ConfigError."""
    values = dict(data)
    if "name" not in values:
        raise ConfigError(f"a {group} description needs the key 'name'; got keys {sorted(values)}.")
    cls = lookup(group, str(values.pop("name")))
    values = with_present_names(cls, values)
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"unknown {group} keys {unknown} for {cls.__name__}; it has {sorted(known)}.")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def plugins() -> tuple[ModuleType, ...]:
    """Return the plug-in modules; a ConfigError if one cannot be imported."""
    load_plugins()
    return _plugins()[0]


def load_plugins() -> None:
    """Import the modules of the `burnish.plugins` entry points and of the variable `BURNISH_PLUGINS`.

    Raises:
        ConfigError: After all imports, if one failed; names its distribution.
    """
    for entry, cause in _plugins()[1]:
        name = PLUGIN_VARIABLE if entry.dist is None else entry.dist.name
        reason = str(cause).strip().rstrip(".") or "no reason given"
        remedy = "change the variable" if entry.dist is None else f"pip uninstall {name}"
        raise ConfigError(
            f"the plug-in '{entry.name}' ({entry.value}) of {name} cannot be imported: "
            f"{type(cause).__name__}: {reason}. Repair it, or: {remedy}."
        ) from cause


@cache
def _plugins() -> tuple[tuple[ModuleType, ...], tuple[tuple[EntryPoint, Exception], ...]]:
    """Import all plug-ins; return their modules, and those that fail to import."""
    named = [*filter(None, map(str.strip, os.environ.get(PLUGIN_VARIABLE, "").split(",")))]
    if named and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m burnish` has it; installed packages come first
    entries = [*entry_points(group=PLUGIN_GROUP), *(EntryPoint(one, one, PLUGIN_GROUP) for one in named)]
    modules: list[ModuleType] = []
    broken: list[tuple[EntryPoint, Exception]] = []
    for entry in entries:
        try:
            entry.load()
            modules.append(sys.modules[entry.module])
        except Exception as error:  # a plug-in may raise any exception
            broken.append((entry, error))
    return tuple(modules), tuple(broken)
