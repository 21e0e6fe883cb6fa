"""Import the weights of another program as a policy: every tensor gets its place, or the import is refused.

Sizes come from the tensors. What these do not hold is given (`source.*`) or taken as published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies import registry
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError
from policies.importing.files import Files, read_entry, read_statistics
from policies.importing.formats import AffineMap, Contents, Description, ForeignSource, Network, PolicySource
from policies.policy import Policy, PolicyConfig
from policies.storage.checksums import sha256
from policies.storage.policy_folder import fault_of
from policies.storage.size_limits import Budget

FEATURES = ("state", "action")

_SPARE_BYTES, _BYTES_PER_BYTE = 512 * 2**20, 32  # allocation allowance: constant, and per byte of weights
_MOST_OPERATIONS = 200_000
_LISTED = 12  # names that an error lists before it counts the rest


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
    interface: Mapping[str, Any] = field(default_factory=dict)  # rate and kind of the actions, where known

    def facts(self) -> dict[str, Any]:
        """Return it as provenance of a policy directory; JSON types only."""
        left_out = [f"{count} ({why})" for why, count in sorted(self.skipped.items())]
        known = {"interface": dict(self.interface)} if self.interface else {}
        return known | {
            "imported": self.file,
            "imported_sha256": self.sha256,
            "imported_entry": self.entry or "the whole file",
            "imported_source": dict(self.source),
            "imported_tensors": self.tensors,
            "imported_parameters": self.parameters,
            "imported_normalizer": dict(self.normalizer),
            "left_out": ", ".join(left_out) or "nothing",
        }


def import_policy(
    path: str | Path,
    source: ForeignSource | PolicySource,
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
        normalization: File of statistics beside the checkpoint, if the program writes one.
        identity: Features (`state`, `action`) without normalisation.
        entry: Name of the weights in the checkpoint; None: averaged ones if it has them.
        sampler: The sampler; None: that of the program's evaluation.

    Raises:
        CheckpointError: If the file cannot be read safely, tensors are missing, unexpected, of another shape
            or not finite, or the policy's actions are not.
        CapabilityError: If the network has no counterpart.
        ConfigError: If a setting is missing or contradicts the tensors, or a feature has no map.
    """
    checkpoint, statistics = Path(path), None if normalization is None else Path(normalization)
    if isinstance(source, PolicySource):
        return _import_whole(Files(checkpoint, entry, statistics), source, identity, sampler)
    name, tensors = read_entry(checkpoint, entry)
    contents = source.contents(tensors)
    given = {} if statistics is None else source.maps(read_statistics(statistics))
    known = {**contents.maps, **given}
    network = source.network(contents.network, len(known["action"][0]) if "action" in known else None)
    maps = _chosen_maps(known, identity)
    policy = _build(source, network, known, maps, sampler)
    skipped = Counter(contents.skipped.values()) + _install(policy, contents, network, maps)
    origin = {feature: "file of statistics" if feature in given else "checkpoint" for feature in maps}
    unused = [feature for feature in contents.maps if origin.get(feature) != "checkpoint"]
    skipped += Counter({"map of a feature that was not asked for": 2 * len(unused)})
    _check_actions(policy)
    return policy, Conversion(
        checkpoint.name,
        sha256(checkpoint),
        name,
        registry.to_json("source", source),
        len(tensors) - sum(skipped.values()),
        sum(weight.numel() for weight in policy.parameters()),
        {feature: origin.get(feature, "identity, as asked for") for feature in FEATURES},
        skipped,
    )


