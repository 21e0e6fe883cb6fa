"""Diffusion Policy's transformer equals PyTorch's own layers, and shows every action what it may see."""

from __future__ import annotations

import pytest
import torch
from messages import mentions
from plain_transformer import PlainTransformer
from small_backbones import COND, CONFIGS, assert_same, build, gradients, inputs

from policies.backbones.dp_transformer import DpTransformerConfig
from policies.errors import CapabilityError, ConfigError
from policies.protocols import Cond

NAMES = [name for name in CONFIGS if name.startswith("dp")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_forward_and_all_gradients_equal_those_of_pytorch_s_layers(name: str, dropout: float) -> None:
    net = build(name, dropout=dropout).double()
    parts = net.config.obs_tokens
    plain = PlainTransformer(net.config, net.chunk_shape, COND // parts).double().eval()
    keys, own = net.config.official_keys(), dict(net.named_parameters())
    plain.load_state_dict({theirs: own[ours] for theirs, ours in keys.items()}, strict=True)
    x, time, cond = inputs(net, 7)
    x.requires_grad_(), cond.vec.requires_grad_()
    ours = net(x, time, cond)
    theirs = plain(x, time, cond.vec.unflatten(-1, (parts, -1)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    found = gradients(ours, x, cond.vec, *(own[keys[name]] for name, _ in plain.named_parameters()))
    assert_same(found, gradients(theirs, x, cond.vec, *plain.parameters()), 1e-11)


def test_training_with_dropout_drops_as_much_as_pytorch_s_layers() -> None:
    """Not the same numbers, which come in another order, but the same mean and spread over many draws."""
    net = build("dp", dropout=0.3)
    plain = PlainTransformer(net.config, net.chunk_shape, COND // 2)
    keys, own = net.config.official_keys(), dict(net.named_parameters())
    plain.load_state_dict({theirs: own[ours] for theirs, ours in keys.items()})
    x, time, cond = inputs(net, 1)
    many = 4000
    x, time, cond = x.expand(many, -1, -1), time.expand(many), cond.repeat(many)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        ours = net.train()(x, time, cond)
        theirs = plain.train()(x, time, cond.vec.unflatten(-1, (2, -1)))
    spread = theirs.std(0)
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * spread * (2 / many) ** 0.5).all()
    torch.testing.assert_close(ours.std(0), spread, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_official_keys_name_every_parameter_once(name: str) -> None:
    net = build(name)
    assert sorted(net.config.official_keys().values()) == sorted(dict(net.named_parameters()))


@pytest.mark.parametrize(
    ("width", "chunk_shape", "obs_steps", "obs_dim", "millions", "digits"),
    [(256, (16, 2), 2, 20, 8.97, 2), (768, (16, 9), 4, 60, 80.4, 1)],
    ids=["push-t", "kitchen"],
)
def test_published_sizes_have_the_published_number_of_weights(
    width: int, chunk_shape: tuple[int, int], obs_steps: int, obs_dim: int, millions: float, digits: int
) -> None:
    config = DpTransformerConfig(width=width, depth=8, heads=4, obs_tokens=obs_steps)
    with torch.device("meta"):
        net = config.build(chunk_shape, obs_steps * obs_dim)
    assert round(sum(weight.numel() for weight in net.parameters()) / 1e6, digits) == millions


def test_an_action_sees_earlier_actions_and_observations_up_to_its_own() -> None:
    net = build("dp", obs_tokens=3).double()
    x, time, cond = inputs(net, 2)
    x.requires_grad_(), cond.vec.requires_grad_()
    out = net(x, time, cond)
    for action in range(x.shape[1]):
        of_x, of_obs = torch.autograd.grad(out[:, action].sum(), [x, cond.vec], retain_graph=True)
        sees_actions = (of_x.abs().amax((0, 2)) > 0).tolist()
        sees_observations = (of_obs.unflatten(-1, (3, 2)).abs().amax((0, 2)) > 0).tolist()
        assert sees_actions == [other <= action for other in range(x.shape[1])]
        assert sees_observations == [step <= action for step in range(3)]


def test_without_causality_every_action_sees_everything() -> None:
    net = build("dp-sees-all")
    x, time, cond = inputs(net, 2)
    x.requires_grad_(), cond.vec.requires_grad_()
    of_x, of_obs = torch.autograd.grad(net(x, time, cond)[:, 0].sum(), [x, cond.vec])
    assert bool((of_x != 0).all()) and bool((of_obs != 0).all())


def test_a_time_for_every_action_and_tokens_are_refused() -> None:
    net = build("dp")
    x, time, cond = inputs(net, 2)
    with pytest.raises(CapabilityError, match=r"one time per chunk, \(M,\); got \(2, 5\)"):
        net(x, time[:, None].expand(-1, 5), cond)
    with pytest.raises(CapabilityError, match="dp_transformer makes its tokens from the condition vector"):
        net.config.build((5, 3), COND, token_dim=3)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=mentions("backbone.heads backbone.width=6 4")):
        DpTransformerConfig(width=6, heads=4)


def test_a_condition_that_cannot_be_cut_or_stays_unseen_is_refused() -> None:
    with pytest.raises(ConfigError, match="equal parts; got 2 for a width of 7"):
        DpTransformerConfig(obs_tokens=2).build((4, 3), 7)
    with pytest.raises(ConfigError, match=r"at least backbone\.obs_tokens=3; got 2"):
        DpTransformerConfig(obs_tokens=3).build((2, 3), 6)
    net = DpTransformerConfig(width=4, depth=1, obs_tokens=3, causal=False).build((2, 3), 6)
    assert net(torch.zeros(1, 2, 3), torch.zeros(1), Cond(torch.zeros(1, 6))).shape == (1, 2, 3)
