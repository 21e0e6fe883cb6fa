"""`burnish merge`: average the weights of policies that were trained from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.overrides import RunContext
from burnish.console import output, table
from burnish.runs.locate import check_folder_to_fill, identified, locate
from policies.bounds import Checked, bounded
from policies.composition.merging import METHODS, merge
from policies.errors import ConfigError
from policies.paths import path_field
from policies.storage.policy_folder import save_policy


@dataclass
class MergeConfig(Checked):
    """Configuration of `burnish merge`."""

    policies: Any = path_field()  # list of runs (last checkpoint), checkpoints or policy directories
    init: str | None = path_field()  # the policy that all were trained from; null: none
    method: str = bounded("linear", choices=METHODS)  # linear: weighted mean | spherical: arcs around init
    weights: list[float] | None = None  # one per policy, of any sum; null: equal
    scale: float = 1.0  # share of the way from init to the mean; below 1 stays nearer to init
    out: str | None = path_field()  # directory; null: merged-<first policy>
    overwrite: bool = False  # replace the policy in an existing directory


def run(config: MergeConfig, context: RunContext) -> float:
    """Merge, print a summary, and return the number of policies."""
    directory, facts = write_merged(config)
    console = output()
    console.print(f"written: {directory}", markup=False, soft_wrap=True)
    console.print(
        table("", ("policy", "weight"), [(one["name"], str(one["weight"])) for one in facts["policies"]])
    )
    return float(len(facts["policies"]))


def write_merged(config: MergeConfig) -> tuple[Path, dict[str, Any]]:
    """Write the merged policy; return its directory and the facts of the merge."""
    if not isinstance(config.policies, list | tuple) or not config.policies:
        raise ConfigError(f"merge needs policies=[a,b,…]; got {config.policies}.")
    found = [locate(str(path), "policies") for path in config.policies]
    start = None if config.init is None else locate(config.init, "init")
    target = Path(config.out if config.out is not None else f"merged-{found[0].label}")
    check_folder_to_fill(target, config.overwrite)
    policy = merge(
        [one.load() for one in found],
        init=None if start is None else start.load(),
        method=config.method,
        weights=config.weights,
        scale=config.scale,
    )
    weights = [1.0] * len(found) if config.weights is None else list(config.weights)
    facts = {
        "method": config.method,
        "scale": config.scale,
        "init": None if start is None else identified(start),
        "policies": [identified(one) | {"weight": w} for one, w in zip(found, weights, strict=True)],
    }
    shared = dict(found[0].provenance())
    for one in found[1:]:
        others = one.provenance()
        shared = {key: value for key, value in shared.items() if others.get(key) == value}
    directory = save_policy(policy, target, provenance=shared | {"name": target.name, "merge": facts})
    return directory, facts
