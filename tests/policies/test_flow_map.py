"""Flow maps and MeanFlow: zero at the exact map of a Gaussian, derivatives, learning, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arcs import score, trained
from gaussian_flow import MEAN, STD, average_velocity, spread
from pairwise import everything
from small_policies import ACTION_DIM, OBS_DIM, observations, small_policy
from torch import Tensor, nn

from policies import registry
from policies.backbones.mlp import MlpBackbone, MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import PolicyConfig
from policies.processes import FlowMap, MeanFlow, RectifiedFlow
from policies.processes.average import AveragePath, derivative
from policies.processes.base import over_rows
from policies.processes.flow_map import OBJECTIVES
from policies.protocols import TE
from policies.samplers.ode import Euler

DERIVED = ("lsd", "esd", "mf")
WITH_DERIVATIVES = [*(FlowMap(objective=name) for name in DERIVED), MeanFlow()]
NAMES = [*DERIVED, "meanflow"]
learns_with_all = pytest.mark.skipif(not everything, reason="with --all: without it other maps learn")
with_derivatives = pytest.mark.parametrize("process", WITH_DERIVATIVES, ids=NAMES)

BACKBONES = {
    "mlp": {"width": 8, "time_dim": 8, "activation": "mish"},
    "mlp-normal": {"width": 8, "time_dim": 8, "activation": "mish", "layer_norm": True, "num_blocks": 2},
    "unet1d": {"widths": (4, 8), "groups": 2, "time_dim": 8},
    "transformer": {"width": 8, "depth": 1, "heads": 2, "time_dim": 8},
    "dp_transformer": {"width": 8, "depth": 1, "heads": 2},
}


# -- the flow towards normal distributions, in closed form -----------------------------------------------


def draw(process: AveragePath, n: int = 64) -> tuple[Tensor, TE]:
    """Draw states of the flow, each on the line that has the flow's own velocity there."""
    generator = torch.Generator().manual_seed(0)
    t = process.sample_time(n, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 3, 2, generator=generator, dtype=torch.float64)
    more = process.more_draws(TE(t, noise), generator=generator)
    start = more["start"] if "start" in more else torch.minimum(t, more["other"])
    x = over_rows(start, noise) * MEAN + over_rows(spread(start), noise) * noise
    velocity = average_velocity(x, start)
    action, eps = (x + over_rows(share, x) * velocity for share in (1 - start, -start))
    torch.testing.assert_close(process.corrupt(action, eps, start), x)
    return action, TE(t, eps, more=more)


def local(x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None) -> Tensor:
    """Return the velocity of the flow, however long the step: right as a flow, wrong as a map."""
    return average_velocity(x, t)


def flow_error(action: Tensor, te: TE) -> Tensor:
    return RectifiedFlow().losses(average_velocity, action, te)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_exact_flow_map_solves_every_equation(objective: str) -> None:
    process = FlowMap(objective=objective)
    action, te = draw(process)
    losses = process.losses(average_velocity, action, te)
    torch.testing.assert_close(losses, flow_error(action, te), rtol=0, atol=1e-20)
    assert (process.losses(local, action, te) - flow_error(action, te)).mean() > 1e-3


@pytest.mark.parametrize("objective", ["psd", "esd"])
def test_the_released_forms_are_not_solved_by_the_exact_flow_map(objective: str) -> None:
    process = FlowMap(objective=objective, paper_compat=True)
    action, te = draw(process)
    assert (process.losses(average_velocity, action, te) - flow_error(action, te)).mean() > 1e-3


@pytest.mark.parametrize("paper_compat", [False, True])
def test_the_two_sub_steps_carry_gradients_in_the_released_form_only(paper_compat: bool) -> None:
    process, has_gradient = FlowMap(paper_compat=paper_compat), []

    def net(*arguments: Any, **_: Any) -> Tensor:
        has_gradient.append(torch.is_grad_enabled())
        return average_velocity(*arguments)

    process.losses(net, *draw(process))
    assert has_gradient == [True, paper_compat, paper_compat, True]  # flow, two sub-steps, the step


