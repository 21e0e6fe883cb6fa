"""Observations as algorithms remember them: goals beside the state, images, features, and shifts alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawing import require_drawing
from messages import mentions
from pairwise import everything
from torch import Tensor

from algos.base import Setup
from algos.cdsa import CdsaConfig
from algos.dppo import DppoConfig
from algos.dsrl import DsrlConfig
from algos.fpo import FpoConfig
from algos.iql import IqlConfig
from algos.offpolicy.hindsight import Hindsight
from algos.onpolicy.ratios import Rows
from algos.policyflow import PolicyFlowConfig
from algos.ppo import PpoConfig
from algos.reinflow import ReinFlowConfig
from algos.sac import SacConfig
from algos.td3_bc import Td3BcConfig
from algos.training.observations import encode
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.make import env
from policies.backbones.mlp import MlpConfig
from policies.backbones.transformer import TransformerConfig
from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.distributions import Drawn
from policies.normalizer import box_statistics
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.processes.deterministic import DeterministicProcess
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianProcess
from policies.wrappers.noise_policy import Steering

ON_POLICY: dict[str, Any] = {
    "num_envs": 2, "steps_per_iteration": 3, "iterations": 2, "batch_size": 4, "update_epochs": 1,
}  # fmt: skip
OFF_POLICY: dict[str, Any] = {
    "total_steps": 60, "warmup_steps": 0, "num_envs": 2, "steps_per_iteration": 3, "log_every": 12,
    "updates_per_step": 0.5, "batch_size": 8, "critic_dims": (8,),
}  # fmt: skip
STEERING = Steering(hidden_dims=(8,))
CASES: dict[str, tuple[Any, Any]] = {
    "ppo": (PpoConfig(**ON_POLICY), GaussianProcess()),
    "dppo": (DppoConfig(**ON_POLICY, tuned_steps=4), VPDiffusion(num_levels=4)),
    "reinflow": (ReinFlowConfig(**ON_POLICY), RectifiedFlow()),
    "fpo": (FpoConfig(**ON_POLICY), RectifiedFlow()),
    "policyflow": (PolicyFlowConfig(**ON_POLICY), RectifiedFlow()),
    "dsrl": (DsrlConfig(**OFF_POLICY, steering=STEERING), RectifiedFlow()),
    "sac": (SacConfig(**OFF_POLICY), TanhGaussianProcess()),
}
CHAINS = ("ppo", "dppo", "reinflow", "fpo", "policyflow")
KINDS = ("dppo", "fpo")  # of ratios: of recorded chains, and of losses
PLAIN = {"image_shadows": False, "image_samples": 0}  # the main cost of drawing
SIGHT = env("avoid", rows="moved", observation="position", cameras=("ahead",), image_size=(24, 24), **PLAIN)


def policy_of(process: Any, *, widths: dict[str, int], images: Any = None, **encoder: Any) -> Policy:
    config = PolicyConfig(
        process=process,
        backbone=MlpConfig(width=8, time_dim=4),
        encoder=VitEncoderConfig(width=8, heads=2, features=5) if images else None,
        horizon=3,
        act_steps=2,
    )
    ones = {name: torch.ones(width) for name, width in widths.items()}
    statistics = {name: box_statistics(-one, one) for name, one in ones.items() if len(one)}
    sizes = {"obs_dim": widths["state"], "goal_dim": widths.get("goal", 0), "action_dim": widths["action"]}
    return build_policy(config, **sizes, images=images, statistics=statistics, seed=3)


def started(name: str, init: Policy, task: Any, **changes: Any) -> Any:
    config = replace(CASES[name][0], **changes)
    return config.build(Setup(env=task, init=init, num_workers=0, num_threads=1, seed=5))


def seeing(name: str) -> Policy:
    return policy_of(CASES[name][1], widths={"state": 2, "action": 2}, images=SIGHT.images)


def numbers(metrics: Any) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if not k.startswith("time/")}


# -- goals ---------------------------------------------------------------------------------------------


def maze(goal: str) -> Any:
    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'mazes'")
    return env("pointmaze-umaze", goal=goal, control="waypoint", hold=10, max_episode_steps=6)


@pytest.mark.parametrize("name", CASES)
def test_a_goal_beside_the_state_gives_the_numbers_of_one_inside(name: str) -> None:
    process, found = CASES[name][1], []
    for goal, widths in (("separate", {"state": 4, "goal": 2}), ("appended", {"state": 6})):
        run = started(name, policy_of(process, widths={**widths, "action": 2}), maze(goal))
        found.append([numbers(run.advance()) for _ in range(2)])
        run.close()
    assert repr(found[0]) == repr(found[1])  # as text, for NaN equals itself


def test_goals_of_a_dataset_are_those_of_states_that_end_with_them() -> None:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(rng.normal(size=(7, 4)), rng.uniform(-1, 1, (6, 2)), rng.normal(size=6), done, not done,
                extras={"goal": np.repeat(rng.normal(size=(1, 2)), 6, axis=0)})
        for done in (True, False)
    ]  # fmt: skip
    beside = EpisodeDataset.from_episodes(episodes)
    from envs.datasets.goals import with_goals_in_states

    inside = with_goals_in_states(beside)
    for config in (Td3BcConfig(steps=4, log_every=4), IqlConfig(steps=4, log_every=4), CdsaConfig(steps=4)):
        found = []
        for data, widths in ((beside, {"state": 4, "goal": 2}), (inside, {"state": 6})):
            init = policy_of(DeterministicProcess(), widths={**widths, "action": 2})
            run = config.build(Setup(dataset=data, init=init, seed=1))
            found.append(numbers(run.advance()))
        assert found[0] == found[1]


def test_a_new_offline_actor_is_told_the_goals_of_its_dataset() -> None:
    goal = np.array([[3.0, 5.0]])
    states = np.random.default_rng(0).normal(size=(7, 4))
    episode = Episode(states, np.zeros((6, 2)), np.arange(6.0), True, False,
                      extras={"goal": np.repeat(goal, 6, axis=0) + np.arange(6)[:, None]})  # fmt: skip
    data = EpisodeDataset.from_episodes([episode])
    run = Td3BcConfig(steps=1).build(Setup(env=maze("separate"), dataset=data))
    assert run.snapshot().goal_dim == 2 and run.table.cond.shape[1] == 6
    bare = replace(data, extras={})
    with pytest.raises(ConfigError, match=mentions("no key 'goal'")):
        Td3BcConfig(steps=1).build(Setup(env=maze("separate"), dataset=bare))


def test_a_fresh_policy_gathers_the_scale_of_goals_too() -> None:
    config = PolicyConfig(
        process=GaussianProcess(), backbone=MlpConfig(width=8, time_dim=4), horizon=3, act_steps=2,
        normalizer={"state": "gaussian", "action": "limits"},
    )  # fmt: skip
    setup = {"policy": config, "env": maze("separate"), "num_workers": 0, "num_threads": 1, "seed": 5}
    run, rollouts = CASES["ppo"][0].build(Setup(**setup)), []
    collect = run.collect
    run.collect = lambda: rollouts.append(collect()) or rollouts[-1]
    run.advance()
    goals = rollouts[0].obs["goal"].flatten(0, 1).double()
    scaled = run.policy.normalizer.encode("goal", goals.float())
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), rtol=0, atol=1e-4)
    again = CASES["ppo"][0].build(Setup(**setup))
    again.load_state_dict(run.state_dict())
    assert torch.equal(again.moments["goal"].mean, goals.mean(0))
    run.close(), again.close()


# -- hindsight -----------------------------------------------------------------------------------------


def relabelling(copies: int = 3, **changes: Any) -> Any:
    init = policy_of(RectifiedFlow(), widths={"state": 4, "goal": 2, "action": 2})
    return started("dsrl", init, maze("separate"), hindsight=copies, **changes)


def test_relabelled_rows_have_goals_rewards_and_ends_of_the_task() -> None:
    run = relabelling()
    rollout = run._collect()  # two environments, three chunks: whole episodes of six steps
    assert rollout.truncated[-1].all() and not rollout.terminated.any()
    assert len(run.replay) == 6 + 3 * 6
    rows = run.replay._rows[6 : len(run.replay)]
    cond, _, _, rewards, end, _ = rows.split(run.replay._widths, dim=1)
    goal = run.learner.policy.normalizer.decode("goal", cond[:, -2:])
    ends = rollout.path[:, :, -1, :2].transpose(0, 1)  # (N, T, 2)
    assert (goal[:, None] - ends.reshape(-1, 2)).norm(dim=2).min(dim=1).values.max() < 1e-5
    # In six steps the point stays within the radius of every later end, so each copy is solved at once.
    path = rollout.path.transpose(0, 1).reshape(6, 2, 4)
    place = torch.cat([torch.arange(3).repeat(3) + 3 * n for n in range(2)])
    near = (path[place][..., :2] - goal[:, None]).norm(dim=2) <= 0.45
    want = near.float() * (near.cumsum(1) <= 1)
    assert torch.equal(rewards, want) and want.any()
    assert torch.equal(end[:, 1], near.any(1).float())
    run.close()


def test_the_goals_of_hindsight_are_never_earlier_than_their_transition() -> None:
    run = relabelling(copies=40)
    rollout = run._collect()
    cond = run.replay._rows[6:126, :6]  # the first episode's copies
    goal = run.learner.policy.normalizer.decode("goal", cond[:, -2:])
    ends = rollout.path[:, 0, -1, :2]
    nearest = (goal[:, None] - ends).norm(dim=2).argmin(dim=1)
    row = torch.arange(3).repeat(40)
    assert (nearest >= row).all() and set(zip(row.tolist(), nearest.tolist(), strict=True)) == {
        (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)
    }  # fmt: skip
    run.close()


def test_hindsight_continues_inside_an_episode() -> None:
    whole, first = relabelling(steps_per_iteration=1), relabelling(steps_per_iteration=1)
    for _ in range(2):
        whole._collect(), first._collect()
    state = first.state_dict()
    rest = relabelling(steps_per_iteration=1)
    rest.load_state_dict(state)
    for run in (whole, rest):
        run._collect(), run._collect()
    assert torch.equal(whole.replay.state_dict()["rows"], rest.replay.state_dict()["rows"])
    assert len(whole.replay) > 8
    for run in (whole, first, rest):
        run.close()


def test_an_episode_that_begins_anew_shares_no_goal_with_the_one_that_a_kill_cut() -> None:
    run = relabelling(steps_per_iteration=1)
    run._collect()
    state = run.state_dict()
    for worker in state["pool"]["workers"]:
        worker["vector"] = None  # as of a simulator that saves no state
    run.load_state_dict(state)
    for _ in range(3):  # whole episodes of three chunks
        run._collect()
    assert len(run.replay) == 2 + 6 + 3 * 6
    run.close()


def test_hindsight_needs_a_task_that_judges_other_goals() -> None:
    init = policy_of(RectifiedFlow(), widths={"state": 6, "action": 2})
    with pytest.raises(ConfigError, match=mentions("env.goal=separate")):
        started("dsrl", init, maze("appended"), hindsight=1)
    with pytest.raises(ConfigError, match=mentions("same noise")):
        DsrlConfig(hindsight=1, variant="sac")


def test_hindsight_refuses_a_policy_that_reads_the_goal_in_two_places() -> None:
    class Twice(type(policy_of(RectifiedFlow(), widths={"state": 4, "goal": 2, "action": 2}))):  # type: ignore[misc]
        def encode(self, obs: Any, *, generator: Any = None) -> Any:
            cond = super().encode(obs, generator=generator)
            return replace(cond, vec=cond.vec.flip(1))

    policy = policy_of(RectifiedFlow(), widths={"state": 4, "goal": 2, "action": 2})
    policy.__class__ = Twice
    with pytest.raises(CapabilityError, match=mentions("elsewhere")):
        Hindsight(maze("separate"), policy, copies=1, generator=torch.Generator(), is_flat=False)


# -- images --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES if everything else ("dppo", "sac"))  # kinds of loops
def test_every_algorithm_learns_from_images_with_a_frozen_encoder(name: str) -> None:
    require_drawing()
    init = seeing(name)
    run = started(name, init, SIGHT)
    metrics = numbers(run.advance())
    assert np.isfinite([v for k, v in metrics.items() if not k.startswith("rollout/")]).all()
    tuned = run.snapshot()
    assert torch.equal(tuned.encoder.vit.stem1.weight, init.encoder.vit.stem1.weight)
    run.close()


def test_an_update_with_a_frozen_encoder_encodes_each_observation_once() -> None:
    require_drawing()
    run, encoded = started("dppo", seeing("dppo"), SIGHT, update_epochs=3), []
    rollout = run.collect()
    run.policy.encoder.register_forward_hook(lambda module, args, cond: encoded.append(len(cond)))
    experience = run.experience(rollout)
    assert sum(encoded) == 3 * 2 + 2 + len(rollout.final_index)  # before chunks, after the last, truncated
    encoded.clear()
    run.learner.update(experience, iteration=0, draws=run.draws)
    assert not encoded
    run.close()


def test_remembered_features_are_those_of_the_images() -> None:
    require_drawing()
    run = started("dsrl", seeing("dsrl"), SIGHT)
    rollout = run._collect()
    images = rollout.obs["ahead"]
    assert images.shape == (3, 2, 1, 24, 24, 3) and images.dtype == torch.uint8
    flat = {key: part.flatten(0, 1) for key, part in rollout.obs.items()}
    want = encode(run.learner.policy, flat).vec
    stored = run.replay.gather(torch.arange(6), run.config.discounting)
    torch.testing.assert_close(stored.cond, want, rtol=0, atol=1e-6)
    inner = ~(rollout.terminated | rollout.truncated)[:-1].flatten()
    assert torch.equal(stored.next_cond[:4][inner], stored.cond[2:][inner])
    blind = encode(run.learner.policy, {**flat, "ahead": torch.zeros_like(flat["ahead"])}).vec
    assert (blind - want).abs().max() > 0.1
    run.close()


@pytest.mark.parametrize("name", CHAINS if everything else KINDS)
def test_shifted_images_leave_the_ratio_of_fresh_data_at_one(name: str) -> None:
    require_drawing()
    run = started(name, seeing(name), SIGHT, encoder="trained", image_shift=3)
    experience = run.experience(run.collect())
    shift = run.learner.shift(experience)
    index = torch.arange(len(experience) * run.ratio.inner_steps)
    rows = Rows.sorted_from(index, run.ratio.inner_steps)
    fresh = run.learner.score(replace(experience, shift=shift), index, rows)
    assert fresh.log_ratio.abs().max() < 1e-5
    assert shift[0].abs().max() > 1e-4  # the images alone do move it
    run.close()


@pytest.mark.parametrize("name", CHAINS if everything else KINDS)
def test_a_trained_encoder_learns_and_without_a_shift_begins_as_the_frozen_one(name: str) -> None:
    require_drawing()
    runs = {
        kind: started(name, seeing(name), SIGHT, encoder=kind, image_shift=0, encoder_lr=1e-3)
        for kind in ("frozen", "trained")
    }
    experiences = {kind: run.experience(run.collect()) for kind, run in runs.items()}
    index = torch.arange(6)
    vecs = [experience.cond.rows(index).vec for experience in experiences.values()]
    torch.testing.assert_close(vecs[0], vecs[1], rtol=0, atol=1e-6)
    pair = (experiences[kind].advantage for kind in runs)
    torch.testing.assert_close(*pair, rtol=0, atol=1e-5)  # convolutions with gradients round differently
    before = seeing(name).encoder.vit.stem1.weight
    for kind, run in runs.items():
        run.advance()
        assert torch.equal(run.snapshot().encoder.vit.stem1.weight, before) == (kind == "frozen")
        run.close()


def test_the_critics_train_the_encoder_and_the_actor_does_not() -> None:
    require_drawing()
    run = started("sac", seeing("sac"), SIGHT, encoder="trained", image_shift=2)
    run._collect()
    batch = run.source.draw(8, torch.Generator().manual_seed(0))
    draws = run.learner.draw(8, torch.Generator().manual_seed(0))
    assert batch.cond.requires_grad and not batch.next_cond.requires_grad
    drawn = Drawn(*run.learner.actor.draw(batch.cond.detach(), draws["eps"]), None)
    alpha = run.learner.temperature.value
    weight = run.learner.encoder[0]
    before = weight.clone()
    run.learner._update_actor(batch, drawn, alpha, draws)
    assert weight.grad is None and torch.equal(weight, before)
    run.learner._update_critic(batch, draws, alpha)
    assert not torch.equal(weight, before)
    run.close()


def test_what_ships_is_the_average_of_actor_and_encoder_each_in_its_place() -> None:
    run = started("sac", seeing("sac"), SIGHT, encoder="trained", ema_decay=0.5)
    policy = run.learner.policy
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    with torch.no_grad():
        for k, weight in enumerate(run._trained):
            weight.add_(1 + k)
    run._ema.update(run._trained)
    now, shipped = dict(policy.named_parameters()), dict(run.snapshot().named_parameters())
    assert sum(not torch.equal(now[name], before[name]) for name in now) == len(run._trained)
    for name, weight in now.items():
        torch.testing.assert_close(shipped[name], (before[name] + weight) / 2)
    run.close()


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_run_on_images_continues_bit_for_bit(name: str) -> None:
    require_drawing()
    whole, first = (started(name, seeing(name), SIGHT, encoder="trained") for _ in range(2))
    first.advance()
    rest = started(name, seeing(name), SIGHT, encoder="trained")
    rest.load_state_dict(first.state_dict())
    whole.advance()
    assert repr(numbers(whole.advance())) == repr(numbers(rest.advance()))
    for ours, theirs in zip(whole.snapshot().parameters(), rest.snapshot().parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for run in (whole, first, rest):
        run.close()


def test_recorded_images_are_encoded_like_those_of_the_task() -> None:
    """With a dataset, half of a batch comes from it: the images of the frames and of those after them."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 24, 24, 3), dtype=np.uint8)
    data = EpisodeDataset.from_episodes(
        [Episode(rng.normal(size=(7, 2)), rng.uniform(-1, 1, (6, 2)), np.zeros(6), False, True,
                 images={"ahead": pixels})]
    )  # fmt: skip
    from algos.transitions import Rewarding, tabulate

    policy = seeing("sac")
    features, raw = (tabulate(data, policy, Rewarding(), trains_encoder=flag) for flag in (False, True))
    row = torch.arange(len(features))
    assert len(features) == 4  # chunks of two whose successor has an image
    plain, batch = features.gather(row), raw.gather(row)
    assert torch.equal(batch.images["ahead"][:, 0], torch.from_numpy(pixels[:4]))
    assert torch.equal(batch.next_images["ahead"][:, 0], torch.from_numpy(pixels[2:6]))
    for flat, images, want in (
        (batch.cond, batch.images, plain.cond),
        (batch.next_cond, batch.next_images, plain.next_cond),
    ):
        obs = {"state": flat.unflatten(1, (1, 2)), **images}
        torch.testing.assert_close(policy.encode(policy.observation(obs)).vec, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("critic_input", ["own", "simulator"])
def test_a_critic_may_see_for_itself_or_be_told_the_simulator_s_state(critic_input: str) -> None:
    require_drawing()
    run = started("ppo", seeing("ppo"), SIGHT, critic_input=critic_input)
    rollout = run.collect()
    before = [weight.clone() for weight in run.learner.critic_params]
    experience = run.experience(rollout)
    run.advance()
    moved = [not torch.equal(a, b) for a, b in zip(before, run.learner.critic_params, strict=True)]
    assert all(moved)
    if critic_input == "simulator":
        assert rollout.obs["simulator"].shape == (3, 2, 8)
        given = rollout.obs["simulator"].flatten(0, 1)
        assert torch.equal(experience.seen.rows(torch.arange(6)), given)
        assert not any("simulator" in name for name in run.snapshot().encoder.sizes.images)
    run.close()


# -- refusals ------------------------------------------------------------------------------------------


def test_an_encoder_without_weights_cannot_be_trained() -> None:
    blind = policy_of(GaussianProcess(), widths={"state": 2, "action": 2})
    with pytest.raises(ConfigError, match=mentions("encoder with weights")):
        started("ppo", blind, env("avoid", observation="position"), encoder="trained")


def test_frozen_denoising_steps_refuse_a_trained_encoder() -> None:
    with pytest.raises(ConfigError, match=mentions("tuned_steps")):
        started("dppo", seeing("dppo"), SIGHT, encoder="trained", tuned_steps=2)


def test_a_steered_policy_keeps_its_encoder() -> None:
    with pytest.raises(ConfigError, match=mentions("frozen policy")):
        DsrlConfig(encoder="trained")


def test_a_task_that_hides_nothing_has_no_other_state_for_critics() -> None:
    init = policy_of(GaussianProcess(), widths={"state": 4, "action": 2})
    with pytest.raises(ConfigError, match=mentions("critic_input")):
        started("ppo", init, env("avoid"), critic_input="simulator")


def test_tokens_beside_the_features_are_refused_where_features_are_stored() -> None:
    config = PolicyConfig(
        process=RectifiedFlow(), backbone=TransformerConfig(width=8, heads=2, depth=1),
        encoder=VitEncoderConfig(width=8, heads=2, features=5, tokens=True), horizon=3, act_steps=2,
    )  # fmt: skip
    init = build_policy(config, obs_dim=2, action_dim=2, images=SIGHT.images)
    with pytest.raises(CapabilityError, match=mentions("encoder.tokens=false")):
        started("dsrl", init, SIGHT)


def test_guidance_survives_the_way_through_stored_features() -> None:
    config = PolicyConfig(
        process=RectifiedFlow(), backbone=MlpConfig(width=8, time_dim=4), goal_dropout=0.2, guidance=2.0
    )
    one = {
        name: box_statistics(-torch.ones(n), torch.ones(n))
        for name, n in (("state", 3), ("goal", 2), ("action", 2))
    }
    policy = build_policy(config, obs_dim=3, action_dim=2, goal_dim=2, statistics=one)
    obs = {"state": torch.rand(5, 1, 3), "goal": torch.rand(5, 2)}
    cond, noise = policy.encode(obs), policy.sample_noise(5, generator=torch.Generator().manual_seed(0))
    again: Tensor = policy.decode(policy.condition(cond.vec), noise)
    assert torch.equal(again, policy.decode(cond, noise))
