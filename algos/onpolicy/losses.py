"""Pure mathematics of on-policy learning: advantages, clip ranges, losses, reward scaling.

Legend: T chunk steps of a rollout, N environments, B rows of a minibatch, S fine-tuned denoising steps (inner
steps): s = 0 is the noisiest, the output of s = S-1 is executed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from policies.errors import CheckpointError


def successor_values(
    value: Tensor, last_value: Tensor, final_value: Tensor | None = None, final_index: Tensor | None = None
) -> Tensor:
    """Return the value (T, N) of the true successor of each step.

    Args:
        value: (T, N) values of the observations acted on.
        last_value: (N,) values of the true observations after the last step, final ones included.
        final_value: (M,) values of the last observations of truncated episodes. Without them (parity with the
            reference only), the next episode's first observation follows a truncation inside the rollout.
        final_index: (M, 2) their indices [t, n].
    """
    following = torch.cat([value[1:], last_value.unsqueeze(0)])
    if final_value is not None and final_index is not None and len(final_index):
        following[final_index[:, 0], final_index[:, 1]] = final_value.to(following.dtype)
    return following


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
    paper_compat: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; bootstraps through truncation, sums stop at episode ends.

    Args:
        reward: (T, N) of each chunk step.
        value: (T, N) of the observation acted on.
        next_value: (T, N) of the true successor (`successor_values`).
        terminated: (T, N) the episode terminated: no bootstrap.
        truncated: (T, N) the episode was truncated: bootstraps from `next_value`, ends the sum.
        gamma: Discount per chunk step.
        lam: lambda of GAE, in [0, 1].
        paper_compat: The lambda-sum runs across truncation, as in the DPPO reference.

    Returns:
        (advantage, return), each (T, N); return = advantage + value.

    Source: Schulman et al., arXiv 1506.02438, equation 16.
    """
    alive = 1.0 - terminated.to(value.dtype)  # bootstraps
    carry = alive if paper_compat else alive * (1.0 - truncated.to(value.dtype))  # continues the sum
    delta = reward + gamma * next_value * alive - value
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + gamma * lam * carry[t] * running
        advantage[t] = running
    return advantage, advantage + value


def clip_ranges(num_steps: int, *, base: float, last: float, rate: float) -> Tensor:
    """Return the clip range of each inner step (S,): from `base` at s = 0, exponentially, to `last`.

    With S = 1 it is `last`; with `rate` 0 growth is linear.

    Source: DPPO reference implementation (clip_ploss_coef_base, _coef, _rate).
    """
    if num_steps == 1:
        return torch.tensor([last])
    x = torch.linspace(0.0, 1.0, num_steps, dtype=torch.float64)
    growth = x if rate == 0 else torch.expm1(rate * x) / math.expm1(rate)
    return (base + (last - base) * growth).float()


def denoising_discounts(num_steps: int, gamma: float) -> Tensor:
    """Return the factor gamma^(S-1-s) of the advantage at each inner step, (S,).

    Source: DPPO (arXiv 2409.00588), section 4.3.
    """
    power = torch.arange(num_steps - 1, -1, -1, dtype=torch.float64)
    return torch.pow(torch.tensor(gamma, dtype=torch.float64), power).float()


def normalize_advantage(advantage: Tensor) -> Tensor:
    """Normalise to zero mean and unit (unbiased) std over the rows (B,)."""
    centred = advantage - advantage.mean()
    if len(advantage) < 2:
        return centred
    return centred / (advantage.std() + 1e-8)


def clip_to_quantiles(advantage: Tensor, low: float, high: float) -> Tensor:
    """Clip (B,) to its own quantiles, linearly interpolated; (0, 1) is the identity."""
    if low <= 0.0 and high >= 1.0:
        return advantage
    ordered = advantage.sort().values  # torch.quantile is limited to 16 M rows
    return advantage.clamp(_quantile(ordered, low), _quantile(ordered, high))


def _quantile(ordered: Tensor, q: float) -> Tensor:
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


def policy_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return (-A r, -A clip(r, 1 - c, 1 + c)), each (B,); PPO minimises the mean of their maximum.

    The second has no gradient: where it is the larger one, r is outside of 1 +- c and its clip constant.

    Source: Schulman et al., arXiv 1707.06347, equation 7.
    """
    cost = -advantage
    clipped = ratio.detach().clamp(1.0 - clip_range, 1.0 + clip_range)  # type: ignore[arg-type]
    return cost * ratio, cost * clipped


def ppo_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return PPO's losses (B,): the maximum of the unclipped and the clipped loss."""
    plain, clipped = policy_losses(ratio, advantage, clip_range)
    return torch.where(plain >= clipped, plain, clipped)


def spo_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return -(r A - |A| (r - 1)^2 / (2 c)), (B,): a quadratic penalty on ratios outside 1 +- c.

    Source: Simple policy optimization, arXiv 2401.16025, equation 11.
    """
    return advantage.abs() / (2.0 * clip_range) * (ratio - 1.0).square() - advantage * ratio


def aspo_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return PPO's losses for positive advantages, SPO's otherwise, (B,). Source: FPO++, arXiv 2602.02481."""
    ppo, spo = (f(ratio, advantage, clip_range) for f in (ppo_losses, spo_losses))
    return torch.where(advantage > 0, ppo, spo)


