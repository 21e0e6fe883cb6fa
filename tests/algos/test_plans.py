"""Windows that reach beyond what was recorded: what was not recorded teaches nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_offline_specified import ACTION, STATE, dataset
from torch import Tensor

from algos.base import Setup
from algos.iql import IqlConfig, IqlLearner
from algos.offline.chunk_loss import ChunkLoss
from algos.offline.loop import OfflineRun
from algos.td3_bc import OwnLikelihood, Td3BcConfig
from algos.transitions import Batch
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.processes.deterministic import DeterministicProcess
from policies.processes.gaussian import GaussianProcess

HORIZON = 4


def run_of(config: Any, process: Any) -> OfflineRun:
    """Return a run that tunes a policy of plans of four steps, the first of which passed already."""
    unit = {name: _unit(name, ACTION) for name in ("min", "max", "mean", "std")}
    state = {name: _unit(name, STATE) for name in unit}
    policy = build_policy(
        PolicyConfig(
            process=process, backbone=MlpConfig(width=32), horizon=HORIZON, act_steps=2, action_start=1,
            normalizer={"state": "gaussian", "action": "limits"},
        ),
        obs_dim=STATE, action_dim=ACTION, statistics={"state": state, "action": unit}, seed=1,
    )  # fmt: skip
    return config.build(Setup(dataset=dataset(), seed=1, init=policy))


def _unit(name: str, width: int) -> Tensor:
    return torch.full((width,), {"min": -1.0, "mean": 0.0}.get(name, 1.0))


def batch_of(run: OfflineRun) -> Batch:
    batch = run.table.gather(torch.arange(len(run.table)))
    assert 0.5 < float(batch.real.mean()) < 1 and len(set(batch.real.sum(1).tolist())) > 1
    return batch


def garbled(batch: Batch) -> Batch:
    """Return the batch with other actions where none was recorded."""
    plan = batch.plan.view(-1, HORIZON, ACTION)
    return replace(batch, plan=torch.where(batch.real[..., None] > 0, plan, plan.flip(0) - 0.5).flatten(1))


def rows_of(learner: Any, batch: Batch, draws: Any) -> list[Tensor]:
    """Return the losses of the recorded steps of every window, from those of single windows."""
    losses = (ChunkLoss(learner.policy) if isinstance(learner, IqlLearner) else learner)(batch, draws)
    return [row[real > 0] for row, real in zip(losses, batch.real, strict=True)]


def test_cloning_beside_values_takes_the_mean_over_recorded_steps() -> None:
    run = run_of(Td3BcConfig(steps=1), RectifiedFlow())
    rule: Any = run.learner.regulariser
    assert isinstance(rule, OwnLikelihood)
    batch = batch_of(run)
    draws = rule.draw(len(batch), torch.Generator().manual_seed(0))
    penalty = rule.penalty(batch, batch.action, run.learner.critic, draws)[0]
    torch.testing.assert_close(penalty, torch.cat(rows_of(rule._cloning, batch, draws)).mean())


@pytest.mark.parametrize(
    "process",
    [RectifiedFlow(), GaussianProcess(), DeterministicProcess()],
    ids=lambda p: type(p).__name__,
)  # fmt: skip
def test_what_iql_weights_is_the_misfit_of_recorded_steps(process: Any) -> None:
    """Averaged over them, or, of densities and single answers, summed over their entries."""
    run = run_of(IqlConfig(steps=1), process)
    learner: Any = run.learner
    batch = batch_of(run)
    draws = learner.draw(len(batch), torch.Generator().manual_seed(0))
    rows = rows_of(learner, batch, draws)
    whole = not isinstance(process, RectifiedFlow)
    wanted = torch.stack([ACTION * row.sum() if whole else row.mean() for row in rows])
    torch.testing.assert_close(learner.policy_loss(batch, draws), wanted)


@pytest.mark.parametrize(
    "process", [GaussianProcess(), DeterministicProcess()], ids=lambda p: type(p).__name__
)
def test_actions_that_nobody_recorded_change_no_misfit(process: Any) -> None:
    """Of a network that sees no noised window: steps do not see each other there."""
    run = run_of(IqlConfig(steps=1), process)
    learner: Any = run.learner
    batch = batch_of(run)
    other = garbled(batch)
    assert not torch.equal(other.plan, batch.plan)
    draws = learner.draw(len(batch), torch.Generator().manual_seed(0))
    torch.testing.assert_close(learner.policy_loss(other, draws), learner.policy_loss(batch, draws))
