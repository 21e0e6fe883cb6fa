"""Both sides of a comparison: the same sizes, weights and noise, and the check that they agree."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Setup
from algos.dppo import DppoConfig
from benchmarks.speed import peers
from envs.datasets.episodes import EpisodeDataset
from envs.make import env as make_env
from policies.backbones.transformer import TransformerConfig
from policies.backbones.unet1d import Unet1dConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM, DDPM

OBS, CHUNK, LEVELS, FT, ENVS = 11, (4, 3), 20, 10, 40
"""Observation, action chunk, denoising steps, tuned ones, environments: DPPO's sizes on Hopper."""

THREADS = 2  # of gradients, of both sides


def episodes(states: Tensor, actions: Tensor, length: int, rewards: Tensor | None = None) -> EpisodeDataset:
    """Return frames (N, ·) as episodes of one length, cut off at their ends; rewards are 0 by default."""
    starts, flags = torch.arange(0, len(states) + 1, length), torch.zeros(len(states), dtype=torch.bool)
    ends = flags.clone()
    ends[starts[1:] - 1] = True
    rewards = torch.zeros(len(states)) if rewards is None else rewards
    return EpisodeDataset(states, actions, rewards, flags, ends, starts)


@cache
def plain_nets() -> tuple[peers.PlainMlp, peers.PlainMlp, peers.PlainCritic]:
    """Return frozen actor, tuned actor and critic of the peer; the two actors differ slightly."""
    torch.manual_seed(0)
    frozen, critic = peers.PlainMlp(CHUNK, OBS), peers.PlainCritic(OBS)
    tuned = peers.PlainMlp(CHUNK, OBS)
    with torch.no_grad():
        for p, q in zip(tuned.parameters(), frozen.parameters(), strict=True):
            p.copy_(q + 1e-3 * torch.randn_like(q))
    return frozen, tuned, critic


def copy_trunk(source: nn.Module, target: nn.Module) -> None:
    """Copy a plain residual network's weights into ours."""
    names = {"inp": "inlet", "hidden1": "blocks.0.linear1", "hidden2": "blocks.0.linear2", "out": "outlet"}
    state = {
        f"trunk.{ours}.{k}": getattr(getattr(source, theirs), k)
        for theirs, ours in names.items()
        for k in ("weight", "bias")
    }
    if isinstance(source, peers.PlainMlp):
        for index, ours in ((1, "linear1"), (3, "linear2")):
            for k in ("weight", "bias"):
                state[f"time_embedding.{ours}.{k}"] = getattr(source.time[index], k)
    target.load_state_dict(state)


@torch.no_grad()
def copy_critics(ensemble: Any, critics: Iterable[nn.Module]) -> None:
    """Give plain critics, one module each, the weights of our ensemble."""
    for member, critic in enumerate(critics):
        values = [value for layer in ensemble.layers_of(member) for value in layer.values()]
        for theirs, value in zip(critic.parameters(), values, strict=True):
            theirs.copy_(value)


def unit_statistics(obs_dim: int = OBS, action_dim: int = CHUNK[1]) -> dict[str, dict[str, Tensor]]:
    """Return statistics that make normalisation the identity."""

    def of(dim: int) -> dict[str, Tensor]:
        one = torch.ones(dim)
        return {"min": -one, "max": one, "mean": 0 * one, "std": one}

    return {"state": of(obs_dim), "action": of(action_dim)}


def our_policy(net: nn.Module, **sampler: Any) -> DenoisingPolicy:
    """Return our policy with the peer's weights."""
    config = PolicyConfig(process=VPDiffusion(num_levels=LEVELS, prediction="eps"), sampler=DDPM(**sampler))
    policy = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    assert isinstance(policy, DenoisingPolicy)
    copy_trunk(net, policy.field)
    return policy.eval()


def push_t() -> tuple[peers.PlainUnet, DenoisingPolicy]:
    """Return the plain U-Net and our policy with its weights, at Diffusion Policy's size for Push-T."""
    widths, time_dim, obs_dim, obs_steps, chunk = (256, 512, 1024), 256, 20, 2, (16, 2)
    torch.manual_seed(0)
    plain = peers.PlainUnet(chunk, obs_dim * obs_steps, widths, time_dim)
    backbone = Unet1dConfig(widths=widths, time_dim=time_dim, film="scale", final_groups=8)
    config = PolicyConfig(
        process=VPDiffusion(num_levels=100, prediction="eps"),
        sampler=DDIM(steps=10, recompute_eps=False),
        backbone=backbone,
        obs_steps=obs_steps,
        horizon=chunk[0],
        act_steps=chunk[0],
    )
    policy = build_policy(
        config, obs_dim=obs_dim, action_dim=chunk[1], statistics=unit_statistics(obs_dim, chunk[1])
    )
    assert isinstance(policy, DenoisingPolicy)
    keys = backbone.official_keys("diffusion_policy")
    policy.field.load_state_dict({keys[name]: weight for name, weight in plain.state_dict().items()})
    return plain.eval(), policy.eval()


