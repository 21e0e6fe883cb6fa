"""Whole training iterations against reference numbers, through our own loop.

The reference run begins with an evaluation whose episodes training then continues; here that is a
collection with the evaluation sampler before the first iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from affine import AffineConfig, AffineCritic, Arrays, assert_weights, load
from official_networks import read
from torch import Tensor

from algos.base import Setup
from algos.dppo import DppoConfig
from algos.onpolicy.frozen_copy import tunable_copy
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ppo_update import PpoUpdate
from algos.onpolicy.ratios import ChainRatio
from envs.rollouts.rollout import Rollout
from envs.spec import ChunkStep, EnvSpec
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.protocols import Chain, Cond

VALUES = {"rtol": 1e-4, "atol": 1e-5}


class ScriptedVector:
    """Environments that return what the script says, whatever the actions."""

    can_save = False

    def __init__(self, data: Arrays, spec: EnvSpec) -> None:
        self.data, self.spec = data, spec
        self.num_envs, self.obs_steps = int(data["N"]), 1
        self.calls, self.actions = 0, []

    def reset(self, seeds: Any, rows: Any = None) -> np.ndarray:
        if rows is None or self.calls == 0:
            return self.data["reset_obs"][0].numpy()
        return self.data["env_obs"][self.calls - 1].numpy()[rows]

    def step_chunk(self, actions: np.ndarray, active: Any = None) -> ChunkStep:
        n, self.calls = self.calls, self.calls + 1
        self.actions.append(actions)
        rewards = np.zeros(actions.shape[:2])
        rewards[:, 0] = self.data["env_reward"][n]
        return ChunkStep(
            obs=self.data["env_obs"][n].numpy(),
            rewards=rewards,
            length=np.full(self.num_envs, actions.shape[1]),
            terminated=self.data["env_terminated"][n].numpy(),
            truncated=self.data["env_truncated"][n].numpy(),
            success=np.zeros(self.num_envs, bool),
            path=np.zeros((*actions.shape[:2], self.spec.obs_dim)),
        )

    def goals(self, rows: Any = None) -> dict[str, np.ndarray]:
        return {}

    def images(self, rows: Any = None) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class ScriptedEnv:
    """The environment configuration of the script."""

    data: Arrays
    made: list[ScriptedVector] = field(default_factory=list)

    @property
    def spec(self) -> EnvSpec:
        width, obs = int(self.data["Da"]), int(self.data["Do"])
        box = (1e6,) * width
        names = (tuple("o" * obs), tuple("a" * width))
        return EnvSpec("script", "script", obs, width, tuple(-b for b in box), box, 1000, 1.0, *names)

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ScriptedVector:
        self.made.append(ScriptedVector(self.data, self.spec))
        return self.made[-1]


class TapeRatio(ChainRatio):
    """Acts with recorded noise and keeps the unreduced log-densities."""

    def play(self, noise: Tensor) -> None:
        self.tape: Iterator[Tensor] = iter(noise.transpose(1, 2))  # per step (N, K+1, Th, Da)
        self.log_probs: list[Tensor] = []

    def sample(self, cond: Cond, generator: torch.Generator) -> Chain:
        chain = self.policy.sample_chain(cond, noise=next(self.tape))
        self.log_probs.append(chain.log_prob)
        return chain


class TapeActor:
    """Acts with recorded noise and records nothing, as an evaluation does."""

    def __init__(self, policy: DenoisingPolicy, noise: Tensor) -> None:
        self.policy, self.tape = policy, iter(noise.transpose(1, 2))

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        return self.policy.act(obs, noise=next(self.tape)), {}


class TapePermutations:
    """Hands out recorded permutations."""

    def __init__(self) -> None:
        self.left: list[Tensor] = []

    def permutation(self, n: int) -> Tensor:
        assert len(self.left[0]) == n
        return self.left.pop(0)

    def noise(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        raise AssertionError("no noise is drawn in these updates")


class RecordingLearner(PpoUpdate):
    """Keeps the metrics of every minibatch."""

    def step(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        report = super().step(*args, **kwargs)
        self.reports.append(report)
        return report


def settings(data: Arrays) -> DppoConfig:
    return DppoConfig(
        num_envs=int(data["N"]),
        steps_per_iteration=int(data["T"]),
        tuned_steps=int(data["ft"]),
        gamma=0.97,
        gae_lambda=0.9,
        reward_scale_const=0.5,
        batch_size=20,
        update_epochs=data["itr1_perms"].shape[0],
        vf_coef=0.5,
        target_kl=1.0,
        max_grad_norm=0.05,
        actor_lr=1e-3,
        actor_min_lr=1e-4,
        actor_lr_warmup=2,
        actor_lr_cycle=10,
        actor_weight_decay=0.01,
        critic_lr=5e-3,
        critic_min_lr=1e-3,
        critic_lr_warmup=2,
        critic_lr_cycle=10,
        critic_warmup_iterations=2,
        gamma_denoising=0.9,
        clip_range=0.1,
        clip_range_base=0.02,
        clip_range_rate=3.0,
        paper_compat=True,
    )


class Replay:
    """Our run around the reference's weights, noise, permutations and environment script."""

    def __init__(self, data: Arrays) -> None:
        self.config, act_steps = settings(data), int(data["act_steps"])
        policy_config = PolicyConfig(
            process=VPDiffusion(int(data["K"]), prediction="eps"),
            backbone=AffineConfig(),
            horizon=int(data["Ta"]),
            act_steps=act_steps,
            normalizer=dict.fromkeys(("state", "goal", "action"), "identity"),
        )
        init = build_policy(policy_config, obs_dim=int(data["Do"]), action_dim=int(data["Da"]))
        load(init.field, data, "init_actor")
        explore, self.evaluate = self.config.samplers(init)
        self.policy = self.config.exploring(tunable_copy(init, explore, self.config.tuned_steps), explore)
        self.critic = AffineCritic(int(data["Do"]))
        load(self.critic, data, "init_critic")
        bounds, reduction = self.config.log_prob_range, self.config.log_prob_reduction
        self.ratio = TapeRatio(self.policy, log_prob_range=bounds, reduction=reduction)
        self.draws = TapePermutations()
        actor = list(self.policy.scored_net.parameters())
        self.learner = RecordingLearner(self.config, ratio=self.ratio, actor=actor, critic=self.critic)
        self.env = ScriptedEnv(data)
        with pytest.MonkeyPatch.context() as patch:  # the backbone of the file is not registered
            patch.setattr("algos.onpolicy.loop.init_facts", lambda *_: {})
            self.run = OnPolicy(
                self.config,
                Setup(env=self.env, num_workers=0, num_threads=1),
                ratio=self.ratio,
                trainable=self.policy.scored_net,
                bc_term=None,
                export_policy=self.policy.clone,
            )
        self.run.learner, self.run.draws = self.learner, self.draws  # type: ignore[assignment]
        self.pool = self.run.pool
        self.run.iteration = 1  # the evaluation counts as iteration 0

    def evaluation(self, noise: Tensor) -> Rollout:
        actor = TapeActor(self.policy.with_sampler(self.evaluate), noise)
        return self.pool.collect(actor, self.config.steps_per_iteration)

    def advance(self, data: Arrays, n: int) -> tuple[Rollout, Any]:
        self.ratio.play(data[f"itr{n}_noise"])
        self.draws.left = list(data[f"itr{n}_perms"])
        self.learner.reports = []
        seen: list[Any] = []
        collect, appraise = self.run.collect, self.run.estimate_advantages
        self.run.collect = lambda: seen.append(collect()) or seen[-1]  # type: ignore[method-assign]
        self.run.estimate_advantages = lambda *args: seen.append(appraise(*args)) or seen[-1]  # type: ignore[assignment]
        self.run.advance()
        self.run.collect, self.run.estimate_advantages = collect, appraise  # type: ignore[method-assign]
        return seen[0], seen[1]


