"""Surrogates and trust regions against closed forms and the steps of official programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read, stored
from torch import Tensor, nn

from algos.onpolicy.advantages import Experience
from algos.onpolicy.losses import SURROGATES, normalize_advantage
from algos.onpolicy.ratios import ChainRatio, normal_divergence
from algos.onpolicy.trust_region import FixpoUpdate, TrpoUpdate, conjugate_gradient
from algos.ppo import PpoConfig
from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.policy_config import ChunkSpec
from policies.protocols import Cond

NAMES = {"ppo": "ppo", "spo": "spo", "dpo_drift": "dpo", "bpo": "bpo_own_sign"}
"""Ours -> theirs. Not implemented: targets by another advantage's sign, soft targets, scores by groups."""
DPO_CONSTANTS = {"dpo/1.0_0.3": 0.1, "dpo": 0.2, "dpo/4.0_1.2": 0.4}
"""Theirs -> the clip range whose constants they are."""


def case(path: Path, name: str) -> dict[str, Tensor]:
    """Return the numbers of one case of a file."""
    found = {
        key.removeprefix(f"{name}/"): one for key, one in stored(path).items() if key.startswith(f"{name}/")
    }
    return {key: torch.from_numpy(value) for key, value in found.items() if value.dtype.kind != "U"}


