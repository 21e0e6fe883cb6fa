"""`burnish list`: available options, and whether they are usable on this machine."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import yaml

from burnish.config.overrides import default_options, experiments
from burnish.console import output, table
from policies import registry
from policies.errors import MissingExtraError

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
    """Return the first sentence of a docstring."""
    return first_sentence(inspect.getdoc(thing) or "")


def first_sentence(text: str) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join(text.split("\n\n")[0].split())


def _parts(group: str) -> Iterator[tuple[object, ...]]:
    for name in registry.names(group):
        source = registry.sources(group).get(name)
        if source is None:
            part = registry.lookup(group, name)
            yield name, summary(part), f"{part.__module__}.{part.__qualname__}"
            continue
        title, text = source.definition(group, name)
        yield name, first_sentence(text) or summary(registry.lookup(group, name)), f"{source.module}.{title}"


def _envs() -> Iterator[tuple[object, ...]]:
    here: dict[Any, str] = {}  # tasks of one kind need the same packages, and building is slow
    for name, part in registry.parts("env").items():
        spec = part().spec
        kind = (part.__module__, part.__bases__)
        if kind not in here:
            here[kind] = availability(part())
        expert = "yes" if hasattr(part, "demonstrate") else ""
        sizes = (spec.obs_dim, spec.action_dim, spec.max_episode_steps, f"{spec.control_hz:.3g}")
        yield name, *sizes, expert, here[kind], summary(part)


def availability(env: object) -> str:
    """Return whether an environment can be built here; if not, the missing extra."""
    try:
        env.make_vector(1).close()  # type: ignore[attr-defined]
    except MissingExtraError as error:
        _, found, line = str(error).partition("pip install")
        return f"no: pip install{line}".rstrip(".") if found else f"no: {error}"
    except Exception as error:  # every simulator fails differently, and the list must go on
        return f"no: {type(error).__name__} {error}".splitlines()[0]
    return "yes"


def _datasets() -> Iterator[tuple[object, ...]]:
    from envs import datasets

    for name, reader in datasets.readers().items():
        yield name, f"{datasets.__name__}.{name}.read", summary(reader.read)


def _experiments() -> Iterator[tuple[object, ...]]:
    for name in experiments():
        text = (resources.files("configs") / "experiment" / f"{name}.yaml").read_text()
        chosen = default_options("train") | _choices(name)
        words = [
            line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line
        ]
        yield name, chosen["algo"], chosen["env"] or "", " ".join(words)


def _choices(experiment: str) -> dict[str, str]:
    """Return the options chosen by an experiment, including its parents'."""
    text = (resources.files("configs") / "experiment" / f"{experiment}.yaml").read_text()
    found: dict[str, str] = {}
    for entry in (yaml.safe_load(text) or {}).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            found |= _choices(entry.removeprefix("/experiment/"))
        elif isinstance(entry, dict):
            found |= {key.removeprefix("override ").lstrip("/"): value for key, value in entry.items()}
    return found
