"""The U-Net backbone does less work than the textbook network and computes the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from pairwise import each_value, everything
from torch import Tensor, nn

import policies.backbones.unet1d as module
from policies.backbones import Backbone
from policies.backbones.unet1d import Unet1dBackbone, Unet1dConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.embeddings import PositionalEmbedding, sinusoid
from policies.networks.mlp_blocks import ResidualTrunk
from policies.networks.unet import ConvBlock, ResidualBlock, UnetConfig
from policies.protocols import Cond
from policies.registry import from_json, to_json

CHUNK, COND, STEPS = (6, 3), 5, 4

CONFIGS = {
    "three-levels": Unet1dConfig(widths=(8, 12, 16), groups=2, time_dim=8, kernel=3),
    "scale-deep-relu": Unet1dConfig(
        widths=(8, 16), groups=4, final_groups=2, film="scale", film_layers=3, activation="relu", time_dim=8
    ),
    "bias-residual-encoder": Unet1dConfig(
        widths=(8, 8), groups=2, film="bias", cond_dims=(6, 6, 6, 4), time_dim=8, norm_eps=1e-3
    ),
    "plain-linear-encoder": Unet1dConfig(
        widths=(8, 16), groups=0, final_groups=2, cond_dims=(6, 4), time_dim=8, time_expansion=1
    ),
    "one-level": Unet1dConfig(widths=(8,), groups=2, time_dim=4, film="bias", film_layers=3),
    "positional-plain-encoder": Unet1dConfig(
        widths=(8, 16),
        groups=2,
        film="scale",
        times="positional",
        time_dim=8,
        cond_dims=(6, 4),
        cond_activation="tanh",
    ),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def net(request: pytest.FixtureRequest) -> Unet1dBackbone:
    return built(request.param)


@pytest.fixture
def small() -> Unet1dBackbone:
    return built(CONFIGS["scale-deep-relu"])


def built(config: Unet1dConfig, chunk: tuple[int, int] = CHUNK, **options: bool) -> Unet1dBackbone:
    """Build a network whose normalisations are not the identity."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = config.build(chunk, COND, **options)
        for part in net.modules():
            if isinstance(part, nn.GroupNorm):
                nn.init.uniform_(part.weight, 0.5, 1.5)
                nn.init.uniform_(part.bias, -0.5, 0.5)
    return net.double()


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


