"""Both sides of a comparison: the same sizes, weights and noise, and the check that they agree."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Setup
from algos.dppo import DppoConfig
from benchmarks import peers
from envs.make import env as make_env
from policies.backbones.unet1d import Unet1dConfig
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig, build_policy
from policies.processes.diffusion import VPDiffusion
from policies.samplers import DDIM, DDPM

OBS, CHUNK, LEVELS, FT, ENVS = 11, (4, 3), 20, 10, 40
"""Observation, action chunk, denoising steps, tuned ones, environments: DPPO's sizes on Hopper."""


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


def unit_statistics(obs_dim: int = OBS, action_dim: int = CHUNK[1]) -> dict[str, dict[str, Tensor]]:
    """Return statistics that make normalisation the identity."""

    def of(dim: int) -> dict[str, Tensor]:
        one = torch.ones(dim)
        return {"min": -one, "max": one, "mean": 0 * one, "std": one}

    return {"state": of(obs_dim), "action": of(action_dim)}


def our_policy(net: nn.Module, **sampler: Any) -> DenoisingPolicy:
    """Return our policy with the peer's weights."""
    config = PolicyConfig(process=VPDiffusion(num_levels=LEVELS), sampler=DDPM(**sampler))
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
        process=VPDiffusion(num_levels=100),
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


def tape(batch: int, seed: int, *, last: bool) -> Tensor:
    """Return the noise that a peer draws from a generator with this seed, as a tape (B, K+1, Th, Da)."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn((batch, *CHUNK), generator=generator) for _ in range(LEVELS + last)]
    return torch.stack(draws if last else [*draws, torch.zeros(batch, *CHUNK)], dim=1)


def require_close(what: str, ours: Any, theirs: Any, tolerance: float) -> None:
    """Stop if ours and the peer do not agree."""
    difference = float((torch.as_tensor(ours) - torch.as_tensor(theirs)).abs().max())
    if not difference <= tolerance:
        raise SystemExit(f"{what}: ours and the peer differ by {difference:.2e} (tolerance {tolerance:.0e})")


def dppo_run(num_workers: int, num_threads: int, steps: int) -> Any:
    """Return our DPPO on Hopper with the peer's weights, tuned network included."""
    frozen, tuned, critic = plain_nets()
    init = our_policy(frozen)
    config = DppoConfig(num_envs=ENVS, steps_per_iteration=steps, batch_size=50_000, update_epochs=5)
    setup = Setup(env=make_env("hopper"), init=init, num_workers=num_workers, num_threads=num_threads)
    run = config.build(setup)
    copy_trunk(tuned, run.policy.scored_net)
    copy_trunk(critic, run.learner.critic)
    return run


def reference() -> peers.ReferenceStyle:
    """Return the reference-style program with its own copies of the weights."""
    return peers.ReferenceStyle(*copy.deepcopy(plain_nets()), levels=LEVELS, ft=FT)