def test_the_exact_average_velocity_is_meanflow_s_target() -> None:
    action, te = draw(MeanFlow())
    torch.testing.assert_close(
        MeanFlow().losses(average_velocity, action, te), torch.zeros_like(action), rtol=0, atol=1e-20
    )


def test_few_steps_of_an_exact_map_end_where_the_flow_ends() -> None:
    noise = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, zero = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    end = noise + average_velocity(noise, zero, one)
    torch.testing.assert_close(end, MEAN + STD * noise)
    for steps in (1, 2, 5):
        table = Euler(steps=steps, clip_action=None).table(MeanFlow(time_scale=1.0))
        assert table.second_time is not None
        times, lengths = table.net_time.double(), table.second_time.double()
        x = noise
        for k in range(steps):
            c = table.rows[k]
            pred = average_velocity(x, times[k].expand(5), (times[k] + lengths[k]).expand(5))
            x = c.mean_x * x + c.mean_pred * pred
        torch.testing.assert_close(x, end, rtol=1e-6, atol=1e-6)


# -- what is drawn and weighed ---------------------------------------------------------------------------


def test_starts_come_before_ends_and_cover_all_pairs() -> None:
    te = TE(torch.rand(20_000), torch.zeros(20_000, 1, 1))
    more = FlowMap().more_draws(te, generator=torch.Generator().manual_seed(0))
    assert bool((more["start"] <= more["end"]).all())
    assert float((more["end"] - more["start"]).mean()) == pytest.approx(1 / 3, abs=0.01)
    other = MeanFlow(flow_share=0.75).more_draws(te, generator=torch.Generator().manual_seed(0))["other"]
    assert float((other == te.t).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert float(other.mean()) == pytest.approx(0.5, abs=0.01)


def test_weights_even_out_rows_and_carry_no_gradient() -> None:
    action, te = draw(MeanFlow())
    te = TE(te.t, te.eps, more={"other": te.t})
    scale = torch.linspace(0.5, 2, len(action), dtype=torch.float64, requires_grad=True)
    net: Callable[..., Tensor] = lambda x, t, until=None, **_: over_rows(scale, x) * x  # noqa: E731
    plain = MeanFlow(weight_power=0.0).losses(net, action, te)
    weighed = MeanFlow(weight_power=1.0, weight_offset=0.5).losses(net, action, te)
    torch.testing.assert_close(plain, RectifiedFlow().losses(net, action, te))
    weight = 1 / (plain.mean((1, 2)) + 0.5)
    torch.testing.assert_close(weighed, weight[:, None, None] * plain)
    gradients = [torch.autograd.grad(loss.sum(), scale)[0] for loss in (plain, weighed)]
    torch.testing.assert_close(gradients[1], weight * gradients[0])


# -- derivatives -----------------------------------------------------------------------------------------


def build(process: Any, backbone: str) -> DenoisingPolicy:
    """Build a policy in float64 with weights away from where they start."""
    part = registry.lookup("backbone", backbone.split("-")[0])(**BACKBONES[backbone])
    config = PolicyConfig(process=process, backbone=part, horizon=4, act_steps=2)
    policy = build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    assert isinstance(policy, DenoisingPolicy)
    return policy


def inputs(policy: DenoisingPolicy, n: int = 3) -> tuple[Any, Tensor, TE]:
    action = torch.rand(n, *policy.chunk.shape, generator=torch.Generator().manual_seed(2)).double() * 2 - 1
    te = policy.sample_te(n, generator=torch.Generator().manual_seed(3))
    return policy.encode({"state": observations(n).double()}), action, te


@pytest.mark.parametrize("backbone", BACKBONES)
def test_derivatives_of_every_backbone_equal_finite_differences(backbone: str) -> None:
    policy = build(FlowMap(objective="esd", time_scale=3.0), backbone)
    cond, action, te = inputs(policy)
    net, step = policy.evaluate(cond), 1e-6
    at, along = (action, te.more["start"], te.more["end"]), (te.eps, torch.ones_like(te.t), 0.5 * te.t)
    value, change = derivative(net, at, along)
    ahead, behind = (net(*(a + side * step * d for a, d in zip(at, along, strict=True))) for side in (1, -1))
    torch.testing.assert_close(value, net(*at))
    torch.testing.assert_close(change, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradients_through_a_derivative_equal_finite_differences(backbone: str) -> None:
    """The released Lagrangian loss stops no gradient, so differences of the loss tell."""
    policy = build(FlowMap(objective="lsd", time_scale=3.0, paper_compat=True), backbone)
    sample, step = inputs(policy), 1e-5
    weights = list(policy.parameters())
    gradients = torch.autograd.grad(policy.matching_loss(*sample, reduce="mean"), weights)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        direction = [torch.randn(w.shape, generator=generator).double() for w in weights]
        sides = []
        for side in (1, -2, 1):  # ahead, behind, and back
            with torch.no_grad():
                for weight, d in zip(weights, direction, strict=True):
                    weight.add_(side * step * d)
                sides.append(float(policy.matching_loss(*sample, reduce="mean")))
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@with_derivatives
@pytest.mark.parametrize("backbone", ["mlp", "unet1d"])
def test_validating_without_gradients_gives_the_same_loss_and_leaves_nothing_behind(
    process: AveragePath, backbone: str
) -> None:
    policy = build(process, backbone)
    sample = inputs(policy)
    loss = policy.matching_loss(*sample)
    with torch.no_grad():
        torch.testing.assert_close(policy.matching_loss(*sample), loss.detach())
        noise = policy.sample_noise(3, generator=torch.Generator().manual_seed(5))
        first = policy.decode(sample[0], noise)
        assert torch.equal(policy.decode(sample[0], noise), first)
        torch.testing.assert_close(policy.matching_loss(*sample), loss.detach())
    assert loss.requires_grad


# -- learning --------------------------------------------------------------------------------------------


@pytest.mark.slow
@learns_with_all
def test_meanflow_lands_on_both_modes_in_two_and_in_four_steps() -> None:
    policy = trained(MeanFlow(), iterations=400)
    two, four = (score(policy, Euler(steps=steps, clip_action=None)) for steps in (2, 4))
    assert two[0] >= 0.6 and four[0] >= 0.85
    assert 0.35 <= four[1] <= 0.65


@pytest.mark.slow
@learns_with_all
def test_psd_keeps_the_flow_and_improves_on_it_in_two_steps() -> None:
    policy = trained(FlowMap(), iterations=600)
    two, eight = (score(policy, Euler(steps=steps, clip_action=None)) for steps in (2, 8))
    assert two[0] >= 0.27  # a flow: 0.22
    assert eight[0] >= 0.75 and 0.35 <= eight[1] <= 0.65


@pytest.mark.slow
@learns_with_all
@pytest.mark.parametrize("objective", DERIVED)
def test_one_step_of_other_objectives_beats_the_mean(objective: str) -> None:
    policy = trained(FlowMap(objective=objective), iterations=600)
    assert score(policy, Euler(steps=1, clip_action=None))[0] >= 0.08  # a flow: 0


# -- refusals --------------------------------------------------------------------------------------------


class Normalising(MlpBackbone):
    """A backbone that normalises by PyTorch's own layer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.norm = nn.LayerNorm(4)


class NormalisingConfig(MlpConfig):
    """Builds it."""

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Normalising:
        return Normalising(self, chunk_shape, cond_dim, second_time=second_time)


@pytest.mark.parametrize("objective", DERIVED)
def test_a_normalisation_whose_gradients_would_be_wrong_is_refused(objective: str) -> None:
    config = PolicyConfig(process=FlowMap(objective=objective), backbone=NormalisingConfig(width=8))
    with pytest.raises(
        CapabilityError, match=r"Normalising has it in norm.*policies.networks.attention.LayerNorm"
    ):
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)
    for process in (FlowMap(), MeanFlow()):  # no gradient goes through a derivative
        config = PolicyConfig(process=process, backbone=NormalisingConfig(width=8))
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)


@pytest.mark.parametrize("sampler", ["heun", "midpoint", "dpmpp_2m", "ancestral", "ddim"])
def test_samplers_of_local_predictions_are_refused(sampler: str) -> None:
    with pytest.raises(ConfigError, match=f"sampler={sampler} .*process=meanflow"):
        small_policy(MeanFlow(), registry.lookup("sampler", sampler)())
