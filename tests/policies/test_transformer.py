"""The diffusion transformer is the network of its docstring, starts at zero, and takes a time per action."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_backbones import COND, CONFIGS, assert_same, build, gradients, inputs
from torch import Tensor

from policies.backbones.transformer import TransformerConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.attention import Attention
from policies.protocols import Cond

NAMES = [name for name in CONFIGS if name.startswith("dit")]


def attend(layer: Attention, queries: Tensor, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Attention by PyTorch's reference function, (M, T, D)."""
    out, _ = F.multi_head_attention_forward(
        queries.transpose(0, 1), tokens.transpose(0, 1), tokens.transpose(0, 1),
        queries.shape[-1], layer.heads, layer.inlet.weight, layer.inlet.bias, None, None, False, 0.0,
        layer.outlet.weight, layer.outlet.bias, training=False, attn_mask=hidden,
    )  # fmt: skip
    return out.transpose(0, 1)


def textbook(net: Any, x: Tensor, time: Tensor, cond: Cond, second_time: Tensor | None = None) -> Tensor:
    """The network written plainly, one modulation after the other; time is (M,) or (M, Th)."""
    width, horizon = net.config.width, x.shape[1]
    e = net.time_embedding(time)
    if second_time is not None:
        e = e + net.second_embedding(second_time)
    if e.dim() == 2:
        e = e.unsqueeze(1).expand(-1, horizon, -1)
    first, _, last = net.cond_embedding
    c = last(F.silu(first(cond.vec))).unsqueeze(1).expand(-1, horizon, -1)
    weight = torch.cat([net.modulation.time.weight, net.modulation.cond.weight], dim=1)
    numbers = F.linear(F.silu(torch.cat([e, c], dim=-1)), weight, net.modulation.time.bias)
    numbers = numbers.view(len(x), horizon, -1, width)  # scales, then shifts, then gates
    places = iter(range(net.modulation.sublayers + 1))
    sublayers = net.modulation.sublayers

    def adapted(h: Tensor, place: int) -> Tensor:
        normal = F.layer_norm(h, (width,), eps=1e-6)
        return normal * (1 + numbers[:, :, place]) + numbers[:, :, sublayers + 1 + place]

    def gate(place: int) -> Tensor:
        return numbers[:, :, 2 * (sublayers + 1) + place]

    hidden = torch.ones(horizon, horizon, dtype=torch.bool).triu(1) if net.config.causal else None
    h = net.inlet(x) + net.positions
    for block in net.blocks:
        place = next(places)
        h = h + gate(place) * attend(block.attention, adapted(h, place), adapted(h, place), hidden)
        if block.cross is not None:
            place = next(places)
            tokens = net.token_inlet(cond.tokens)
            h = h + gate(place) * attend(block.cross, adapted(h, place), tokens)
        place = next(places)
        ffn = block.ffn
        h = h + gate(place) * ffn.linear2(F.gelu(ffn.linear1(adapted(h, place))))
    return net.outlet(adapted(h, next(places)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("second", [False, True], ids=["one-time", "two-times"])
def test_forward_and_all_gradients_equal_the_textbook_network(
    name: str, dtype: torch.dtype, tolerance: float, second: bool
) -> None:
    net = build(name, second_time=second).to(dtype)
    x, time, cond = inputs(net, 7)
    other = time.flip(0) + 0.5 if second else None
    of = [x.requires_grad_(), cond.vec.requires_grad_(), *net.parameters()]
    ours, theirs = net(x, time, cond, second_time=other), textbook(net, x, time, cond, other)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert_same(gradients(ours, *of), gradients(theirs, *of), 10 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_every_action_may_have_a_time_of_its_own(name: str) -> None:
    net = build(name, second_time=True).double()
    x, time, cond = inputs(net, 4)
    times = time[:, None] + torch.arange(x.shape[1])
    own = net(x, times, cond, second_time=times / 2)
    torch.testing.assert_close(own, textbook(net, x, times, cond, times / 2), rtol=1e-12, atol=1e-12)
    row = torch.tensor([2, 0, 0, 1])
    shared = net(x, times, cond, time_row=row, second_time=times / 2)
    expected = net(x, times[row], cond, second_time=times[row] / 2)
    torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-12)
    same = time[:, None].expand(-1, x.shape[1])
    equal = net(x, same, cond, second_time=same), net(x, time, cond, second_time=time)
    torch.testing.assert_close(*equal, rtol=1e-12, atol=1e-12)


def test_a_fresh_network_predicts_zero_and_none_of_its_sublayers_does_anything() -> None:
    config = CONFIGS["dit"]
    net = config.build((5, 3), COND)
    x, time, cond = inputs(net, 3)
    assert torch.equal(net(x, time, cond), torch.zeros_like(x))
    torch.nn.init.eye_(net.outlet.weight)
    tokens = net.inlet(x) + net.positions
    expected = F.layer_norm(tokens, (config.width,), eps=1e-6)[..., :3]
    torch.testing.assert_close(net(x, time, cond), expected)


def test_training_wakes_every_weight_of_a_fresh_network() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = CONFIGS["dit-tokens"].build((5, 3), COND, token_dim=7, second_time=True)
    x, time, cond = inputs(net, 16)
    before = {name: weight.clone() for name, weight in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for _ in range(4):  # output, then gates, then sublayers, then what is before them
        loss = (net(x, time, cond, second_time=time) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not [name for name, weight in net.named_parameters() if torch.equal(weight, before[name])]


def test_an_action_sees_later_ones_unless_the_network_is_causal() -> None:
    for name, sees in (("dit", True), ("dit-causal", False)):
        net = build(name).double()
        x, time, cond = inputs(net, 2)
        later = x.clone()
        later[:, 3:] += 1
        with torch.no_grad():
            moved = (net(later, time, cond) - net(x, time, cond)).abs().amax((0, 2))
        assert bool((moved[:3] > 1e-3).all()) is sees and bool((moved[:3] == 0).all()) is not sees
        assert bool((moved[3:] > 1e-3).all())


def test_tokens_are_a_set_of_any_size_that_matters() -> None:
    net = build("dit-tokens").double()
    x, time, cond = inputs(net, 3)
    assert cond.tokens is not None
    out = net(x, time, cond)
    torch.testing.assert_close(net(x, time, Cond(cond.vec, cond.tokens.flip(1))), out)
    for other in (cond.tokens[:, :1], cond.tokens + 1):
        assert not torch.allclose(net(x, time, Cond(cond.vec, other)), out)


def test_tokens_that_are_missing_or_not_expected_are_refused() -> None:
    net = build("dit-tokens")
    x, time, cond = inputs(net, 3)
    with pytest.raises(CapabilityError, match="built with tokens to attend to and called without any"):
        net(x, time, Cond(cond.vec))
    with pytest.raises(CapabilityError, match="built without tokens to attend to and called with any"):
        build("dit").bind(cond, torch.zeros(1))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(
        ConfigError, match=r"a divisor of backbone.width=12 \(one of 1, 2, 3, 4, 6, 12\); got 5"
    ):
        TransformerConfig(width=12, heads=5)
