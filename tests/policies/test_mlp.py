"""The MLP backbone does less work than the textbook network and computes the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from pairwise import each_value, everything, repeated
from torch import Tensor, nn

from policies.backbones import Backbone
from policies.backbones.mlp import MlpBackbone, MlpConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.embeddings import sinusoid
from policies.networks.mlp_blocks import ExpandedTrunk, PlainTrunk
from policies.protocols import Cond
from policies.registry import from_json, to_json

CHUNK, COND, STEPS = (4, 3), 5, 6

CONFIGS = {
    "one-block": MlpConfig(width=16, time_dim=8),
    "one-block-mish-norm": MlpConfig(width=16, time_dim=8, activation="mish", layer_norm=True),
    "three-blocks": MlpConfig(width=16, num_blocks=3, time_dim=8),
    "two-blocks-mish-norm-encoder": MlpConfig(
        width=16, num_blocks=2, time_dim=8, activation="mish", layer_norm=True, cond_dims=(9, 4)
    ),
    "encoder-of-its-own": MlpConfig(width=16, time_dim=8, cond_dims=(9, 4), cond_activation="tanh"),
    "plain": MlpConfig(residual=False, hidden_dims=(16, 10), time_dim=8),
    "plain-norm": MlpConfig(
        residual=False, hidden_dims=(16, 10), time_dim=8, layer_norm=True, activation="mish"
    ),
    "expanded": MlpConfig(
        width=16, num_blocks=2, time_dim=8, activation="mish", layer_norm=True, expansion=2
    ),
    "narrower-than-the-chunk": MlpConfig(width=8, time_dim=4),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def net(request: pytest.FixtureRequest) -> MlpBackbone:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return request.param.build(CHUNK, COND)


@pytest.fixture
def one_block() -> MlpBackbone:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CONFIGS["one-block"].build(CHUNK, COND)


def inputs(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Cond]:
    generator = torch.Generator().manual_seed(n)
    draw = [
        torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (CHUNK, (COND,))
    ]
    return draw[0], torch.randint(STEPS, (n,), generator=generator).to(dtype), Cond(draw[1])


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


def gradients(net: MlpBackbone, out: Tensor, *others: Tensor) -> list[Tensor]:
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), [*net.parameters(), *others]))


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= rtol * b.norm() + 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_forward_and_all_gradients_equal_the_textbook_network(
    net: MlpBackbone, dtype: torch.dtype, tolerance: float
) -> None:
    net = net.to(dtype)
    x, time, cond = inputs(7, dtype)
    x.requires_grad_(), cond.vec.requires_grad_()
    ours, theirs = net(x, time, cond), textbook(net, x, time, cond)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert_same(gradients(net, ours, x, cond.vec), gradients(net, theirs, x, cond.vec), tolerance)


@pytest.mark.parametrize("shared", ["time", "cond", "both"])
def test_shared_rows_equal_repeated_rows(net: MlpBackbone, shared: str) -> None:
    x, _, cond = inputs(9)
    times = torch.arange(STEPS).float()
    step, row = torch.randint(STEPS, (9,)), torch.randint(4, (9,))
    few = Cond(cond.vec[:4].clone().requires_grad_())
    time_args = (times, step) if shared != "cond" else (times[step], None)
    cond_args = (few, row) if shared != "time" else (few.rows(row), None)
    ours = net(x, time_args[0], cond_args[0], cond_row=cond_args[1], time_row=time_args[1])
    theirs = textbook(net, x, times[step], few.rows(row))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_same(gradients(net, ours, few.vec), gradients(net, theirs, few.vec), 1e-5)


@pytest.mark.parametrize(("batch", "grad"), each_value([1, 3, 600], [False, True]))
def test_bind_equals_forward(net: MlpBackbone, batch: int, grad: bool) -> None:
    x, _, cond = inputs(batch)
    times = torch.arange(STEPS).float()
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # the second time from the tables of the first
            bound = net.bind(cond, times)
            for k in range(STEPS):
                torch.testing.assert_close(
                    bound(k, x), net(x, times[k].expand(batch), cond), rtol=1e-5, atol=1e-6
                )


def test_one_condition_may_be_shared_by_all_rows(net: MlpBackbone) -> None:
    x, _, cond = inputs(5)
    times = torch.arange(STEPS).float()
    one = Cond(cond.vec[:1])
    torch.testing.assert_close(net.bind(one, times)(2, x), net.bind(one.repeat(5), times)(2, x))


def test_gradients_flow_through_bind(net: MlpBackbone) -> None:
    x, _, cond = inputs(4)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        net.bind(cond, times)  # a remembered table must not cut the graph
    x.requires_grad_(), cond.vec.requires_grad_()
    ours, theirs = net.bind(cond, times)(1, x), textbook(net, x, times[1].expand(4), cond)
    assert_same(gradients(net, ours, x, cond.vec), gradients(net, theirs, x, cond.vec), 1e-5)


def test_bound_field_of_frozen_weights_is_differentiable_in_the_state(net: MlpBackbone) -> None:
    net.requires_grad_(False)
    x, _, cond = inputs(4)
    times = torch.arange(STEPS).float()
    x.requires_grad_()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            bound = net.bind(Cond(cond.vec.clone()), times)
        if mode is torch.inference_mode:
            bound = net.bind(cond, times)  # tables made without a graph serve one that needs it
        (ours,) = torch.autograd.grad(bound(1, x).sum(), x)
        (theirs,) = torch.autograd.grad(textbook(net, x, times[1].expand(4), cond).sum(), x)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_rows_do_not_influence_each_other(net: MlpBackbone) -> None:
    x, time, cond = inputs(6)
    times = torch.arange(STEPS).float()
    spoiled = x.clone()
    spoiled[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    with torch.no_grad():
        for evaluate in (lambda x: net(x, time, cond), lambda x: net.bind(cond, times)(0, x)):
            assert torch.equal(evaluate(x)[others], evaluate(spoiled)[others])
            assert evaluate(spoiled)[2].isnan().all()


def _optimizer_step(**options: bool) -> Callable[[MlpBackbone], None]:
    def change(net: MlpBackbone) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
        net(*inputs(4)).square().sum().backward()
        with torch.no_grad():
            net.bind(inputs(4)[2], torch.arange(STEPS).float())  # acting between backward and step
        optimizer.step()

    return change


@torch.no_grad()
def _perturb_last_block(net: MlpBackbone) -> None:
    weight = (
        net.trunk.blocks[-1].linear2.weight if hasattr(net.trunk, "blocks") else net.trunk.layers[-1].weight
    )
    weight.add_(torch.randn_like(weight))


@torch.no_grad()
def _perturb_time_embedding(net: MlpBackbone) -> None:
    net.time_embedding.linear1.bias.add_(1.0)


def _load_other(net: MlpBackbone) -> None:
    net.load_state_dict({name: value + 0.1 for name, value in net.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        _optimizer_step(fused=True),
        _optimizer_step(foreach=True),
        _optimizer_step(foreach=False),
        _perturb_last_block,
        _perturb_time_embedding,
        _load_other,
    ],
    ids=["fused", "foreach", "single", "in-place", "time-embedding", "load"],
)
def test_acting_follows_the_weights(net: MlpBackbone, change: Callable[[MlpBackbone], None]) -> None:
    x, _, cond = inputs(3)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        before = net.bind(cond, times)(2, x)
    change(net)
    with torch.no_grad():
        after = net.bind(cond, times)(2, x)
        time = times[2].expand(3)
        expected = textbook(net, x, time, cond)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(net(x, time, cond), expected, rtol=1e-5, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


def test_acting_follows_the_times(one_block: MlpBackbone) -> None:
    x, _, cond = inputs(3)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        one_block.bind(cond, times)
        times.add_(1.0)
        torch.testing.assert_close(
            one_block.bind(cond, times)(0, x), textbook(one_block, x, torch.ones(3), cond)
        )


def test_acting_follows_a_change_of_type(one_block: MlpBackbone) -> None:
    x, _, cond = inputs(3)
    with torch.no_grad():
        one_block.bind(cond, torch.arange(STEPS).float())
        one_block.double()
        out = one_block.bind(Cond(cond.vec.double()), torch.arange(STEPS).double())(0, x.double())
    assert out.dtype == torch.float64


def test_copies_pickles_and_state_carry_no_tables(one_block: MlpBackbone) -> None:
    x, _, cond = inputs(3)
    times = torch.arange(STEPS).float()
    keys, size = set(one_block.state_dict()), len(pickle.dumps(one_block))
    with torch.no_grad():
        out = one_block.bind(cond, times)(0, x)
        assert set(one_block.state_dict()) == keys
        assert len(pickle.dumps(one_block)) == size
        for twin in (copy.deepcopy(one_block), pickle.loads(pickle.dumps(one_block))):
            assert torch.equal(twin.bind(cond, times)(0, x), out)
            twin.trunk.outlet.bias.add_(1.0)
            torch.testing.assert_close(twin.bind(cond, times)(0, x), out + 1)
        assert torch.equal(one_block.bind(cond, times)(0, x), out)


def test_official_keys_name_every_parameter_once(net: MlpBackbone) -> None:
    if net.config.expansion is not None:  # of MIP, whose names its source has
        with pytest.raises(ConfigError, match=r"no MLP with backbone.expansion"):
            net.config.official_keys()
        return
    assert sorted(net.config.official_keys().values()) == sorted(dict(net.named_parameters()))


def test_configuration_survives_json_and_omegaconf() -> None:
    for config in CONFIGS.values():
        assert from_json("backbone", to_json("backbone", config)) == config
    assert OmegaConf.structured(MlpConfig).width == MlpConfig().width


def test_backbone_satisfies_the_protocol(one_block: MlpBackbone) -> None:
    assert isinstance(one_block, Backbone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1; got 0"),
        (
            {"activation": "swish"},
            "activation must be one of relu, mish, tanh, silu, gelu, gelu_erf, leaky_relu; got 'swish'",
        ),
        ({"expansion": 2}, "backbone.expansion must be null without residual=true and layer_norm=true"),
        ({"times": "waves"}, "backbone.times must be one of learned, octaves, uniform, joint; got 'waves'"),
        ({"time_dim": 7}, "time_dim must be even and at least 4; got 7"),
        ({"time_dim": 2}, "time_dim must be even and at least 4; got 2"),
        ({"cond_dims": (4, 0)}, "cond_dims must be at least 1"),
        ({"residual": False}, "residual=false needs hidden_dims"),
        ({"hidden_dims": (8,)}, "no hidden_dims; got hidden_dims="),
        ({"residual": False, "hidden_dims": (8, -1)}, "hidden_dims must be at least 1"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        MlpConfig(**fields)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", repeated(["two-blocks-mish-norm-encoder", "plain-norm"]))
def test_gradients_of_a_compiled_network_equal_eager_ones(name: str) -> None:
    net = CONFIGS[name].build(CHUNK, COND)
    x, _, cond = inputs(5)
    times, row = torch.arange(STEPS).float(), torch.randint(5, (5,))

    def shared(x: Tensor, vec: Tensor) -> Tensor:
        return net(x, times, Cond(vec), cond_row=row, time_row=row)

    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    assert_same(gradients(net, compiled(x, cond.vec)), gradients(net, shared(x, cond.vec)), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(not everything, reason="with --all: without it the contracts compile the loops")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_loop_equals_eager(backend: str, one_block: MlpBackbone) -> None:
    x, _, cond = inputs(5)
    times = torch.arange(STEPS).float()

    def loop(x: Tensor, vec: Tensor) -> Tensor:
        bound = one_block.bind(Cond(vec), times)
        return bound(1, bound(0, x))

    with torch.no_grad():
        compiled = torch.compile(loop, fullgraph=True, backend=backend)
        with torch._inductor.config.patch(compile_threads=1):  # a pool of processes takes longer to start
            torch.testing.assert_close(compiled(x, cond.vec), loop(x, cond.vec), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_exported_loop_follows_any_batch(one_block: MlpBackbone) -> None:
    times = torch.arange(STEPS).float()

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = one_block

        def forward(self, x: Tensor, vec: Tensor) -> Tensor:
            bound = self.net.bind(Cond(vec), times)
            for k in range(3):
                x = bound(k, x)
            return x

    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        x, _, cond = inputs(4)
        program = torch.export.export(Loop(), (x, cond.vec), dynamic_shapes=({0: batch}, {0: batch})).module()
        for n in (1, 2, 7):
            x, _, cond = inputs(n)
            torch.testing.assert_close(program(x, cond.vec), Loop()(x, cond.vec), rtol=1e-5, atol=1e-6)


# -- a second time ----------------------------------------------------------------------------------------


@pytest.fixture
def two_times() -> MlpBackbone:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CONFIGS["two-blocks-mish-norm-encoder"].build(CHUNK, COND, second_time=True)


def test_a_second_time_has_an_embedding_of_its_own_that_is_added(two_times: MlpBackbone) -> None:
    net = two_times.double()
    x, time, cond = inputs(7, torch.float64)
    second = time.flip(0) + 0.5
    ours, theirs = net(x, time, cond, second_time=second), textbook(net, x, time, cond, second)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same(gradients(net, ours), gradients(net, theirs), 1e-12)


def test_bind_and_shared_rows_carry_the_second_time(two_times: MlpBackbone) -> None:
    x, _, cond = inputs(9)
    times = torch.arange(STEPS).float()
    seconds, row = times.flip(0) / 3, torch.arange(9) % STEPS
    with torch.no_grad():
        for _ in range(2):  # the second time from the tables of the first
            bound = two_times.bind(cond, times, seconds)
            for k in range(STEPS):
                here = two_times(x, times[k].expand(9), cond, second_time=seconds[k].expand(9))
                torch.testing.assert_close(bound(k, x), here, rtol=1e-5, atol=1e-6)
        shared = two_times(x, times, cond, time_row=row, second_time=seconds)
        plain = two_times(x, times[row], cond, second_time=seconds[row])
        moved = two_times.bind(cond, times, seconds + 1)(0, x)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(moved, bound(0, x))


def test_a_second_time_that_is_missing_or_not_expected_is_refused(two_times: MlpBackbone) -> None:
    x, time, cond = inputs(3)
    with pytest.raises(CapabilityError, match="built with a second time and called without"):
        two_times(x, time, cond)
    with pytest.raises(CapabilityError, match="built without a second time and called with"):
        CONFIGS["one-block"].build(CHUNK, COND)(x, time, cond, second_time=time)


def test_tokens_are_refused() -> None:
    with pytest.raises(CapabilityError, match="cannot attend to tokens"):
        CONFIGS["one-block"].build(CHUNK, COND, token_dim=3)
