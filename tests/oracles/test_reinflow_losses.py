"""Rectified flow and shortcut models against ReinFlow's released code: losses, gradients, samples, times.

The rectified-flow network is our MLP. The shortcut network, which embeds both times together, is rebuilt
here. The released shortcut path ends with a rest of the noise, x = t x1 + (1 - (1 - delta) t) x0, which is
our path towards x1 + delta x0. Its exponent `max_denoising_steps` draws lengths from 1 to 2^-(max - 2).

Not covered, because the package does not implement it: samples on the grid linspace(0, 1, K) that ends at the
data (`sample_official` of rectified flow), a defect of the released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import install, load, residual_dims
from torch import Tensor, nn

from policies.backbones.mlp import MlpConfig
from policies.denoising import DenoisingPolicy
from policies.embeddings import sinusoid
from policies.hooks import Hook
from policies.policy import PolicyConfig, build_policy
from policies.processes.flow import RectifiedFlow
from policies.processes.shortcut import Shortcut
from policies.protocols import TE, Cond, Step
from policies.samplers import Euler
from policies.trunk import PlainTrunk, TrunkConfig

FORWARD = {"rtol": 1e-5, "atol": 1e-6}
LOSS = {"rtol": 1e-4, "atol": 1e-5}
GRADIENT = {"rtol": 1e-3, "atol": 1e-5}
QUANTILE = {"rtol": 0.0, "atol": 0.002}

DENSITIES = {"uniform": "uniform", "logitnormal": "logit_normal", "beta": "beta"}


class Clamp(Hook):
    """Keep the state in the range of actions."""

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        return x.clamp(-1.0, 1.0)


@dataclass(frozen=True)
class OfficialConfig:
    """Builds the released shortcut network with the widths of a file."""

    weights: dict[str, Tensor]

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> OfficialShortcut:
        return OfficialShortcut(self.weights, shape)

    def official_keys(self) -> dict[str, str]:
        dims = residual_dims(self.weights, "vel_head.")
        trunk = TrunkConfig(**dims).official_trunk_keys("vel_head.", "trunk.")
        plain = {
            f"cond_emb.moduleList.{i}.linear_1.{kind}": f"cond_encoder.{name}.{kind}"
            for i, name in enumerate(("inlet", "layers.0"))
            for kind in ("weight", "bias")
        }
        times = {f"t_emb.{i}.{kind}": f"times.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
        return trunk | plain | times


class OfficialShortcut(nn.Module):
    """Embeds [pos(t), pos(d)] and adds the encoded condition; a residual trunk reads [x, embedding]."""

    def __init__(self, weights: dict[str, Tensor], shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        width, both = weights["t_emb.0.weight"].shape
        self.dim = both // 2
        self.times = nn.Sequential(nn.Linear(both, width), nn.Mish(), nn.Linear(width, width))
        first, last = (weights[f"cond_emb.moduleList.{i}.linear_1.weight"].shape for i in (0, 1))
        self.cond_encoder = PlainTrunk((first[1], first[0], last[0]), "relu")
        dims = residual_dims(weights, "vel_head.")
        inputs, outputs = weights["vel_head.layers.0.weight"].shape[1], shape[0] * shape[1]
        self.trunk = TrunkConfig(**dims).build_trunk(inputs, outputs)
        install(self, OfficialConfig(weights).official_keys(), weights)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        assert second_time is not None
        waves = torch.cat([sinusoid(time, self.dim), sinusoid(second_time, self.dim)], dim=-1)
        embedded = self.times(waves) + self.cond_encoder(cond.vec)
        return self.trunk(torch.cat([x.flatten(1), embedded], dim=1)).view(-1, *self.shape)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Any:
        assert second_times is not None

        def bound(k: int, x: Tensor) -> Tensor:
            time, second = (value[k].expand(len(x)) for value in (times, second_times))
            return self(x, time, cond, second_time=second)

        return bound


def weights_of(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[4:]: value for name, value in arrays.items() if name.startswith("net.")}


def build(arrays: dict[str, Tensor], process: Any, backbone: Any, sampler: Any = None) -> DenoisingPolicy:
    horizon, action_dim = arrays["x1"].shape[1:]
    config = PolicyConfig(
        process=process, backbone=backbone, sampler=sampler, horizon=horizon, act_steps=horizon
    )
    policy = build_policy(config, obs_dim=arrays["obs"][0].numel(), action_dim=action_dim)
    assert isinstance(policy, DenoisingPolicy)
    install(policy.field, backbone.official_keys(), weights_of(arrays))
    return policy


def reflow(arrays: dict[str, Tensor], sampler: Any = None) -> DenoisingPolicy:
    weights = weights_of(arrays)
    time_dim = weights["time_embedding.1.weight"].shape[1]
    backbone = MlpConfig(time_dim=time_dim, **residual_dims(weights, "mlp_mean."))
    return build(arrays, RectifiedFlow(time_scale=1.0), backbone, sampler)


def shortcut(arrays: dict[str, Tensor], sampler: Any = None) -> DenoisingPolicy:
    process = Shortcut(time_scale=1.0, max_steps=2 ** int(arrays["max_denoising_steps"]))
    return build(arrays, process, OfficialConfig(weights_of(arrays)), sampler)


def shortcut_draws(arrays: dict[str, Tensor]) -> tuple[TE, Tensor]:
    """Return the draws of a file, first the consistency rows, and the clean chunks that they go with."""
    length = 2.0 ** -arrays["d_base_sc"].float()
    t = torch.cat([arrays["t_idx_sc"].float() * length, arrays["t_fm"]])
    eps = torch.cat([arrays["x0_sc"], arrays["x0_fm"]])
    lengths = torch.cat([length, torch.zeros_like(arrays["t_fm"])])
    return TE(t, eps, more={"length": lengths}), arrays["x1"] + arrays["delta"].float() * eps


def assert_gradients(policy: DenoisingPolicy, arrays: dict[str, Tensor], keys: dict[str, str]) -> None:
    ours = dict(policy.field.named_parameters())
    expected = {name[5:]: value for name, value in arrays.items() if name.startswith("grad.")}
    assert {keys[name] for name in expected} == set(ours)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            ours[keys[name]].grad, gradient, **GRADIENT, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_samples(arrays: dict[str, Tensor], build_policy: Any, prefix: str) -> None:
    """Compare all samples `<prefix>_K<steps>_clip<per step>`."""
    found = [key for key in arrays if key.startswith(f"{prefix}_K")]
    assert found
    for key in found:
        steps, clip = (int(part) for part in key.removeprefix(f"{prefix}_K").split("_clip"))
        policy = build_policy(arrays, Euler(steps=steps))
        chunk = policy.decode(Cond(arrays["obs"].flatten(1)), arrays["z"], hooks=[Clamp()] if clip else [])
        torch.testing.assert_close(chunk, arrays[key], **FORWARD, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.golden("reinflow_reflow_loss*.npz")
def test_rectified_flow_equals_the_released_loss_and_gradients(golden_path: Path) -> None:
    arrays = load(golden_path)
    policy = reflow(arrays)
    cond, t = Cond(arrays["obs"].flatten(1)), arrays["t"]
    x = policy.process.corrupt(arrays["x1"], arrays["x0"], t)
    torch.testing.assert_close(x, arrays["xt"], **FORWARD)
    torch.testing.assert_close(
        policy.process.target(arrays["x1"], arrays["x0"], t), arrays["v_target"], **FORWARD
    )
    torch.testing.assert_close(policy.evaluate(cond)(x, t), arrays["v_hat"], **FORWARD)
    torch.testing.assert_close(sinusoid(t, policy.field.config.time_dim), arrays["time_emb_of_t"], **FORWARD)
    loss = policy.matching_loss(cond, arrays["x1"], TE(t, arrays["x0"]), reduce="mean")
    torch.testing.assert_close(loss, arrays["loss"], **LOSS)
    loss.backward()
    assert_gradients(policy, arrays, policy.field.config.official_keys())


@pytest.mark.golden("reinflow_reflow_loss*.npz")
def test_rectified_flow_samples_equal_those_of_the_left_grid(golden_path: Path) -> None:
    assert_samples(load(golden_path), reflow, "sample_leftgrid")


@pytest.mark.golden("reinflow_reflow_loss*.npz")
def test_time_densities_have_the_released_quantiles(golden_path: Path) -> None:
    arrays = load(golden_path)
    for official, ours in DENSITIES.items():
        generator = torch.Generator().manual_seed(0)
        t = RectifiedFlow(ours).sample_time(2_000_000, generator=generator).sort().values
        index = (arrays["tq_levels"] * (len(t) - 1)).round().long()
        torch.testing.assert_close(t[index].double(), arrays[f"tq_{official}"].double(), **QUANTILE)
        assert t[0] >= 0
        assert t[-1] <= arrays[f"tminmax_{official}"][1] + 0.002


@pytest.mark.golden("reinflow_shortcut_loss*.npz")
def test_a_shortcut_model_equals_the_released_loss_and_gradients(golden_path: Path) -> None:
    arrays = load(golden_path)
    policy, cond = shortcut(arrays), Cond(arrays["obs"].flatten(1))
    te, action = shortcut_draws(arrays)
    x = policy.process.corrupt(action, te.eps, te.t)
    torch.testing.assert_close(x, arrays["full_x_t"], **FORWARD)
    torch.testing.assert_close(te.t, arrays["full_t"], **FORWARD)
    net, length = policy.evaluate(cond), te.more["length"]
    torch.testing.assert_close(net(x, te.t, te.t + length), arrays["v_pred"], **FORWARD)
    count = int(arrays["k_num"])
    assert bool((length[:count] > 0).all()) and not bool(length[count:].any())
    halves = net(x, te.t, te.t + length / 2)[:count]
    torch.testing.assert_close(halves, arrays["sc_v1"], **FORWARD)
    loss = policy.matching_loss(cond, action, te, reduce="mean")
    torch.testing.assert_close(loss, arrays["loss"], **LOSS)
    error = (arrays["v_pred"] - arrays["v_target"]).square()
    torch.testing.assert_close(policy.matching_loss(cond, action, te, reduce="none"), error, **LOSS)
    loss.backward()
    assert_gradients(policy, arrays, policy.config.backbone.official_keys())


@pytest.mark.golden("reinflow_shortcut_loss*.npz")
def test_samples_of_a_shortcut_model_equal_the_released_ones(golden_path: Path) -> None:
    assert_samples(load(golden_path), shortcut, "sample_official")
