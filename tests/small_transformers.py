"""The smallest transformer backbones, away from the zeros that they start with, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policies.backbones.dp_transformer import DpTransformerConfig
from policies.backbones.gpt import GptConfig
from policies.backbones.transformer import TransformerConfig
from policies.protocols import Cond

CHUNK, COND, STEPS, TOKENS = (5, 3), 6, 6, (2, 7)
"""(Th, Da), C (cut into one, two or three parts), K and (N, Ct)."""

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2}

CONFIGS: dict[str, Any] = {
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


def build(name: str, *, second_time: bool = False, chunk: tuple[int, int] = CHUNK, **changes: Any) -> Any:
    """Build a backbone in evaluation mode, all of whose weights matter."""
    config = CONFIGS[name]
    token_dim = TOKENS[1] if name.endswith("-tokens") else 0
    config = type(config)(**(vars(config) | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = config.build(chunk, COND, token_dim=token_dim, second_time=second_time).eval()
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
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


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float) -> None:
    """Compare lists of gradients, each by its norm."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= rtol * b.norm() + rtol * 1e-3