def small_dit(process: Any, sampler: Any) -> tuple[peers.PlainDit, DenoisingPolicy]:
    """Return the plain transformer and our policy with its weights: 16 actions, 6 blocks, 256 wide."""
    width, depth, heads, time_dim, obs_dim, chunk = 256, 6, 4, 64, 46, (16, 7)
    torch.manual_seed(0)
    plain = peers.PlainDit(chunk, obs_dim, width, depth, heads, time_dim)
    config = PolicyConfig(
        process=process,
        sampler=sampler,
        backbone=TransformerConfig(width=width, depth=depth, heads=heads, time_dim=time_dim),
        horizon=chunk[0],
        act_steps=chunk[0],
    )
    policy = build_policy(
        config, obs_dim=obs_dim, action_dim=chunk[1], statistics=unit_statistics(obs_dim, chunk[1])
    )
    assert isinstance(policy, DenoisingPolicy)
    _copy_dit(plain, policy.field)
    return plain.eval(), policy.eval()


@torch.no_grad()
def _copy_dit(plain: peers.PlainDit, ours: Any) -> None:
    """Copy weights; ours has the modulations of all sublayers in one product: scales, shifts, gates."""
    ours.inlet.load_state_dict(plain.inlet.state_dict())
    ours.outlet.load_state_dict(plain.outlet.state_dict())
    ours.positions.copy_(plain.positions)
    for i, name in ((1, "linear1"), (3, "linear2")):
        getattr(ours.time_embedding, name).load_state_dict(plain.time[i].state_dict())
    ours.cond_embedding.load_state_dict(plain.cond.state_dict())
    for block, source in zip(ours.blocks, plain.blocks, strict=True):
        block.attention.inlet.load_state_dict(source.qkv.state_dict())
        block.attention.outlet.load_state_dict(source.out.state_dict())
        linears = [part for part in block.ffn.modules() if isinstance(part, nn.Linear)]
        for linear, theirs in zip(linears, (source.ffn[0], source.ffn[2]), strict=True):
            linear.load_state_dict(theirs.state_dict())
    layers = [source.modulation for source in plain.blocks]
    for kind in ("weight", "bias"):
        per_block = [getattr(layer, kind).chunk(6) for layer in layers]
        last = getattr(plain.modulation, kind).chunk(2)
        scales, shifts, gates = ([b[i + j] for b in per_block for j in (0, 1)] for i in (0, 2, 4))
        whole = torch.cat([*scales, last[0], *shifts, last[1], *gates])
        if kind == "bias":
            ours.modulation.time.bias.copy_(whole)
            continue
        time_dim = ours.modulation.time.in_features
        ours.modulation.time.weight.copy_(whole[:, :time_dim])
        ours.modulation.cond.weight.copy_(whole[:, time_dim:])


def tape(batch: int, seed: int, *, last: bool, chunk: tuple[int, int] = CHUNK) -> Tensor:
    """Return the noise that a peer draws from a generator with this seed, as a tape (B, K+1, Th, Da)."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn((batch, *chunk), generator=generator) for _ in range(LEVELS + last)]
    return torch.stack(draws if last else [*draws, torch.zeros(batch, *chunk)], dim=1)


def require_close(what: str, ours: Any, theirs: Any, tolerance: float) -> None:
    """Stop if ours and the peer do not agree."""
    difference = float((torch.as_tensor(ours) - torch.as_tensor(theirs)).abs().max())
    if not difference <= tolerance:
        raise SystemExit(f"{what}: ours and the peer differ by {difference:.2e} (tolerance {tolerance:.0e})")


def dppo_run(num_workers: int, num_threads: int, steps: int, **setup: Any) -> Any:
    """Return our DPPO on Hopper with the peer's weights, tuned network included."""
    frozen, tuned, critic = plain_nets()
    config = DppoConfig(num_envs=ENVS, steps_per_iteration=steps, batch_size=50_000, update_epochs=5)
    processes = {"num_workers": num_workers, "num_threads": num_threads}
    run = config.build(Setup(env=make_env("hopper"), init=our_policy(frozen), **processes, **setup))
    copy_trunk(tuned, run.policy.scored_net)
    copy_trunk(critic, run.learner.critic)
    return run


def reference() -> peers.ReferenceStyle:
    """Return the reference-style program with its own copies of the weights."""
    return peers.ReferenceStyle(*copy.deepcopy(plain_nets()), levels=LEVELS, ft=FT)
