"""Cases of learning from a replay: a batch, the chunks of a steered policy, and whole updates of DSRL."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from algos.dsrl import DsrlConfig, NoiseAliasedUpdate
from algos.offpolicy.replay_buffer import Discounting, Mixture, Replay
from benchmarks.speed import peers
from benchmarks.speed.peers_offline import plain_net
from benchmarks.speed.peers_offpolicy import PlainDsrl, PlainReplay
from benchmarks.speed.sides import (
    CHUNK,
    OBS,
    copy_critics,
    copy_trunk,
    plain_nets,
    require_close,
    unit_statistics,
)
from benchmarks.speed.timing import Figure, compare, interleave
from policies.build import build_policy
from policies.networks.critics import EnsembleConfig
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.wrappers.noise_policy import SteeredPolicy, Steering

BATCH, GAMMA, LATENT = 256, 0.99, 12  # GAMMA is that of the peer
ADDED_AT_ONCE = 10_000


def filled(rows: int) -> Replay:
    """Return a replay of random transitions, a tenth of which end early."""
    ring = Replay(rows, cond=OBS, latent=LATENT, action=LATENT, steps=CHUNK[0])
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, rows, ADDED_AT_ONCE):
        n = min(ADDED_AT_ONCE, rows - begin)
        normal = torch.randn(n, 2 * OBS + 2 * LATENT + CHUNK[0], generator=generator)
        cond, next_cond, latent, action, rewards = normal.split([OBS, OBS, LATENT, LATENT, CHUNK[0]], dim=1)
        ended = torch.rand(n, generator=generator) < 0.1
        length = torch.where(ended, torch.randint(1, CHUNK[0] + 1, (n,), generator=generator), CHUNK[0])
        ring.add(
            cond=cond, latent=latent, action=action, rewards=rewards, length=length, terminated=ended,
            truncated=torch.zeros_like(ended), next_cond=next_cond,
        )  # fmt: skip
    return ring


def plain_arrays(ring: Replay) -> dict[str, np.ndarray]:
    """Return what the peer stores of the same transitions."""
    widths = {
        "state": OBS, "latent": LATENT, "action": LATENT, "rewards": CHUNK[0], "length": 1,
        "terminated": 1, "truncated": 1, "next_state": OBS,
    }  # fmt: skip
    parts = dict(zip(widths, ring.state_dict()["rows"].split(list(widths.values()), dim=1), strict=True))
    del parts["truncated"]
    arrays = {name: np.ascontiguousarray(part.numpy()) for name, part in parts.items()}
    return arrays | {name: arrays[name][:, 0] for name in ("length", "terminated")}


def replay(options: argparse.Namespace) -> Iterator[Figure]:
    """A batch of 256 chunk transitions, rewards discounted as it is drawn, against plain arrays."""
    ring = filled(options.rows)
    source, peer = Mixture(ring, Discounting(GAMMA)), PlainReplay(plain_arrays(ring))
    row = torch.arange(0, len(ring), 997)
    ours, theirs = ring.gather(row, Discounting(GAMMA)), peer.gather(row.numpy())
    for found, expected in ((ours.action, "action"), (ours.next_cond, "next_state")):
        require_close("replay", found, theirs[expected], 0.0)
    for value, name in ((ours.reward, "reward"), (ours.discount, "discount")):
        require_close("replay", value, theirs[name], 1e-5)
    generator, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    chance = np.full(len(ring), 1 / len(ring))
    times = interleave(
        {
            "ours": lambda: source.draw(BATCH, generator),
            "arrays": lambda: peer.draw(BATCH, rng),
            "chance": lambda: peer.draw_by_probability(BATCH, chance, rng),
        },
        rounds=options.rounds,
        clock=time.process_time,
    )
    yield Figure("replay, 256 chunks", "Mixture.draw", "plain arrays", times["ours"], times["arrays"], 2.5)
    yield Figure("replay, 256 chunks", "Mixture.draw", "probabilities", times["ours"], times["chance"], 20.0)


def steered(options: argparse.Namespace) -> Iterator[Figure]:
    """The chunks of latents, as acting and the critics of chunks ask for them, against a diffusers loop."""
    net, schedule = plain_nets()[0], peers.ddim_scheduler()
    policy = steered_policy(net)
    for batch, floor in ((4, 2.4), (40, 2.4), (BATCH, 1.7)):
        generator = torch.Generator().manual_seed(batch)
        state = torch.rand(batch, OBS, generator=generator) * 2 - 1
        latent = torch.rand(batch, policy.latent_dim, generator=generator) * 2 - 1
        start = (policy.wrapper.bound * latent).view(batch, *CHUNK)
        ours = partial(policy.chunk_of, state, latent)
        theirs = partial(peers.diffusers_ddim, net, schedule, state, start)
        require_close("steered", ours(), theirs(), 5e-5)
        case, sides = f"steered chunks, batch {batch}", (("chunk_of", ours), ("diffusers loop", theirs))
        yield compare(case, *sides, floor, rounds=options.rounds, clock=time.process_time)


def ensembles(options: argparse.Namespace) -> Iterator[Figure]:
    """Ten small critics forwards and backwards, as one, against a loop over modules."""
    count, width, rows = 10, 64, 64
    net = EnsembleConfig(members=count, hidden_dims=(width, width)).build(OBS, LATENT)
    modules = [plain_net(OBS + LATENT, width, width, 1) for _ in range(count)]
    net.load_members(
        [[dict(layer.named_parameters()) for layer in one if isinstance(layer, nn.Linear)] for one in modules]
    )
    both = torch.randn(rows, OBS + LATENT, generator=torch.Generator().manual_seed(0))
    cond, action = both.split([OBS, LATENT], dim=1)

    def ours() -> Tensor:
        net.zero_grad(set_to_none=True)
        loss = net(cond, action).square().mean(dim=1).sum()
        loss.backward()
        return loss.detach()

    def theirs() -> Tensor:
        for one in modules:
            one.zero_grad(set_to_none=True)
        loss = torch.stack([one(both).square().mean() for one in modules]).sum()
        loss.backward()
        return loss.detach()

    require_close("ten critics", ours(), theirs(), 1e-5)
    first = modules[0][0].weight.grad
    require_close("their gradients", net.weight[0].grad[0].t(), first, 1e-5)  # type: ignore[index]
    case, sides = f"{count} critics of width {width}", (("one stack", ours), ("a loop", theirs))
    yield compare(case, *sides, 2.5, rounds=options.rounds, clock=time.process_time)


def dsrl(options: argparse.Namespace) -> Iterator[Figure]:
    """Two steps of the critics and one of the distillation at batch 256, against a plain program.

    Drawing from the replay and asking the frozen policy included; `sac` has neither.
    """
    for variant, floor in (("na", 1.6), ("sac", 1.3)):
        sides = Sides(variant, rows=min(options.rows, 100_000))
        sides.require_equal()
        case = "DSRL, 2 steps + distillation" if variant == "na" else "DSRL by SAC, 2 steps"
        both = ("learner", sides.ours), ("plain program", sides.theirs)
        yield compare(case, *both, floor, rounds=options.rounds, clock=time.process_time)


class Sides:
    """The learner and its peer, with the same weights and transitions.

    Args:
        variant: Of DSRL.
        rows: Of the replay.
    """

    def __init__(self, variant: str, rows: int) -> None:
        torch.manual_seed(0)
        net, self.variant = plain_nets()[0], variant
        policy = steered_policy(net)
        ring = filled(rows)
        config = DsrlConfig(variant=variant, paper_compat=True)  # the density of the peer
        self.learner = config.learner_of(policy)
        self.source, self.generator = Mixture(ring, Discounting(GAMMA)), torch.Generator().manual_seed(1)
        self.replay, self.rng = PlainReplay(plain_arrays(ring)), np.random.default_rng(1)
        self.peer = PlainDsrl(net, CHUNK, OBS, policy.wrapper.bound, variant)
        self._copy_weights(policy)

    def _copy_weights(self, policy: SteeredPolicy) -> None:
        trunk, linear, norm = policy.actor.trunk, self.peer.actor[::3], self.peer.actor[1::3]
        ours = [trunk.inlet, *trunk.layers]
        for theirs, own in zip([*linear, *norm], [*ours, *trunk.norms], strict=True):
            theirs.load_state_dict(own.state_dict())
        copy_critics(self.learner.critic, self.peer.critics)
        if isinstance(self.learner, NoiseAliasedUpdate):
            copy_critics(self.learner.noise_critic, self.peer.noise_critics)
        self.peer.remake()

    def require_equal(self) -> None:
        """Take the steps on both sides with the same rows and draws, and compare every loss."""
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            row = torch.randint(len(self.replay), (BATCH,), generator=generator)
            batch = self.source.online.gather(row, self.source.discounting)
            draws = self.learner.draw(BATCH, generator)
            plain = self.replay.gather(row.numpy())
            found = self.learner.step(batch, draws)
            expected = self.peer.step(plain, draws["eps"], draws["next_eps"])
            if isinstance(self.learner, NoiseAliasedUpdate):
                latent = self.learner.draw_latents(BATCH, generator)
                found |= self.learner.distill(batch, {"latent": latent})
                expected |= self.peer.distill(plain, latent)
            for name, value in expected.items():
                require_close(f"DSRL, {name}", found[name], value, 1e-4 * max(1.0, abs(value)))

    def ours(self) -> None:
        """Take two steps, and what follows them."""
        for _ in range(2):
            batch = self.source.draw(BATCH, self.generator)
            self.learner.step(batch, self.learner.draw(BATCH, self.generator))
        self.learner.finish_round(2, BATCH, self.source, self.generator)

    def theirs(self) -> None:
        """Take two steps, and one of the distillation."""
        for _ in range(2):
            eps, next_eps = torch.randn(2, BATCH, LATENT, generator=self.generator)
            self.peer.step(self.replay.draw(BATCH, self.rng), eps, next_eps)
        if self.variant == "na":
            latent = torch.randn(BATCH, LATENT, generator=self.generator) / self.peer.bound
            self.peer.distill(self.replay.draw(BATCH, self.rng), latent)


def steered_policy(net: peers.PlainMlp) -> SteeredPolicy:
    """Return our policy with the peer's weights, ten DDIM steps, and an actor in front of it."""
    config = PolicyConfig(
        process=VPDiffusion(num_levels=100, prediction="eps"), sampler=DDIM(steps=10, recompute_eps=False)
    )
    base = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    copy_trunk(net, base.field)  # type: ignore[arg-type]
    return Steering().wrap(base.eval())
