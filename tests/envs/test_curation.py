"""Which episodes are kept, how often rows are drawn, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from messages import mentions
from small_tables import single_steps

from algos.cloning.batches import Shuffle, WeightedStream, WindowSampler
from algos.training.serialization import capture_generator
from algos.transitions import TransitionTable
from envs.datasets.curation import SAMPLING_WEIGHT, Curation, WeightedRows
from envs.datasets.episodes import EpisodeDataset
from policies.errors import ConfigError, DatasetError
from policies.policy_config import ChunkSpec


def controllers(share: float, seed: int, *, episodes: int = 100, steps: int = 20) -> EpisodeDataset:
    """Return episodes of which a share acts by a = s and is rewarded for it; starts move all returns."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(episodes, 1, 1))
    state = np.concatenate([start, rng.normal(size=(episodes, steps - 1, 1))], axis=1)
    right = np.arange(episodes) < share * episodes
    action = np.where(right[:, None, None], state, rng.normal(size=state.shape))
    reward = -np.square(action - state)[..., 0] + start[:, 0] / 4
    return flat(state, action, reward, right)


def flat(state: np.ndarray, action: np.ndarray, reward: np.ndarray, success: np.ndarray) -> EpisodeDataset:
    episodes, steps = reward.shape
    parts = state.reshape(episodes * steps, -1), action.reshape(episodes * steps, -1), reward.reshape(-1)
    begin = np.arange(episodes + 1) * steps
    extras = {"success": success}
    return EpisodeDataset.from_arrays(*parts, np.zeros(len(parts[2])), None, begin, episode_extras=extras)


def slope(dataset: EpisodeDataset) -> float:
    """Return the weighted regression of actions on states."""
    weight = dataset.extras.get(SAMPLING_WEIGHT, torch.ones(dataset.num_frames))
    state, action = dataset.observations[:, 0].double(), dataset.actions[:, 0].double()
    return float((weight * state * action).sum() / (weight * state.square()).sum())


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_weights_make_a_regression_follow_the_few_good_episodes(share: float) -> None:
    kinds = [Curation(), Curation(weighting="return"), Curation(weighting="advantage")]
    plain, by_return, by_advantage = (
        np.mean([slope(curate(controllers(share, seed))) for seed in range(8)]) for curate in kinds
    )
    assert plain < 2 * share < 0.5 < by_return <= by_advantage


def test_rows_are_drawn_as_often_as_they_weigh() -> None:
    weight = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
    one, other = (WeightedRows(weight).draw(8000, torch.Generator().manual_seed(1)) for _ in range(2))
    share = one.bincount(minlength=6) / 8000
    assert torch.equal(one, other)
    torch.testing.assert_close(share, weight / 8, atol=0.02, rtol=0)
    assert not share[weight == 0].any()


def test_without_weights_draws_are_what_they_were() -> None:
    steps = [single_steps(torch.zeros(9, 2), torch.zeros(9, 2))]
    plain = TransitionTable(steps, 9).draw(50, torch.Generator().manual_seed(3))
    assert torch.equal(plain, torch.randint(9, (50,), generator=torch.Generator().manual_seed(3)))
    weighted = TransitionTable(steps, 9, weight=torch.eye(9)[4]).draw(50, torch.Generator())
    assert weighted.tolist() == [4] * 50


def test_windows_carry_the_weights_of_their_frames_and_the_stream_continues() -> None:
    dataset = Curation(weighting="return")(controllers(0.2, 0, episodes=6, steps=5))
    train, _ = dataset.split(0.3, seed=1)
    windows = WindowSampler(train, ChunkSpec(horizon=2, act_steps=1, action_dim=1), pad_end=False)
    assert windows.weight is not None
    assert torch.equal(windows.weight, train.extras[SAMPLING_WEIGHT][windows.frames])
    generator = torch.Generator().manual_seed(0)
    stream = WeightedStream(windows.weight, generator)
    stream.take(7)
    state, expected = stream.state_dict(), stream.take(9)
    assert state.keys() == {"num", "generator"} != Shuffle(3, generator).state_dict().keys()
    other = WeightedStream(windows.weight, torch.Generator())
    other.load_state_dict(state)
    assert torch.equal(other.take(9), expected)
    assert not torch.equal(capture_generator(generator), state["generator"])


def test_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dataset = controllers(0.25, 0, episodes=8)
    assert Curation(keep="success").kept(dataset).tolist() == [0, 1]
    assert Curation(keep="return", share=0.25).kept(dataset).tolist() == [0, 1]
    assert Curation(keep="return", share=0.01)(dataset).num_episodes == 1
    assert Curation(keep="return", share=0.29)(controllers(0.5, 0)).num_episodes == 29
    assert "1 of 8 episodes" in caplog.text
    curated = Curation(keep="success", weighting="return")(dataset)
    assert curated.num_episodes == 2 and "of its rows" in caplog.text
    assert float(curated.extras[SAMPLING_WEIGHT].sum()) == pytest.approx(1)
    assert Curation()(dataset) is dataset


@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_the_diverging_half_is_that_of_the_noisy_demonstrator(noise: float) -> None:
    rng = np.random.default_rng(0)
    state, gain = rng.normal(size=(40, 50, 4)), rng.normal(size=(4, 2))
    deviation = np.where(np.arange(40) % 2, noise, 0.05)
    action = np.tanh(state @ gain / 2) + deviation[:, None, None] * rng.normal(size=(40, 50, 2))
    dataset = flat(state, action, np.zeros((40, 50)), np.ones(40, dtype=bool))
    kept = Curation(keep="divergence", share=0.5).kept(dataset)
    assert (kept % 2 == 0).sum() >= 19


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": "return"}, "curation.share must be given with curation.keep=return"),
        ({"share": 0.5}, "curation.share must be null with curation.keep=all"),
        ({"keep": "success", "share": 0.5}, "curation.share must be null"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as found:
        Curation(**given)  # type: ignore[arg-type]
    assert message in str(found.value)


def test_data_that_decide_nothing_are_refused() -> None:
    data = controllers(0.5, 0, episodes=2)
    alike = flat(np.ones((3, 4, 1)), np.ones((3, 4, 1)), np.ones((3, 4)), np.zeros(3, dtype=bool))
    for dataset, curate, words in (
        (data, Curation(weighting="advantage"), "more than 2 episodes weighting=return"),
        (alike, Curation(weighting="return"), "different scores all 3"),
        (alike, Curation(keep="success"), "successes there is none"),
    ):
        with pytest.raises(ConfigError, match=mentions(words)):
            curate(dataset)
    with pytest.raises(DatasetError, match="two episodes or more"):
        Curation(keep="divergence", share=0.5)(data.select([0]))
    with pytest.raises(ConfigError, match=SAMPLING_WEIGHT):
        WeightedRows(torch.tensor([1.0, -0.5]))
