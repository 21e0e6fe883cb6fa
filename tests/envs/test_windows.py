import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.datasets import EpisodeDataset, episodes
from envs.datasets.windows import Windows
from policies.errors import DatasetError
from policies.policy_config import ChunkSpec


def make(lengths, obs_dim=2, action_dim=3):
    rng = np.random.default_rng(sum(lengths))
    num, start = sum(lengths), np.concatenate([[0], np.cumsum(lengths)])
    ends = np.zeros(num, bool)
    ends[start[1:] - 1] = True
    obs, action = rng.normal(size=(num, obs_dim)), rng.normal(size=(num, action_dim))
    return EpisodeDataset.from_arrays(obs, action, np.zeros(num), ends, np.zeros(num), start)


def by_item(data, chunk, pad_end):
    """Build every window one element at a time."""
    out = []
    starts = data.episode_start.tolist()
    for first, end in pairwise(starts):
        for frame in range(first, end):
            begin = frame - chunk.action_start
            if not pad_end and begin + chunk.horizon > end:
                continue
            history = [max(first, frame - j) for j in reversed(range(chunk.obs_steps))]
            rows = range(begin, begin + chunk.horizon)
            inside = [min(max(row, first), end - 1) for row in rows]
            mask = [first <= row < end for row in rows]
            out.append((frame, data.observations[history], data.actions[inside], mask))
    return out


@pytest.mark.parametrize("pad_end", [True, False])
def test_windows_begin_where_the_recording_policy_decided(pad_end):
    data, chunk = make([7, 4]), ChunkSpec(3, 2, 2)
    decided = np.array([1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0], bool)
    some = replace(data, extras={"decision": torch.from_numpy(decided)})
    windows, every = Windows(some, chunk, pad_end=pad_end), Windows(data, chunk, pad_end=pad_end)
    kept = [i for i, frame in enumerate(every.frames.tolist()) if decided[frame]]
    assert windows.frames.tolist() == every.frames[kept].tolist() and len(kept) == (6 if pad_end else 5)
    found, wanted = windows.gather(torch.arange(len(kept))), every.gather(torch.tensor(kept))
    for part in ("obs", "action", "mask"):
        assert torch.equal(getattr(found, part), getattr(wanted, part))
    for wrong in (torch.zeros(len(decided)), torch.ones(len(decided), 1)):
        with pytest.raises(DatasetError, match="decision"):
            Windows(replace(data, extras={"decision": wrong}), chunk, pad_end=pad_end)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    obs_steps=st.integers(1, 4),
    horizon=st.integers(1, 6),
    oldest=st.booleans(),
    pad_end=st.booleans(),
)
def test_every_window_equals_the_one_built_item_by_item(lengths, obs_steps, horizon, oldest, pad_end):
    data = make(lengths)
    start = min(obs_steps - 1, horizon - 1) if oldest else 0
    chunk = ChunkSpec(3, horizon, 1, obs_steps, action_start=start)
    expected = by_item(data, chunk, pad_end)
    if not expected:
        with pytest.raises(DatasetError, match="no episode holds a whole chunk"):
            Windows(data, chunk, pad_end=pad_end)
        return
    windows = Windows(data, chunk, pad_end=pad_end)
    assert windows.frames.tolist() == [frame for frame, *_ in expected]
    batch = windows.gather(torch.arange(windows.num))
    assert torch.equal(batch.obs, torch.stack([obs for _, obs, *_ in expected]))
    assert torch.equal(batch.action, torch.stack([action for *_, action, _ in expected]))
    assert batch.mask.tolist() == [mask for *_, mask in expected]


def test_gather_follows_the_index_in_any_order_and_with_repeats():
    windows = Windows(make([5, 7]), ChunkSpec(3, 4, 2, 2))
    everything = windows.gather(torch.arange(windows.num))
    index = torch.tensor([7, 0, 7, 11, 3])
    batch = windows.gather(index)
    for got, expected in ((batch.obs, everything.obs), (batch.action, everything.action)):
        assert torch.equal(got, expected[index])
    assert torch.equal(batch.mask, everything.mask[index])


def test_what_is_made_of_a_dataset_is_not_checked_again(monkeypatch):
    data = make([5, 7])
    monkeypatch.setattr(episodes, "check_dataset", None)
    assert data.select([1]).select([0]).lengths.tolist() == [7]
    assert data.to("meta").storage is data.storage
    assert data.with_cameras([]) is data
    assert len(Windows(data, ChunkSpec(3, 4, 2, 2))) == 12


def test_no_window_sees_another_episode():
    # Every frame carries its episode's number, so a window that crosses an edge would show two numbers.
    data = make([4, 1, 6])
    number = torch.repeat_interleave(torch.arange(3.0), data.lengths)
    data = EpisodeDataset.from_arrays(
        number[:, None], number[:, None], number, data.terminated, data.truncated, data.episode_start
    )
    batch = Windows(data, ChunkSpec(1, 5, 1, 3, action_start=2)).gather(torch.arange(11))
    seen = torch.cat([batch.obs, batch.action], dim=1).squeeze(2)
    assert torch.equal(seen, number[:, None].expand_as(seen))


def test_both_conventions_agree_for_a_history_of_one():
    data = make([6, 3])
    newest = Windows(data, ChunkSpec(3, 4, 4, 1, action_start=0))
    oldest = Windows(data, ChunkSpec(3, 4, 4, 1, action_start=1 - 1))
    assert torch.equal(newest.gather(newest.frames).action, oldest.gather(oldest.frames).action)


def test_episodes_too_short_for_a_chunk_are_reported(caplog):
    with caplog.at_level(logging.WARNING):
        windows = Windows(make([6, 3, 5, 2]), ChunkSpec(3, 4, 4), pad_end=False)
    assert windows.short_episodes == [1, 3]
    assert "2 of 4 episodes are too short for a chunk of 4 actions" in caplog.text


def test_a_dataset_with_another_action_width_is_refused():
    with pytest.raises(DatasetError, match="'actions' must be 2 wide for this task; got 3"):
        Windows(make([4]), ChunkSpec(2, 4, 4))


def test_batches_are_views_of_no_storage_that_training_could_change():
    data = make([8])
    windows = Windows(data, ChunkSpec(3, 1, 1))
    before = data.actions.clone()
    windows.gather(torch.arange(8)).action.zero_()
    assert torch.equal(data.actions, before)


def test_sampled_windows_follow_the_generator():
    windows = Windows(make([9, 9]), ChunkSpec(3, 2, 2))
    one = windows.sample(5, generator=torch.Generator().manual_seed(3))
    two = windows.sample(5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(one.action, two.action)