def _import_whole(
    files: Files, source: PolicySource, identity: Sequence[str], sampler: Any
) -> tuple[Policy, Conversion]:
    """Build a described policy and give every weight its place."""
    try:
        found = source.read(files)
    except KeyError as error:
        program = registry.name_of("source", source)
        raise CheckpointError(
            f"{files.path}: its configuration has no {error}, which files of source={program} hold; "
            f"it may be of another version of that program."
        ) from error
    _check_read(files, source, found)
    maps = _chosen_maps(found.maps, [*identity, *found.fixed])
    own_maps = maps if found.wrapper is None else {}  # a wrapper has the normaliser of its policy
    modes = {name: "limits" if name in own_maps else "identity" for name in (*FEATURES, "goal")}
    config = replace(found.config, normalizer=modes, sampler=sampler or found.config.sampler)
    nbytes = sum(weight.numel() for weight in found.weights.values()) * 4
    with Budget(_SPARE_BYTES + _BYTES_PER_BYTE * nbytes, _MOST_OPERATIONS):
        sizes: dict[str, Any] = {"goal_dim": found.goal_dim, "images": found.images}
        policy = build_policy(config, obs_dim=found.obs_dim, action_dim=found.action_dim, **sizes)
        policy = (policy if found.wrapper is None else found.wrapper.wrap(policy)).eval()
    if left := sorted(found.tensors.left):
        raise CheckpointError(f"the tensors are not those of this policy: unexpected {_listed(left)}.")
    _install_maps(policy, maps)
    own = {name: value for name, value in policy.state_dict().items() if "normalizer." not in name}
    missing, unknown = sorted(set(own) - set(found.weights)), sorted(set(found.weights) - set(own))
    if missing or unknown:
        raise CheckpointError(
            f"the tensors are not those of this policy: missing {_listed(missing)}; unexpected "
            f"{_listed(unknown)}."
        )
    for weight, value in found.weights.items():
        _check(f"'{weight}'", value, own[weight], weight)
        own[weight].copy_(value)
    _check_actions(policy)
    origin = dict.fromkeys(maps, "checkpoint")
    if files.normalization is not None:
        origin |= dict.fromkeys(set(found.beside) & set(maps), "file of statistics")
    origin |= dict.fromkeys(found.fixed, "identity, as in the program")
    skipped = Counter(found.tensors.skipped.values())
    facts = registry.to_json("source", source)
    return policy, Conversion(
        files.path.name,
        sha256(files.path),
        found.entry,
        facts | ({"state": list(found.state)} if found.state else {}),
        found.tensors.count - sum(skipped.values()),
        sum(weight.numel() for weight in policy.parameters()),
        {feature: origin.get(feature, "identity, as asked for") for feature in FEATURES},
        skipped,
        found.interface,
    )


def _check_read(files: Files, source: PolicySource, found: Description) -> None:
    """Refuse statistics and entries that the source does not read."""
    program = registry.name_of("source", source)
    if files.normalization is not None and not found.beside:
        raise ConfigError(f"source={program} reads no statistics beside the checkpoint: no normalization=….")
    if files.entry not in (None, found.entry, found.entry.rpartition("/")[2]):
        raise ConfigError(f"source={program} reads the entry '{found.entry}' alone; got entry={files.entry}.")


def _chosen_maps(maps: Mapping[str, AffineMap], identity: Sequence[str]) -> dict[str, AffineMap]:
    """Return the maps of the features that have one; a goal is scaled if the state is."""
    if unknown := sorted(set(identity) - set(FEATURES)):
        raise ConfigError(f"identity must list some of {', '.join(FEATURES)}; got {', '.join(unknown)}.")
    if missing := [name for name in FEATURES if name not in maps and name not in identity]:
        raise ConfigError(
            f"'{missing[0]}' has no statistics in the checkpoint or beside it. Give normalization=<file of "
            f"statistics>, or identity=[{','.join(missing)}]."
        )
    shared = {"goal": "state"}
    return {name: value for name, value in maps.items() if shared.get(name, name) not in identity}