DRIFT_RISE, DRIFT_FALL, DRIFT_RANGE = 2.0, 0.6, 0.2  # alpha, beta and the clip range that they belong to


def dpo_drift_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return -(r A - D), (B,): D = relu(g - k tanh(g / k)) slows a ratio down that has moved far.

    g = (r - 1) A and k = 2 c / 0.2 for A >= 0, else g = A log r and k = 0.6 c / 0.2.

    Source: Discovered Policy Optimisation, arXiv 2210.05639, equation 9. Deviation: k is proportional to the
    clip range c; the published constants are those of 0.2.
    """
    scale = clip_range / DRIFT_RANGE
    rises = advantage >= 0
    log_ratio = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()  # finite where a ratio underflows to 0
    gain = torch.where(rises, (ratio - 1.0) * advantage, advantage * log_ratio)
    width = torch.where(rises, DRIFT_RISE * scale, DRIFT_FALL * scale)
    return torch.relu(gain - width * torch.tanh(gain / width)) - ratio * advantage


def bpo_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return |A| |r - (1 + c sign A)|, (B,): ratios are drawn to the edges of 1 +- c.

    Source: Bounded ratio reinforcement learning (BPO). Deviation: the sign is that of the advantage itself;
    the publication takes it from the distance to a learned median of returns.
    """
    return advantage.abs() * (ratio - (1.0 + clip_range * advantage.sign())).abs()


def plain_losses(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return -r A, (B,), for updates that bound the divergence (`algos.onpolicy.trust_region`)."""
    return -advantage * ratio


SURROGATES = {
    "ppo": ppo_losses, "spo": spo_losses, "aspo": aspo_losses, "dpo_drift": dpo_drift_losses,
    "bpo": bpo_losses, "fixpo": plain_losses, "trpo": plain_losses,
}  # fmt: skip
"""(ratio, advantage, clip range), each (B,) -> losses (B,)."""
TRUST_REGIONS = ("fixpo", "trpo")
"""Surrogates that `target_kl` bounds."""


def value_losses(value: Tensor, target: Tensor, old_value: Tensor, clip: float | None = None) -> Tensor:
    """Return half the squared error (B,), optionally its maximum with that of the clipped value."""
    error = (value - target).square()
    if clip is not None:
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - target).square())
    return 0.5 * error


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Estimate the KL divergence from old to new policy per row: r - 1 - log r >= 0 (k3 estimator)."""
    return torch.expm1(log_ratio) - log_ratio


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Return 1 - Var(target - value) / Var(target): 1 perfect, 0 as good as the mean, NaN if constant."""
    variance = target.var(correction=0)
    unexplained = (target - value).var(correction=0)
    return torch.where(variance > 0, 1.0 - unexplained / variance, torch.full_like(variance, torch.nan))


def merge_moments(mean: Tensor, var: Tensor, count: float, batch: Tensor) -> tuple[Tensor, Tensor, float]:
    """Merge the moments of `batch` (any shape) into running ones; all float64.

    Source: Chan, Golub, LeVeque 1979; variance divided by count - 1, as in the DPPO reference.
    """
    added = float(batch.numel())
    total = count + added
    delta = batch.mean() - mean
    squares = var * count + batch.var(correction=0) * added + delta.square() * (count * added / total)
    return mean + delta * (added / total), squares / (total - 1.0), total


class RewardScaler:
    """Divides rewards by the running std of the discounted return; no mean is subtracted.

    The N environments share one statistic; the discounted return carries over between calls. `gamma` is the
    discount of that return per chunk step, `clip` the largest absolute scaled reward.

    Source: DPPO reference implementation, running reward scaling.
    """

    def __init__(self, num_envs: int, *, gamma: float, clip: float) -> None:
        self.gamma, self.clip = gamma, clip
        self.mean = torch.zeros((), dtype=torch.float64)
        self.var = torch.ones((), dtype=torch.float64)
        self.count = 1e-4
        self.carried = torch.zeros(num_envs, dtype=torch.float64)

    def __call__(self, reward: Tensor, first: Tensor) -> Tensor:
        """Update the statistic with a rollout and scale its rewards.

        Shapes:
            reward: (T, N) raw. first: (T, N) whether the step begins an episode. Returns (T, N) float64.
        """
        reward = reward.double()
        keep = self.gamma * (1.0 - first.double())
        returns = torch.empty_like(reward)
        for t in range(len(reward)):
            self.carried = reward[t] + keep[t] * self.carried
            returns[t] = self.carried
        self.mean, self.var, self.count = merge_moments(self.mean, self.var, self.count, returns)
        return self.scaled(reward)

    def scaled(self, reward: Tensor) -> Tensor:
        """Return rewards scaled by the statistic so far."""
        return (reward / torch.sqrt(self.var + 1e-8)).clamp(-self.clip, self.clip)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "var": self.var, "count": self.count, "carried": self.carried.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["carried"].shape != self.carried.shape:
            raise CheckpointError(
                f"the training state has rewards of {len(state['carried'])} environments, this run "
                f"{len(self.carried)}. Resume with the same num_envs."
            )
        self.mean, self.var = state["mean"].clone(), state["var"].clone()
        self.count, self.carried = float(state["count"]), state["carried"].clone()
