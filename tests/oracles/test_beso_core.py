"""EDM's process and the samplers against BESO's released wrappers, samplers and schedules.

Our state is theirs times alpha, and the network sees ours over the deviation of the data. Not covered,
because the package does not implement it: the loss on the last row only, the schedules `polyexp`, `ve` and
`vp`, churn, and the samplers lms, dpm_2_ancestral, dpmpp_2s and dpmpp_2s_ancestral.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.processes import Edm
from policies.processes.schedules import noise_grid
from policies.protocols import TE, Cond, Hook, Step
from policies.samplers.loop import denoise
from policies.samplers.ode import Ancestral, DPMpp2M, Euler, Heun, Midpoint
from policies.samplers.step_table import StepTable

pytestmark = pytest.mark.golden("beso_core*.npz")

RANGES = {"kitchen": (0.005, 1.0), "block": (0.05, 1.0), "edm": (0.002, 80.0)}
SAMPLERS = {
    "euler": Euler(clip_action=None),
    "ddim": Euler(clip_action=None),
    "heun": Heun(clip_x0=None),
    "dpm_2": Midpoint(clip_x0=None),
    "dpmpp_2m": DPMpp2M(clip_x0=None),
    "euler_ancestral": Ancestral(clip_x0=None, noise_clip=None),
}
ATOL = 2e-5


@pytest.fixture
def arrays(golden_path: Path) -> dict[str, Tensor]:
    with np.load(golden_path) as file:
        return {name: torch.from_numpy(np.asarray(file[name])) for name in file.files}


def process_of(arrays: dict[str, Tensor]) -> Edm:
    return Edm(data_std=float(arrays["sigma_data"]), noise_min=1e-3, noise_max=100.0, time_scale=1.0)


def network(arrays: dict[str, Tensor], *, goal: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """F(x, c_noise) for the stored states and goals; x as BESO's network sees it."""
    given = arrays["goal"] if goal else torch.zeros_like(arrays["goal"])
    context = arrays["state"] @ arrays["net_S"] + (given @ arrays["net_G"])[:, None] + arrays["net_c"]

    def net(x: Tensor, c_noise: Tensor) -> Tensor:
        time = c_noise.reshape(-1, 1, 1) * arrays["net_v"]
        return torch.tanh(x @ arrays["net_A"] + time + context)

    return net


def times_of(sigma: Tensor) -> Tensor:
    return 1 / (1 + sigma)


def test_preconditioning(arrays: dict[str, Tensor]) -> None:
    process, sigma = process_of(arrays), arrays["sigma"]
    alpha, ours = process.alpha_sigma(times_of(sigma))
    torch.testing.assert_close(alpha / process.data_std, arrays["c_in"], rtol=1e-5, atol=0)
    torch.testing.assert_close(alpha.square(), arrays["c_skip"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours, arrays["c_out"], rtol=1e-5, atol=0)
    y = arrays["action"] + arrays["noise"] * sigma[:, None, None]
    x, t = y * alpha[:, None, None], times_of(sigma)
    for goal, name in ((True, "cfg_lambda1"), (False, "cfg_lambda0"), (True, "denoised")):
        pred = network(arrays, goal=goal)(x / process.data_std, process.net_time(t))
        torch.testing.assert_close(process.convert(x, t, pred, "edm", "x0"), arrays[name], rtol=0, atol=ATOL)


def test_loss_and_gradients(arrays: dict[str, Tensor]) -> None:
    process = process_of(arrays)
    weights = {name: arrays[f"net_{name}"].requires_grad_() for name in "AvcSG"}
    net = network(arrays)

    def evaluate(x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None) -> Tensor:
        return net(x / process.data_std, process.net_time(t))

    te = TE(times_of(arrays["sigma"]), arrays["noise"])
    loss = process.losses(evaluate, arrays["action"], te).mean()
    torch.testing.assert_close(loss, arrays["loss"].float(), rtol=1e-5, atol=0)
    for (name, _), grad in zip(weights.items(), torch.autograd.grad(loss, [*weights.values()]), strict=True):
        torch.testing.assert_close(grad, arrays[f"loss_grad_{name}"], rtol=1e-5, atol=1e-7)


def test_noise_density(arrays: dict[str, Tensor]) -> None:
    for task in ("kitchen", "block"):
        low, high = RANGES[task]
        process = Edm(data_std=float(arrays["sigma_data"]), noise_min=low, noise_max=high)
        got = process.noise_of_share(arrays["loglogistic_u"].double())
        torch.testing.assert_close(
            got.float(), arrays[f"loglogistic_sigma_{task}"].float(), rtol=1e-5, atol=0
        )


def test_noise_grids(arrays: dict[str, Tensor]) -> None:
    kinds = {"karras7": ("karras", 7.0), "karras5": ("karras", 5.0), "exponential": ("exponential", 7.0)}
    names = [n for n in arrays if n.startswith("sched_") and n.split("_")[1] in (*kinds, "linear")]
    assert names
    for name in names:
        _, kind, task, count = name.split("_")
        grid, rho = kinds.get(kind, (kind, 7.0))
        low, high = RANGES[task]
        got = noise_grid(grid, int(count), high, low, rho)
        torch.testing.assert_close(got.float(), arrays[name][:-1].float(), rtol=1e-5, atol=0)


class Watch(Hook):
    """Collects the clean estimates."""

    def __init__(self) -> None:
        self.x0: list[Tensor] = []

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        self.x0.append(x0)
        return x0, eps


def tape_of(arrays: dict[str, Tensor], table: StepTable) -> Tensor:
    start = arrays["x_init"]
    if table.is_deterministic:
        return start
    draws = arrays["step_noise"][: table.num_steps]
    return torch.cat([start[:, None], draws.transpose(0, 1)], dim=1)


def test_samplers(arrays: dict[str, Tensor]) -> None:
    process = process_of(arrays)
    names = [name for name in arrays if name.startswith("sample_") and not name.endswith("__denoised")]
    covered = [name for name in names if name.split("__")[0].removeprefix("sample_") in SAMPLERS]
    assert {name.split("__")[0].removeprefix("sample_") for name in covered} == set(SAMPLERS)
    for name in covered:
        sampler, schedule = name.removeprefix("sample_").split("__")
        sigmas = arrays[f"sched_{schedule}"].double()
        table = SAMPLERS[sampler].over(process, [*times_of(sigmas[:-1]).tolist(), 1.0])  # type: ignore[attr-defined]
        net, watch = network(arrays), Watch()
        bound = lambda k, x, t=table, n=net: n(x / process.data_std, t.net_time[k])  # noqa: E731
        got = denoise(
            bound, table, tape_of(arrays, table), hooks=[watch], cond=Cond(torch.zeros(3, 1))
        ).action
        torch.testing.assert_close(got, arrays[name], rtol=0, atol=ATOL)
        entries = table.entries or (True,) * table.num_steps
        first = [x0 for x0, is_first in zip(watch.x0, entries, strict=True) if is_first]
        torch.testing.assert_close(torch.stack(first), arrays[f"{name}__denoised"], rtol=0, atol=ATOL)
