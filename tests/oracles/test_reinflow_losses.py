"""Rectified flow and shortcut models against ReinFlow's released code: losses, gradients, samples, times.

The rectified-flow network is our MLP. The shortcut network, which embeds both times together, is rebuilt
here. The released shortcut path ends with a rest of the noise, x = t x1 + (1 - (1 - delta) t) x0, which is
our path towards x1 + delta x0. Its exponent `max_denoising_steps` draws lengths from 1 to 2^-(max - 2).

The released rectified flows ask their network on the grid linspace(0, 1, K) that ends at the data, while they
step by 1 / K; `Euler(released_times=True)` does the same (`sample_official`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from official_flows import official_reflow, official_shortcut
from official_networks import read
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.networks.embeddings import sinusoid
from policies.processes.flow import RectifiedFlow
from policies.protocols import TE, Cond, Hook, Step
from policies.samplers.ode import Euler

FORWARD = {"rtol": 1e-5, "atol": 1e-6}
LOSS = {"rtol": 1e-4, "atol": 1e-5}
GRADIENT = {"rtol": 1e-3, "atol": 1e-5}
QUANTILE = {"rtol": 0.0, "atol": 0.002}

DENSITIES = {"uniform": "uniform", "logitnormal": "logit_normal", "beta": "beta"}


class Clamp(Hook):
    """Keep the state in the range of actions."""

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        return x.clamp(-1.0, 1.0)


def weights_of(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[4:]: value for name, value in arrays.items() if name.startswith("net.")}


def reflow(arrays: dict[str, Tensor], sampler: Any = None) -> DenoisingPolicy:
    return official_reflow(weights_of(arrays), arrays["obs"], arrays["x1"].shape[1:], sampler)


def shortcut(arrays: dict[str, Tensor], sampler: Any = None) -> DenoisingPolicy:
    max_steps = 2 ** int(arrays["max_denoising_steps"])
    shape = arrays["x1"].shape[1:]
    return official_shortcut(weights_of(arrays), arrays["obs"], shape, sampler, max_steps=max_steps)


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


def assert_samples(arrays: dict[str, Tensor], build_policy: Any, prefix: str, **sampler: Any) -> None:
    """Compare all samples `<prefix>_K<steps>_clip<per step>`; `sampler` are settings of Euler."""
    found = [key for key in arrays if key.startswith(f"{prefix}_K")]
    assert found
    for key in found:
        steps, clip = (int(part) for part in key.removeprefix(f"{prefix}_K").split("_clip"))
        policy = build_policy(arrays, Euler(steps=steps, **sampler))
        chunk = policy.decode(Cond(arrays["obs"].flatten(1)), arrays["z"], hooks=[Clamp()] if clip else [])
        torch.testing.assert_close(chunk, arrays[key], **FORWARD, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.golden("reinflow_reflow_loss*.npz")
def test_rectified_flow_equals_the_released_loss_and_gradients(golden_path: Path) -> None:
    arrays = read(golden_path)
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
@pytest.mark.parametrize(("prefix", "released"), [("sample_leftgrid", False), ("sample_official", True)])
def test_samples_of_a_rectified_flow_equal_those_of_both_grids(
    golden_path: Path, prefix: str, released: bool
) -> None:
    assert_samples(read(golden_path), reflow, prefix, released_times=released)


@pytest.mark.golden("reinflow_reflow_loss*.npz")
def test_time_densities_have_the_released_quantiles(golden_path: Path) -> None:
    arrays = read(golden_path)
    for official, ours in DENSITIES.items():
        generator = torch.Generator().manual_seed(0)
        t = RectifiedFlow(ours).sample_time(2_000_000, generator=generator).sort().values
        index = (arrays["tq_levels"] * (len(t) - 1)).round().long()
        torch.testing.assert_close(t[index].double(), arrays[f"tq_{official}"].double(), **QUANTILE)
        assert t[0] >= 0
        assert t[-1] <= arrays[f"tminmax_{official}"][1] + 0.002


@pytest.mark.golden("reinflow_shortcut_loss*.npz")
def test_a_shortcut_model_equals_the_released_loss_and_gradients(golden_path: Path) -> None:
    arrays = read(golden_path)
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
    assert_samples(read(golden_path), shortcut, "sample_official")
