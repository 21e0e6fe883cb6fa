"""Learned worlds that imagine frames: their coder, and that they are a task for policies of images."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from small_algorithms import policy_config, setup, start

from algos.cloning.frames import FrameCoding, with_latents
from algos.cloning.world import LearnedWorld, WorldConfig, errors_by_horizon, frame_errors
from algos.training.serialization import from_plain, to_plain
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.images import Images
from envs.engine.learned import ImaginedFrames
from envs.engine.pixels import match_cameras
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.make import env
from envs.spec import named_options
from envs.tasks.avoid.task import Avoid
from envs.tasks.world import LearnedTask
from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CheckpointError, ConfigError, DatasetError
from policies.networks.frames import FrameCoder
from policies.storage.policy_folder import load_policy, save_policy
from policies.wrappers.world import World, WorldModel

SIZE = (18, 20)  # no multiples of eight
TASK = Avoid(rows="moved", observation="position", cameras=("ahead",), image_size=SIZE)
SMALL = WorldConfig(members=2, steps=4, batch_size=8, log_every=2, latent_dim=3, validation_fraction=0.2)


def seen_episodes(count: int = 12, length: int = 4) -> EpisodeDataset:
    """Walks of a bright square, whose place is the state; every other one ends with success."""
    generator, frames = torch.Generator().manual_seed(0), count * length
    places = torch.randint(0, 12, (frames, 2), generator=generator)
    pixels = torch.full((frames, *SIZE, 3), 40, dtype=torch.uint8)
    for frame, (x, y) in zip(pixels, places.tolist(), strict=True):
        frame[x : x + 6, y : y + 6] = 220
    start = torch.arange(0, frames + 1, length)
    ended = torch.zeros(frames, dtype=torch.bool)
    ended[start[1::2] - 1] = True
    return EpisodeDataset.from_arrays(
        places / 12, torch.rand(frames, 2, generator=generator), ended.float(), ended, None, start,
        next_observations=torch.roll(places / 12, -1, 0), images={"ahead": Images.of(pixels.numpy())},
        episode_extras={"success": [True, False] * (count // 2)}, meta={"source": "squares"},
    )  # fmt: skip


def begin(config: WorldConfig = SMALL, **changes: Any) -> LearnedWorld:
    given = {"init": None, "env": TASK, "dataset": seen_episodes()} | changes
    return config.build(setup("flow", **given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = begin()
    while run.progress < run.total:
        run.advance()
    place = tmp_path_factory.mktemp("worlds") / "frames"
    return save_policy(run.snapshot(), place, provenance={"env": named_options(TASK)})


def world(folder: Path, **options: Any) -> LearnedTask:
    return env("world", model=str(folder), doubt=None, **options)  # type: ignore[return-value]


def image_policy(size: tuple[int, int] = SIZE) -> Any:
    config = dataclasses.replace(
        policy_config("flow"), encoder=VitEncoderConfig(width=8, heads=2, features=5)
    )
    return build_policy(config, obs_dim=2, action_dim=2, images={"ahead": (*size, 3)}, seed=0).eval()


# -- the coder --------------------------------------------------------------------------------------------


def test_a_coder_learns_to_draw_what_it_reads() -> None:
    data = seen_episodes(count=40)
    options: dict[str, Any] = {"batch_size": 32, "lr": 3e-3, "log_every": 150, "seed": 0}
    run = FrameCoding(data, ["ahead"], 8, steps=150, device=torch.device("cpu"), **options)
    run.advance()
    coder = run.coder.eval()
    frames = coder.stacked({"ahead": data.images["ahead"][torch.arange(data.num_frames)]})
    with torch.no_grad():
        latent = coder.encode(frames)
    error = (coder.decode(latent) - frames).square().mean()
    assert run.is_done and float(error.detach()) < 0.25 * float(frames.var(dim=0).mean())
    torch.testing.assert_close(latent.std(dim=0), torch.ones(8), rtol=0, atol=0.25)
    drawn = coder.draw(latent)["ahead"]
    assert drawn.dtype == torch.uint8 and drawn.shape == (data.num_frames, *SIZE, 3)
    close = (drawn.permute(0, 3, 1, 2) / 255 - coder.decode(latent).clamp(0, 1)).abs()
    assert float(close.max().detach()) <= 0.5 / 255 + 1e-6


def test_a_coder_learns_from_two_frames_at_once_at_least() -> None:
    run = begin(dataclasses.replace(SMALL, batch_size=1))
    run.advance()
    assert run.progress == SMALL.log_every


def test_a_state_is_the_task_s_state_beside_the_vector_of_its_frames() -> None:
    data, coder = seen_episodes(count=2), FrameCoder(["ahead"], SIZE, 3).eval()
    coded = with_latents(data, coder)
    latent = coder.encode(coder.stacked({"ahead": data.images["ahead"][torch.arange(8)]}))
    torch.testing.assert_close(coded.observations, torch.cat([data.observations, latent], dim=1))
    assert coded.next_observations is not None and data.next_observations is not None and not coded.images
    after = torch.tensor([1, 2, 3, 3, 5, 6, 7, 7])  # there is no frame after the last one of an episode
    torch.testing.assert_close(
        coded.next_observations, torch.cat([data.next_observations, latent[after]], dim=1)
    )
    assert with_latents(data, None) is data


# -- learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [({"steps": 6}, "algo.steps 4 6"), ({"lr": 0.1}, "")])
def test_a_coder_s_schedule_stays_when_it_is_resumed(changes: dict[str, Any], message: str) -> None:
    one, again = begin(), begin(dataclasses.replace(SMALL, **changes))
    one.advance()
    if message:
        with pytest.raises(CheckpointError, match=mentions(message)):
            again.load_state_dict(one.state_dict())
    else:
        again.load_state_dict(one.state_dict())


@pytest.mark.parametrize("blocks", [1, 3], ids=["coder", "members"])
def test_a_run_goes_on_bit_by_bit_from_either_stage(blocks: int) -> None:
    one, again, other = begin(), begin(), begin(seed=6)
    metrics = [one.advance() for _ in range(blocks)]
    assert ("frames/loss" in metrics[-1]) is (blocks == 1)
    assert one.snapshot().state_dim == 5, "a checkpoint of either stage holds a world"
    file = io.BytesIO()
    torch.save(to_plain(one.state_dict()), file)
    file.seek(0)
    again.load_state_dict(from_plain(torch.load(file, weights_only=True)))
    assert again.progress == one.progress == 2 * blocks and one.total == 8
    states = []
    for run in (one, again, other):
        while run.progress < run.total:
            last = run.advance()
        states.append(run.snapshot().state_dict())
    assert {"validation/error_1", "validation/frame_error_0", "validation/frame_error_1"} <= set(last)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    for part in ("coder.", "base."):
        assert any(
            not torch.equal(value, states[2][name])
            for name, value in states[0].items()
            if name.startswith(part)
        )


def test_data_without_the_task_s_images_are_refused() -> None:
    plain = dataclasses.replace(seen_episodes(), images={})
    with pytest.raises(DatasetError, match=mentions("squares images ahead")):
        begin(dataset=plain)
    with pytest.raises(DatasetError, match=mentions("squares images ahead")):
        begin(env=dataclasses.replace(TASK, image_size=(20, 18)))


def test_doubt_counts_the_vector_of_frames_by_half_and_errors_leave_it_out() -> None:
    config = dataclasses.replace(policy_config("regression"), horizon=1, act_steps=1)
    members = [build_policy(config, obs_dim=7, action_dim=8, seed=seed) for seed in (0, 1)]
    model = WorldModel(members, World(2, 1, 1, latent_dim=3, cameras=("ahead",), image_size=SIZE)).eval()
    assert (model.state_dim, model.task_dim) == (5, 2)
    given = (torch.rand(4, 5), torch.rand(4, 2), torch.zeros(4, *model.noise_shape))
    doubt = model.say(*given)[1]
    obs = {"state": torch.cat(given[:2], dim=1).unsqueeze(1)}
    said = torch.stack([member.plan(obs, given[2])[:, 0] for member in members])
    gaps = (said - said.mean(dim=0)).square()
    halves = (gaps[..., :2].mean(dim=-1) + gaps[..., 2:5].mean(dim=-1)) / 2
    torch.testing.assert_close(doubt, halves.sqrt().amax(dim=0))
    data = seen_episodes(count=6)
    errors, drawn = errors_by_horizon(model, data, 3), frame_errors(model, data, (1, 3))
    assert len(errors) == 3 and set(drawn) == {0, 1, 3}
    assert model.coder is not None
    frames = model.coder.stacked({"ahead": data.images["ahead"][torch.arange(0, 24, 4)]})
    own = model.coder.decode(model.coder.encode(frames)).clamp(0, 1)
    assert drawn[0] == pytest.approx(float((own - frames).square().mean().sqrt()), rel=1e-5)
    with torch.no_grad():
        model.coder.decoder[-1].bias.add_(1.0)  # type: ignore[operator]
    assert errors_by_horizon(model, data, 3) == errors and frame_errors(model, data, (1, 3)) != drawn


# -- a task for policies of images ------------------------------------------------------------------------


def test_imagined_frames_follow_from_seeds_in_any_vector_and_are_saved(folder: Path) -> None:
    config = world(folder, cameras=("ahead",), horizon=6)
    wide, single = config.make_vector(3, obs_steps=2), config.make_vector(1, obs_steps=2)
    chunks, seeds = np.random.default_rng(0).uniform(-1, 1, (2, 3, 3, 2)), [3, 4, 5]
    assert wide.reset(seeds).shape == (3, 2, 2)
    began = wide.images()["ahead"]
    assert began.shape == (3, 2, *SIZE, 3) and began.dtype == np.uint8
    step = wide.step_chunk(chunks[0])
    seen, state = wide.images()["ahead"], wide.state_dict()
    assert (seen != began).any()
    for row, seed in enumerate(seeds):
        single.reset([seed])
        np.testing.assert_array_equal(single.images()["ahead"][0], began[row])
        got = single.step_chunk(chunks[0][[row]])
        np.testing.assert_array_equal(got.path[0], step.path[row])
        np.testing.assert_array_equal(single.images()["ahead"][0], seen[row])
    np.testing.assert_array_equal(wide.images([2])["ahead"], seen[[2]])
    again = config.make_vector(3, obs_steps=2)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.images()["ahead"], seen)
    active = ~step.done
    np.testing.assert_array_equal(
        again.step_chunk(chunks[1], active).path, wide.step_chunk(chunks[1], active).path
    )
    np.testing.assert_array_equal(again.images()["ahead"], wide.images()["ahead"])


def test_frames_are_drawn_from_the_vector_beside_the_observed_state(folder: Path) -> None:
    model: Any = load_policy(folder)
    stepper = world(folder).stepper(1)
    state = stepper.reset(0, 9)
    whole = torch.cat([torch.from_numpy(state), torch.from_numpy(stepper.latent(0))]).float()
    assert bool((model.first_states == whole).all(dim=1).any())
    history = ImaginedFrames(stepper, ["ahead"], obs_steps=1)
    history.begin(0)
    drawn = model.coder.draw(whole[None, 2:])["ahead"][0]
    np.testing.assert_array_equal(history.images([0])["ahead"][0, 0], drawn.numpy())


def test_a_policy_of_images_acts_in_a_world_of_frames(folder: Path) -> None:
    policy = image_policy()
    found = evaluate(policy, world(folder), EvaluationSettings(episodes=3))
    assert len(found.rows) == 3 and all(0 < row.length <= 100 for row in found.rows)
    assert match_cameras(world(folder, cameras=("ahead",)), {}).cameras == ()
    with pytest.raises(ConfigError, match=mentions("images ahead env.model")):
        match_cameras(world(folder), image_policy((20, 18)).images)
    with pytest.raises(ConfigError, match=mentions("env.cameras ahead top")):
        world(folder, cameras=("top",)).make_vector(1)


@pytest.mark.parametrize("algo", ["reinflow", "dsrl"])
def test_a_policy_of_images_is_tuned_in_a_world_of_frames(algo: str, folder: Path) -> None:
    run = start(algo, "flow", env=world(folder), init=image_policy())
    before = run.snapshot().state_dict()
    while run.progress < run.total:
        run.advance()
    after = run.snapshot().state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    run.close()


def test_a_world_of_states_has_no_frames(tmp_path: Path) -> None:
    own = dataclasses.replace(TASK, cameras=())
    run = begin(env=own)
    assert run.total == SMALL.steps
    place = save_policy(run.snapshot(), tmp_path / "states", provenance={"env": named_options(own)})
    with pytest.raises(ConfigError, match=mentions("env.cameras world none ahead")):
        evaluate(image_policy(), world(place), EvaluationSettings(episodes=1))
