"""Learned worlds: what members learn, what a world answers, and that it is a task like any other."""

from __future__ import annotations

import dataclasses
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from point_env import PointStepper
from small_algorithms import dataset, policy_config, setup
from torch import Tensor

from algos.cloning.world import LearnedWorld, WorldConfig, answers_of, errors_by_horizon
from algos.training.serialization import from_plain, to_plain
from benchmarks.studies.world import MEASURES, agreement, imagined_states
from envs.datasets.curation import SAMPLING_WEIGHT
from envs.datasets.episodes import EpisodeDataset
from envs.engine.learned import LearnedStepper
from envs.fit import require_same_task
from envs.make import env
from envs.tasks.avoid.task import Avoid, AvoidStepper
from envs.tasks.gym.task import Gym
from envs.tasks.world import LearnedTask
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CheckpointError, ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes.regression import Regression
from policies.samplers.ode import Ancestral
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.world import World, WorldModel

SMALL = WorldConfig(members=2, steps=6, batch_size=8, log_every=2, validation_fraction=0.2)


def begin(process: str = "flow", config: WorldConfig = SMALL, **changes: Any) -> LearnedWorld:
    return config.build(setup(process, **{"init": None} | changes))


def episodes(lengths: tuple[int, ...], ended: tuple[bool, ...], *, width: int = 2, seed: int = 0) -> Any:
    """Random episodes; those that ended did so with success."""
    generator, frames = torch.Generator().manual_seed(seed), sum(lengths)
    start = torch.tensor([0, *lengths]).cumsum(0)
    terminated = torch.zeros(frames, dtype=torch.bool)
    terminated[start[1:] - 1] = torch.tensor(ended)
    return EpisodeDataset.from_arrays(
        torch.rand(frames, width, generator=generator), torch.rand(frames, 2, generator=generator),
        torch.arange(frames).float(), terminated, None, start, episode_extras={"success": list(ended)},
    )  # fmt: skip


# -- what members learn -----------------------------------------------------------------------------------


def test_members_see_changes_rewards_and_flags_of_steps_with_a_successor() -> None:
    data = episodes((3, 2, 1), (True, False, False))
    data = dataclasses.replace(
        data, extras=dict(data.extras) | {SAMPLING_WEIGHT: torch.arange(data.num_frames)}
    )
    rows = answers_of(data)
    assert rows.lengths.tolist() == [3, 1], "the last frame of a recording that was cut has no successor"
    frames = torch.tensor([0, 1, 2, 3])
    assert torch.equal(rows.extras[SAMPLING_WEIGHT], frames)
    torch.testing.assert_close(rows.observations, torch.cat([data.observations, data.actions], dim=1)[frames])
    assert rows.actions[:, 2].tolist() == frames.tolist()
    assert rows.actions[:, 3:].tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    units = data.observations[frames].double().std(dim=0)
    change = data.observations[frames + 1] - data.observations[frames]
    change[2] = 0  # nothing is known of what comes after an end
    torch.testing.assert_close(rows.actions[:, :2], (change / units).float())


def test_a_world_of_a_linear_task_is_learned_from_random_steps() -> None:
    start = torch.arange(0, 401, 8)
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(400, 2, generator=generator) * 2 - 1
    first = torch.rand(50, 1, 2, generator=generator) * 2 - 1
    reached = first + 0.2 * actions.view(50, 8, 2).cumsum(dim=1)
    before = torch.cat([first, reached[:, :-1]], dim=1)
    data = EpisodeDataset.from_arrays(
        before.flatten(0, 1), actions, before.sum(dim=2).flatten(), torch.zeros(400), None, start,
        next_observations=reached.flatten(0, 1),
    )  # fmt: skip
    plan = PolicyConfig(process=Regression(), backbone=MlpConfig(width=32, time_dim=4))
    run = WorldConfig(members=1, steps=200, batch_size=32, lr=1e-2, validation_fraction=0.2).build(
        setup("regression", init=None, dataset=data, policy=plan)
    )
    metrics = [run.advance(), run.advance()]
    assert run.progress == run.total and "validation/error_1" not in metrics[0]
    assert float(metrics[1]["validation/error_1"]) < 0.03
    errors = errors_by_horizon(run.snapshot(), data, 50)
    assert len(errors) == 7 and errors[0] < 0.03 and errors[-1] < 0.1