@pytest.mark.golden("dppo_agent_iterations*.npz")
def test_iterations_match_reference(golden_path: Path) -> None:
    data = read(golden_path)
    replay = Replay(data)
    replay.evaluation(data["itr0_noise"])
    iterations = sorted(
        int(name[3:-7]) for name in data if name.startswith("itr") and name.endswith("_chains")
    )
    assert iterations
    for n in iterations:
        assert_rates(replay.learner, data, n)
        rollout, experience = replay.advance(data, n)
        assert_rollout(rollout, data, n)
        assert_experience(replay, experience, data, n)
        assert_updates(replay, data, n)
        assert replay.run.progress == int(data["step_counter"][n])
    np.testing.assert_allclose(np.stack(replay.env.made[0].actions), data["env_actions"], **VALUES)


def assert_rates(learner: PpoUpdate, data: Arrays, n: int) -> None:
    expected = data["lr_after_scheduler_step"][n - 1, 1:].tolist()  # used in the next iteration
    assert learner.rates(n) == pytest.approx(expected, rel=1e-9)


def assert_rollout(rollout: Rollout, data: Arrays, n: int) -> None:
    torch.testing.assert_close(rollout.obs["state"], data[f"itr{n}_obs"], **VALUES)
    torch.testing.assert_close(rollout.record["chain"], data[f"itr{n}_chains"].float(), **VALUES)
    last = data[f"itr{n}_next_obs_last"].float()
    torch.testing.assert_close(rollout.next_obs_last["state"], last, **VALUES)
    assert torch.equal(rollout.first, data[f"itr{n}_first_in"].bool())
    assert torch.equal(rollout.terminated, data[f"itr{n}_terminated"].bool())


def assert_experience(replay: Replay, experience: Any, data: Arrays, n: int) -> None:
    for ours, theirs in (
        (experience.value, "values"),
        (experience.advantage, "advantages"),
        (experience.target, "returns"),
    ):
        torch.testing.assert_close(ours, data[f"itr{n}_{theirs}"].flatten().float(), **VALUES)
    log_probs = torch.cat(replay.ratio.log_probs)
    torch.testing.assert_close(log_probs, data[f"itr{n}_logprobs"].float(), rtol=2e-4, atol=1e-4)
    scaler = replay.run.scaler
    assert scaler is not None
    moments = [float(scaler.mean), float(scaler.var), scaler.count]
    assert moments == pytest.approx(data[f"itr{n}_ret_rms"].tolist(), rel=1e-6)
    torch.testing.assert_close(scaler.carried, data[f"itr{n}_scaler_ret"], **VALUES)


def assert_updates(replay: Replay, data: Arrays, n: int) -> None:
    names = ("policy/loss", "value/loss", "policy/clip_fraction", "policy/approx_kl", "policy/ratio_mean")
    ours = torch.stack([torch.stack([report[name] for name in names]) for report in replay.learner.reports])
    torch.testing.assert_close(ours.double(), data[f"itr{n}_losses"], rtol=5e-4, atol=1e-5)
    assert_weights(replay.policy.scored_net, data, f"itr{n}_ft", atol=1e-6)
    assert_weights(replay.critic, data, f"itr{n}_critic", atol=1e-6)
    assert_weights(replay.policy.field.base, data, "init_actor", atol=0.0)
