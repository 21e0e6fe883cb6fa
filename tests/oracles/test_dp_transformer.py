"""The transformer of Diffusion Policy equals the released one: outputs, masks and every gradient.

The number of heads leaves no trace in the weights. Where a file does not record it, it is the one number with
which the recorded output comes out; with any other the difference is of the size of the output. Gradients are
compared with those of a network of PyTorch's own layers, which must reproduce the recorded output first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import install, read
from plain_transformer import PlainTransformer
from torch import Tensor

from policies.backbones.dp_transformer import DpTransformer, DpTransformerConfig
from policies.networks.attention import set_attention
from policies.protocols import Cond

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
"""Stated with the reference numbers."""

BUFFERS = {"mask", "memory_mask", "_dummy_variable"}
"""What the released network saves beside its weights."""


def weights_of(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name[2:]: value for name, value in arrays.items() if name.startswith("w/")}
    return {name: value for name, value in named.items() if name not in BUFFERS}


def count(weights: dict[str, Tensor], prefix: str) -> int:
    """Count the layers of a stack."""
    return len({name.removeprefix(prefix).split(".")[0] for name in weights if name.startswith(prefix)})


def configure(arrays: dict[str, Tensor], heads: int) -> DpTransformerConfig:
    weights = weights_of(arrays)
    return DpTransformerConfig(
        width=weights["pos_emb"].shape[2],
        depth=count(weights, "decoder.layers."),
        heads=heads,
        memory_depth=count(weights, "encoder.layers."),
        obs_tokens=arrays["cond"].shape[1],
        causal="w/mask" in arrays,
    )


def build(arrays: dict[str, Tensor], heads: int) -> DpTransformer:
    config = configure(arrays, heads)
    net = config.build(tuple(arrays["x"].shape[1:]), arrays["cond"][0].numel())
    install(net, config.official_keys(), weights_of(arrays))
    return net.eval()


def inputs_of(arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor, Cond]:
    return arrays["x"], arrays["t"].float(), Cond(arrays["cond"].flatten(1))


def released(path: Path) -> tuple[dict[str, Tensor], DpTransformer]:
    """Return the arrays of a file and our network with its weights."""
    arrays = read(path)
    for name in ("heads", "n_head", "num_heads"):
        if name in arrays:
            return arrays, build(arrays, int(arrays[name]))
    width = arrays["w/pos_emb"].shape[2]
    nets = [build(arrays, heads) for heads in range(1, width + 1) if width % heads == 0]
    outputs = [net(*inputs_of(arrays)).detach() for net in nets]
    fitting = [
        net for net, out in zip(nets, outputs, strict=True) if torch.allclose(out, arrays["y"], **TOLERANCE)
    ]
    differences = [float((out - arrays["y"]).abs().max()) for out in outputs]
    assert len(fitting) == 1, f"differences by number of heads: {differences}"
    return arrays, fitting[0]


def gradients(out: Tensor, *of: Tensor) -> list[Tensor]:
    weight = torch.cos(torch.arange(out.numel())).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), of))


@pytest.mark.golden("dp_transformer*.npz")
@pytest.mark.parametrize("how", ["auto", "math"])
def test_forward_equals_the_released_network(golden_path: Path, how: str) -> None:
    arrays, net = released(golden_path)
    set_attention(net, how)
    x, time, cond = inputs_of(arrays)
    torch.testing.assert_close(net(x, time, cond), arrays["y"], **TOLERANCE)
    order = torch.arange(len(x))
    shared = net(x, time, cond, cond_row=order, time_row=order)
    torch.testing.assert_close(shared, arrays["y"], **TOLERANCE)


@pytest.mark.golden("dp_transformer*.npz")
@pytest.mark.parametrize("grad", [False, True])
def test_bound_field_equals_the_released_network(golden_path: Path, grad: bool) -> None:
    arrays, net = released(golden_path)
    x, time, cond = inputs_of(arrays)
    with torch.set_grad_enabled(grad):
        bound = net.bind(cond, time)
        rows = torch.stack([bound(k, x)[k] for k in range(len(x))])
    torch.testing.assert_close(rows, arrays["y"], **TOLERANCE)


@pytest.mark.golden("dp_transformer*.npz")
def test_masks_equal_the_released_ones(golden_path: Path) -> None:
    arrays, net = released(golden_path)
    for name in ("mask", "memory_mask"):
        ours, theirs = getattr(net, name), arrays.get(f"w/{name}")
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert torch.equal(torch.zeros_like(theirs).masked_fill(~ours, -torch.inf), theirs)


@pytest.mark.golden("dp_transformer*.npz")
@pytest.mark.parametrize("path", ["forward", "bind"])
def test_every_gradient_equals_that_of_pytorch_s_layers(golden_path: Path, path: str) -> None:
    arrays, net = released(golden_path)
    plain = PlainTransformer(net.config, net.chunk_shape, arrays["cond"].shape[2])
    plain.load_state_dict(weights_of(arrays), strict=True)
    x, time, cond = inputs_of(arrays)
    x.requires_grad_(), cond.vec.requires_grad_()
    theirs = plain(x, time, cond.vec.view_as(arrays["cond"]))
    torch.testing.assert_close(theirs, arrays["y"], **TOLERANCE)
    if path == "forward":
        ours = net(x, time, cond)
    else:
        bound = net.bind(cond, time)
        ours = torch.stack([bound(k, x)[k] for k in range(len(x))])
    keys, own = net.config.official_keys(), dict(net.named_parameters())
    expected = gradients(theirs, x, cond.vec, *plain.parameters())
    found = gradients(ours, x, cond.vec, *(own[keys[name]] for name, _ in plain.named_parameters()))
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, **TOLERANCE)
