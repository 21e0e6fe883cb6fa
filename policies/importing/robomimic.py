"""Checkpoints of robomimic (arXiv 2108.03298): its behaviour cloning and its diffusion policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.actors import deterministic, joined, layer, layers, one_step, stacked
from policies.importing.conditions import columns
from policies.importing.files import Files, Tensors
from policies.importing.formats import Description, PolicySource
from policies.importing.robomimic_diffusion import describe_diffusion, entry_of
from policies.importing.robomimic_facts import interface_of_task, normalisation_maps
from policies.processes.mixture import MixtureProcess
from policies.registry import register

_MLP, _DECODER = "policy.nets.mlp._model.", "policy.nets.decoder.nets."
_OTHERS = ("rnn", "transformer", "vae")  # kinds of behaviour cloning with other networks


@register("source", "robomimic")
@dataclass(frozen=True)
class RobomimicSource(PolicySource):
    """robomimic's BC and BC-GMM on states, its diffusion policy also on images; no setting is needed.

    Attributes:
        keys: Order of its observations in `state`; empty: as in the checkpoint.

    Source:
        robomimic 0.3 to 0.5. It evaluates a mixture with deviations of 1e-4 around the means of the drawn
        mode, and a Gaussian likewise; deviation: here they are 0.
    """

    keys: tuple[str, ...] = ()

    def read(self, files: Files) -> Description:
        whole = files.whole()
        if missing := sorted({"model", "config", "algo_name", "shape_metadata"} - set(whole)):
            raise CheckpointError(f"{files.path} is not a checkpoint of robomimic: it has no {missing[0]}.")
        config = files.json(whole["config"], "config")
        algo, shapes = config["algo"], whole["shape_metadata"]["all_shapes"]
        modalities = config["observation"]["modalities"]["obs"]
        diffuses = _check_algorithm(whole["algo_name"], algo, modalities)
        theirs = {key: shapes[key][0] for key in shapes if key in modalities["low_dim"]}
        ours = list(self.keys or theirs)
        if sorted(ours) != sorted(theirs):
            raise ConfigError(f"source.keys must list {', '.join(theirs)}; got {', '.join(ours)}.")
        action_dim = whole["shape_metadata"]["ac_dim"]
        maps = normalisation_maps(whole, config["train"], ours, action_dim)
        fixed = tuple(name for name in ("state", "action") if name not in maps)
        interface = interface_of_task(whole.get("env_metadata"))
        if diffuses:
            entry = entry_of(whole["model"], files.entry)
            found = describe_diffusion(whole, config, Tensors(whole["model"][entry]), ours, maps)
            return replace(found, entry=f"model/{entry}", fixed=fixed, interface=interface)
        entry = "model/nets" if "nets" in whole["model"] else "model"
        tensors = Tensors(whole["model"].get("nets", whole["model"]))
        stack = layers(tensors, _MLP)
        if not stack or stack[0][0].shape[1] != sum(theirs.values()):
            raise CheckpointError(
                f"the MLP must read the {sum(theirs.values())} numbers of {', '.join(theirs)}."
            )
        stack[0] = (stack[0][0].index_select(1, columns(theirs, ours)), stack[0][1])
        policy, weights = _policy(tensors, stack, algo)
        return Description(
            policy, sum(theirs.values()), action_dim, weights, tensors, maps,
            entry=entry, state=tuple(ours), fixed=fixed, beside=(), interface=interface,
        )  # fmt: skip


def _check_algorithm(name: str, algo: Mapping[str, Any], modalities: Mapping[str, list[str]]) -> bool:
    """Return whether it is the diffusion policy; what cannot be imported is refused."""
    diffuses = name == "diffusion_policy"
    others = [kind for kind in _OTHERS if algo.get(kind, {}).get("enabled")]
    known = ("low_dim", "rgb") if diffuses else ("low_dim",)
    unknown = [key for kind, keys in modalities.items() if kind not in known for key in keys]
    if name not in ("bc", "diffusion_policy") or others or unknown:
        raise CapabilityError(
            "only BC and BC-GMM on states, and the diffusion policy on images and states can be imported; "
            f"got {', '.join((name, *others, *unknown))}."
        )
    return diffuses


def _policy(tensors: Tensors, stack: list[Any], algo: Mapping[str, Any]) -> Any:
    if not algo["gmm"]["enabled"]:
        gaussian = algo["gaussian"]["enabled"]
        tensors.skip(f"{_DECODER}scale.", "deviations, which its evaluation does not use")
        return deterministic(
            [*stack, layer(tensors, f"{_DECODER}{'mean' if gaussian else 'action'}")], "relu"
        )
    if algo["gmm"]["std_activation"] != "softplus":
        raise CapabilityError(
            f"deviations by {algo['gmm']['std_activation']} cannot be imported; softplus can."
        )
    parts = [layer(tensors, f"{_DECODER}{name}") for name in ("logits", "mean", "scale")]
    whole, low = [*stack, joined(*parts)], algo["gmm"]["min_std"]
    process = MixtureProcess(
        num_modes=len(parts[0][1]), state_std=True, min_std=low, init_std=max(low, 0.1), max_std=max(low, 1.0)
    )
    return one_step(whole, "relu", process=process), stacked(whole, "head.trunk.")
