"""RECAP against closed forms: returns, values, advantages, labels, dropout, guidance.

Not compared: `advantage_official`, in which rewards and values have different scales; demonstrations that are
positive whatever their advantage.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from official_critics import arrays_of
from torch import Tensor

from algos.cloning.advantage_labels import advantages, is_positive, step_rewards, two_hot
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import Cond
from policies.wrappers.advantage import Advantage

files = pytest.mark.golden("recap_analytic*.npz")
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Any]:
    return {name: torch.as_tensor(value).double() for name, value in arrays_of(golden_path).items()}


def episodes(arrays: dict[str, Any]) -> EpisodeDataset:
    lengths = arrays["lengths"].long()
    frames = int(lengths.sum())
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[start[1:] - 1] = True
    return EpisodeDataset(
        observations=torch.zeros(frames, 1), actions=torch.zeros(frames, 1), rewards=torch.zeros(frames),
        terminated=ends, truncated=torch.zeros_like(ends), episode_start=start,
        episode_extras={"success": arrays["success"].bool()},
    )  # fmt: skip


def remaining(arrays: dict[str, Any]) -> Tensor:
    return torch.cat([torch.arange(int(n), 0, -1) for n in arrays["lengths"]])


@files
def test_rewards_and_returns_are_those_of_steps_to_success(arrays: dict[str, Any]) -> None:
    data = episodes(arrays)
    rewards = step_rewards(data, -float(arrays["failure_reward"]))
    torch.testing.assert_close(rewards.double(), arrays["reward"], **EXACT)
    to_go = replace(data, rewards=rewards).returns_to_go(float(arrays["gamma"]))
    torch.testing.assert_close(to_go.double(), arrays["return"], **EXACT)
    scaled = to_go.double() / to_go.abs().max()
    torch.testing.assert_close(scaled, arrays["value_target"], **EXACT)


@files
def test_values_are_means_of_categorical_distributions(arrays: dict[str, Any]) -> None:
    target, atoms = arrays["value_target"], arrays["atoms"]
    found = two_hot(target, atoms)
    torch.testing.assert_close(found, arrays["two_hot"], **EXACT)
    torch.testing.assert_close(found @ atoms, target, **EXACT)
    loss = -(found * arrays["logits"].log_softmax(dim=1)).sum(dim=1)
    torch.testing.assert_close(loss, arrays["ce_loss"], **EXACT)
    torch.testing.assert_close(arrays["logits"].softmax(1) @ atoms, arrays["value_from_logits"], **EXACT)


@files
def test_advantages_and_labels_are_those_of_the_equations(arrays: dict[str, Any]) -> None:
    found = advantages(
        arrays["value_target"],
        arrays["V"],
        remaining(arrays),
        int(arrays["lookahead"]),
        float(arrays["gamma"]),
    )
    torch.testing.assert_close(found, arrays["advantage_linear"], **EXACT)
    positive = is_positive(arrays["advantage_official"], float(arrays["positive_fraction"]))
    assert torch.equal(positive, arrays["label_raw"].bool())


@files
def test_a_dropped_label_is_no_label(arrays: dict[str, Any]) -> None:
    label, drops = arrays["label"].bool(), arrays["dropout_uniform"] < arrays["dropout_prob"]
    free = torch.zeros(len(label), 1)
    for negative, name in ((-1.0, "conditional_both"), (0.0, "conditional_positive_only")):
        given = torch.where(label, 1.0, negative)[:, None]
        used = Cond(given, free=Cond(free)).freed(drops).vec
        assert torch.equal(used[:, 0] != 0, arrays[name].bool())


@files
def test_guided_predictions_and_chunks_are_those_of_the_weight(arrays: dict[str, Any]) -> None:
    """A field linear in the label: its two predictions are those of the file, or of two Gaussians."""
    low, high, s = (float(arrays[f"gauss_{name}"]) for name in ("m_uncond", "m_cond", "s"))

    class Gaussians(torch.nn.Module):
        """Velocity of the straight path from noise to N(m, s^2), m by the label."""

        def bind(self, cond: Cond, times: Tensor) -> Any:
            mean = (low + (high - low) * cond.vec[:, -1:])[:, :, None]

            def bound(k: int, x: Tensor) -> Tensor:
                t = times[k] / 100
                spread = t * t * s * s + (1 - t) ** 2
                return mean + (t * s * s - (1 - t)) / spread * (x - t * mean)

            return bound

    steps = int(arrays["gauss_K"])
    config = PolicyConfig(
        process=RectifiedFlow(), backbone=MlpConfig(width=8), horizon=1, act_steps=1, goal_dropout=0.1,
        normalizer={"state": "identity", "action": "identity", "goal": "identity"}, observation_clip=None,
    )  # fmt: skip
    base: Any = build_policy(config, obs_dim=1, action_dim=1, goal_dim=1).double()
    base.field = Gaussians()
    base = base.with_sampler(replace(base.sampler, steps=steps, clip_action=None))
    obs, noise = torch.zeros(2, 1, 1, dtype=torch.float64), torch.tensor([0.0, 1.0]).view(2, 1, 1).double()
    for i, weight in enumerate(arrays["guidance_w"].tolist()):
        mean, above = Advantage(weight).wrap(base).act(obs, noise=noise).flatten()
        torch.testing.assert_close(mean, arrays["gauss_guided_mean"][i], rtol=0, atol=1e-12)
        torch.testing.assert_close(above - mean, arrays["gauss_guided_std"][i], rtol=0, atol=1e-12)
        guided = arrays["v_uncond"] + weight * (arrays["v_cond"] - arrays["v_uncond"])
        torch.testing.assert_close(guided, arrays["v_guided"][i], **EXACT)
