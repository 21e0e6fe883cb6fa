"""Cases of learning from a replay: a batch of chunk transitions, and the chunks of a steered policy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from algos.replay import Discounting, Mixture, Replay
from benchmarks import peers
from benchmarks.sides import CHUNK, OBS, copy_trunk, plain_nets, require_close, unit_statistics
from benchmarks.timing import Figure, interleave
from policies.latent_steering import SteeredPolicy, Steering
from policies.policy import PolicyConfig, build_policy
from policies.processes.diffusion import VPDiffusion
from policies.samplers import DDIM

BATCH, GAMMA, LATENT = 256, 0.99, 12
ADDED_AT_ONCE = 10_000


class PlainReplay:
    """Arrays in NumPy, one for each part of a transition, that are converted at every draw.

    Args:
        arrays: state, latent, action, rewards (M, Ta), length, terminated (M,), next_state; float32.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        """Return M."""
        return len(self.arrays["length"])

    def gather(self, row: np.ndarray) -> dict[str, Tensor]:
        """Return rows (B,), their rewards discounted."""
        found = {name: array[row] for name, array in self.arrays.items()}
        rewards, length, terminated = (found.pop(name) for name in ("rewards", "length", "terminated"))
        step = np.arange(rewards.shape[1])
        found["reward"] = (rewards * GAMMA**step * (step < length[:, None])).sum(1)
        found["discount"] = GAMMA**length * (1 - terminated)
        return {name: torch.as_tensor(part, dtype=torch.float32) for name, part in found.items()}

    def draw(self, n: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return n rows, drawn uniformly."""
        return self.gather(rng.integers(len(self), size=n))

    def draw_by_probability(self, n: int, chance: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return n rows, drawn through a vector of probabilities as long as the replay."""
        return self.gather(rng.choice(len(chance), size=n, p=chance))


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
    )
    yield Figure("replay, 256 chunks", "Mixture.draw", "plain arrays", times["ours"], times["arrays"], 1.2)
    yield Figure("replay, 256 chunks", "Mixture.draw", "probabilities", times["ours"], times["chance"], 20.0)


def steered(options: argparse.Namespace) -> Iterator[Figure]:
    """The chunks of 256 latents, as the noise-aliased critics ask for them, against a diffusers loop."""
    net, schedule = plain_nets()[0], peers.ddim_scheduler()
    policy = _steered(net)
    for batch, floor in ((4, 2.0), (BATCH, 1.5)):
        generator = torch.Generator().manual_seed(batch)
        state = torch.rand(batch, OBS, generator=generator) * 2 - 1
        latent = torch.rand(batch, policy.latent_dim, generator=generator) * 2 - 1
        start = (policy.wrapper.bound * latent).view(batch, *CHUNK)
        ours: Callable[[], Tensor] = lambda s=state, u=latent: policy.chunk_of(s, u)  # type: ignore[misc]  # noqa: E731
        peer: Callable[[], Tensor] = lambda s=state, w=start: peers.diffusers_ddim(net, schedule, s, w)  # type: ignore[misc]  # noqa: E731
        require_close("steered", ours(), peer(), 5e-5)
        times = interleave({"ours": ours, "peer": peer}, rounds=options.rounds, slot_s=0.1)
        yield Figure(
            f"steered chunks, batch {batch}",
            "chunk_of",
            "diffusers loop",
            times["ours"],
            times["peer"],
            floor,
        )


def _steered(net: peers.PlainMlp) -> SteeredPolicy:
    """Return our policy with the peer's weights, ten DDIM steps, and an actor in front of it."""
    config = PolicyConfig(process=VPDiffusion(num_levels=100), sampler=DDIM(steps=10, recompute_eps=False))
    base = build_policy(config, obs_dim=OBS, action_dim=CHUNK[1], statistics=unit_statistics())
    copy_trunk(net, base.field)  # type: ignore[arg-type]
    return Steering().wrap(base.eval())
