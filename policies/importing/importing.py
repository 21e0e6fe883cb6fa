"""Weights of other programs become a policy of ours: every tensor gets its place, or the import is refused.

Nothing in a checkpoint is run. Sizes come from the tensors; what they do not hold is given by the
caller (`source.*`) or taken as published, and is stored with the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies import registry
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError
from policies.importing.files import read_entry, read_statistics
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.policy import Policy, PolicyConfig
from policies.storage.checksums import sha256
from policies.storage.policy_folder import fault_of

FEATURES = ("state", "action")

_LISTED = 12
"""Names that an error lists before it counts the rest."""


@dataclass(frozen=True)
class Conversion:
    """What was imported, and from where."""

    file: str  # name of the checkpoint
    sha256: str  # of the checkpoint
    entry: str  # which of its entries; empty: the whole file
    source: Mapping[str, Any]  # the program, with the settings given or taken as published
    tensors: int  # how many tensors have a place in the policy
    parameters: int  # how many numbers these are
    normalizer: Mapping[str, str]  # where the map of each feature comes from
    skipped: Mapping[str, int]  # how many tensors were left out, by reason

    def facts(self) -> dict[str, Any]:
        """Return it as provenance of a policy directory; JSON types only."""
        left_out = [f"{count} ({why})" for why, count in sorted(self.skipped.items())]
        return {
            "imported": self.file,
            "imported_sha256": self.sha256,
            "imported_entry": self.entry or "the whole file",
            "imported_source": dict(self.source),
            "imported_tensors": self.tensors,
            "imported_parameters": self.parameters,
            "imported_normalizer": dict(self.normalizer),
            "left_out": ", ".join(left_out) or "nothing",
        }


@dataclass(frozen=True)
class _Sizes:
    obs_dim: int
    obs_steps: int
    action_dim: int
    horizon: int


def import_policy(
    path: str | Path,
    source: ForeignSource,
    *,
    normalization: str | Path | None = None,
    identity: Sequence[str] = (),
    entry: str | None = None,
    sampler: Any = None,
) -> tuple[Policy, Conversion]:
    """Make a policy of a checkpoint of another program.

    Args:
        path: The checkpoint; see `policies.importing.files.read_entry`.
        source: The program, and what the tensors do not hold.
        normalization: File of statistics beside the checkpoint, where the program keeps one.
        identity: Features (`state`, `action`) that are left as they are.
        entry: Which weights of the checkpoint; None: averaged ones where there are.
        sampler: How to sample; None: as the program evaluates.

    Raises:
        CheckpointError: If the file cannot be read safely, tensors are missing, unexpected, of another shape
            or not finite, or the policy's actions are not.
        CapabilityError: If the weights are of a kind that has no counterpart.
        ConfigError: If a setting is missing or contradicts the tensors, or a feature has no map.
    """
    checkpoint = Path(path)
    found, tensors = read_entry(checkpoint, entry)
    contents = source.contents(tensors)
    given = {} if normalization is None else source.maps(read_statistics(Path(normalization)))
    there = {**contents.maps, **given}
    network = source.network(contents.network, len(there["action"][0]) if "action" in there else None)
    maps = _chosen_maps(there, identity)
    sizes = _sizes(source, network, there)
    policy = _built(source, network, sizes, maps, sampler)
    skipped = Counter(contents.skipped.values()) + _install(policy, source, contents, network, maps)
    where = {name: "file of statistics" if name in given else "checkpoint" for name in maps}
    unused = [name for name in contents.maps if where.get(name) != "checkpoint"]
    skipped += Counter({"map of a feature that was not asked for": 2 * len(unused)})
    _check_actions(policy)
    return policy, Conversion(
        checkpoint.name,
        sha256(checkpoint),
        found,
        registry.to_json("source", source),
        len(tensors) - sum(skipped.values()),
        sum(weight.numel() for weight in policy.parameters()),
        {feature: where.get(feature, "identity, as asked for") for feature in FEATURES},
        skipped,
    )


def _chosen_maps(maps: Mapping[str, AffineMap], identity: Sequence[str]) -> dict[str, AffineMap]:
    """Return the maps of the features that have one."""
    if unknown := sorted(set(identity) - set(FEATURES)):
        raise ConfigError(f"identity must list some of {', '.join(FEATURES)}; got {', '.join(unknown)}.")
    if missing := [name for name in FEATURES if name not in maps and name not in identity]:
        raise ConfigError(
            f"'{missing[0]}' has no statistics, neither in the checkpoint nor beside it. Give the file of "
            f"statistics (normalization=…), or ask for identity=[{','.join(missing)}] on purpose."
        )
    return {name: maps[name] for name in FEATURES if name not in identity}


def _sizes(source: ForeignSource, network: Network, maps: Mapping[str, AffineMap]) -> _Sizes:
    widths = {name: len(scale) for name, (scale, _) in maps.items()}
    obs_steps = _agreed(
        "obs_steps",
        given=source.obs_steps,
        network=network.obs_steps,
        statistics=_ratio(network.cond_dim, widths.get("state")),
    )
    obs_dim = widths.get("state", network.cond_dim // obs_steps)
    _check_product("condition", network.cond_dim, obs_steps, obs_dim)
    by_horizon = _ratio(network.chunk_size, source.horizon)
    action_dim = _agreed(
        "action_dim",
        given=source.action_dim,
        network=by_horizon if network.action_dim is None else network.action_dim,
        statistics=widths.get("action"),
    )
    by_width = _ratio(network.chunk_size, action_dim)
    horizon = _agreed(
        "horizon", given=source.horizon, network=by_width if network.horizon is None else network.horizon
    )
    if network.chunk_size is not None:
        _check_product("chunk", network.chunk_size, horizon, action_dim)
    return _Sizes(obs_dim, obs_steps, action_dim, horizon)


def _check_product(what: str, whole: int, steps: int, width: int) -> None:
    if whole != steps * width:
        raise ConfigError(
            f"the network's {what} has {whole} numbers, which cannot be {steps} rows of {width}. Take the "
            "file of statistics that belongs to it, and the sizes that it was trained with."
        )


def _ratio(whole: int | None, part: int | None) -> int | None:
    """Return the quotient where both are known and it is a whole number."""
    return None if whole is None or part is None or whole % part or whole < part else whole // part


def _agreed(name: str, **values: int | None) -> int:
    """Return the value that all agree on."""
    known = {who: value for who, value in values.items() if value is not None}
    if not known:
        raise ConfigError(f"source.{name} is in no tensor of this checkpoint; give source.{name}=<number>.")
    if len(set(known.values())) > 1:
        numbers = ", ".join(f"{value} ({who})" for who, value in known.items())
        raise ConfigError(f"source.{name} must be one number; got {numbers}.")
    return next(iter(known.values()))


def _built(
    source: ForeignSource, network: Network, sizes: _Sizes, maps: Mapping[str, AffineMap], sampler: Any
) -> DenoisingPolicy:
    process, own_sampler = source.parts()
    start = source.first_row(sizes.obs_steps)
    config = PolicyConfig(
        process=process,
        backbone=network.backbone,
        sampler=own_sampler if sampler is None else sampler,
        obs_steps=sizes.obs_steps,
        horizon=sizes.horizon,
        act_steps=source.act_steps or max(sizes.horizon - start, 1),
        action_start=start,
        normalizer={name: "limits" if name in maps else "identity" for name in (*FEATURES, "goal")},
        observation_clip=None,
    )
    policy = build_policy(config, obs_dim=sizes.obs_dim, action_dim=sizes.action_dim)
    assert isinstance(policy, DenoisingPolicy)
    return policy.eval()


def _install(
    policy: DenoisingPolicy,
    source: ForeignSource,
    contents: Contents,
    network: Network,
    maps: Mapping[str, AffineMap],
) -> Counter[str]:
    """Put maps and weights in place; returns how many tensors of the networks were left out, by reason."""
    for name, (scale, offset) in maps.items():
        for part, value in (("scale", scale), ("offset", offset)):
            own = policy.normalizer.get_buffer(f"{name}_{part}")
            _check(f"{part} of '{name}'", value, own, f"normalizer.{name}_{part}")
            own.copy_(value)
    keys = source.keys(network, policy.chunk.action_dim)
    fields, left_out = _fields(policy, source, contents)
    for field, weights in fields:
        left_out["rebuilt, and equal"] += _load(field, keys, weights, network.constants)
    return +left_out


def _fields(
    policy: DenoisingPolicy, source: ForeignSource, contents: Contents
) -> tuple[list[tuple[nn.Module, Mapping[str, Tensor]]], Counter[str]]:
    """Return the backbones of the policy, each with its released weights, and what no step uses."""
    if contents.tuned is None:
        return [(policy.field, contents.network)], Counter()
    steps, times = source.steps_of_tuned(), policy.table.net_time
    if steps is None or not 1 <= steps <= len(times):
        raise ConfigError(
            f"these weights were fine-tuned for the last denoising steps; give their number, "
            f"source.tuned_steps=<1..{len(times)}>; got {steps}."
        )
    first = len(times) - steps
    if first == 0:
        return [(policy.field, contents.tuned)], Counter({"the frozen network": len(contents.network)})
    switch = float(times[first - 1] + times[first]) / 2
    policy.field = SwitchedField(policy.field, policy.clone().field, switch)
    return [(policy.field.base, contents.network), (policy.field.tuned, contents.tuned)], Counter()


def _load(
    field: nn.Module, keys: Mapping[str, str], weights: Mapping[str, Tensor], implied: Mapping[str, Tensor]
) -> int:
    """Load released weights strictly; returns how many tensors only repeat what the network implies."""
    own = field.state_dict()
    constants = {name: value for name, value in implied.items() if name in weights}
    missing = sorted(set(keys) - set(weights))
    unexpected = sorted(set(weights) - set(keys) - set(constants))
    if missing or unexpected:
        raise CheckpointError(
            f"the tensors are not those of this network: missing {_listed(missing)}; unexpected "
            f"{_listed(unexpected)}."
        )
    shapes = [
        f"'{name}' must have shape {tuple(own[ours].shape)}; got {tuple(weights[name].shape)}"
        for name, ours in keys.items()
        if weights[name].shape != own[ours].shape
    ]
    if shapes:
        raise CheckpointError(f"the tensors do not fit this network: {_listed(shapes, '; ')}.")
    for name, value in constants.items():
        if not torch.equal(weights[name], value):
            raise CheckpointError(f"'{name}' is another one than that of the released network.")
    for name, ours in keys.items():
        _check(f"'{name}'", weights[name], own[ours], ours)
    field.load_state_dict({ours: weights[name] for name, ours in keys.items()}, strict=True)
    return len(constants)


def _check(name: str, value: Tensor, own: Tensor, ours: str) -> None:
    if value.shape != own.shape:
        raise CheckpointError(f"{name} must have shape {tuple(own.shape)}; got {tuple(value.shape)}.")
    if fault := fault_of(ours, value, own.dtype):
        raise CheckpointError(f"{name} {fault}.")


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    rest = len(names) - _LISTED
    shown = separator.join(names[:_LISTED]) or "none"
    return f"{shown} and {rest} more" if rest > 0 else shown


@torch.no_grad()
def _check_actions(policy: Policy) -> None:
    """Act once, on the observation in the middle of the normalised range."""
    middle = torch.zeros(1, policy.chunk.obs_steps, policy.obs_dim)
    obs = {"state": policy.normalizer.decode("state", middle)}
    actions = policy.act(obs, generator=torch.Generator().manual_seed(0))
    if not actions.isfinite().all():
        raise CheckpointError("the imported policy's actions are not finite. Check the file of statistics.")
