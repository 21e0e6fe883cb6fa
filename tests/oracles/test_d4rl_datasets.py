"""The D4RL conversions against arrays made by D4RL's own code on two small files stored beside them."""

import builtins
from pathlib import Path

import numpy as np
import pytest

from envs.datasets import d4rl

STYLES = ("v0", "v2")


@pytest.fixture
def golden(golden_path: Path):
    return np.load(golden_path)


def source(golden_path: Path, style: str) -> Path:
    return golden_path.parent / f"d4rl_synthetic_{style}style.hdf5"


def by_row(arrays):
    return {key: value for key, value in arrays.items() if not key.startswith("metadata")}


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("style", STYLES)
def test_loader_returns_the_official_keys_and_squeezes_columns(golden_path, golden, style):
    arrays = d4rl.load_d4rl(source(golden_path, style))
    assert sorted(arrays) == golden[f"{style}_keys"].tolist()
    for key in ("rewards", "terminals"):
        expected = golden[f"{style}_{key}_loaded"]
        assert arrays[key].dtype == expected.dtype
        np.testing.assert_array_equal(arrays[key], expected)


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("terminate_on_end", [False, True])
def test_transitions_equal_qlearning_dataset_bit_for_bit(golden_path, golden, style, terminate_on_end):
    arrays = d4rl.load_d4rl(source(golden_path, style))
    got = d4rl.qlearning_dataset(
        arrays, terminate_on_end=terminate_on_end, max_episode_steps=int(golden["max_episode_steps"])
    )
    assert len(got) == 5
    for key, value in got.items():
        expected = golden[f"{style}_q{int(terminate_on_end)}_{key}"]
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("style", STYLES)
def test_compat_episodes_hold_exactly_the_official_transitions(golden_path, golden, style):
    data = d4rl.read(
        source(golden_path, style), max_episode_steps=int(golden["max_episode_steps"]), d4rl_compat=True
    ).transitions()
    for key, name in [
        ("observations", "observations"),
        ("actions", "actions"),
        ("next_observations", "next_observations"),
        ("rewards", "rewards"),
        ("terminated", "terminals"),
    ]:
        np.testing.assert_array_equal(getattr(data, key).numpy(), golden[f"{style}_q0_{name}"])


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("style", STYLES)
def test_episodes_equal_sequence_dataset(golden_path, golden, style):
    arrays = by_row(d4rl.load_d4rl(source(golden_path, style)))
    episodes = list(d4rl.sequence_dataset(arrays, max_episode_steps=int(golden["max_episode_steps"])))
    prefix = f"{style}_seq_"
    np.testing.assert_array_equal([len(e["rewards"]) for e in episodes], golden[prefix + "lengths"])
    np.testing.assert_array_equal(
        [e["rewards"].sum(dtype=np.float64) for e in episodes], golden[prefix + "returns"]
    )
    np.testing.assert_array_equal([e["observations"][0] for e in episodes], golden[prefix + "first_obs"])
    np.testing.assert_array_equal([e["observations"][-1] for e in episodes], golden[prefix + "last_obs"])
    np.testing.assert_array_equal(
        [bool(e["terminals"][-1]) for e in episodes], golden[prefix + "last_terminal"]
    )
    if prefix + "last_timeout" in golden:
        np.testing.assert_array_equal([e["timeouts"][-1] for e in episodes], golden[prefix + "last_timeout"])


@pytest.mark.golden("d4rl_datasets*.npz")
def test_episode_iterator_refuses_metadata_as_the_official_one_does(golden_path, golden):
    arrays = d4rl.load_d4rl(source(golden_path, "v2"))
    error = getattr(builtins, str(golden["v2_seq_with_metadata_raises"]))
    with pytest.raises(error, match="metadata/iteration"):
        list(d4rl.sequence_dataset(arrays))


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("style", STYLES)
def test_default_reader_finds_the_true_episodes(golden_path, golden, style):
    # The true episode of every raw row is stored; unlike the official conversions we must find exactly it,
    # also without `timeouts`, and lose neither the end of the file nor a time-out's true successor.
    data = d4rl.read(source(golden_path, style), max_episode_steps=int(golden["max_episode_steps"]))
    number = np.repeat(np.arange(data.num_episodes), data.lengths.numpy())
    np.testing.assert_array_equal(number, golden["raw_episode_id"])
    np.testing.assert_array_equal(data.terminated.numpy(), golden[f"{style}_terminals_loaded"].astype(bool))
    last = data.episode_start[1:] - 1
    assert bool((data.terminated | data.truncated)[last].all())
    steps = data.transitions()
    assert len(steps.frames) == data.num_frames
    raw = d4rl.load_d4rl(source(golden_path, style))
    np.testing.assert_array_equal(steps.next_observations.numpy(), raw["next_observations"])
