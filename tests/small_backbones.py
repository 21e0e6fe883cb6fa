"""The smallest backbones of every kind, with weights that all matter, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from policies.backbones.dp_transformer import DpTransformerConfig
from policies.backbones.gpt import GptConfig
from policies.backbones.mlp import MlpConfig
from policies.backbones.transformer import TransformerConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.protocols import Cond

CHUNK, COND, STEPS, TOKENS = (5, 3), 6, 6, (2, 7)
"""(Th, Da), C (cut into one, two or three parts), K and (N, Ct)."""

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2}

MLPS = {
    "mlp-one-block": MlpConfig(width=16, time_dim=8),
    "mlp-one-block-mish-norm": MlpConfig(width=16, time_dim=8, activation="mish", layer_norm=True),
    "mlp-three-blocks": MlpConfig(width=16, num_blocks=3, time_dim=8),
    "mlp-two-blocks-mish-norm-encoder": MlpConfig(
        width=16, num_blocks=2, time_dim=8, activation="mish", layer_norm=True, cond_dims=(9, 4)
    ),
    "mlp-encoder-of-its-own": MlpConfig(width=16, time_dim=8, cond_dims=(9, 4), cond_activation="tanh"),
    "mlp-plain": MlpConfig(residual=False, hidden_dims=(16, 10), time_dim=8),
    "mlp-plain-norm": MlpConfig(
        residual=False, hidden_dims=(16, 10), time_dim=8, layer_norm=True, activation="mish"
    ),
    "mlp-expanded": MlpConfig(
        width=16, num_blocks=2, time_dim=8, activation="mish", layer_norm=True, expansion=2
    ),
    "mlp-narrower-than-the-chunk": MlpConfig(width=8, time_dim=4),
}

UNETS = {
    "unet-three-levels": Unet1dConfig(widths=(8, 12, 16), groups=2, time_dim=8, kernel=3),
    "unet-scale-deep-relu": Unet1dConfig(
        widths=(8, 16), groups=4, final_groups=2, film="scale", film_layers=3, activation="relu", time_dim=8
    ),
    "unet-bias-residual-encoder": Unet1dConfig(
        widths=(8, 8), groups=2, film="bias", cond_dims=(6, 6, 6, 4), time_dim=8, norm_eps=1e-3
    ),
    "unet-plain-linear-encoder": Unet1dConfig(
        widths=(8, 16), groups=0, final_groups=2, cond_dims=(6, 4), time_dim=8, time_expansion=1
    ),
    "unet-one-level": Unet1dConfig(widths=(8,), groups=2, time_dim=4, film="bias", film_layers=3),
    "unet-positional-plain-encoder": Unet1dConfig(
        widths=(8, 16),
        groups=2,
        film="scale",
        times="positional",
        time_dim=8,
        cond_dims=(6, 4),
        cond_activation="tanh",
    ),
}

TRANSFORMERS: dict[str, Any] = {
    "dit": TransformerConfig(**SMALL, time_dim=8),
    "dit-causal": TransformerConfig(**SMALL, time_dim=8, causal=True),
    "dit-narrow-ffn": TransformerConfig(**(SMALL | {"depth": 1, "heads": 4}), time_dim=4, ffn_ratio=1),
    "dit-tokens": TransformerConfig(**SMALL, time_dim=8),
    "dp": DpTransformerConfig(**SMALL, obs_tokens=2),
    "dp-one-token": DpTransformerConfig(**SMALL),
    "dp-blocks-in-memory": DpTransformerConfig(**SMALL, obs_tokens=3, memory_depth=2),
    "dp-sees-all": DpTransformerConfig(**SMALL, obs_tokens=2, causal=False),
    "gpt": GptConfig(**SMALL, obs_tokens=2),
    "gpt-goals": GptConfig(**SMALL, obs_tokens=3, goal_tokens=1, goal_unread=(1,), outlet_width=8),
}

CONFIGS: dict[str, Any] = MLPS | UNETS | TRANSFORMERS


def build(name: str, *, second_time: bool = False, chunk: tuple[int, int] = CHUNK, **changes: Any) -> Any:
    """Build a backbone in evaluation mode, all of whose weights matter."""
    config = CONFIGS[name]
    token_dim = TOKENS[1] if name.endswith("-tokens") else 0
    config = type(config)(**(vars(config) | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = config.build(chunk, COND, token_dim=token_dim, second_time=second_time).eval()
        with torch.no_grad():
            for weight in net.parameters() if name in TRANSFORMERS else ():  # some start at zero
                weight.add_(0.2 * torch.randn_like(weight))
            for part in net.modules():
                if isinstance(part, nn.GroupNorm):
                    nn.init.uniform_(part.weight, 0.5, 1.5)
                    nn.init.uniform_(part.bias, -0.5, 0.5)
    return net


def inputs(net: Any, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Cond]:
    """Draw n chunks, times and conditions, with tokens where the network attends to some."""
    generator = torch.Generator().manual_seed(seed)
    like = next(net.parameters())

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(like.dtype)

    x, cond = draw(*net.chunk_shape), draw(COND)
    tokens = draw(*TOKENS) if getattr(net, "token_inlet", None) is not None else None
    return x, torch.randint(STEPS, (n,), generator=generator).to(like.dtype), Cond(cond, tokens)


def gradients(out: Tensor, *of: Tensor) -> list[Tensor]:
    """Differentiate a sum of all outputs with different weights; zeros where nothing depends."""
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return list(torch.autograd.grad((out * weight).sum(), of, materialize_grads=True))


def assert_same(
    ours: list[Tensor], theirs: list[Tensor], rtol: float, *, share: float = 1e-3, scale: float = 1.0
) -> None:
    """Compare lists of gradients, each by its norm; those that are nearly zero by a share of the scale."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= rtol * (b.norm() + share * scale)