def gradients(net: Unet1dBackbone, out: Tensor, *others: Tensor) -> list[Tensor]:
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), [*net.parameters(), *others]))


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-9) -> None:
    scale = max(float(b.norm()) for b in theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= rtol * b.norm() + 1e-3 * rtol * scale


# -- the same numbers -------------------------------------------------------------------------------------


def test_forward_and_all_gradients_equal_the_textbook_network(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    x.requires_grad_(), cond.vec.requires_grad_()
    ours, theirs = net(x, time, cond), Textbook(net)(x, time, cond)
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(net, ours, x, cond.vec), gradients(net, theirs, x, cond.vec))


def test_float32_is_as_close_as_it_can_be(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    expected = net(x, time, cond).float()
    ours = net.float()(x.float(), time.float(), Cond(cond.vec.float()))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("horizon", range(1, 34) if everything else (*range(1, 10), 16, 33))
def test_any_horizon_equals_the_chunk_padded_by_its_last_row(horizon: int) -> None:
    chunk = (horizon, 2)
    net = built(CONFIGS["three-levels"], chunk)
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


@pytest.mark.parametrize("shared", ["time", "cond", "both"])
def test_shared_rows_equal_repeated_rows(net: Unet1dBackbone, shared: str) -> None:
    x, _, cond = inputs(5)
    times = steps()
    step, row = torch.tensor([3, 0, 0, 2, 3]), torch.tensor([1, 1, 0, 2, 0])
    few = Cond(cond.vec[:3].clone().requires_grad_())
    time_args = (times, step) if shared != "cond" else (times[step], None)
    cond_args = (few, row) if shared != "time" else (few.rows(row), None)
    ours = net(x, time_args[0], cond_args[0], cond_row=cond_args[1], time_row=time_args[1])
    theirs = Textbook(net)(x, times[step], few.rows(row))
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(net, ours, few.vec), gradients(net, theirs, few.vec))


@pytest.mark.parametrize(("grad", "laid_out"), each_value([False, True], [True, False]))
def test_bind_equals_forward(
    net: Unet1dBackbone, grad: bool, laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not laid_out:
        monkeypatch.setattr(module, "_FEW_NUMBERS", 0)
    times = steps()
    for batch in (1, 3):
        x, _, cond = inputs(batch)
        with torch.set_grad_enabled(grad):
            for _ in range(2):  # the second time from the tables of the first
                bound = net.bind(cond, times)
                for k in (3, 0):
                    torch.testing.assert_close(bound(k, x), net(x, times[k].expand(batch), cond))


def test_one_condition_may_be_shared_by_all_rows(net: Unet1dBackbone) -> None:
    x, _, cond = inputs(3)
    one = Cond(cond.vec[:1])
    torch.testing.assert_close(net.bind(one, steps())(2, x), net.bind(one.repeat(3), steps())(2, x))


def test_gradients_flow_through_bind(net: Unet1dBackbone) -> None:
    x, _, cond = inputs(3)
    times = steps()
    with torch.no_grad():
        net.bind(cond, times)  # a remembered table must not cut the graph
        net(x, times[:3], cond)
    x.requires_grad_(), cond.vec.requires_grad_()
    ours, theirs = net.bind(cond, times)(1, x), Textbook(net)(x, times[1].expand(3), cond)
    assert_same(gradients(net, ours, x, cond.vec), gradients(net, theirs, x, cond.vec))


def test_bound_field_of_frozen_weights_is_differentiable_in_the_state(net: Unet1dBackbone) -> None:
    net.requires_grad_(False)
    x, _, cond = inputs(3)
    times = steps()
    x.requires_grad_()
    (theirs,) = torch.autograd.grad(Textbook(net)(x, times[1].expand(3), cond).sum(), x)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            bound = net.bind(Cond(cond.vec.clone()), times)
        if mode is torch.inference_mode:
            bound = net.bind(cond, times)  # tables made without a graph serve one that needs it
        (ours,) = torch.autograd.grad(bound(1, x).sum(), x)
        torch.testing.assert_close(ours, theirs)


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
            assert_same([ours], [theirs], 1e-7)


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
    net = built(Unet1dConfig(widths=(8,), groups=0, time_dim=8, kernel=1))  # rows that do not see each other
    x, _, cond = inputs(2)
    each = torch.arange(12).double().view(2, 6)
    with torch.no_grad():
        out = net(x, each, cond)
        for row in range(CHUNK[0]):
            alone = net(x, each[:, row], cond)
            torch.testing.assert_close(out[:, row], alone[:, row])


def test_coarser_levels_see_the_mean_of_embedded_times() -> None:
    net = built(CONFIGS["three-levels"])
    rows = torch.arange(6.0).view(1, 6, 1)
    fine, coarse, coarsest = net.unet.coarsened(rows)
    assert fine.flatten().tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert coarse.flatten().tolist() == [0.5, 2.5, 4.5, 5]
    assert coarsest.flatten().tolist() == [1.5, 4.75]


def test_a_second_time_has_an_embedding_of_its_own_that_is_added() -> None:
    net = built(CONFIGS["bias-residual-encoder"], second_time=True)
    x, time, cond = inputs(3)
    second = time.flip(0) + 0.5
    ours, theirs = net(x, time, cond, second_time=second), Textbook(net)(x, time, cond, second)
    torch.testing.assert_close(ours, theirs)
    assert_same(gradients(net, ours), gradients(net, theirs))
    with torch.no_grad():
        bound = net.bind(cond, time, second)
        torch.testing.assert_close(bound(1, x)[1], ours[1])
        moved = net.bind(cond, time, second + 1)(1, x)
    assert not torch.allclose(moved[1], ours[1])


def test_a_second_time_that_is_missing_or_not_expected_is_refused(small: Unet1dBackbone) -> None:
    x, time, cond = inputs(3)
    with pytest.raises(CapabilityError, match="built with a second time and called without"):
        built(CONFIGS["one-level"], second_time=True)(x, time, cond)
    with pytest.raises(CapabilityError, match="built without a second time and called with"):
        small(x, time, cond, second_time=time)


# -- state ------------------------------------------------------------------------------------------------


def test_rows_do_not_influence_each_other(net: Unet1dBackbone) -> None:
    x, time, cond = inputs(4)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    with torch.no_grad():
        for evaluate in (lambda x: net(x, time, cond), lambda x: net.bind(cond, steps())(0, x)):
            assert torch.equal(evaluate(x)[[0, 1, 3]], evaluate(spoiled)[[0, 1, 3]])
            assert evaluate(spoiled)[2].isnan().all()


def _fused_step(net: Unet1dBackbone) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    net(*inputs(3)).square().sum().backward()
    with torch.no_grad():
        net.bind(inputs(3)[2], steps())  # acting between backward and step
    optimizer.step()


@torch.no_grad()
def _perturb_a_convolution(net: Unet1dBackbone) -> None:
    weight = net.unet.blocks[1].second.conv.weight
    weight.add_(torch.cos(torch.arange(weight.numel()).double()).view_as(weight))


@torch.no_grad()
def _perturb_time_embedding(net: Unet1dBackbone) -> None:
    net.time_embedding.linear1.bias.add_(3.0)


def _load_other(net: Unet1dBackbone) -> None:
    net.load_state_dict({name: value + 0.1 for name, value in net.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [_fused_step, _perturb_a_convolution, _perturb_time_embedding, _load_other],
    ids=["fused", "convolution", "time-embedding", "load"],
)
def test_acting_follows_the_weights(small: Unet1dBackbone, change: Callable[[Unet1dBackbone], None]) -> None:
    x, _, cond = inputs(3)
    times = steps()
    with torch.no_grad():
        before = small.bind(cond, times)(2, x)
    change(small)
    with torch.no_grad():
        after, time = small.bind(cond, times)(2, x), times[2].expand(3)
        expected = Textbook(small)(x, time, cond)
        torch.testing.assert_close(after, expected)
        torch.testing.assert_close(small(x, time, cond), expected)
    assert (after - before).abs().max() > 1e-3


def test_acting_follows_the_times(small: Unet1dBackbone) -> None:
    x, _, cond = inputs(3)
    times = steps()
    with torch.no_grad():
        small.bind(cond, times)
        times.add_(1.0)
        torch.testing.assert_close(
            small.bind(cond, times)(0, x), Textbook(small)(x, torch.ones(3).double(), cond)
        )


def test_copies_pickles_and_state_carry_no_tables(small: Unet1dBackbone) -> None:
    x, _, cond = inputs(3)
    times = steps()
    keys, size = set(small.state_dict()), len(pickle.dumps(small))
    with torch.no_grad():
        out = small.bind(cond, times)(0, x)
        assert set(small.state_dict()) == keys
        assert len(pickle.dumps(small)) == size
        for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            assert torch.equal(twin.bind(cond, times)(0, x), out)
            twin.unet.outlet.bias.add_(1.0)
            torch.testing.assert_close(twin.bind(cond, times)(0, x), out + 1)
        assert torch.equal(small.bind(cond, times)(0, x), out)


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
    net = built(CONFIGS["one-level"], (6, 8))
    keys = net.config.official_keys("dppo", action_dim=8)
    assert sorted(keys.values()) == sorted(dict(net.named_parameters()))
    assert net.unet.blocks[0].shortcut is None
    torch.testing.assert_close(net(*inputs(2, (6, 8))), Textbook(net)(*inputs(2, (6, 8))))


def test_official_keys_of_diffusion_policy_name_every_parameter_once() -> None:
    net = built(CONFIGS["three-levels"])
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
        CONFIGS[name].official_keys(program)


def test_configuration_survives_json_and_omegaconf() -> None:
    for config in CONFIGS.values():
        assert from_json("backbone", to_json("backbone", config)) == config
    assert tuple(OmegaConf.structured(Unet1dConfig).widths) == Unet1dConfig().widths


def test_backbone_satisfies_the_protocol(small: Unet1dBackbone) -> None:
    assert isinstance(small, Backbone) and issubclass(Unet1dConfig, UnetConfig)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"widths": ()}, "widths must be one or more, each at least 1; got []"),
        ({"widths": (8, 0)}, "widths must be one or more, each at least 1"),
        ({"kernel": 4}, "kernel must be odd; got 4"),
        ({"groups": 3}, "groups must be 0 or a divisor of every width of (64, 128, 256); got 3"),
        ({"groups": -1}, "groups must be at least 0; got -1"),
        ({"final_groups": 7}, "final_groups must be 0 or a divisor of every width of (64,); got 7"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0; got 0.0"),
        ({"time_dim": 7}, "time_dim must be even and at least 4; got 7"),
        ({"time_expansion": 0}, "time_expansion must be at least 1; got 0"),
        ({"film": "shift"}, "film must be one of one_plus_scale, scale, bias; got 'shift'"),
        ({"film_layers": 2}, "film_layers must be one of 1, 3; got 2"),
        ({"cond_dims": (4,)}, "cond_dims must be an odd number of equal hidden widths and an output width"),
        ({"cond_dims": (4, 5, 4, 3)}, "an odd number of equal hidden widths"),
        ({"cond_dims": (4, 0)}, "cond_dims must be at least 1"),
        (
            {"times": "positional", "time_dim": 6},
            "time_dim must be a multiple of 4 for backbone.times=positional",
        ),
        (
            {"activation": "swish"},
            "activation must be one of relu, mish, tanh, silu, gelu, gelu_erf, leaky_relu; got 'swish'",
        ),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Unet1dConfig(**fields)
    assert message in str(refused.value) and str(refused.value).startswith("backbone.")


def test_tokens_are_refused() -> None:
    with pytest.raises(CapabilityError, match="backbone=unet1d cannot attend to tokens"):
        CONFIGS["one-level"].build(CHUNK, COND, token_dim=3)


# -- tracing ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it a perceptron is compiled")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_gradients_of_a_compiled_network_equal_eager_ones() -> None:
    small = built(CONFIGS["one-level"])
    x, _, cond = inputs(3)
    times, row = steps(), torch.tensor([2, 0, 0])

    def shared(x: Tensor, vec: Tensor) -> Tensor:
        return small(x, times, Cond(vec), cond_row=row, time_row=row)

    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    assert_same(gradients(small, compiled(x, cond.vec)), gradients(small, shared(x, cond.vec)))
