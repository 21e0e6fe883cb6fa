"""Chunk transitions against a walk through the episodes, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from messages import mentions
from torch import Tensor

from algos.base import Setup
from algos.cdsa import CdsaConfig
from algos.offline.online import columns_of, rows_of
from algos.td3_bc import Td3BcConfig
from algos.transitions import Batch, Rewarding, TransitionTable, tabulate
from envs.datasets.action_bounds import actions_for, box_of, clipped_actions
from envs.datasets.episodes import EpisodeDataset
from policies.build import build_policy
from policies.errors import DatasetError
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess

LENGTHS, ENDS = (5, 1, 7, 3), (True, True, False, True)


def dataset(*, successors: bool = True) -> EpisodeDataset:
    """Return four episodes; all but the third end because the task does."""
    generator, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    start = torch.tensor([0, *LENGTHS]).cumsum(0)
    terminated, truncated = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    for last, over in zip((start[1:] - 1).tolist(), ENDS, strict=True):
        terminated[last], truncated[last] = over, not over
    observations = torch.randn(n, 3, generator=generator)
    following = torch.cat([observations[1:], torch.zeros(1, 3)])
    following[start[1:] - 1] = torch.randn(len(LENGTHS), 3, generator=generator)
    return EpisodeDataset(
        observations=observations, actions=torch.rand(n, 2, generator=generator) * 2 - 1,
        rewards=torch.randn(n, generator=generator), terminated=terminated, truncated=truncated,
        episode_start=start, next_observations=following if successors else None, meta={"source": "walk"},
    )  # fmt: skip


def policy(**sizes: int) -> Policy:
    one = torch.ones(3)
    state = {"mean": 0.3 * one, "std": 2 * one, "min": -one, "max": one}
    action = {"mean": 0 * one[:2], "std": one[:2], "min": -2 * one[:2], "max": 2 * one[:2]}
    return build_policy(
        PolicyConfig(
            process=DeterministicProcess(), normalizer={"state": "gaussian", "action": "limits"}, **sizes
        ),
        obs_dim=3, action_dim=2, statistics={"state": state, "action": action},
    )  # fmt: skip


def walked(data: EpisodeDataset, sizes: dict[str, int], rule: Rewarding) -> list[dict[str, Tensor]]:
    """Return what a loop over all frames says the transitions are."""
    history, steps = sizes.get("obs_steps", 1), sizes["act_steps"]
    rows = []
    for first, end in zip(data.episode_start[:-1].tolist(), data.episode_start[1:].tolist(), strict=True):
        for t in range(first, end):
            frames = list(range(t, min(t + steps, end)))
            last, over = frames[-1], bool(data.terminated[frames[-1]])
            if len(frames) < steps and not over:
                continue
            if data.next_observations is None and last == end - 1 and not over:
                continue
            if data.next_observations is not None:
                newest = data.next_observations[last]
            else:
                newest = data.observations[last if last == end - 1 else last + 1]
            past = [data.observations[max(first, i)] for i in range(t - history + 1, t + 1)]
            after = [data.observations[max(first, min(i, last))] for i in range(last - history + 2, last + 1)]
            reward = sum(
                rule.gamma**j * (rule.scale * float(data.rewards[f]) + rule.shift)
                for j, f in enumerate(frames)
            )
            padded = frames + [last] * (steps - len(frames))
            begin, stop = t - sizes.get("action_start", 0), last if over else end - 1
            window = range(begin, begin + sizes["horizon"])
            planned = [min(max(f, first), stop) for f in window]
            rows.append({
                "state": (torch.stack(past) - 0.3).flatten() / 2,
                "next": (torch.stack([*after, newest]) - 0.3).flatten() / 2,
                "action": (data.actions[padded] / 2).flatten(),
                "reward": torch.tensor(reward),
                "discount": torch.tensor(0.0 if over else rule.gamma ** len(frames)),
                "plan": (data.actions[planned] / 2).flatten(),
                "real": torch.tensor([float(first <= f <= stop) for f in window]),
            })  # fmt: skip
    return rows


@pytest.mark.parametrize("successors", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"horizon": 1, "act_steps": 1},
        {"horizon": 4, "act_steps": 3},
        {"horizon": 5, "act_steps": 3, "obs_steps": 2, "action_start": 1},
    ],
)  # fmt: skip
def test_rows_are_those_of_a_walk(sizes: dict[str, int], successors: bool) -> None:
    data, rule = dataset(successors=successors), Rewarding(0.9, 2.0, -0.5)
    rows = walked(data, sizes, rule)
    table = tabulate(data, policy(**sizes), rule)
    assert len(table) == len(rows) > 0
    batch = table.gather(torch.arange(len(table)))
    for name, got in (
        ("state", batch.cond), ("next", batch.next_cond), ("action", batch.action),
        ("reward", batch.reward), ("discount", batch.discount), ("plan", batch.plan), ("real", batch.real),
    ):  # fmt: skip
        torch.testing.assert_close(
            got, torch.stack([row[name] for row in rows]).float(), rtol=1e-5, atol=1e-6
        )


def test_single_steps_are_the_transitions_of_the_dataset() -> None:
    data = dataset()
    table, own = tabulate(data, policy(horizon=1, act_steps=1), Rewarding()), data.transitions()
    batch = table.gather(torch.arange(len(table)))
    torch.testing.assert_close(batch.cond, (own.observations - 0.3) / 2)
    torch.testing.assert_close(batch.next_cond, (own.next_observations - 0.3) / 2)
    assert torch.equal(batch.reward, own.rewards)
    assert torch.equal(batch.discount == 0, own.terminated)


def test_the_next_action_is_the_one_recorded_next() -> None:
    data = dataset()
    table = tabulate(data, policy(horizon=1, act_steps=1), Rewarding())
    batch = table.gather(torch.arange(len(table)))
    last = torch.isin(torch.arange(len(table)), data.episode_start[1:] - 1)
    assert torch.equal(batch.has_next > 0, ~last)
    following = data.actions[torch.arange(len(table))[~last] + 1] / 2
    torch.testing.assert_close(batch.next_action[~last], following)


def test_the_next_chunk_is_recorded_whole_or_to_the_end_of_the_task() -> None:
    """The third episode, frames 6 to 12, stops for another reason: of two chunks its last five lack one."""
    data = dataset()
    table = tabulate(data, policy(horizon=3, act_steps=3), Rewarding())
    batch = table.gather(torch.arange(len(table)))
    found = dict(zip(table.frame.tolist(), (batch.has_next > 0).tolist(), strict=True))
    assert found == {
        **{0: True, 1: True, 2: False, 3: False, 4: False, 5: False},
        **{6: True, 7: True, 8: False, 9: False, 10: False, 13: False, 14: False, 15: False},
    }
    one = batch.next_action[table.frame == 1]
    torch.testing.assert_close(one, data.actions[[4, 4, 4]].flatten()[None] / 2)


def test_values_do_not_look_beyond_a_mask() -> None:
    data = dataset()
    masks = torch.ones(data.num_frames)
    masks[8] = 0
    table = tabulate(replace(data, extras={"masks": masks}), policy(horizon=2, act_steps=2), Rewarding(0.9))
    plain = tabulate(data, policy(horizon=2, act_steps=2), Rewarding(0.9))
    cut = (table.gather(torch.arange(len(table))).discount == 0).sum()
    assert cut == (plain.gather(torch.arange(len(plain))).discount == 0).sum() + 2


def test_recordings_without_a_stretch_are_refused() -> None:
    short = dataset().select([2])
    with pytest.raises(DatasetError, match=mentions("act_steps 8")):
        tabulate(short, policy(horizon=8, act_steps=8), Rewarding())
    with pytest.raises(DatasetError, match=mentions("12 algo.critic_horizon")) as caught:
        tabulate(short, policy(horizon=1, act_steps=1), Rewarding(), steps=12)
    assert "act_steps" not in str(caught.value)


def test_actions_outside_the_box_are_clipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset()
    wild = replace(data, actions=data.actions * 2)
    box = box_of(data, None)
    with caplog.at_level("WARNING"):
        inside = clipped_actions(wild, box)
    outside = int((wild.actions.abs() > 1).sum())
    assert f"{outside} action entries" in caplog.text and inside.actions.abs().max() <= 1
    assert clipped_actions(data, box) is data


def test_without_a_task_actions_are_clipped_to_the_box_of_the_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, init = dataset(), policy(horizon=1, act_steps=1)  # whose box is ±2
    wild = replace(data, actions=3 * data.actions)
    outside = int((wild.actions.abs() > 2).sum())
    with caplog.at_level("WARNING"):
        table = Td3BcConfig(steps=1).build(Setup(dataset=wild, init=init)).table
    assert f"{outside} action entries" in caplog.text and "box of the policy of init" in caplog.text
    expected = (wild.actions.clamp(-2, 2) / 2)[wild.transition_frames]
    torch.testing.assert_close(table.action, expected, rtol=0, atol=1e-4)
    caplog.clear()
    at_the_ends = replace(data, actions=torch.where(data.actions > 0, 2.0, -2.0))
    assert actions_for(at_the_ends, init, None) is at_the_ends and not caplog.records
    init.normalizer.modes["action"] = "gaussian"
    assert actions_for(wild, init, None) is wild, "mean and deviation are no box"


@pytest.mark.parametrize(
    "config", [Td3BcConfig(steps=2, warmup_steps=1), CdsaConfig(steps=1)], ids=["td3_bc", "cdsa"]
)
def test_actions_beyond_what_a_policy_reaches_are_told(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of a normal distribution a third lies beyond its deviation, where actions are cut off."""
    data, init = dataset(), policy(horizon=1, act_steps=1)
    config.build(Setup(dataset=data, init=init))
    assert not caplog.records
    init.normalizer.modes["action"] = "gaussian"
    init.normalizer.refit("action", data.statistics()["action"])
    table = config.build(Setup(dataset=data, init=init)).table
    share = 100 * float((table.action.abs() > 1).float().mean())
    assert 20 < share < 50
    (record,) = caplog.records
    assert f"{share:.2g} % of the action entries lie beyond ±1" in record.message
    assert "(gaussian)" in record.message and "policy.normalizer.action=limits" in record.message