def _build(
    source: ForeignSource,
    network: Network,
    known: Mapping[str, AffineMap],
    maps: Mapping[str, AffineMap],
    sampler: Any,
) -> DenoisingPolicy:
    """Build the policy, with sizes on which settings, tensors and known statistics agree."""
    widths = {name: len(scale) for name, (scale, _) in known.items()}
    by_state = _ratio(network.cond_dim, widths.get("state"))
    obs_steps = _agreed("obs_steps", given=source.obs_steps, network=network.obs_steps, statistics=by_state)
    obs_dim = widths.get("state", network.cond_dim // obs_steps)
    _check_product("condition", network.cond_dim, obs_steps, obs_dim)
    by_horizon = network.action_dim or _ratio(network.chunk_size, source.horizon)
    statistics = widths.get("action")
    action_dim = _agreed("action_dim", given=source.action_dim, network=by_horizon, statistics=statistics)
    by_width = network.horizon or _ratio(network.chunk_size, action_dim)
    horizon = _agreed("horizon", given=source.horizon, network=by_width)
    if network.chunk_size is not None:
        _check_product("chunk", network.chunk_size, horizon, action_dim)
    process, own_sampler = source.parts()
    start = source.first_row(obs_steps)
    config = PolicyConfig(
        process=process,
        backbone=network.backbone,
        sampler=own_sampler if sampler is None else sampler,
        obs_steps=obs_steps,
        horizon=horizon,
        act_steps=source.act_steps or max(horizon - start, 1),
        action_start=start,
        normalizer={name: "limits" if name in maps else "identity" for name in (*FEATURES, "goal")},
        observation_clip=None,
    )
    policy = build_policy(config, obs_dim=obs_dim, action_dim=action_dim)
    assert isinstance(policy, DenoisingPolicy)
    return policy.eval()


def _check_product(what: str, whole: int, steps: int, width: int) -> None:
    if whole != steps * width:
        raise ConfigError(
            f"the network's {what} has {whole} numbers, which cannot be {steps} rows of {width}. Give the "
            "statistics and the sizes that it was trained with."
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


def _install(
    policy: DenoisingPolicy, contents: Contents, network: Network, maps: Mapping[str, AffineMap]
) -> Counter[str]:
    """Load maps and weights; returns how many tensors of the networks were left out, by reason."""
    _install_maps(policy, maps)
    fields, left_out = _fields(policy, contents)
    for backbone, weights in fields:
        left_out["rebuilt, and equal"] += _load(backbone, network, weights)
    return +left_out


def _install_maps(policy: Policy, maps: Mapping[str, AffineMap]) -> None:
    for name, (scale, offset) in maps.items():
        for part, value in (("scale", scale), ("offset", offset)):
            own = policy.normalizer.get_buffer(f"{name}_{part}")
            _check(f"{part} of '{name}'", value, own, f"normalizer.{name}_{part}")
            own.copy_(value)


def _fields(
    policy: DenoisingPolicy, contents: Contents
) -> tuple[list[tuple[nn.Module, Mapping[str, Tensor]]], Counter[str]]:
    """Return the backbones of the policy, each with its released weights, and what no step uses."""
    if contents.tuned is None:
        return [(policy.field, contents.network)], Counter()
    steps, times = contents.tuned_steps, policy.table.net_time
    if steps is None or not 1 <= steps <= len(times):
        raise ConfigError(
            f"source.tuned_steps must be the number of fine-tuned denoising steps, 1 to {len(times)}; "
            f"got {steps}."
        )
    first = len(times) - steps
    if first == 0:
        return [(policy.field, contents.tuned)], Counter({"the frozen network": len(contents.network)})
    switch = float(times[first - 1] + times[first]) / 2
    policy.field = SwitchedField(policy.field, policy.clone().field, switch)
    return [(policy.field.base, contents.network), (policy.field.tuned, contents.tuned)], Counter()


def _load(field: nn.Module, network: Network, weights: Mapping[str, Tensor]) -> int:
    """Load released weights strictly; returns how many tensors only repeat what the network implies."""
    own = field.state_dict()
    constants = {name: value for name, value in network.constants.items() if name in weights}
    missing = sorted(set(network.keys) - set(weights))
    unexpected = sorted(set(weights) - set(network.keys) - set(constants))
    if missing or unexpected:
        raise CheckpointError(
            f"the tensors are not those of this network: missing {_listed(missing)}; unexpected "
            f"{_listed(unexpected)}."
        )
    for name, value in constants.items():
        if not torch.equal(weights[name], value):
            raise CheckpointError(f"'{name}' differs from that of the released network.")
    for name, ours in network.keys.items():
        _check(f"'{name}'", weights[name], own[ours], ours)
    field.load_state_dict({ours: weights[name] for name, ours in network.keys.items()}, strict=True)
    return len(constants)


def _check(name: str, value: Tensor, own: Tensor, ours: str) -> None:
    if value.shape != own.shape:
        raise CheckpointError(f"{name} must have shape {tuple(own.shape)}; got {tuple(value.shape)}.")
    if fault := fault_of(ours, value, own.dtype):
        raise CheckpointError(f"{name} {fault}.")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    shown = ", ".join(names[:_LISTED]) or "none"
    return f"{shown} and {rest} more" if rest > 0 else shown


@torch.no_grad()
def _check_actions(policy: Policy) -> None:
    """Act once, on the observation in the middle of the normalised range."""
    middle = torch.zeros(1, policy.chunk.obs_steps, policy.obs_dim)
    obs = {"state": policy.normalizer.decode("state", middle)}
    if policy.goal_dim:
        obs["goal"] = policy.normalizer.decode("goal", torch.zeros(1, policy.goal_dim))
    obs |= {
        camera: torch.full((1, policy.chunk.obs_steps, *shape), 128, dtype=torch.uint8)
        for camera, shape in policy.images.items()
    }
    actions = policy.act(obs, generator=torch.Generator().manual_seed(0))
    if not actions.isfinite().all():
        raise CheckpointError("the imported policy's actions are not finite. Check the file of statistics.")