def test_a_run_follows_from_its_seed_and_goes_on_bit_by_bit() -> None:
    one, again, other = begin(), begin(), begin(seed=6)
    one.advance()
    file = io.BytesIO()
    torch.save(to_plain(one.state_dict()), file)
    file.seek(0)
    again.load_state_dict(from_plain(torch.load(file, weights_only=True)))
    assert again.progress == one.progress == 2
    other.advance()
    states = []
    for run in (one, again, other):
        run.advance()
        states.append(run.snapshot().state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert any(not torch.equal(value, states[2][name]) for name, value in states[0].items())


def test_held_out_episodes_of_one_step_do_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    run = begin(dataset=episodes((1,) * 6, (True,) * 6))
    while run.progress < run.total:
        metrics = run.advance()
    assert not any(name.startswith("validation/") for name in metrics) and "one step" in caplog.text


@pytest.mark.parametrize(
    ("ended", "words"),
    [((True, True), "every success keep_failures=true"), ((False, False), "no success"), ((True, False), "")],
)
def test_data_with_one_kind_of_episode_are_told(
    ended: tuple[bool, bool], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(SMALL, validation_fraction=0.0)
    begin(config=config, env=env("avoid"), dataset=episodes((8, 8), ended, width=4))
    told = [one.getMessage() for one in caplog.records if one.name == "algos.cloning.world"]
    assert len(told) == bool(words)
    caplog.clear()
    cut = dataclasses.replace(
        episodes((8, 8), (False, False), width=4), episode_extras={"success": torch.tensor(ended)}
    )
    begin(config=config, env=env("avoid"), dataset=cut)
    assert "no step" in caplog.text, "the last step of a recording that was cut is left out"
    assert not words or re.search(mentions(words), told[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": None}, "algo=world env="),
        ({"env": Gym(id="Reacher-v5")}, "algo=world env=gym"),
        ({"dataset": None}, "algo=world dataset="),
        ({"init": build_policy(policy_config("flow"), obs_dim=2, action_dim=2)}, "algo=world init"),
    ],
)
def test_what_a_world_cannot_be_learned_from_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=mentions(words)):
        begin(**changes)


# -- what a world answers ---------------------------------------------------------------------------------


SIZES = {"state": 4, "action": 5}


class KnownMember(Policy):
    """A member that says the truth of the task of points, or misses it by a constant."""

    error = 0.0

    def plan(self, obs: Any, noise: Tensor) -> Tensor:
        state, action = obs["state"][:, 0].split([2, 2], dim=1)
        change = 0.2 * action + self.error
        reached = state + change
        reward = 1.0 - (reached - torch.tensor([0.5, 0.0])).norm(dim=1, keepdim=True)
        out, won = (reached.abs() > 1.6).any(dim=1, keepdim=True), reward > 0.9
        scale = self.normalizer.get_buffer("state_scale")[:2]
        row = torch.cat([change * scale, reward, out.float(), won.float()], dim=1)
        return self.normalize_action(row).unsqueeze(1)


def known(*errors: float) -> WorldModel:
    config = dataclasses.replace(policy_config("regression"), horizon=1, act_steps=1)
    config = dataclasses.replace(build_policy(config, obs_dim=4, action_dim=5).config, observation_clip=None)
    members = []
    for error in errors:
        member = KnownMember(config, obs_dim=4, action_dim=5)
        stats = {name: {"min": -4 * torch.ones(d), "max": 3 * torch.ones(d)} for name, d in SIZES.items()}
        member.normalizer.fit(stats)
        member.error = error
        members.append(member)
    world = WorldModel(members, World(len(members), 3, 2)).eval()
    world.thresholds.fill_(0.5)
    world.first_states.copy_(torch.tensor([[0.1, 0.2], [-1.2, 0.9]]))
    return world


def test_a_strip_shows_what_members_imagine_from_one_state_on() -> None:
    actions = torch.tensor([[0.5, -0.5], [0.25, 0.0], [0.0, 1.0]])
    told = imagined_states(known(0.0, 0.0), torch.tensor([0.1, 0.2]), actions)
    assert told.shape == (2, 4, 2)
    expected = torch.tensor([0.1, 0.2]) + 0.2 * torch.cat([torch.zeros(1, 2), actions.cumsum(dim=0)])
    torch.testing.assert_close(told, expected.expand(2, -1, -1), rtol=0, atol=2e-5)


def test_a_world_that_knows_the_task_plays_its_episodes() -> None:
    imagined, real = LearnedStepper(known(0.0), 2, doubt=1.5), PointStepper(2)
    rows, generator = np.arange(2), np.random.default_rng(0)
    for row in rows:
        real.position[row] = imagined.reset(row, row)
    ends = []
    for _ in range(30):
        actions = generator.uniform(-1, 1, (2, 2)) + np.array([0.3, 0.0])
        said, true = imagined.step(rows, actions), real.step(rows, actions)
        np.testing.assert_allclose(said.obs, true.obs, atol=2e-5)
        np.testing.assert_allclose(said.reward, true.reward, atol=2e-5)
        np.testing.assert_array_equal(said.terminated, true.terminated)
        np.testing.assert_array_equal(said.success, true.success)
        assert not said.truncated.any(), "one member has no doubt"
        ends += true.terminated.tolist()
    assert 0 < sum(ends) < len(ends)


def test_doubt_truncates_and_never_terminates() -> None:
    world = known(0.0, 0.03)
    world.doubt_limit.fill_(1.0)
    stepper = LearnedStepper(world, 1, doubt=None)
    stepper.reset(0, 0)
    scale = float(world.state_scale[0] * world.normalizer.get_buffer("action_scale")[0])
    doubt = world.answer(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 1, 5)).doubt
    torch.testing.assert_close(doubt, torch.tensor([0.015 * scale]))
    for limit, expected in ((None, False), (0.016 * scale, False), (0.014 * scale, True)):
        stepper = LearnedStepper(world, 1, doubt=limit)
        stepper.reset(0, 0)
        step = stepper.step(np.array([0]), np.zeros((1, 2)))
        assert step.truncated.tolist() == [expected] and not step.terminated.any()