def test_a_box_that_no_task_gives_is_that_of_the_data_and_said(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset()
    assert float(box_of(data, None)["max"].max()) == 1.0 and not caplog.records
    wild = replace(data, actions=data.actions * 2)
    outside = int((wild.actions.abs() > 1).sum())
    assert float(box_of(wild, None)["max"].max()) == pytest.approx(float(wild.actions.max()))
    assert f"{outside} action entries" in caplog.text and "Give env=" in caplog.text


@pytest.mark.parametrize("horizon", [1, 3])
def test_a_table_gathers_what_was_put_in(horizon: int) -> None:
    generator = torch.Generator().manual_seed(0)
    action = torch.randn(6, 2, generator=generator)
    widths = {"cond": 3, "next_cond": 3, "next_action": 2, "plan": 2 * horizon, "real": horizon}
    parts = {name: torch.randn(6, width, generator=generator) for name, width in widths.items()}
    parts |= {name: torch.randn(6, generator=generator) for name in ("reward", "discount", "has_next")}
    if horizon == 1:
        parts |= {"plan": action, "real": torch.ones(6, 1)}
    batch, row = Batch(action=action, **parts, row=torch.arange(6)), torch.tensor([4, 1])
    table = TransitionTable((rows_of(batch, block) for block in batch.row.split(4)), 6)
    found = columns_of(table.gather(row))
    assert not [name for name, part in columns_of(rows_of(batch, row)).items() if not found[name].equal(part)]


def test_a_last_frame_with_a_mask_of_0_is_no_transition() -> None:
    """It may hold no action: all agree on which frames are transitions."""
    data = dataset(successors=False)
    masks = torch.ones(data.num_frames)
    masks[sum(LENGTHS[:3]) - 1] = 0  # the end of the episode that was cut
    masked = replace(data, extras={"masks": masks})
    table = tabulate(masked, policy(horizon=1, act_steps=1), Rewarding(0.9))
    assert len(table) == len(masked.transition_frames) == data.num_frames - 1
