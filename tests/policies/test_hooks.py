"""Hooks: guidance and inpainting inside the denoising loop."""

from __future__ import annotations

import pytest
import torch
from messages import mentions
from torch import Tensor

from policies.errors import CapabilityError
from policies.processes import RectifiedFlow, VPDiffusion
from policies.protocols import Cond, Hook, Step
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.hooks import Guidance, Inpaint
from policies.samplers.loop import denoise
from policies.samplers.ode import Euler
from policies.samplers.step_table import StepTable

B, TH, DA = 6, 4, 2
COND = Cond(torch.arange(B, dtype=torch.float64)[:, None])
PAIRS = [
    (DDPM(min_std=0.1, final_std=None), VPDiffusion(20)),
    (DDIM(steps=5), VPDiffusion(20, prediction="x0")),
    (DDIM(steps=5, recompute_eps=False), VPDiffusion(20, prediction="v")),
    (Euler(steps=5), RectifiedFlow()),
]
every_pair = pytest.mark.parametrize(("sampler", "process"), PAIRS)


def draw(table: StepTable) -> Tensor:
    shape = (B, TH, DA) if table.is_deterministic else (B, table.num_steps + 1, TH, DA)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(k: int, x: Tensor) -> Tensor:
    return 0.8 * torch.tanh(x.flip(1) + 0.1 * k)


class Witness(Hook):
    """Keeps what the loop shows to hooks."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.gaps: list[Tensor] = []

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.append(step)
        self.gaps.append((step.alpha * x0 + step.sigma * eps - x).abs().max())
        return x0, eps


@every_pair
def test_hooks_see_a_pair_that_explains_the_state(sampler, process) -> None:
    table, witness = sampler.table(process), Witness()
    denoise(network, table, draw(table), hooks=[witness], cond=COND)
    assert max(witness.gaps) < 1e-10
    assert [s.k for s in witness.steps] == list(range(table.num_steps))
    assert witness.steps[0].t_next == witness.steps[1].t
    assert witness.steps[-1].t_next == 1.0
    assert witness.steps[0].cond is COND


@every_pair
def test_inpainting_pins_the_masked_rows_and_moves_the_others(sampler, process) -> None:
    table = sampler.table(process)
    known = torch.full((B, TH, DA), 0.25, dtype=torch.float64)
    mask = torch.zeros(TH, DA, dtype=torch.float64)
    mask[:2] = 1.0
    free = denoise(network, table, draw(table)).action
    pinned = denoise(network, table, draw(table), hooks=[Inpaint(known, mask)], cond=COND).action
    torch.testing.assert_close(pinned[:, :2], known[:, :2], rtol=0, atol=1e-12)
    assert (pinned[:, 2:] - free[:, 2:]).abs().max() > 1e-3  # the network mixes rows


@every_pair
def test_an_empty_mask_and_a_zero_scale_change_nothing(sampler, process) -> None:
    table = sampler.table(process)
    plain = denoise(network, table, draw(table)).action
    idle = [
        Inpaint(torch.ones(TH, DA, dtype=torch.float64), torch.zeros(TH, DA, dtype=torch.float64)),
        Guidance(lambda x0, cond: x0, scale=0.0),
    ]
    out = denoise(network, table, draw(table), hooks=idle, cond=COND).action
    torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-9)


@every_pair
def test_guidance_lowers_the_cost_more_the_stronger_it_is(sampler, process) -> None:
    table = sampler.table(process)
    goal = torch.full((TH, DA), 0.5, dtype=torch.float64)
    costs = []
    for scale in (0.0, 0.2, 0.6):
        hook = Guidance(lambda x0, cond: x0 - goal, scale)
        action = denoise(network, table, draw(table), hooks=[hook], cond=COND).action
        costs.append((action - goal).square().mean())
    assert costs[2] < costs[1] < costs[0]
    assert costs[2] < 0.5 * costs[0]


@every_pair
def test_guidance_keeps_a_pair_that_explains_the_state(sampler, process) -> None:
    table, witness = sampler.table(process), Witness()
    hooks = [Guidance(lambda x0, cond: x0 - 0.5, 0.3), witness]
    denoise(network, table, draw(table), hooks=hooks, cond=COND)
    assert max(witness.gaps) < 1e-10


def test_guidance_may_depend_on_the_condition_of_each_row() -> None:
    table = DDIM(steps=5).table(VPDiffusion(20))
    hook = Guidance(lambda x0, cond: x0 - 0.1 * cond.vec[:, :, None], scale=1.0)
    action = denoise(network, table, draw(table), hooks=[hook], cond=COND).action
    want = (0.1 * COND.vec[:, :, None]).expand_as(action)
    torch.testing.assert_close(action, want, rtol=0, atol=1e-12)


def test_hooks_are_sample_hooks_and_need_a_condition() -> None:
    hook: Hook = Hook()
    table = DDIM(steps=5).table(VPDiffusion(20))
    with pytest.raises(CapabilityError, match=mentions("cond None")):
        denoise(network, table, draw(table), hooks=[hook])
