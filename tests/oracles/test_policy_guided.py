"""Policy-guided diffusion: loss, deterministic sampling, the guide and the rollouts of the released program.

Left out is what we do not copy: churn, whose first-order move starts from the state before it, and gradients
divided by the norm of a whole window. The steps of the program around the guide are written down here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from official_networks import read
from torch import Tensor, nn

from algos.cloning.trajectories import COSINE, PolicyGuide, episode_of
from envs.spec import symmetric_spec
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.processes import Edm
from policies.processes.deterministic import DeterministicProcess
from policies.processes.gaussian import GaussianProcess
from policies.protocols import Cond, Step
from policies.samplers.loop import denoise
from policies.samplers.ode import Heun

pytestmark = pytest.mark.golden("pgd_core*.npz")

PROCESS = Edm(data_std=1.0, noise_min=0.002, noise_max=80.0, time_scale=1.0)
CHAIN = {"rtol": 5e-4, "atol": 5e-4}


class OfficialUnet(nn.Module):
    """The released network: convolutions between which every row is normalised by itself."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        super().__init__()
        self.arrays = {name: nn.Parameter(value) for name, value in arrays.items() if name.startswith("w.")}

    def conv(self, x: Tensor, name: str) -> Tensor:
        kernel = self.arrays[f"w.{name}.kernel"].permute(2, 1, 0)
        before = (kernel.shape[2] - 1) // 2
        padded = F.pad(x.transpose(1, 2), (before, kernel.shape[2] - 1 - before))
        return F.conv1d(padded, kernel, self.arrays[f"w.{name}.bias"]).transpose(1, 2)

    def dense(self, x: Tensor, name: str) -> Tensor:
        return x @ self.arrays[f"w.{name}.kernel"] + self.arrays[f"w.{name}.bias"]

    def active(self, x: Tensor, name: str) -> Tensor:
        weights = (self.arrays[f"w.{name}.{kind}"] for kind in ("scale", "bias"))
        return F.group_norm(x.flatten(0, 1), 8, *weights, eps=1e-6).view_as(x).relu()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        half = len(self.arrays["w.TimeEmbedding_0.Dense_0.kernel"]) // 2
        phase = time[:, None] * torch.exp(-math.log(1e4) / (half - 1) * torch.arange(half))
        e = self.dense(torch.cat([phase.sin(), phase.cos()], dim=1), "TimeEmbedding_0.Dense_0")
        e = F.silu(self.dense(F.silu(e), "TimeEmbedding_0.Dense_1"))[:, None]
        levels = sum(name.startswith("w.Encoder_0.Dense") for name in self.arrays) // 2
        skips: list[Tensor] = []
        for i in range(levels):
            x = F.max_pool1d(x.transpose(1, 2), 2).transpose(1, 2) if i else x
            first = self.conv(x, f"Encoder_0.Conv_{2 * i}") + self.dense(e, f"Encoder_0.Dense_{i}")
            x = self.active(first, f"Encoder_0.GroupNorm_{2 * i}")
            x = self.active(self.conv(x, f"Encoder_0.Conv_{2 * i + 1}"), f"Encoder_0.GroupNorm_{2 * i + 1}")
            skips.append(x)
        for i, skip in enumerate(reversed(skips[:-1])):
            x = F.interpolate(x.transpose(1, 2), skip.shape[1]).transpose(1, 2)
            up = self.conv(x, f"Decoder_0.Conv_{3 * i}") + self.dense(e, f"Decoder_0.Dense_{i}")
            x = torch.cat([self.active(up, f"Decoder_0.GroupNorm_{3 * i}"), skip], dim=-1)
            for j in (3 * i + 1, 3 * i + 2):
                x = self.active(self.conv(x, f"Decoder_0.Conv_{j}"), f"Decoder_0.GroupNorm_{j}")
        return self.conv(x, f"Decoder_0.Conv_{3 * (levels - 1)}")


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Tensor]:
    return read(golden_path)


def levels_of(arrays: dict[str, Tensor]) -> list[float]:
    """Return the noise levels of sampling, the last 0."""
    times = PROCESS.grid(int(arrays["cfg"][3]))
    return [1 / t - 1 for t in times]


def clean(net: nn.Module, u: Tensor, noise: float) -> Tensor:
    """Return the clean rows that the network reads from rows u (B, L, D) at a noise level."""
    t = torch.full((len(u),), 1 / (1 + noise))
    alpha, sigma = (float(value[0]) for value in PROCESS.alpha_sigma(t))
    return alpha * (alpha * u) + sigma * net(alpha * u, PROCESS.net_time(t))


def spec_of(arrays: dict[str, Tensor]) -> Any:
    _, states, actions, _ = arrays["cfg"].tolist()
    names = [tuple(f"{kind} {i}" for i in range(n)) for kind, n in (("s", states), ("a", actions))]
    return symmetric_spec(*names, name="toy", family="toy", max_episode_steps=100, control_hz=1.0)


def model_of(arrays: dict[str, Tensor]) -> Policy:
    """Return a model with the released statistics of rows."""
    parts = ("obs", "action", "reward", "done")
    mean, std = (torch.cat([arrays[f"stats_{part}_{kind}"] for part in parts]) for kind in ("mean", "std"))
    own = {"mean": mean, "std": std, "min": mean - std, "max": mean + std}
    config = PolicyConfig(process=PROCESS, backbone=MlpConfig(width=8, time_dim=4), horizon=4, act_steps=1,
                          normalizer={"action": "gaussian", "state": "identity"})  # fmt: skip
    return build_policy(config, obs_dim=1, action_dim=len(mean), statistics={"action": own})


