"""TD3+BC against d3rlpy: `--peers`, in an environment with d3rlpy 2.8 (and gym, which it imports)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import torch
from torch import Tensor

from algos.base import Setup
from algos.offline.loop import OfflineRun
from algos.td3_bc import Td3BcConfig
from benchmarks.speed.cases_offline import BATCH, arrays_of, dataset_of
from benchmarks.speed.cases_released import figure, require_equal_steps
from benchmarks.speed.peers import program
from benchmarks.speed.peers_released import Released, Sampled
from benchmarks.speed.timing import Figure


def learner(run: OfflineRun) -> Released:
    """Return d3rlpy's TD3+BC at its defaults, with its own buffer."""
    d3rlpy, tools = (program(name, "d3rlpy") for name in ("d3rlpy", "d3rlpy.torch_utility"))
    rows = arrays_of(run)
    ends = rows["discount"][:, 0] == 0
    follows = (rows["next_state"][:-1] == rows["state"][1:]).all(axis=1)
    cut = np.append(~follows, True) & ~ends
    with redirect_stdout(StringIO()):
        buffer = d3rlpy.dataset.MDPDataset(rows["state"], rows["action"], rows["reward"], ends, cut)
    algo = d3rlpy.algos.TD3PlusBCConfig().create(device="cpu:0")
    algo.create_impl((run.table.cond.shape[1],), run.table.action.shape[1])
    impl = algo.impl
    parts, steps = impl.modules, 0

    def sample() -> Sampled:
        found = tools.TorchMiniBatch.from_batch(buffer.sample_transition_batch(BATCH), 0.99, False, "cpu:0")
        return [found.observations, found.actions, found.rewards, found.next_observations, found.terminals]

    def train(batch: Sampled) -> None:
        nonlocal steps
        steps += 1  # the second step of two updates the actor, as ours
        state, action, reward, next_state, end = batch
        ones: Tensor = torch.ones_like(reward)
        impl.update(
            tools.TorchMiniBatch(state, action, reward, next_state, action, reward, end, ones, "cpu:0"), steps
        )

    return Released(
        impl,
        train,
        sample,
        [[parts.policy], list(parts.q_funcs)],
        [[parts.actor_optim.optim], [parts.critic_optim.optim]],
        [(parts.targ_policy, parts.policy), (parts.targ_q_funcs, parts.q_funcs)],
        True,
    )


def d3rlpy(options: argparse.Namespace) -> Iterator[Figure]:
    """A step of TD3+BC at d3rlpy's defaults, which are the published ones; CPU time."""
    run = Td3BcConfig().build(Setup(dataset=dataset_of(options), seed=0))
    peer = learner(run)
    require_equal_steps(run, peer)
    yield figure(options, run, peer, ("TD3+BC step", "d3rlpy", 1.25))
