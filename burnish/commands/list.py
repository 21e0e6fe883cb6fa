"""`burnish list`: available options, and whether they are usable on this machine."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from importlib import metadata

import yaml

from burnish.config.overrides import (
    default_options,
    experiments,
    options_of,
    preset_summary,
    preset_text,
    presets,
)
from burnish.console import output, table
from policies import registry
from policies.extras import install_command

KINDS = {
    "algos": "algo",
    "envs": "env",
    "processes": "process",
    "encoders": "encoder",
    "backbones": "backbone",
    "samplers": "sampler",
    "sources": "source",
}


def main(arguments: Sequence[str]) -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="burnish list", description="What there is to choose from.")
    parser.add_argument("kind", choices=[*KINDS, "datasets", "experiments"])
    kind = parser.parse_args(arguments).kind
    if kind == "experiments":
        shown = table("", ("experiment=", "algo", "env", "what it is"), _experiments())
    elif kind == "datasets":
        shown = table("", ("format", "read by", "what it is"), _datasets())
    elif kind == "envs":
        shown = table("", ("env=", "obs", "act", "steps", "Hz", "expert", "here", "what it is"), _envs())
    else:
        group = KINDS[kind]
        shown = table("", (f"{group}=", "what it is", "defined in"), _parts(group))
    output().print(shown)
    return 0


def summary(thing: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    return first_paragraph(inspect.getdoc(thing) or "")


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a text in one line."""
    return " ".join(text.split("\n\n")[0].split())


def _parts(group: str) -> Iterator[tuple[object, ...]]:
    for name in options_of(group):
        if name in presets(group):
            yield name, preset_summary(group, name), f"configs/{group}/{name}.yaml"
            continue
        source = registry.sources(group).get(name)
        if source is None:
            part = registry.lookup(group, name)
            yield name, summary(part), f"{part.__module__}.{part.__qualname__}"
            continue
        title, text = source.definition(group, name)
        yield name, first_paragraph(text) or summary(registry.lookup(group, name)), f"{source.module}.{title}"


def _envs() -> Iterator[tuple[object, ...]]:
    for name, part in registry.parts("env").items():
        if hasattr(part, "needs"):  # what it is depends on that option
            installed = availability(getattr(part, "packages", ()), getattr(part, "extra", ""))
            yield f"{name} env.{part.needs}=", "", "", "", "", "", installed, summary(part)
            continue
        spec = part().spec
        expert = "yes" if hasattr(part, "demonstrate") else ""
        sizes = (spec.obs_dim, spec.action_dim, spec.max_episode_steps, f"{spec.control_hz:.3g}")
        yield name, *sizes, expert, availability(spec.packages, spec.extra), summary(part)


def availability(packages: Sequence[str], extra: str) -> str:
    """Return whether the packages of a task are installed; if not, how to install them."""
    try:
        for package in packages:
            metadata.version(package)
    except metadata.PackageNotFoundError as error:
        return f"no: {install_command(extra)}" if extra else f"no: pip install {error.name}"
    return "yes"


def _datasets() -> Iterator[tuple[object, ...]]:
    from envs import datasets

    for name, reader in datasets.readers().items():
        yield name, f"{reader.read.__module__}.read", summary(reader.read)


def _experiments() -> Iterator[tuple[object, ...]]:
    for name in experiments():
        chosen = default_options("train") | _choices(name)
        yield name, chosen["algo"], chosen["env"] or "", preset_summary("experiment", name)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML has its C library


def _choices(experiment: str) -> dict[str, str]:
    """Return the options chosen by an experiment, including its parents'."""
    text = preset_text("experiment", experiment)
    found: dict[str, str] = {}
    for entry in (yaml.load(text, _LOADER) or {}).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            found |= _choices(entry.removeprefix("/experiment/"))
        elif isinstance(entry, dict):
            found |= {key.removeprefix("override ").lstrip("/"): value for key, value in entry.items()}
    return found
