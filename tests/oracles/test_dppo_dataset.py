"""Windows and transitions against DPPO's dataset classes.

Not compared: the successor DPPO stores for the very last item (zeros although the true one is known) and
for terminal items (the first observation of the next trajectory); no value looks at the latter.
"""

from pathlib import Path

import numpy as np
import pytest

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import Windows
from policies.policy_config import ChunkSpec

DISCOUNT = 0.9


@pytest.fixture
def golden(golden_path: Path):
    return np.load(golden_path)


@pytest.fixture
def dataset(golden):
    start = np.concatenate([[0], np.cumsum(golden["traj_lengths"])])
    return EpisodeDataset.from_arrays(
        golden["states"],
        golden["actions"],
        golden["rewards"],
        golden["terminals"],
        np.zeros_like(golden["terminals"]),
        start,
    )


def histories(golden):
    return sorted(
        int(key[2:].split("_")[0]) for key in golden if key.startswith("To") and key.endswith("state")
    )


@pytest.mark.golden("dppo_dataset*.npz")
def test_windows_equal_the_official_ones(golden, dataset):
    assert histories(golden)
    for history in histories(golden):
        state, action = golden[f"To{history}_state"], golden[f"To{history}_action"]
        chunk = ChunkSpec(action.shape[2], action.shape[1], 1, obs_steps=state.shape[1], action_start=0)
        windows = Windows(dataset, chunk, pad_end=False)
        indices = np.stack([windows.frames.numpy(), windows.steps.numpy()], axis=1)
        np.testing.assert_array_equal(indices, golden[f"To{history}_indices"])
        batch = windows.gather(windows.frames.new_tensor(range(windows.num)))
        np.testing.assert_array_equal(batch.obs.numpy(), state)
        np.testing.assert_array_equal(batch.action.numpy(), action)
        assert bool(batch.mask.all())
        short = np.flatnonzero(golden["traj_lengths"] < action.shape[1])
        assert windows.short_episodes == short.tolist()


@pytest.mark.golden("dppo_dataset*.npz")
def test_transitions_equal_the_official_ones(golden, dataset):
    steps = dataset.transitions()
    np.testing.assert_array_equal(steps.frames.numpy(), golden["q_indices"][:, 0])
    np.testing.assert_array_equal(steps.observations.numpy(), golden["q_state"][:, 0])
    np.testing.assert_array_equal(steps.rewards.numpy(), golden["q_reward"][:, 0])
    np.testing.assert_array_equal(steps.terminated.numpy(), golden["q_done"][:, 0].astype(bool))
    compared = ~steps.terminated.numpy()
    compared[-1] = False
    np.testing.assert_array_equal(steps.next_observations.numpy()[compared], golden["q_next"][compared, 0])


@pytest.mark.golden("dppo_dataset*.npz")
def test_returns_to_go_equal_the_official_ones(golden, dataset):
    got = dataset.returns_to_go(DISCOUNT)[dataset.transitions().frames]
    np.testing.assert_allclose(got.numpy(), golden["q_rtg"][:, 0], rtol=1e-6)
