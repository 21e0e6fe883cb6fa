"""Merging: one policy is itself, shares of 0 and 1 are members, other architectures are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from small_algorithms import init, policy_config
from torch import Tensor

from algos.cloning.recap import with_goal
from burnish.commands.merge import MergeConfig, run
from burnish.config.overrides import RunContext
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.composition.merging import merge, spherical
from policies.errors import CheckpointError, ConfigError
from policies.policy import Policy
from policies.runner import SIGNATURE
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.advantage import Advantage


def trained(seed: int) -> Policy:
    """Return the start with other weights."""
    policy, generator = init("flow"), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy


def equal(a: Policy, b: Policy) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("method", ["linear", "spherical"])
def test_one_policy_and_equal_policies_are_themselves_bit_by_bit(method: str) -> None:
    policy, start = trained(1), init("flow")
    assert equal(merge([policy], init=start, method=method), policy)
    assert equal(merge([policy] * 3, init=start, method=method), policy)
    assert equal(merge([trained(2), policy], init=start, method=method, weights=(0, 5)), policy)
    assert equal(merge([trained(2), policy], init=start, method=method, weights=(5, 0)), trained(2))
    assert equal(merge([policy, trained(2)], init=start, method=method, scale=0.0), start)


def test_linear_means_are_those_of_the_weights() -> None:
    policies = [trained(seed) for seed in range(3)]
    found = merge(policies, weights=(1, 2, 1)).state_dict()
    assert equal(merge(policies, weights=(5e307, 1e308, 5e307)), merge(policies, weights=(1, 2, 1)))
    for name, value in found.items():
        a, b, c = (policy.state_dict()[name] for policy in policies)
        torch.testing.assert_close(value, 0.25 * a + 0.5 * b + 0.25 * c)


def test_the_scale_is_the_share_of_the_way_from_the_start() -> None:
    policies, start = [trained(1), trained(2)], init("flow")
    whole, half = (merge(policies, init=start, method="spherical", scale=eta) for eta in (1.0, 0.5))
    for name, weight in half.named_parameters():
        middle = (dict(whole.named_parameters())[name] + dict(start.named_parameters())[name]) / 2
        torch.testing.assert_close(weight, middle)


def test_members_stay_as_they_are() -> None:
    policies = [trained(1), trained(2)]
    merged = merge(policies)
    assert equal(policies[0], trained(1)) and equal(policies[1], trained(2)) and not merged.training


def other(**changes: Any) -> Policy:
    one = changes.pop("high", torch.ones(2))
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    config = replace(policy_config("flow"), **changes)
    return build_policy(config, obs_dim=2, action_dim=2, statistics={"state": limits, "action": limits})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda: init("diffusion"), "policies[1] parts.process.name diffusion flow compose=[a,b]"),
        (lambda: other(backbone=MlpConfig(width=9, time_dim=4)), "parts.backbone.width 9 8"),
        (lambda: other(act_steps=1), "act_steps 1 2"),
        (lambda: other(high=2 * torch.ones(2)), "policies[1] normalizer init=<policy>"),
    ],
)
def test_what_is_no_other_training_of_the_same_policy_is_refused(policy: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=mentions(words)):
        merge([init("flow"), policy()])


def test_wrappers_that_differ_are_named_and_composing_is_advised_only_where_it_works() -> None:
    wrapped = Advantage().wrap(with_goal(init("flow"), 1, 0.1))
    with pytest.raises(ConfigError, match=mentions("policies[1] wrappers none advantage member 0")) as caught:
        merge([wrapped, init("flow")])
    assert "compose=" not in str(caught.value)


def test_arguments_that_do_not_fit_are_refused() -> None:
    two = [trained(1), trained(2)]
    for weights in ((1,), (1, -1), (0, 0), (1, float("nan"))):
        with pytest.raises(ConfigError, match=mentions("weights 2")):
            merge(two, weights=weights)
    with pytest.raises(ConfigError, match=mentions("method=spherical init=")):
        merge(two, method="spherical")
    with pytest.raises(ConfigError, match=mentions("scale=0.5 init=")):
        merge(two, scale=0.5)
    with pytest.raises(ConfigError, match=mentions("scale -1")):
        merge(two, init=init("flow"), scale=-1.0)
    with pytest.raises(ConfigError, match=mentions("scale=1e+40")):
        merge(two, init=init("flow"), scale=1e40)
    with pytest.raises(ConfigError, match=mentions("method linear spherical cubic")):
        merge(two, method="cubic")


def test_a_tensor_of_one_number_is_averaged() -> None:
    start = torch.full((1,), 3.0, dtype=torch.float64)
    found = spherical([start + 0.1, start - 0.2], [1.0, 1.0], start, "one")
    torch.testing.assert_close(found, start - 0.05)


def test_opposite_changes_have_no_spherical_mean() -> None:
    start, one = init("flow"), trained(1)
    away = init("flow")
    with torch.no_grad():
        for weight, base, moved in zip(away.parameters(), start.parameters(), one.parameters(), strict=True):
            weight.copy_(2 * base - moved)
    with pytest.raises(ConfigError, match=mentions("method=spherical opposite method=linear")):
        merge([one, away], init=start, method="spherical")


def test_the_command_writes_a_policy_that_records_its_parents(tmp_path: Path) -> None:
    facts = {"algo": "bc", "task": "point"}
    paths = [str(save_policy(trained(s), tmp_path / f"p{s}", provenance=facts | {"seed": s})) for s in (1, 2)]
    start, out = str(save_policy(init("flow"), tmp_path / "start")), tmp_path / "merged"
    config = MergeConfig(
        policies=paths, init=start, method="spherical", weights=[1.0, 3.0], scale=0.5, out=str(out)
    )
    assert run(config, RunContext(tmp_path)) == 2
    wanted = merge([trained(1), trained(2)], init=init("flow"), method="spherical", weights=(1, 3), scale=0.5)
    assert equal(load_policy(out), wanted)
    found = json.loads((out / "config.json").read_text())["provenance"]
    assert found["task"] == "point" and "seed" not in found
    assert [one["name"] for one in found["merge"]["policies"]] == ["p1", "p2"]
    assert len(found["merge"]["init"]["sha256"]) == 64 and found["merge"]["scale"] == 0.5
    with pytest.raises(ConfigError, match=mentions("out= overwrite=true")):
        run(config, RunContext(tmp_path))
    for given in (None, 3, {"a": 1}):
        with pytest.raises(ConfigError, match=mentions("policies=[a,b")):
            run(MergeConfig(policies=given), RunContext(tmp_path))
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / SIGNATURE).write_text("{}")
    with pytest.raises(CheckpointError, match=mentions("policies= exported folder Give")):
        run(MergeConfig(policies=[str(tmp_path / "graphs")]), RunContext(tmp_path))


def test_a_mean_is_finite_where_a_change_is_zero() -> None:
    start = init("flow")
    found: list[Tensor] = list(merge([start, trained(1)], init=start, method="spherical").parameters())
    middle = list(merge([start, trained(1)]).parameters())
    for a, b in zip(found, middle, strict=True):
        torch.testing.assert_close(a, b)
