"""The D4RL conversions against arrays made by D4RL's own code on small files stored beside them.

Arrays of `d4rl_datasets<tag>.npz` begin with the style of a file, `d4rl_synthetic<tag>_<style>style.hdf5`.
"""

import builtins
from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from envs.datasets.formats import d4rl


@pytest.fixture
def golden(golden_path: Path):
    return np.load(golden_path)


@pytest.fixture
def styles(golden):
    found = [name.removesuffix("_keys") for name in golden.files if name.endswith("_keys")]
    assert found
    return found


def source(golden_path: Path, style: str) -> Path:
    """Return the file of a style: that with the tag of the arrays, or the only one."""
    tag = golden_path.stem.removeprefix("d4rl_datasets")
    own = golden_path.with_name(f"d4rl_synthetic{tag}_{style}style.hdf5")
    files = [own] if own.exists() else list(golden_path.parent.glob(f"d4rl_*{style}*.hdf5"))
    assert len(files) == 1, f"the rows of {golden_path.name} in the style {style} are in {own.name}"
    return files[0]


def by_row(arrays):
    return {key: value for key, value in arrays.items() if not key.startswith("metadata")}


@pytest.mark.golden("d4rl_datasets*.npz")
def test_loader_returns_the_official_keys_and_squeezes_columns(golden_path, golden, styles):
    for style in styles:
        arrays = d4rl.load_d4rl(source(golden_path, style))
        assert sorted(arrays) == golden[f"{style}_keys"].tolist()
        for key in ("rewards", "terminals"):
            expected = golden[f"{style}_{key}_loaded"]
            assert arrays[key].dtype == expected.dtype
            np.testing.assert_array_equal(arrays[key], expected)


@pytest.mark.golden("d4rl_datasets*.npz")
@pytest.mark.parametrize("terminate_on_end", [False, True])
def test_transitions_equal_qlearning_dataset_bit_for_bit(golden_path, golden, styles, terminate_on_end):
    for style in styles:
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
def test_compat_episodes_hold_exactly_the_official_transitions(golden_path, golden, styles):
    for style in styles:
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
def test_episodes_equal_sequence_dataset(golden_path, golden, styles):
    for style in styles:
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
            np.testing.assert_array_equal(
                [e["timeouts"][-1] for e in episodes], golden[prefix + "last_timeout"]
            )


@pytest.mark.golden("d4rl_datasets*.npz")
def test_episode_iterator_refuses_metadata_as_the_official_one_does(golden_path, golden):
    ending = "_seq_with_metadata_raises"
    refused = [name.removesuffix(ending) for name in golden.files if name.endswith(ending)]
    assert refused
    for style in refused:
        arrays = d4rl.load_d4rl(source(golden_path, style))
        error = getattr(builtins, str(golden[style + ending]))
        with pytest.raises(error, match=mentions("metadata/iteration")):
            list(d4rl.sequence_dataset(arrays))


@pytest.mark.golden("d4rl_datasets*.npz")
def test_default_reader_finds_the_true_episodes(golden_path, golden, styles):
    # The true episode of every raw row is stored; unlike the official conversions we must find exactly it,
    # also without `timeouts`, and lose neither the end of the file nor a time-out's true successor.
    for style in styles:
        data = d4rl.read(source(golden_path, style), max_episode_steps=int(golden["max_episode_steps"]))
        number = np.repeat(np.arange(data.num_episodes), data.lengths.numpy())
        np.testing.assert_array_equal(number, golden["raw_episode_id"])
        np.testing.assert_array_equal(
            data.terminated.numpy(), golden[f"{style}_terminals_loaded"].astype(bool)
        )
        last = data.episode_start[1:] - 1
        assert bool((data.terminated | data.truncated)[last].all())
        steps = data.transitions()
        assert len(steps.frames) == data.num_frames
        raw = d4rl.load_d4rl(source(golden_path, style))
        np.testing.assert_array_equal(steps.next_observations.numpy(), raw["next_observations"])
