"""The U-Net backbone does less work than the textbook network and computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import everything
from small_backbones import COND, UNETS, assert_same, build, gradients
from torch import Tensor

import policies.backbones.unet1d as module
from policies.backbones.unet1d import Unet1dBackbone, Unet1dConfig
from policies.errors import ConfigError
from policies.networks.embeddings import PositionalEmbedding, sinusoid
from policies.networks.mlp_blocks import ResidualTrunk
from policies.networks.unet import ConvBlock, ResidualBlock
from policies.protocols import Cond

CHUNK, STEPS = (6, 3), 4


@pytest.fixture(params=UNETS)
def net(request: pytest.FixtureRequest) -> Unet1dBackbone:
    return built(request.param)


@pytest.fixture
def small() -> Unet1dBackbone:
    return built("unet-scale-deep-relu")


def built(name: str, chunk: tuple[int, int] = CHUNK, **options: Any) -> Unet1dBackbone:
    net: Unet1dBackbone = build(name, chunk=chunk, **options).double()
    return net


def inputs(n: int, chunk: tuple[int, int] = CHUNK) -> tuple[Tensor, Tensor, Cond]:
    generator = torch.Generator().manual_seed(n)
    x, vec = (torch.randn(n, *s, generator=generator, dtype=torch.float64) for s in (chunk, (COND,)))
    return x, torch.randint(STEPS, (n,), generator=generator).double(), Cond(vec)


def steps() -> Tensor:
    return torch.arange(STEPS).double()


class Textbook:
    """The network written plainly: stock modules on (B, C, T), one input for time and condition."""

    def __init__(self, net: Unet1dBackbone) -> None:
        self.net, self.unet, self.config = net, net.unet, net.config
        self.act = F.relu if net.config.activation == "relu" else F.mish

    def __call__(self, x: Tensor, time: Tensor, cond: Cond, second_time: Tensor | None = None) -> Tensor:
        net, unet = self.net, self.unet
        c = torch.cat([self.embed(time, second_time), self.encode(cond.vec)], dim=1)
        missing = -x.shape[1] % 2 ** (unet.levels - 1)
        h = F.pad(x.transpose(1, 2), (0, missing), mode="replicate")
        blocks, skips = iter(unet.blocks), []

        def pair(h: Tensor) -> Tensor:
            h = self.block(next(blocks), h, c)
            return self.block(next(blocks), h, c)

        for level in range(unet.levels):
            h = pair(h)
            skips.append(h)
            if level + 1 < unet.levels:
                h = unet.downs[level](h)
        h = pair(h)
        for up in unet.ups:
            h = up(pair(torch.cat([h, skips.pop()], dim=1)))
        h = unet.outlet(self.conv(unet.head, h))
        return h.transpose(1, 2)[:, : net.chunk_shape[0]]

    def embed(self, time: Tensor, second_time: Tensor | None) -> Tensor:
        e = torch.zeros(())
        for part, given in ((self.net.time_embedding, time), (self.net.second_embedding, second_time)):
            if isinstance(part, PositionalEmbedding):
                e = e + part(given)
            elif part is not None and given is not None:
                e = e + part.linear2(F.mish(part.linear1(sinusoid(given, part.dim))))
        return e

    def encode(self, vec: Tensor) -> Tensor:
        encoder = self.net.cond_encoder
        if not isinstance(encoder, ResidualTrunk):
            return encoder(vec)
        h = encoder.inlet(vec)
        for block in encoder.blocks:
            h = h + block.linear2(self.act(block.linear1(self.act(h))))
        return encoder.outlet(h)

    def block(self, block: ResidualBlock, x: Tensor, c: Tensor) -> Tensor:
        h, layers = self.conv(block.first, x), list(block.film.layers)
        z = layers[0](self.act(c) if len(layers) == 1 else c)
        for layer in layers[1:]:
            z = layer(self.act(z))
        if self.config.film == "bias":
            h = h + z.unsqueeze(2)
        else:
            scale, bias = z.unsqueeze(2).chunk(2, dim=1)
            h = h * (scale if self.config.film == "scale" else 1 + scale) + bias
        return self.conv(block.second, h) + (x if block.shortcut is None else block.shortcut(x))

    def conv(self, block: ConvBlock, x: Tensor) -> Tensor:
        h = block.conv(x)
        return self.act(h if block.norm is None else block.norm(h))


def assert_same_gradients(of: Sequence[Tensor], ours: Tensor, theirs: Tensor) -> None:
    expected = gradients(theirs, *of)
    scale = max(float(one.norm()) for one in expected)
    assert_same(gradients(ours, *of), expected, 1e-9, scale=scale)


# -- the same numbers -------------------------------------------------------------------------------------


def test_forward_and_all_gradients_equal_the_textbook_network(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    of = [x.requires_grad_(), cond.vec.requires_grad_(), *net.parameters()]
    ours, theirs = net(x, time, cond), Textbook(net)(x, time, cond)
    torch.testing.assert_close(ours, theirs)
    assert_same_gradients(of, ours, theirs)


def test_float32_is_as_close_as_it_can_be(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    expected = net(x, time, cond).float()
    ours = net.float()(x.float(), time.float(), Cond(cond.vec.float()))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("horizon", range(1, 34) if everything else (*range(1, 10), 16, 33))
def test_any_horizon_equals_the_chunk_padded_by_its_last_row(horizon: int) -> None:
    chunk = (horizon, 2)
    net = built("unet-three-levels", chunk)
    x, time, cond = inputs(2, chunk)
    assert net.unet.padding == (4 - horizon % 4) % 4
    with torch.no_grad():
        out = net(x, time, cond)
        torch.testing.assert_close(out, Textbook(net)(x, time, cond))
        torch.testing.assert_close(net.bind(cond, time)(0, x)[0], out[0])


def test_a_chunk_of_another_length_is_refused(small: Unet1dBackbone) -> None:
    x, time, cond = inputs(2, (4, 3))
    with pytest.raises(ConfigError, match="built for chunks of 6 rows; got 4"):
        small(x, time, cond)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives_along_a_direction_equal_the_backward_pass(small: Unet1dBackbone) -> None:
    x, time, cond = inputs(2)
    direction = torch.cos(torch.arange(x.numel()).double()).view_as(x)
    _, forward = torch.func.jvp(lambda x: small(x, time, cond).sum(), (x,), (direction,))
    x.requires_grad_()
    (backward,) = torch.autograd.grad(small(x, time, cond).sum(), x)
    torch.testing.assert_close(forward, (backward * direction).sum())


def test_second_derivatives_equal_those_of_the_textbook_network(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(2)
    x.requires_grad_()
    results = []
    for out in (net(x, time, cond), Textbook(net)(x, time, cond)):
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True))
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert_same([ours], [theirs], 1e-7, scale=float(theirs.norm()))


@pytest.mark.parametrize("grad", [False, True])
def test_modulations_before_the_loop_and_in_it_are_the_same(
    net: Unet1dBackbone, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, time, cond = inputs(3)
    with torch.set_grad_enabled(grad):
        before = net.bind(cond, time)(1, x)
        monkeypatch.setattr(module, "_FEW_NUMBERS", 0)
        torch.testing.assert_close(net.bind(cond, time)(1, x), before)


# -- times ------------------------------------------------------------------------------------------------


def test_one_time_for_each_action_that_is_the_same_equals_one_time(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    with torch.no_grad():
        expected = net(x, time, cond)
        each = time.unsqueeze(1).repeat(1, CHUNK[0])
        torch.testing.assert_close(net(x, each, cond), expected)
        torch.testing.assert_close(net(x, each, cond, time_row=torch.arange(3)), expected)
        torch.testing.assert_close(net.bind(cond, each)(1, x)[1], expected[1])


def test_each_action_sees_its_own_time() -> None:
    net = built("unet-one-level", groups=0, kernel=1)  # rows that do not see each other
    x, _, cond = inputs(2)
    each = torch.arange(12).double().view(2, 6)
    with torch.no_grad():
        out = net(x, each, cond)
        for row in range(CHUNK[0]):
            alone = net(x, each[:, row], cond)
            torch.testing.assert_close(out[:, row], alone[:, row])


def test_coarser_levels_see_the_mean_of_embedded_times() -> None:
    net = built("unet-three-levels")
    rows = torch.arange(6.0).view(1, 6, 1)
    fine, coarse, coarsest = net.unet.coarsened(rows)
    assert fine.flatten().tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert coarse.flatten().tolist() == [0.5, 2.5, 4.5, 5]
    assert coarsest.flatten().tolist() == [1.5, 4.75]


def test_a_second_time_has_an_embedding_of_its_own_that_is_added() -> None:
    net = built("unet-bias-residual-encoder", second_time=True)
    x, time, cond = inputs(3)
    second = time.flip(0) + 0.5
    ours, theirs = net(x, time, cond, second_time=second), Textbook(net)(x, time, cond, second)
    torch.testing.assert_close(ours, theirs)
    assert_same_gradients(list(net.parameters()), ours, theirs)


# -- configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "chunk", "cond_dim", "count"),
    [
        ({"widths": (256, 512, 1024), "time_dim": 256}, (16, 2), 40, 65.78e6),  # Push-T, state
        ({"widths": (512, 1024, 2048), "time_dim": 128}, (16, 10), 274, 255.6e6),  # two cameras
    ],
)
def test_published_sizes_have_the_published_number_of_weights(
    changes: dict[str, object], chunk: tuple[int, int], cond_dim: int, count: float
) -> None:
    with torch.device("meta"):
        net = Unet1dConfig(film="scale", final_groups=8, **changes).build(chunk, cond_dim)
    assert sum(weight.numel() for weight in net.parameters()) == pytest.approx(count, rel=1e-4)


@pytest.mark.parametrize(
    ("widths", "chunk", "cond_dim", "count"),
    [
        ((40, 80), (4, 7), 19, 648_615),  # lift
        ((64, 128), (4, 7), 23, 1_623_255),  # square
        ((64, 128), (16, 14), 59, 1_681_694),  # transport
    ],
)
def test_sizes_of_dppo_have_the_recorded_number_of_weights(
    widths: tuple[int, ...], chunk: tuple[int, int], cond_dim: int, count: int
) -> None:
    config = Unet1dConfig(widths=widths, time_dim=16, film="scale", film_layers=3)
    with torch.device("meta"):
        net = config.build(chunk, cond_dim)
    assert sum(weight.numel() for weight in net.parameters()) == count


def test_official_keys_name_every_parameter_once(net: Unet1dBackbone) -> None:
    if net.config.cond_activation is not None:  # of MIP, whose names its source has
        with pytest.raises(ConfigError, match=r"no U-Net with such backbone.cond_dims"):
            net.config.official_keys()
        return
    keys = net.config.official_keys(action_dim=CHUNK[1])
    assert sorted(keys.values()) == sorted(dict(net.named_parameters()))


def test_a_first_level_as_wide_as_an_action_has_no_shortcut() -> None:
    net = built("unet-one-level", (6, 8))
    keys = net.config.official_keys("dppo", action_dim=8)
    assert sorted(keys.values()) == sorted(dict(net.named_parameters()))
    assert net.unet.blocks[0].shortcut is None
    torch.testing.assert_close(net(*inputs(2, (6, 8))), Textbook(net)(*inputs(2, (6, 8))))


def test_official_keys_of_diffusion_policy_name_every_parameter_once() -> None:
    net = built("unet-three-levels")
    keys = net.config.official_keys("diffusion_policy", action_dim=CHUNK[1])
    assert sorted(keys.values()) == sorted(dict(net.named_parameters()))
    assert keys["diffusion_step_encoder.1.weight"] == "time_embedding.linear1.weight"


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        ("scale-deep-relu", "diffusion_policy", "no U-Net with backbone.film_layers=3; use 1"),
        (
            "bias-residual-encoder",
            "diffusion_policy",
            "no U-Net with such backbone.cond_dims; leave them empty",
        ),
        ("one-level", "robomimic", "program must be one of diffusion_policy, dppo; got 'robomimic'"),
    ],
)
def test_networks_that_a_program_never_had_have_no_keys(name: str, program: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UNETS[f"unet-{name}"].official_keys(program)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": 4}, "kernel must be odd; got 4"),
        ({"groups": 3}, "groups must be 0 or a divisor of every width of (64, 128, 256); got 3"),
        ({"final_groups": 7}, "final_groups must be 0 or a divisor of every width of (64,); got 7"),
        ({"cond_dims": (4,)}, "cond_dims must be an odd number of equal hidden widths and an output width"),
        ({"cond_dims": (4, 5, 4, 3)}, "an odd number of equal hidden widths"),
        (
            {"times": "positional", "time_dim": 6},
            "time_dim must be a multiple of 4 for backbone.times=positional",
        ),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Unet1dConfig(**fields)
    assert message in str(refused.value) and str(refused.value).startswith("backbone.")


# -- tracing ----------------------------------------------------------------------------------------------