@pytest.mark.parametrize(
    ("ours", "theirs", "clip"),
    [*((ours, theirs, None) for ours, theirs in NAMES.items())]
    + [("dpo_drift", theirs, clip) for theirs, clip in DPO_CONSTANTS.items()],
)
@pytest.mark.golden("surrogates_losses*.npz")
def test_losses_of_a_ratio(golden_path: Path, ours: str, theirs: str, clip: float | None) -> None:
    data = read(golden_path)
    log_ratio, advantage = data["log_ratio"].requires_grad_(), data["advantage"]
    epsilon = torch.full_like(advantage, float(data["epsilon"]) if clip is None else clip)
    loss = SURROGATES[ours](log_ratio.exp(), advantage, epsilon)
    (grad,) = torch.autograd.grad(loss.sum(), log_ratio)
    torch.testing.assert_close(loss, data[f"{theirs}/loss"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, data[f"{theirs}/grad"], rtol=1e-11, atol=1e-11)


@pytest.mark.golden("surrogates_bpo*.npz")
def test_the_official_bounded_ratio_step_without_a_median(golden_path: Path) -> None:
    """Its target is soft; away from a zero advantage the slope is that of our hard one."""
    part = case(golden_path, "value")
    clip, temperature, *_ = part["cfg"].tolist()
    for name in ("mb0", "mb1"):
        q, v, old = (part[f"{name}/{key}"].double() for key in ("returns", "v", "old_log_prob"))
        log_prob = part[f"{name}/lp"].double().requires_grad_()
        loss = SURROGATES["bpo"]((log_prob - old).exp(), q - v, torch.full_like(q, clip)).mean()
        (grad,) = torch.autograd.grad(loss, log_prob)
        is_hard = (q - v).abs() > 20 * temperature
        assert is_hard.sum() > 0.9 * len(q)
        expected = part[f"{name}/grad_lp"].double()
        torch.testing.assert_close(grad[is_hard], expected[is_hard], rtol=1e-5, atol=1e-7)


@pytest.mark.golden("surrogates_advantage*.npz")
def test_normalised_advantages_and_divergences_of_normals(golden_path: Path) -> None:
    data = read(golden_path)
    advantage = data["advantage"].double()
    torch.testing.assert_close(normalize_advantage(advantage), data["batch_unbiased"], rtol=1e-6, atol=1e-7)
    mean_p, std_p, mean_q, std_q = (data[f"kl/{key}"] for key in ("mean_p", "std_p", "mean_q", "std_q"))
    at_mean = gaussian_log_prob(mean_p, mean_q, std_q)
    found = normal_divergence(gaussian_entropy(std_p), gaussian_entropy(std_q), at_mean).sum(-1)
    torch.testing.assert_close(found, data["kl/p_from_q"], rtol=1e-12, atol=1e-12)


class NormalPolicy(nn.Module):
    """A normal policy of one action: a network's mean and one deviation per entry."""

    tuned_steps, has_entropy, noise_correlation = 1, True, 0.0

    def __init__(self, net: nn.Module, log_std: Tensor) -> None:
        super().__init__()
        self.log_std, self.net = nn.Parameter(log_std.clone()), net
        self.chunk = ChunkSpec(len(log_std), horizon=1, act_steps=1)

    def transition_log_prob(
        self, cond: Cond, x: Tensor, x_next: Tensor, step: Tensor, cond_row: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert cond_row is None  # of one inner step: every row has its own condition
        mean = self.net(cond.vec)[:, None]
        std = self.log_std.exp().expand_as(mean)
        return gaussian_log_prob(x_next, mean, std), gaussian_entropy(std)


class Tape:
    """Hands out recorded permutations and noise."""

    def __init__(self, permutations: Tensor | None = None, noise: Tensor | None = None) -> None:
        self.left, self.recorded = iter(() if permutations is None else permutations), noise

    def permutation(self, n: int) -> Tensor:
        return next(self.left)

    def noise(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        assert self.recorded is not None
        return self.recorded


def experience_of(
    obs: Tensor, actions: Tensor, log_prob: Tensor, advantage: Tensor, target: Tensor
) -> Experience:
    chain = torch.stack([torch.zeros_like(actions), actions], dim=1)[:, :, None]
    return Experience(
        Cond(obs), {"chain": chain, "log_prob": log_prob[:, None]}, advantage, target, 0 * target
    )


def settings(**options: Any) -> PpoConfig:
    return PpoConfig(log_prob_range=None, log_prob_reduction="joint", **options)


class Squeezed(nn.Module):
    """A linear critic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).squeeze(-1)


@pytest.mark.golden("surrogates_fixpo*.npz")
def test_two_epochs_of_fixpo(golden_path: Path) -> None:
    """The file's second case bounds the mean, which leaves single rows outside; it is not offered."""
    get = case(golden_path, "max")
    lr, bound, caution, beta_lr, _, size, piece, epochs, _ = get["cfg"].tolist()
    policy = NormalPolicy(nn.Linear(4, 2), get["init/log_std"])
    critic = Squeezed(4)
    with torch.no_grad():
        for layer, name in ((policy.net, "actor"), (critic.layer, "critic")):
            layer.weight.copy_(get[f"init/{name}_w"])
            layer.bias.copy_(get[f"init/{name}_b"])
    config = settings(
        surrogate="fixpo",
        target_kl=bound,
        actor_lr=lr,
        critic_lr=lr,
        batch_size=int(size),
        update_epochs=int(epochs),
        vf_coef=1.0,
        microbatch_size=10,
    )
    update = FixpoUpdate(config, ratio=ChainRatio(policy, log_prob_range=None, reduction="joint"),
                         actor=[*policy.parameters()], critic=critic)  # fmt: skip
    assert update.caution == caution
    update.beta_optimizer.param_groups[0]["lr"] = beta_lr
    sweep = update.sweep
    update.sweep = lambda experience, draws, _: sweep(experience, draws, int(piece))  # type: ignore[method-assign]
    columns = (get[name] for name in ("obs", "act", "logp_old", "adv", "returns"))
    experience = experience_of(*columns)
    metrics = update.update(experience, iteration=0, draws=Tape(get["permutations"]))
    assert metrics["policy/fixes"] == float(get["log/fixup_grad_steps"])
    torch.testing.assert_close(metrics["policy/beta"].double(), get["log/beta"].double(), rtol=1e-5, atol=0)
    weight = {"rtol": 0.0, "atol": 2e-6}
    torch.testing.assert_close(policy.log_std.data, get["after/log_std"], **weight)
    for layer, name in ((policy.net, "actor"), (critic.layer, "critic")):
        torch.testing.assert_close(layer.weight.data, get[f"after/{name}_w"], **weight)
        torch.testing.assert_close(layer.bias.data, get[f"after/{name}_b"], **weight)


def natural(get: dict[str, Tensor]) -> tuple[TrpoUpdate, Experience, Tape]:
    width = get["actions"].shape[1]
    net = nn.Sequential(
        nn.Linear(get["obs"].shape[1], 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, width)
    )
    policy = NormalPolicy(net, get["init/log_std"])
    keys = [key for key in get if key.startswith("init/") and key != "init/log_std"]
    with torch.no_grad():
        for param, key in zip(net.parameters(), keys, strict=True):
            param.copy_(get[key])
    config = settings(surrogate="trpo", target_kl=float(get["target_kl"]) * width)
    update = TrpoUpdate(config, ratio=ChainRatio(policy, log_prob_range=None, reduction="joint"),
                        actor=[*policy.parameters()], critic=Squeezed(3))  # fmt: skip
    update.damping *= width  # their divergence is a mean over entries, ours the sum
    columns = (get[key] for key in ("obs", "actions", "old_log_prob", "advantages", "advantages"))
    experience = update.with_reference(experience_of(*columns))
    return update, experience, Tape(noise=get["cg_start_noise"] / width)


@pytest.mark.parametrize("name", ["kl01", "kl1", "kl_large"])
@pytest.mark.golden("surrogates_trpo*.npz")
def test_a_natural_step(golden_path: Path, name: str) -> None:
    """Gradient, curvature and full step; our line search bounds KL(old || new), theirs KL(new || old)."""
    get = case(golden_path, name)
    update, experience, tape = natural(get)
    width = get["actions"].shape[1]
    grads, _ = update.actor_gradient(experience, torch.arange(len(experience)), draws=tape)
    uphill = -torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(uphill, get["gradient"], rtol=1e-4, atol=1e-6)
    product = update.curved(experience, get["hvp_in"]) / width
    torch.testing.assert_close(product, get["hvp_out"], rtol=1e-4, atol=1e-5)
    before = [param.detach().clone() for param in update.actor]
    share = update.natural_step(experience, tape)["policy/step"]
    assert 0 < share <= 1
    after = [get[key.replace("init/", "after/")] for key in get if key.startswith("init/")]
    for old, new, theirs in zip(before, update.actor, after, strict=True):
        torch.testing.assert_close(old + (new.detach() - old) / share, theirs, rtol=0, atol=5e-5)


@pytest.mark.golden("surrogates_trpo*.npz")
def test_conjugate_gradients_solve_what_they_are_given(golden_path: Path) -> None:
    """The direction itself: fifteen iterations from the recorded start."""
    get = case(golden_path, "kl01")
    update, experience, tape = natural(get)
    width = get["actions"].shape[1]
    start, target = 1e-4 * tape.noise((), get["gradient"]), get["gradient"]
    found = conjugate_gradient(lambda v: update.curved(experience, v), target, start, update.iterations)
    torch.testing.assert_close(width * found, get["direction"], rtol=1e-3, atol=1e-4)
