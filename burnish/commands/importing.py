"""`burnish import`: convert weights of another program to a policy directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.overrides import RunContext
from burnish.console import output, table
from burnish.runs.locate import check_folder_to_fill
from policies import registry
from policies.errors import ConfigError
from policies.importing.importing import Conversion, import_policy
from policies.paths import path_field
from policies.storage.policy_folder import save_policy


@dataclass
class ImportConfig:
    """Configuration of `burnish import`."""

    weights: str | None = path_field()  # checkpoint: .safetensors, or of torch.save (.pt, .pth, .ckpt)
    source: Any = None  # source program, and facts missing from its tensors
    normalization: str | None = path_field()  # statistics file beside the checkpoint (DPPO, ReinFlow)
    identity: list[str] = field(default_factory=list)  # unnormalised features, of state and action
    entry: str | None = None  # weights to read, e.g. model; null: EMA weights if present
    sampler: Any = None  # sampler; null: that of the program's evaluation
    out: str | None = path_field()  # directory; null: imported-<checkpoint>
    overwrite: bool = False  # replace the policy in an existing directory


@dataclass(frozen=True)
class Imported:
    """A policy directory and the facts of its import."""

    directory: Path
    conversion: Conversion


def run(config: ImportConfig, context: RunContext) -> float:
    """Import, print a summary, and return the number of assigned tensors."""
    imported = convert(config)
    _print_result(imported)
    return float(imported.conversion.tensors)


def convert(config: ImportConfig) -> Imported:
    """Import a checkpoint and write the policy directory."""
    if config.weights is None:
        raise ConfigError("import needs weights=<checkpoint>.")
    if config.source is None:
        known = ", ".join(registry.names("source"))
        raise ConfigError(f"import needs source=<program>; choose one of: {known}.")
    checkpoint = Path(config.weights)
    target = Path(config.out if config.out is not None else f"imported-{checkpoint.stem}")
    check_folder_to_fill(target, config.overwrite)
    policy, conversion = import_policy(
        checkpoint,
        config.source,
        normalization=config.normalization,
        identity=config.identity,
        entry=config.entry,
        sampler=config.sampler,
    )
    directory = save_policy(policy, target, provenance={"name": target.name, **conversion.facts()})
    return Imported(directory, conversion)


def _print_result(imported: Imported) -> None:
    console, facts = output(), imported.conversion.facts()
    console.print(f"written: {imported.directory}", markup=False, soft_wrap=True)
    console.print(table("", ("import", ""), [(name, _shown(value)) for name, value in facts.items()]))


def _shown(value: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
