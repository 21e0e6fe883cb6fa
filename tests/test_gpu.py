"""The same numbers on an accelerator; skipped where there is none."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from point_env import PointEnv
from point_steering import changed, start
from small_algorithms import FROM_SCRATCH, PROCESSES, accepts, dataset, setup, small
from small_policies import observations, small_policy
from two_modes import two_mode_setup

from algos.a2pr import A2prConfig
from algos.base import Setup
from algos.bc import Bc, BcConfig
from algos.dppo import DppoConfig
from algos.iql import IqlConfig
from algos.offline.batched_seeds import SeedBatch, build_seeds
from algos.offline.loop import OfflineRun
from algos.offline.neighbor_autotune import Load, Rows, build_search
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.rollouts.fleet import RolloutSettings
from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess
from policies.samplers.ddpm import DDIM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


POLICIES = {
    "ddpm": lambda: small_policy(VPDiffusion(num_levels=5)),
    "ddim": lambda: small_policy(VPDiffusion(num_levels=8), DDIM(steps=4)),
    "flow": lambda: small_policy(RectifiedFlow()),
    "gaussian": lambda: small_policy(GaussianProcess()),
}


def point_policy() -> Policy:
    """An untrained policy of the point task."""
    config = PolicyConfig(process=VPDiffusion(num_levels=4), backbone=MlpConfig(width=16))
    stats = {name: {"min": -torch.ones(2), "max": torch.ones(2)} for name in ("state", "action")}
    return build_policy(config, obs_dim=2, action_dim=2, statistics=stats)


@pytest.mark.parametrize("name", POLICIES)
def test_actions_are_those_of_the_cpu(name: str) -> None:
    policy = POLICIES[name]()
    obs, noise = observations(64), policy.sample_noise(64)
    there = policy.clone().to("cuda")
    out = there.act(obs.cuda(), noise=noise.cuda())
    assert out.device.type == "cuda"
    torch.testing.assert_close(out.cpu(), policy.act(obs, noise=noise), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_replayed_decisions_are_those_of_before_the_recording_and_see_new_weights(name: str) -> None:
    policy = POLICIES[name]().to("cuda")
    obs = observations(8).cuda()
    for _ in range(2):
        noise = [policy.sample_noise(8) for _ in range(6)]
        replayed = [policy.act(obs, noise=one) for one in noise]
        with torch.no_grad():
            alone = [policy.executed(policy.plan(policy.observation(obs), one)) for one in noise]
        for ours, theirs in zip(replayed, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.1)


REPLAYED = ("bc", "td3_bc", "iql", "a2pr", "rebrac", "qc", "fql", "expo", "pa_rl", "sac", "dsrl", "diffuser")


@pytest.mark.parametrize("algo", REPLAYED)
def test_replayed_steps_are_those_of_single_kernels(algo: str, caplog: pytest.LogCaptureFixture) -> None:
    process = next(one for one in ("flow", "diffusion", "deterministic", *PROCESSES) if accepts(algo, one))
    changes: dict[str, Any] = {"init": None} if algo in FROM_SCRATCH else {}
    given = {"dataset": dataset(), "device": torch.device("cuda"), **changes}
    weights = []
    for replays in (True, False):
        run = small(registry.lookup("algo", algo), process).build(setup(process, **given))
        recorded = run._gradients if isinstance(run, Bc) else run._recorded
        recorded._is_on = replays
        for _ in range(12):
            if isinstance(run, Bc):
                run._step(run._draw())
            elif isinstance(run, OfflineRun):
                run._step()
            elif run.progress < run.total:
                run.advance()
        assert bool(recorded._graphs) == replays, caplog.text
        policy = run.policy if isinstance(run, Bc) else run.learner.policy
        weights.append([weight.detach().clone() for weight in policy.parameters()])
        run.close()
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("algo", "process"), [("dppo", "diffusion"), ("reinflow", "flow"), ("ppo", "gaussian")]
)
def test_an_update_never_waits_for_the_device(algo: str, process: str) -> None:
    run = small(registry.lookup("algo", algo), process).build(setup(process, device=torch.device("cuda")))
    for mode in ("default", "error"):  # the first step makes tables and moments
        experience = run.experience(run.collect())
        index = torch.arange(len(experience) * run.ratio.inner_steps, device="cuda")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            run.learner.step(experience, index, draws=run.draws, train_actor=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    run.close()


def test_experience_of_a_policy_on_the_device_is_scored_as_it_was_drawn() -> None:
    algo = DppoConfig(num_envs=4, steps_per_iteration=8, batch_size=64, update_epochs=1, tuned_steps=2)
    given = Setup(env=PointEnv(), init=point_policy(), num_workers=2, device=torch.device("cuda"))
    run = algo.build(given)
    rollout = run.collect()
    assert {part.device.type for part in (*rollout.record.values(), *rollout.obs.values())} == {"cuda"}
    metrics = {name: float(value) for name, value in run.advance().items()}
    assert abs(metrics["policy/ratio_mean"] - 1.0) < 0.05
    run.close()


def test_workers_evaluate_a_policy_on_the_cpu() -> None:
    policy = point_policy().to("cuda")
    policy.act(torch.zeros(1, 1, 2))  # leaves tables on the device
    rows = evaluate(policy, PointEnv(), Settings(episodes=3), num_workers=1).rows
    assert rows == evaluate(policy.clone().cpu(), PointEnv(), Settings(episodes=3)).rows
    assert policy.device.type == "cuda"


def test_cloning_steps_stay_on_the_device_and_lower_the_loss() -> None:
    setup = two_mode_setup()
    setup.device = torch.device("cuda")
    run = BcConfig(steps=200, batch_size=64, warmup_steps=5, log_every=50, validation_fraction=0.0).build(
        setup
    )
    losses = [float(run.advance()["policy/loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert {p.device.type for p in run.snapshot().parameters()} == {"cuda"}


def test_dppo_updates_on_the_device_while_workers_act_on_the_cpu() -> None:
    init = point_policy()
    algo = DppoConfig(num_envs=4, steps_per_iteration=8, batch_size=64, update_epochs=2, tuned_steps=2)
    rollout = RolloutSettings("workers")
    given = Setup(env=PointEnv(), init=init, num_workers=0, device=torch.device("cuda"), rollout=rollout)
    run = algo.build(given)
    before = [p.clone() for p in run.policy.scored_net.parameters()]
    metrics = {name: float(value) for name, value in run.advance().items()}
    assert abs(metrics["policy/ratio_mean"] - 1.0) < 0.05
    assert any(not torch.equal(p, q) for p, q in zip(run.policy.scored_net.parameters(), before, strict=True))
    run.close()


@pytest.mark.parametrize("how", ["lists", "tree", "brute", "auto"])
def test_nearest_rows_are_those_of_the_cpu(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    state, action = torch.randn(400, 5, generator=generator), torch.rand(400, 2, generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        rows, query = Rows(state.to(device), action.to(device), 2.0), (action + 0.3).to(device)
        search = build_search(how, rows, load=Load(10, 16), generator=generator)
        found.append(search.nearest(torch.arange(400, device=device), rows.state, query).row)
    assert found[1].device.type == "cuda" and torch.equal(found[0], found[1].cpu())


def rewarded() -> EpisodeDataset:
    """Return small episodes whose rewards differ."""
    dataset = two_mode_setup().dataset
    assert dataset is not None
    return replace(dataset, rewards=dataset.actions.sum(dim=1))


def test_offline_steps_stay_on_the_device() -> None:
    config = PrdcConfig(steps=4, log_every=4, batch_size=16, hidden_dims=(8,), critic_dims=(8,))
    setup = Setup(dataset=rewarded(), device=torch.device("cuda"))
    run = config.build(setup)
    assert all(torch.as_tensor(value).isfinite() for value in run.advance().values())
    assert run.table.device.type == run.learner.policy.device.type == "cuda"


@pytest.mark.parametrize("kind", [Td3BcConfig, PrdcConfig, A2prConfig, RebracConfig, IqlConfig])
def test_several_seeds_learn_together_on_the_device_what_they_learn_alone(kind: Any) -> None:
    narrow = {"hidden_dims": (8,), "critic_dims": (8,), "value_dims": (8,), "vae_width": 8}
    known = {f.name for f in fields(kind)}
    sizes = {name: value for name, value in narrow.items() if name in known}
    config = kind(steps=8, log_every=4, batch_size=16, **sizes)
    setup = Setup(dataset=rewarded(), seed=1, device=torch.device("cuda"))
    runs = build_seeds(config, setup, [0, 1, 2])
    group, alone = SeedBatch(runs), config.build(setup)
    group.advance()
    alone.load_state_dict(copy.deepcopy(runs[1].state_dict()))
    group.advance()
    alone.advance()
    for ours, theirs in zip(runs[1].snapshot().parameters(), alone.snapshot().parameters(), strict=True):
        assert ours.device.type == "cuda"
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 * config.actor_lr)


@pytest.mark.parametrize("variant", ["na", "sac"])
def test_steering_learns_on_the_device_and_goes_on_from_its_state(variant: str) -> None:
    config, device = changed(variant=variant, total_steps=24), torch.device("cuda")
    run, again = (start(config, device=device) for _ in range(2))
    run.advance()
    again.load_state_dict(copy.deepcopy(run.state_dict()))
    for each in (run, again):
        while each.progress < each.total:
            assert all(torch.as_tensor(value).isfinite().all() for value in each.advance().values())
        each.close()
    assert run.replay.device.type == run.learner.policy.device.type == "cuda"
    weights = [
        {name: value.cpu() for name, value in one.snapshot().state_dict().items()} for one in (run, again)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-4)
