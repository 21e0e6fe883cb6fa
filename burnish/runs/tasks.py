"""Task of a policy."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from algos.training.run_directory import RunDirectory
from burnish.config.saved import describe_part, restore_part
from burnish.runs.locate import Located
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.recorded_task import recorded_env, recorded_task
from envs.evaluation.protocol import describe_task
from envs.fit import require_same_task, task_text
from envs.spec import task_name
from policies import registry
from policies.errors import ConfigError
from policies.storage.atomic_write import write_text

_log = logging.getLogger(__name__)


def task_of(policy: Located, remedy: str = "") -> Any:
    """Return the task configuration of a policy.

    Raises:
        ConfigError: If its provenance names no task, which ends with `remedy`, or names one that runs code
            and the policy is not in a run.
    """
    env = _recorded_task(policy)
    if env is None:
        raise ConfigError(
            f"the policy {policy.path} names no task: it was trained without env=<name>, or saved without "
            f"its provenance.{remedy}"
        )
    require_known_code(env, policy.run, f"the policy {policy.path}")
    return env


def _code_record(run: Path, env: Any) -> Path:
    """Return the file that records that this user began a run with a task that runs code."""
    env = env.compared() if hasattr(env, "compared") else env
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    facts = json.dumps([str(run.resolve()), describe_part("env", env)], sort_keys=True, default=str)
    return state / "burnish" / "code" / hashlib.sha256(facts.encode()).hexdigest()


def record_code(run: Path, env: Any) -> None:
    """Note, outside the run, that this user began it with a task that runs code."""
    if getattr(env, "runs_code", False):
        write_text(_code_record(run, env), f"{run.resolve()}\n")


def require_known_code(env: Any, run: Path | None, whose: str) -> None:
    """Refuse a saved task that runs code, unless this user began the run in this folder (ConfigError)."""
    if getattr(env, "runs_code", False) and (run is None or not _code_record(run, env).exists()):
        raise ConfigError(
            f"{whose} names a task that runs code, which is done for runs that you began in their folder. If "
            f"you trust it, give the task yourself: {task_text(env)}."
        )


def _recorded_task(policy: Located) -> Any:
    """Return the task of a policy without running any of it; None if its provenance names none."""
    description = policy.provenance().get("env")
    return restore_part("env", description) if isinstance(description, Mapping) else None


def known_task(policy: Located) -> Any:
    """Return the task of a policy; None if its provenance names none that is known here."""
    try:
        return _recorded_task(policy)
    except ConfigError:
        return None


def values_of_task(env: Any) -> dict[str, Any]:
    """Return the keys and values of a task given as a Python object.

    Args:
        env: A task's configuration, an environment with gymnasium's interface, or a function that makes one.
            A function or class of a module works everywhere; any other object in this process only, with
            `num_workers=0`.

    Raises:
        ConfigError: If it is none of these.
    """
    if hasattr(env, "make_vector"):
        if not is_dataclass(env) or isinstance(env, type):
            raise ConfigError(f"env= must be the instance of a dataclass; {type(env).__name__} is none.")
        if type(env) not in registry.registered("env").values():
            task: Any = env
            registry.register("env", task.spec.name)(type(env))
        changed = {f.name: value for f in fields(env) if (value := getattr(env, f.name)) != f.default}
        plain = describe_part("env", env)
        return {"env": plain["name"], **{f"env.{key}": plain[key] for key in changed if plain[key] != {}}}
    if not (callable(env) or hasattr(env, "step")):
        raise ConfigError(f"env= must be a task, an environment or a function; got {type(env).__name__}.")
    from envs.tasks.gym.factories import HERE, local_factory

    factory = local_factory(env)
    values = {"env": "gym", "env.factory": factory}
    return values | ({"num_workers": 0} if factory.startswith(HERE) else {})


def description_of(policy: Located) -> dict[str, Any] | None:
    """Return the task description of a policy, in the protocols' format.

    None if its provenance names no task, or a file of the task is missing.
    """
    try:
        return describe_task(task_of(policy))
    except (ConfigError, OSError):
        return None


def options_that_differ(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options that differ between two task descriptions; unknown options are skipped."""
    ours, theirs = own["options"], other["options"]
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def require_task_of(policy: Located, env: Any, key: str, *, allow_other_task: bool) -> None:
    """Refuse a policy that was made for another task; log the conditions that differ.

    Policies without a known task pass.

    Args:
        policy: The policy.
        env: The requested task.
        key: Configuration key of the policy.
        allow_other_task: Warn instead.

    Raises:
        ConfigError: If name or options of the tasks differ; names both.
    """
    own = known_task(policy)
    if own is None:
        return
    names = require_same_task(
        "this command", env, f"{key}={policy.label}", own, allow_other_task=allow_other_task
    )
    names = [name for name in names if name not in ("cameras", "image_size")]  # the policy's, or refused
    if names:
        _log.warning(
            "%s was made with other options: %s.", policy.label,
            ", ".join(f"env.{n}={getattr(own, n)}, here {getattr(env, n)}" for n in names),
        )  # fmt: skip


def require_recording_of(policy: Located, dataset: EpisodeDataset, key: str, *, allow_other: bool) -> None:
    """Refuse recorded episodes of another task than the policy's; unknown tasks pass.

    Args:
        policy: The policy.
        dataset: The episodes; a file that names its task without options agrees with any of them.
        key: Configuration key of the policy.
        allow_other: Warn instead.

    Raises:
        ConfigError: If name or options of the tasks differ; names both.
    """
    own, found = known_task(policy), recorded_task(dataset.meta)
    recorded = None if found is None else recorded_env(*found)
    if own is None or found is None or recorded is None:
        return
    if found[1] is not None or found[0] != task_name(own):
        name = f"{key}={policy.label}"
        require_same_task(name, own, dataset.source, recorded, allow_other_task=allow_other)


def task_label(run: RunDirectory) -> str:
    """Return the task of a run with the options that select it, e.g. `metaworld env.task=push`; or empty."""
    section = run.section("env")
    try:
        return task_text(restore_part("env", section)).removeprefix("env=") if section else ""
    except ConfigError:
        return str(section.get("name", ""))