def test_thresholds_imagine_as_many_flags_as_were_recorded() -> None:
    run = begin(dataset=dataset(episodes=60))
    run.advance()
    world, data = run.snapshot(), run._train.transitions()
    noise = world.sample_noise(len(data.frames), generator=torch.Generator().manual_seed(0))
    said = world.answer(data.observations, data.actions, noise)
    assert float(said.terminated.float().mean()) == pytest.approx(
        float(data.terminated.float().mean()), abs=0.05
    )
    assert not said.success.any(), "no success was recorded"
    assert 0.9 < float((said.doubt <= world.doubt_limit).float().mean()) <= 1.0


# -- a task like any other --------------------------------------------------------------------------------


@cache
def folder(process: str, base: Path) -> Path:
    data = episodes((4,) * 12, (True, False) * 6, width=4)
    run = begin(process, env=Avoid(), dataset=data)
    run.advance()
    return save_policy(run.snapshot(), base / process, provenance={"env": {"name": "avoid", "rows": "fixed"}})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


def task(base: Path, process: str = "flow", **options: Any) -> LearnedTask:
    return env("world", model=str(folder(process, base)), known_rules=False, doubt=None, **options)  # type: ignore[return-value]


def test_a_world_is_the_task_it_was_learned_of(base: Path) -> None:
    world, own = task(base, horizon=7), Avoid().spec
    assert world.spec.name == "world:avoid" and world.spec.max_episode_steps == 7
    assert world.spec.obs_names == own.obs_names and world.spec.success_rule == own.success_rule
    assert world.judge is None and task(base).imagined == Avoid()
    assert dataclasses.replace(world, known_rules=True).judge == Avoid()
    assert require_same_task("one", world, "other", Avoid()) == []
    with pytest.raises(ConfigError, match=mentions("env=avoid env=hopper")):
        require_same_task("one", world, "other", env("hopper"))
    with pytest.raises(ConfigError, match=mentions("env.rows=fixed env.rows=moved")):
        require_same_task("one", world, "other", Avoid(rows="moved"))
    with pytest.raises(ConfigError, match=mentions("env=world env.model=")):
        _ = LearnedTask().spec
    gone = LearnedTask(model=str(base / "gone"))
    assert require_same_task("one", gone, "other", env("hopper")) == [], "its policies outlive a world"


@pytest.mark.parametrize("process", ["regression", "flow", "diffusion"])
def test_imagined_episodes_follow_from_their_seeds_in_any_vector_and_are_saved(
    process: str, base: Path
) -> None:
    config = task(base, process, horizon=6)
    wide, single = config.make_vector(5, obs_steps=2), config.make_vector(1, obs_steps=2)
    chunks, seeds = np.random.default_rng(0).uniform(-1, 1, (2, 5, 3, 2)), [3, 4, 5, 6, 3]
    assert (wide.reset(seeds)[0] == wide.reset(seeds)[4]).all()
    steps = [wide.step_chunk(chunks[0])]
    state = wide.state_dict()
    steps.append(wide.step_chunk(chunks[1], ~steps[0].done))
    for row in range(5):
        single.reset([seeds[row]])
        for step, chunk in zip(steps, chunks, strict=True):
            if not step.length[row]:
                break
            got = single.step_chunk(chunk[row : row + 1])
            np.testing.assert_array_equal(got.path[0], step.path[row])
            np.testing.assert_array_equal(got.rewards[0], step.rewards[row])
            assert got.done[0] == step.done[row] and got.success[0] == step.success[row]
    again = config.make_vector(5, obs_steps=2)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.step_chunk(chunks[1], ~steps[0].done).path, steps[1].path)


