"""The MLP backbone does less work than the textbook network and computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_backbones import MLPS, STEPS, assert_same, build, gradients, inputs
from torch import Tensor, nn

from policies.backbones.mlp import MlpBackbone, MlpConfig
from policies.errors import ConfigError
from policies.networks.embeddings import sinusoid
from policies.networks.mlp_blocks import ExpandedTrunk, PlainTrunk
from policies.protocols import Cond

every_network = pytest.mark.parametrize("name", MLPS)


def textbook(
    net: MlpBackbone, x: Tensor, time: Tensor, cond: Cond, second_time: Tensor | None = None
) -> Tensor:
    """The network written plainly: concatenate, then layer after layer, nothing folded or shared."""
    act = F.relu if net.config.activation == "relu" else F.mish
    cond_act = torch.tanh if net.config.cond_activation == "tanh" else act
    e = torch.zeros(())
    for embedding, given in ((net.time_embedding, time), (net.second_embedding, second_time)):
        if embedding is not None and given is not None:
            e = e + embedding.linear2(F.mish(embedding.linear1(sinusoid(given, embedding.dim))))
    s = cond.vec
    if isinstance(net.cond_encoder, PlainTrunk):
        s = net.cond_encoder.inlet(s)
        for layer in net.cond_encoder.layers:
            s = layer(cond_act(s))
    trunk = net.trunk
    h = trunk.inlet(torch.cat([x.flatten(1), e, s], dim=1))
    if isinstance(trunk, PlainTrunk):
        for i, layer in enumerate(trunk.layers):
            h = layer(act(h if trunk.norms is None else trunk.norms[i](h)))
        return h.view_as(x)
    if isinstance(trunk, ExpandedTrunk):
        h = act(trunk.norm(h))
        for block in trunk.blocks:
            h = h + block.linear2(block.norm2(act(block.linear1(block.norm1(h)))))
        return trunk.outlet(trunk.last_norm(h)).view_as(x)
    for block in trunk.blocks:
        norm1, norm2 = block.norm1 or nn.Identity(), block.norm2 or nn.Identity()
        h = h + block.linear2(act(norm2(block.linear1(act(norm1(h))))))
    return trunk.outlet(h).view_as(x)


@every_network
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
    assert_same(gradients(ours, *of), gradients(theirs, *of), tolerance, share=1e-7)


@every_network
def test_official_keys_name_every_parameter_once(name: str) -> None:
    net = build(name)
    if net.config.expansion is not None:  # of MIP, whose names its source has
        with pytest.raises(ConfigError, match=r"no MLP with backbone.expansion"):
            net.config.official_keys()
        return
    assert sorted(net.config.official_keys().values()) == sorted(dict(net.named_parameters()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expansion": 2}, "backbone.expansion must be null without residual=true and layer_norm=true"),
        ({"residual": False}, "residual=false needs hidden_dims"),
        ({"hidden_dims": (8,)}, "no hidden_dims; got hidden_dims="),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        MlpConfig(**fields)


@pytest.mark.slow
def test_exported_loop_follows_any_batch() -> None:
    net, times = build("mlp-one-block"), torch.arange(STEPS).float()

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, vec: Tensor) -> Tensor:
            bound = self.net.bind(Cond(vec), times)
            for k in range(3):
                x = bound(k, x)
            return x

    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        x, _, cond = inputs(net, 4)
        program = torch.export.export(Loop(), (x, cond.vec), dynamic_shapes=({0: batch}, {0: batch})).module()
        for n in (1, 2, 7):
            x, _, cond = inputs(net, n)
            torch.testing.assert_close(program(x, cond.vec), Loop()(x, cond.vec), rtol=1e-5, atol=1e-6)
