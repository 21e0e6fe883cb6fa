"""What all algorithms on rectified flows share: the times that they learn, explore and ship at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from point_flows import FPO, POLICYFLOW, RATES, REINFLOW, SIZES, make_flow, make_run

from algos.fpo import AwmConfig
from algos.onpolicy.ratios import Rows
from algos.onpolicy.samplers import on_even_times
from policies.backbones.dp_transformer import DpTransformerConfig
from policies.build import build_policy
from policies.samplers.ode import Euler, Heun

AWM = AwmConfig(**SIZES, **RATES)


@pytest.mark.parametrize("config", [REINFLOW, FPO, AWM, POLICYFLOW], ids=lambda config: type(config).__name__)
def test_fine_tuning_leaves_the_times_that_released_flows_were_sampled_at(config: Any) -> None:
    init = make_flow().with_sampler(Euler(steps=4, released_times=True))
    even = make_flow().with_sampler(Euler(steps=4)).table.net_time
    assert not torch.equal(init.table.net_time, even)
    run = make_run(config, init)
    export_policy: Any = run.snapshot()
    assert torch.equal(run.policy.table.net_time, even)  # type: ignore[attr-defined]
    assert torch.equal(export_policy.table.net_time, even) and not export_policy.sampler.released_times
    assert init.sampler == Euler(steps=4, released_times=True)
    run.close()


@pytest.mark.parametrize("config", [FPO, AWM, POLICYFLOW], ids=lambda config: type(config).__name__)
def test_exploration_leaves_actions_unbounded_and_what_is_shipped_does_not(config: Any) -> None:
    init = make_flow()
    with torch.no_grad():
        init.field.trunk.outlet.bias.add_(2.0)  # far beyond the bound
    run = make_run(config, init)
    record = run.collect().record
    action = record.get("action", record.get("end"))
    assert run.policy.sampler == Euler(steps=4, clip_action=None)  # type: ignore[attr-defined]
    assert action is not None and float(action.max()) > 1.5
    assert run.snapshot().sampler == init.sampler == Euler(steps=4)  # type: ignore[attr-defined]
    run.close()


def test_samplers_without_such_times_stay_as_they_are() -> None:
    assert on_even_times(Heun(steps=3)) == Heun(steps=3)


@pytest.mark.parametrize("config", [REINFLOW, FPO, POLICYFLOW], ids=lambda config: type(config).__name__)
def test_features_that_cloning_drops_are_dropped_by_no_ratio(config: Any) -> None:
    """On fresh data ratios are 1, and a policy is at no distance from itself, in whatever mode it came."""
    net = DpTransformerConfig(width=8, depth=1, heads=1, dropout=0.5)
    flow = make_flow()
    init = build_policy(replace(flow.config, backbone=net), obs_dim=flow.obs_dim, action_dim=2).train()
    run = make_run(replace(config, bc_weight=1.0), init)
    experience = run.experience(run.collect())
    rows = Rows.sorted_from(torch.arange(len(experience) * run.ratio.inner_steps), run.ratio.inner_steps)
    assert run.ratio.score(experience, rows).log_ratio.abs().max() < 1e-4
    cond = experience.cond.rows(torch.arange(len(experience)))
    noise = init.sample_noise(len(experience), generator=torch.Generator().manual_seed(0))
    assert not run._bc_term.losses(cond, noise).any()
    assert init.training
    run.close()