def test_noise_moves_a_sampled_world_and_not_a_regression(base: Path) -> None:
    """Two episodes from one state with one member differ by their seeds alone."""
    for process, is_moved in (("flow", True), ("regression", False)):
        stepper = task(base, process).stepper(2)
        for row in (0, 1):
            stepper.reset(row, row)
        stepper._states[:], stepper._member[:] = stepper._states[0], 0
        obs = stepper.step(np.arange(2), np.zeros((2, 2))).obs
        assert bool((obs[0] != obs[1]).any()) is is_moved


def test_all_members_take_another_sampler(base: Path) -> None:
    model: Any = load_policy(folder("flow", base)).with_sampler(Ancestral(steps=3))  # type: ignore[attr-defined]
    rows, doubt = model.say(model.states[:2], torch.zeros(2, 2), model.sample_noise(2))
    assert len(rows) == len(model.members) == 2 and bool((doubt > 0).all())
    assert not any(member.is_deterministic for member in model.members)


def test_a_saved_world_answers_as_before(base: Path) -> None:
    model: Any = load_policy(folder("flow", base))
    assert isinstance(model, WorldModel) and len(model.members) == 2
    card = (folder("flow", base) / "README.md").read_text()
    assert "A learned world (flow)" in card and "env=world" in card and "policy.act" not in card
    for starts, states in (("initial", model.first_states), ("data", model.states)):
        first = torch.from_numpy(task(base, starts=starts).stepper(1).reset(0, 9)).float()
        assert bool((states == first).all(dim=1).any())
    one, two = (torch.nn.utils.parameters_to_vector(member.parameters()) for member in model.members)
    assert not torch.equal(one, two)
    other = save_policy(build_policy(policy_config("flow"), obs_dim=2, action_dim=2), base / "other",
                        provenance={"env": {"name": "avoid"}})  # fmt: skip
    with pytest.raises(CheckpointError, match=mentions("env.model= no learned world of avoid")):
        env("world", model=str(other)).make_vector(1)


def test_a_directory_names_no_task_that_runs_code(base: Path) -> None:
    facts = {"env": {"name": "gym", "factory": "os:getcwd"}}
    place = save_policy(load_policy(folder("flow", base)), base / "code", provenance=facts)
    with pytest.raises(ConfigError, match=mentions("env.model= code env=gym")):
        _ = env("world", model=str(place)).spec


def test_measures_of_agreement_are_those_of_the_literature() -> None:
    """The rank violation is SIMPLER's; numbers by hand."""
    imagined, real = np.array([0.1, 0.4, 0.3, 0.9, 0.4]), np.array([0.2, 0.5, 0.5, 0.8, 0.3])
    found = [measure(imagined, real) for measure in MEASURES.values()]
    assert found == pytest.approx([0.8983, 0.7632, 0.12, -0.04], abs=5e-5)
    equal = np.repeat(imagined, 2).reshape(5, 2)
    same = agreement(equal, equal, draws=50)
    for value, low, high in (same["Pearson"], same["Spearman"]):
        assert (value, low, high) == pytest.approx((1, 1, 1))
    assert same["imagined − real"] == pytest.approx((0, 0, 0))


def test_the_rules_of_avoid_judge_what_the_simulator_does() -> None:
    stepper, generator = AvoidStepper(16), np.random.default_rng(0)
    obs = np.stack([stepper.reset(row, row) for row in range(16)])
    wrong = ends = 0
    for _ in range(100):
        actions = np.clip(generator.normal([0.0, 0.7], 0.5, (16, 2)), -1, 1)
        step = stepper.step(np.arange(16), actions)
        reward, terminated, success = Avoid().judge(obs, actions, step.obs)
        wrong += int((terminated != step.terminated).sum() + (success != step.success).sum())
        ends += int(step.terminated.sum())
        np.testing.assert_array_equal(reward, success)
        obs = step.obs
        for row in np.flatnonzero(step.terminated):
            obs[row] = stepper.reset(row, int(generator.integers(1000)))
    assert ends > 50 and wrong <= 0.1 * ends
    near = stepper.place(0, np.array([0.0, stepper.scene.finish_y - 0.001]))
    step = stepper.step(np.array([0]), np.array([[0.0, 1.0]]))
    assert [flag[0] for flag in Avoid().judge(near[None], np.zeros((1, 2)), step.obs)] == [1.0, True, True]
