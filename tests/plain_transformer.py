"""Diffusion Policy's transformer put together from PyTorch's own layers, under the released names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from policies.backbones.dp_transformer import DpTransformerConfig
from policies.networks.embeddings import sinusoid


class PlainTransformer(nn.Module):
    """What `policies.backbones.dp_transformer` computes, written plainly: nothing shared, nothing kept."""

    def __init__(self, config: DpTransformerConfig, chunk_shape: tuple[int, int], obs_dim: int) -> None:
        super().__init__()
        (horizon, action_dim), width = chunk_shape, config.width
        tokens = 1 + config.obs_tokens
        options = {"dropout": config.dropout, "activation": "gelu", "batch_first": True, "norm_first": True}
        sizes = (width, config.heads, 4 * width)
        self.pos_emb = nn.Parameter(torch.zeros(1, horizon, width))
        self.cond_pos_emb = nn.Parameter(torch.zeros(1, tokens, width))
        self.input_emb, self.cond_obs_emb = nn.Linear(action_dim, width), nn.Linear(obs_dim, width)
        self.encoder = (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(*sizes, **options),
                config.memory_depth,
                enable_nested_tensor=False,
            )
            if config.memory_depth
            else nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **options), config.depth)
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, action_dim)
        rows, columns = torch.arange(horizon)[:, None], torch.arange(tokens)[None]
        self.masks: tuple[Tensor | None, Tensor | None] = (None, None)
        if config.causal:
            self.masks = (torch.arange(horizon)[None] > rows, columns > rows + 1)  # True: hidden

    def forward(self, x: Tensor, time: Tensor, obs: Tensor) -> Tensor:
        """Evaluate; x (M, Th, Da), time (M,), obs (M, To, Do)."""
        waves = sinusoid(time.to(x.dtype), self.pos_emb.shape[-1])
        memory = torch.cat([waves.unsqueeze(1), self.cond_obs_emb(obs)], dim=1) + self.cond_pos_emb
        own, other = self.masks
        h = self.input_emb(x) + self.pos_emb
        h = self.decoder(h, self.encoder(memory), tgt_mask=own, memory_mask=other)
        return self.head(self.ln_f(h))
