"""Attention gives the same numbers both ways, and one of them can be differentiated as often as one likes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from torch import Tensor, nn

from policies.errors import ConfigError
from policies.networks.attention import (
    Attention,
    FeedForward,
    LayerNorm,
    causal_mask,
    explicit_attention,
    set_attention,
)

WIDTH, HEADS = 8, 2


@pytest.fixture
def attention() -> Attention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attention(WIDTH, HEADS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)  # fmt: skip


def torch_attention(ours: Attention) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    theirs.load_state_dict(dict(zip(names, ours.state_dict().values(), strict=True)))
    return theirs


@pytest.mark.parametrize("how", ["auto", "math"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_to_itself_is_that_of_pytorch(attention: Attention, how: str, masked: bool) -> None:
    set_attention(attention, how)
    h, mask = draw(3, 5, WIDTH), causal_mask(5) if masked else None
    theirs, _ = torch_attention(attention)(h, h, h, attn_mask=None if mask is None else ~mask)
    torch.testing.assert_close(attention(h, mask), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["auto", "math"])
@pytest.mark.parametrize("rows", [1, 3])
def test_reading_a_memory_is_attention_to_its_tokens(attention: Attention, how: str, rows: int) -> None:
    set_attention(attention, how)
    h, tokens = draw(3, 5, WIDTH), draw(rows, 2, WIDTH, seed=1)
    mask = torch.tensor([[True, False]] + 4 * [[True, True]])
    memory = attention.memory(tokens)
    assert memory.shape == (2, rows, HEADS, 2, WIDTH // HEADS)
    whole = tokens.expand(3, -1, -1)
    theirs, _ = torch_attention(attention)(h, whole, whole, attn_mask=~mask)
    torch.testing.assert_close(attention.read(h, memory, mask), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 600])
@pytest.mark.parametrize("masked", [False, True])
def test_both_ways_give_the_same_numbers_and_gradients(attention: Attention, rows: int, masked: bool) -> None:
    h, mask = draw(rows, 5, WIDTH).requires_grad_(), causal_mask(5) if masked else None
    results = []
    for how in ("auto", "math"):
        set_attention(attention, how)
        out = attention(h, mask)
        results.append([out, *torch.autograd.grad(out.cos().sum(), [h, *attention.parameters()])])
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(fused, explicit, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_the_explicit_way_has_derivatives_of_any_order() -> None:
    q, k, v = (draw(2, 1, 3, 2, seed=i, dtype=torch.float64).requires_grad_() for i in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return explicit_attention(q, k, v, causal_mask(3))

    assert torch.autograd.gradcheck(attend, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_explicit_normalisation_has_right_gradients_of_forward_mode_derivatives() -> None:
    """PyTorch's own lack a part, without an error; see the top of `policies/networks/attention.py`."""
    norm = LayerNorm(WIDTH).double()
    set_attention(norm, "math")
    x, tangent = draw(3, WIDTH, dtype=torch.float64), draw(3, WIDTH, seed=1, dtype=torch.float64)
    scale = torch.linspace(0.5, 2.0, WIDTH, dtype=torch.float64).requires_grad_()

    def derivative(scale: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: norm((scale * x).tanh()), (x,), (tangent,))[1]

    assert torch.autograd.gradcheck(derivative, (scale,))


@pytest.mark.parametrize("affine", [False, True])
def test_both_ways_of_normalising_give_the_same_numbers_and_gradients(affine: bool) -> None:
    norm = LayerNorm(WIDTH, elementwise_affine=affine)
    h = (3 + draw(4, 5, WIDTH)).requires_grad_()
    with torch.no_grad():
        for seed, weight in enumerate(norm.parameters()):
            weight.add_(draw(WIDTH, seed=seed))
    results = []
    for how in ("auto", "math"):
        set_attention(norm, how)
        out = norm(h)
        results.append([out, *torch.autograd.grad(out.cos().sum(), [h, *norm.parameters()])])
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(fused, explicit, rtol=1e-5, atol=1e-5)


def test_the_way_is_chosen_for_all_attention_inside_and_goes_with_copies() -> None:
    net = nn.Sequential(nn.ModuleList([Attention(WIDTH, 1)]), nn.Linear(2, 2), LayerNorm(WIDTH))
    set_attention(net, "math")
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [part.how for part in twin.modules() if hasattr(part, "how")] == ["math", "math"]
    set_attention(nn.Linear(2, 2), "math")


def test_an_unknown_way_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=mentions("flash auto math")):
        set_attention(Attention(WIDTH, HEADS), "flash")


@pytest.mark.parametrize("how", ["auto", "math"])
def test_dropout_drops_in_training_only_and_by_the_global_generator(how: str) -> None:
    attention, ffn = Attention(WIDTH, HEADS, dropout=0.5), FeedForward(WIDTH, WIDTH, dropout=0.5)
    set_attention(attention, how)
    h = draw(3, 5, WIDTH)
    with torch.random.fork_rng(), torch.no_grad():
        for layer in (attention, ffn):
            torch.manual_seed(1)
            first, second = layer.train()(h), layer(h)
            torch.manual_seed(1)
            assert torch.equal(layer(h), first) and not torch.equal(first, second)
            state = torch.get_rng_state()
            assert torch.equal(layer.eval()(h), layer(h))
            assert torch.equal(torch.get_rng_state(), state)


def test_dropped_attention_weights_keep_their_mean() -> None:
    q, k, v = draw(1, 1, 1, 2), draw(1, 1, 4, 2, seed=1), draw(1, 1, 4, 2, seed=2)
    many = q.expand(20000, -1, -1, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = explicit_attention(many, k, v, dropout_p=0.3)
    torch.testing.assert_close(dropped.mean(0), F.scaled_dot_product_attention(q, k, v)[0], rtol=0, atol=0.03)
