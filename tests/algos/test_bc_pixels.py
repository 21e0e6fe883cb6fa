"""Cloning from images: what is seen decides, bytes travel, runs resume, exports agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions
from small_cloning import finish, tiny, weights

from algos.base import Setup
from algos.bc import Bc, BcConfig
from benchmarks.studies.foresight import ForesightConfig
from envs.datasets import Episode, EpisodeDataset, read_dataset, write_robomimic
from envs.datasets.windows import Windows
from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.encoders.resnet import ResNetEncoderConfig
from policies.encoders.vit import VitEncoderConfig
from policies.errors import ConfigError
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess

VIT = VitEncoderConfig(width=16, heads=2, features=16, shift=1)
SIDES = (-0.8, 0.8)


def told_by_pictures(obs_steps: int = 1, num: int = 8) -> EpisodeDataset:
    """The same states everywhere; a bright half of the picture says which way to go."""
    episodes = []
    for i in range(num):
        side = i % 2
        pixels = np.full((3, 16, 16, 3), 20, np.uint8)
        pixels[:, :, 8 * side : 8 * side + 8] = 230
        states = np.zeros((4, 4))
        states[:, 0] = np.arange(4) / 4
        actions = np.full((3, 2), SIDES[side])
        episodes.append(Episode(states, actions, np.zeros(3), False, True, images={"front": pixels}))
    return EpisodeDataset.from_episodes(episodes)


def setup(dataset: EpisodeDataset, encoder: object = VIT, process: object = None, **changes: object) -> Setup:
    config = PolicyConfig(
        process=process or RectifiedFlow(),
        encoder=encoder,
        backbone=MlpConfig(width=32, time_dim=8),
        obs_steps=2,
        horizon=2,
        act_steps=1,
    )
    return Setup(policy=config, dataset=dataset, **changes)  # type: ignore[arg-type]


def test_a_policy_learns_what_only_the_picture_tells() -> None:
    data = told_by_pictures()
    algorithm = tiny(steps=100, batch_size=16, warmup_steps=10, lr=3e-3, log_every=50).build(
        setup(data, process=GaussianProcess())
    )
    finish(algorithm)
    policy = algorithm.snapshot()
    batch = Windows(data, policy.chunk, cameras=("front",)).gather(torch.arange(24))
    obs = {"state": batch.obs, **batch.images}
    noise = torch.zeros(24, *policy.noise_shape)  # the mean
    wanted = batch.action[:, 0]
    assert (policy.act(obs, noise=noise)[:, 0] - wanted).abs().max() < 0.3
    swapped = obs | {"front": obs["front"].flip(3)}  # left and right: the other way
    assert (policy.act(swapped, noise=noise)[:, 0] + wanted).abs().max() < 0.3


def test_images_reach_the_encoder_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = tiny().build(setup(told_by_pictures()))
    seen = []
    encode = algorithm.policy.encode
    monkeypatch.setattr(algorithm.policy, "encode", lambda obs, **how: seen.append(obs) or encode(obs, **how))
    algorithm.advance()
    assert all(obs["front"].dtype == torch.uint8 and obs["front"].shape == (8, 2, 16, 16, 3) for obs in seen)


def test_a_run_from_a_file_resumes_bit_exactly(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "demo.hdf5", told_by_pictures())
    config = tiny(validation_fraction=0.25, validation_samples=2)

    def started() -> Bc:
        return config.build(setup(read_dataset(tmp_path / "demo.hdf5")))

    whole, first, second = started(), started(), started()
    rows = finish(whole)
    assert np.isfinite(float(rows[-1]["validation/action_mse"]))
    first.advance()
    second.load_state_dict(first.state_dict())
    finish(second)
    assert torch.equal(weights(second.policy), weights(whole.policy))
    assert torch.equal(weights(second.snapshot()), weights(whole.snapshot()))


def test_foresight_without_weight_is_cloning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PARTS["algo"], "foresight", ForesightConfig)

    def cloned(config: BcConfig) -> torch.Tensor:
        started = setup(told_by_pictures())
        run = config.build(replace(started, policy=replace(started.policy, obs_steps=1)))
        finish(run)
        return weights(run.policy)

    shared = vars(tiny())
    plain = cloned(BcConfig(**shared))
    assert torch.equal(cloned(ForesightConfig(**shared, weight=0.0)), plain)
    told = cloned(ForesightConfig(**shared, weight=1.0))
    assert told.isfinite().all() and not torch.equal(told, plain)


def test_foresight_resumes_bit_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PARTS["algo"], "foresight", ForesightConfig)
    started = setup(told_by_pictures())
    started = replace(started, policy=replace(started.policy, obs_steps=1))
    whole, first, second = (ForesightConfig(**vars(tiny())).build(started) for _ in range(3))
    finish(whole)
    first.advance()
    second.load_state_dict(first.state_dict())
    finish(second)
    assert torch.equal(weights(second.policy), weights(whole.policy))


def test_a_policy_without_eyes_trains_from_the_same_file_without_reading_images(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "demo.hdf5", told_by_pictures())
    data = read_dataset(tmp_path / "demo.hdf5")
    (tmp_path / "demo.hdf5").unlink()
    run = tiny().build(setup(data, encoder=None))
    finish(run)  # a look at a picture would need the file
    assert run.progress == run.total and not run.snapshot().images


def test_data_without_the_images_of_a_policy_are_refused() -> None:
    data = told_by_pictures()
    with pytest.raises(ConfigError, match=mentions("encoder=state")):
        tiny().build(setup(data.with_cameras(())))
    with pytest.raises(ConfigError, match=mentions("33 front 16")):
        tiny().build(setup(data, ResNetEncoderConfig()))
    init = tiny().build(setup(data)).snapshot()
    with pytest.raises(ConfigError, match=mentions("(16, 16, 3) front")):
        tiny().build(Setup(dataset=data.with_cameras(()), init=init))