def target_of(arrays: dict[str, Tensor], *, deterministic: bool) -> Policy:
    """Return the released target: mean tanh(s W), and a deviation where it is no deterministic one."""
    _, states, actions, _ = arrays["cfg"].tolist()
    process = DeterministicProcess() if deterministic else GaussianProcess()
    config = PolicyConfig(process=process, backbone=MlpConfig(width=8, time_dim=4), horizon=1, act_steps=1,
                          normalizer={"action": "identity", "state": "identity"})  # fmt: skip
    policy: Any = build_policy(config, obs_dim=states, action_dim=actions)
    if deterministic:
        policy.trunk = Call(lambda vec: vec @ arrays["policy_W"])
    else:
        std = arrays["policy_log_std"].exp()
        policy.head = Call(lambda vec: ((vec @ arrays["policy_W"]).tanh()[:, None], std[None, None]))
    return policy


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def test_network_preconditioning_and_loss(arrays: dict[str, Tensor]) -> None:
    net, close = OfficialUnet(arrays), {"rtol": 1e-5, "atol": 1e-5}
    out = net(arrays["in.x"][None], arrays["in.c_noise"][None])[0]
    torch.testing.assert_close(out.detach(), arrays["net"], **close)
    times = 1 / (1 + arrays["sigma"])
    alpha, sigma = PROCESS.alpha_sigma(times)
    for found, name in ((alpha.square(), "c_skip"), (sigma, "c_out"), (alpha, "c_in")):
        torch.testing.assert_close(found, arrays[name], **close)
    torch.testing.assert_close(PROCESS.net_time(times), arrays["c_noise"], **close)
    t = 1 / (1 + torch.exp(PROCESS.density_mean + 1.2 * arrays["loss_sigma_normal"]))
    x = PROCESS.corrupt(arrays["loss_batch"], arrays["loss_noise"], t)
    target = PROCESS.target(arrays["loss_batch"], arrays["loss_noise"], t)
    loss = (net(x, PROCESS.net_time(t)) - target).square().mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), arrays["loss"], **close)
    gradient = net.arrays["w.Decoder_0.Conv_3.kernel"].grad
    torch.testing.assert_close(gradient, arrays["loss_grad_last_conv"], **close)


def test_sampling_without_churn(arrays: dict[str, Tensor]) -> None:
    net = OfficialUnet(arrays)
    table = Heun(steps=int(arrays["cfg"][3]), clip_x0=None).table(PROCESS)
    noise = arrays["x_init"][None] * 80 / math.hypot(80, 1) / table.start_std
    bound = lambda k, x: net(x, table.net_time[k].expand(1))  # noqa: E731
    found = denoise(bound, table, noise, cond=Cond(torch.zeros(1, 0)))
    torch.testing.assert_close(found.action[0].detach(), arrays["no_churn_chain"][-1], **CHAIN)


@pytest.mark.parametrize("case", ["gauss", "gauss_norm", "det", "denoised", "delay"])
@torch.no_grad()
def test_guided_steps_from_every_recorded_state(arrays: dict[str, Tensor], case: str) -> None:
    net, noise, count = OfficialUnet(arrays), levels_of(arrays), int(arrays["cfg"][3])
    target = target_of(arrays, deterministic=case == "det")
    guide = PolicyGuide(model_of(arrays), target, spec_of(arrays), weight=float(count))
    u = noise[0] * arrays["x_init"][None]
    for k in range(count):
        t = 1 / (1 + noise[k])
        alpha = float(PROCESS.alpha_sigma(torch.tensor(t, dtype=torch.float64))[0])
        step = Step(k, count, t, 1 / (1 + noise[k + 1]), Cond(u[:, 0]), alpha=alpha, sigma=alpha * noise[k])
        if case == "gauss":
            moved = guide.before_prediction(step, alpha * u) / alpha
        else:
            slope = guide.slope(clean(net, u, noise[k]) if case == "denoised" else u)
            slope = slope if case == "delay" else slope / slope.norm()
            sine = 0.0 if case == "delay" else COSINE * math.sin(math.pi * (k + 1) / count)
            acts = k < count - 1 and (case != "delay" or k > 1)
            moved = u + (1 - k / count + sine) * slope if acts else u
        expected = arrays[f"{case}_chain"][k][None]
        torch.testing.assert_close(churned(net, moved, arrays["noise"][k], noise, k), expected, **CHAIN)
        u = expected


def churned(net: nn.Module, u: Tensor, draw: Tensor, noise: list[float], k: int) -> Tensor:
    """Return the state after step k of the program's sampler."""
    is_noisy = 0.05 <= noise[k] <= 50
    high = noise[k] * (1 + (min(80 / (len(noise) - 1), math.sqrt(2) - 1) if is_noisy else 0))
    hat = u + math.sqrt(high**2 - noise[k] ** 2) * 1.003 * draw
    slope = (hat - clean(net, hat, high)) / high
    move = noise[k + 1] - high
    if not noise[k + 1]:
        return u + move * slope
    first = u + move * slope
    return hat + move / 2 * (slope + (first - clean(net, first, noise[k + 1])) / noise[k + 1])


def test_rollouts_of_windows(arrays: dict[str, Tensor]) -> None:
    rows = model_of(arrays).physical(arrays["none_chain"][-1])
    rows[:, -1] = 0.0  # no end
    found = episode_of(rows, spec_of(arrays), seed=0)
    for name, value in (
        ("obs", found.observations[:-1]), ("next_obs", found.observations[1:]), ("action", found.actions),
        ("reward", found.rewards[:, None]),
    ):  # fmt: skip
        torch.testing.assert_close(torch.from_numpy(value), arrays[f"none_rollout_{name}"], **CHAIN)
