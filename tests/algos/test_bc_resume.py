"""Cloning stopped and continued, or begun again: the same numbers, on the same data, or a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from messages import mentions
from small_cloning import tiny
from two_modes import two_mode_setup

from envs.datasets.curation import SAMPLING_WEIGHT
from policies.errors import CheckpointError


def test_a_continued_run_takes_the_weight_decay_it_is_given() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    algorithm = replace(tiny(), weight_decay=0.5).build(setup)
    algorithm.load_state_dict(state)
    assert algorithm._optimizer.param_groups[0]["weight_decay"] == 0.5


def test_continuing_on_another_number_of_threads_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    tiny().build(setup).load_state_dict(state)
    assert "num_threads" not in caplog.text
    tiny().build(replace(setup, num_threads=2)).load_state_dict(state)
    assert "num_threads=1, now it is 2" in caplog.text


# -- refusals -----------------------------------------------------------------------------------------


def test_continuing_on_other_data_is_refused_even_when_there_is_as_much_of_it() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    actions = setup.dataset.actions.clone()
    actions[3, 0] += 1e-3
    with pytest.raises(CheckpointError, match=mentions("init= data")):
        tiny().build(replace(setup, dataset=replace(setup.dataset, actions=actions))).load_state_dict(state)
    moved = replace(setup.dataset, meta={"source": "elsewhere.hdf5"})
    tiny().build(replace(setup, dataset=moved)).load_state_dict(state)


def test_checkpoint_of_other_data_or_length_is_refused() -> None:
    state = tiny().build(two_mode_setup()).state_dict()
    with pytest.raises(CheckpointError, match=mentions("init= data")):
        tiny().build(two_mode_setup(num_episodes=10)).load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("validation_fraction 240")):
        tiny(pad_end=False).build(two_mode_setup()).load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("algo.steps 6 8")):
        tiny(steps=8).build(two_mode_setup()).load_state_dict(state)


def test_weighted_windows_are_split_as_before() -> None:
    """Windows drawn by weight have no passes to count, and those held out must not be learned from."""
    setup = two_mode_setup()
    weight = torch.ones(setup.dataset.num_frames)
    setup = replace(setup, dataset=replace(setup.dataset, extras={SAMPLING_WEIGHT: weight}))
    state = tiny(validation_fraction=0.5).build(setup).state_dict()
    with pytest.raises(CheckpointError, match=mentions("validation_fraction")):
        tiny(validation_fraction=0.0).build(setup).load_state_dict(state)


def test_another_seed_or_start_is_refused_on_resuming() -> None:
    setup = two_mode_setup()
    state = tiny().build(setup).state_dict()
    with pytest.raises(CheckpointError, match=mentions(f"seed {setup.seed} {setup.seed + 1}")):
        tiny().build(replace(setup, seed=setup.seed + 1)).load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("init None")):
        tiny().build(replace(setup, init=tiny().build(setup).snapshot())).load_state_dict(state)
    old = {name: value for name, value in state.items() if name not in ("seed", "init")}
    tiny().build(replace(setup, seed=setup.seed + 1)).load_state_dict(old)
