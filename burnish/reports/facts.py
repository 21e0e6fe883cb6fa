"""What was run: parts, versions, machine, cost, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.config.overrides import Overrides
from burnish.runs.locate import locate
from burnish.runs.tasks import task_label
from policies.errors import BurnishError, ConfigError
from policies.storage.policy_folder import read_config
from policies.storage.strict_json import own_file, read_small

_ENVIRONMENT_BYTES = 2**18
_PARTS = ("process", "backbone", "encoder", "sampler")


class Facts(NamedTuple):
    """Facts of a run as (name, text), and a shell command with its settings."""

    rows: tuple[tuple[str, str], ...]
    command: str


def facts_of(directory: RunDirectory) -> Facts:
    """Return what was run; facts that the run directory lacks are left out."""
    environment = _environment(directory)
    packages = environment.get("packages")
    known = packages if isinstance(packages, dict) else {}
    versions = [f"{name} {version}" for name, version in known.items()]
    if python := environment.get("python"):
        versions.append(f"Python {python}")
    rows = {
        "algorithm": part_name(directory, "algo"),
        "task": task_label(directory),
        "policy": " · ".join(filter(None, map(_part, _parts(directory)))),
        "from": origin_of(directory),
        "seed": directory.config.get("seed"),
        "cost": cost_of(directory),
        "machine": machine_of(directory),
        "versions": ", ".join(versions),
        "source": environment.get("commit") or "",
    }
    told = tuple((name, str(value)) for name, value in rows.items() if value not in (None, ""))
    return Facts(told, repeating(directory))


def origin_of(directory: RunDirectory) -> str:
    """Return the name of the data, and of the policy, that a run began with."""
    init, dataset = (directory.config.get(key) for key in ("init", "dataset"))
    names = [Path(str(dataset)).name] if dataset else []
    if init:
        try:
            names.append(locate(init, "init").label)
        except BurnishError:
            names.append(str(init))
    return " and ".join(names)


def cost_of(directory: RunDirectory) -> str:
    """Return steps and time of a run; empty before the first logged row."""
    rows = read_jsonl(directory.metrics_path)
    if not rows:
        return ""
    return f"{max(row.get('step') or 0 for row in rows):,} steps in {duration(elapsed_s(rows))}"


def elapsed_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of training up to the last of the logged rows."""
    return max((row.get("time/elapsed_s") or 0.0 for row in rows), default=0.0)


def repeating(directory: RunDirectory) -> str:
    """Return the shell command with the settings of a run; of repeated keys the last value."""
    typed = directory.overrides
    try:
        last = {item.key: item.text for item in Overrides.parse(typed).items}
        typed = [text for key, text in last.items() if key not in ("resume", "hydra.run.dir")]
    except ConfigError:  # edited by hand
        pass
    return shlex.join(["burnish", "train", *typed])


def part_name(directory: RunDirectory, group: str) -> str:
    """Return the registered name of a run's part; empty without one."""
    return str(directory.section(group).get("name") or "")


def _parts(directory: RunDirectory) -> list[Any]:
    """Return the parts of the trained policy, which may come from `init`; before a checkpoint the keys."""
    try:
        parts = read_config(directory.policy_path()).get("parts")
    except BurnishError:
        parts = directory.config
    return [parts.get(group) for group in _PARTS] if isinstance(parts, dict) else []


def _part(section: Any) -> str:
    """Return the name of a part; of a process that can predict several kinds, with the kind."""
    if not isinstance(section, dict):
        return ""
    name, kind = str(section.get("name") or ""), section.get("prediction")
    return f"{name} ({kind})" if kind else name


def _environment(directory: RunDirectory) -> dict[str, Any]:
    """Return the environment of a run; empty for runs of versions that did not record it."""
    try:
        found = json.loads(read_small(own_file(directory.path / "environment.json"), _ENVIRONMENT_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def machine_of(directory: RunDirectory) -> str:
    """Return what a run was trained on; empty if it is not recorded."""
    environment = _environment(directory)
    parts = [
        environment.get("accelerator"),
        environment.get("processor"),
        f"{count} processors" if (count := environment.get("cpu_count")) else None,
        f"{threads} threads of torch" if (threads := environment.get("torch_threads")) else None,
    ]
    return ", ".join(str(part) for part in parts if part)


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours, such as `90 s` or `35 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
