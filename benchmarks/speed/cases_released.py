"""Offline learning against the released programs themselves: `--programs`, a folder with their clones."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from algos.a2pr import A2prConfig, AdvantageGuide
from algos.base import Setup
from algos.iql import IqlConfig, IqlLearner
from algos.offline.loop import OfflineRun
from algos.prdc import PrdcConfig
from algos.td3_bc import Td3BcConfig
from benchmarks.speed.cases_offline import (
    BATCH,
    BLOCK,
    POOL,
    arrays_of,
    dataset_of,
    learner_of,
    list_search_of,
    near_the_data,
    ours_of,
    stand_still,
)
from benchmarks.speed.peers_released import Released, corl, lamda
from benchmarks.speed.sides import require_close
from benchmarks.speed.timing import Figure, compare
from policies.networks.critics import Ensemble

SETTLED = 1000
"""Steps before the timing. Means of gradients of inactive units have decayed to numbers below 1e-38 by then,
for which processors of Intel need many times as long; ours are zero."""
FLOORS = {"td3_bc": 1.25, "iql": 1.25, "a2pr": 1.2, "a fresh actor": 1.7, "near the data": 1.5}
ALIKE, ALIKE_IQL = 1e-5, 5e-4
"""Largest difference of weights and of means of gradients, relative to their norms; IQL's second step has
another deviation, for ours learns a log-variance."""


def parts_of(run: OfflineRun) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Return networks and optimisers in the order of `Released`."""
    learner: Any = run.learner
    parts = [(learner.policy, learner.actor_optimizer), (learner.critic, learner.critic_optimizer)]
    if isinstance(learner, IqlLearner):
        return [(learner.policy.head.trunk, parts[0][1]), parts[1], (learner.value, learner.value_optimizer)]
    if isinstance(guide := learner.regulariser, AdvantageGuide):
        parts += [(guide.value, guide.value_optimizer), (guide.vae, guide.vae_optimizer)]
    return parts


def layers_of(network: nn.Module, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what `read` finds of every weight, in the layout of linear layers one after another."""
    if not isinstance(network, Ensemble):
        return [read(parameter) for parameter in network.parameters()]
    stacks = list(zip(network.weight, network.bias, strict=True))
    pairs = [(read(w)[e].t(), read(b)[e, 0]) for e in range(network.members) for w, b in stacks]
    return [one for pair in pairs for one in pair]


def same_weights(run: OfflineRun, peer: Released) -> None:
    """Give the peer our weights."""
    peer.take([layers_of(network, Tensor.detach) for network, _ in parts_of(run)])


def require_equal_steps(run: OfflineRun, peer: Released, pool: Tensor | None = None) -> None:
    """Take two steps with the same rows and noise; compare all weights and the means of all gradients."""
    learner: Any = run.learner
    same_weights(run, peer)
    generator = torch.Generator().manual_seed(2)
    for step in range(2):
        row = torch.randint(len(run.table if pool is None else pool), (BATCH,), generator=generator)
        batch = run.table.gather(row if pool is None else pool[row])
        draws = learner.draw(BATCH, generator)
        torch.manual_seed(step)
        for name in ("target", "vae_data", "vae_policy"):  # in the order of the peer
            if name in draws:
                draws[name] = torch.randn(draws[name].shape)
        learner.step(batch, draws)
        flag = (batch.discount == 0) == peer.marks_ends
        torch.manual_seed(step)
        flags, reward = flag[:, None].float(), batch.reward[:, None]
        peer.train([batch.cond, batch.action, reward, batch.next_cond, flags])
    alike = ALIKE_IQL if isinstance(learner, IqlLearner) else ALIKE
    both = zip(parts_of(run), peer.weights(), peer.moments(), strict=True)
    for (network, optimizer), weights, moments in both:
        means = {parameter: state["exp_avg"] for parameter, state in optimizer.state.items()}
        ours = layers_of(network, Tensor.detach) + layers_of(network, means.__getitem__)
        for mine, theirs in zip(ours, (*weights, *moments), strict=True):
            size = float(theirs.detach().norm())
            require_close("two steps", (mine - theirs.detach()).norm(), 0.0, alike * size)


def theirs_of(peer: Released) -> Callable[[], None]:
    """Return a block of the peer's steps."""

    def block() -> None:
        for _ in range(BLOCK):
            peer.step()

    return block


def released(options: argparse.Namespace) -> Iterator[Figure]:
    """A step of TD3+BC, IQL, A2PR and PRDC at their defaults against the released programs; CPU time."""
    if options.programs is None:
        raise SystemExit("`released` needs --programs, a folder with clones of CORL, PRDC and A2PR.")
    setup = Setup(dataset=dataset_of(options), seed=0)
    for method, config, name in (("td3_bc", Td3BcConfig(), "TD3+BC step"), ("iql", IqlConfig(), "IQL step")):
        run = config.build(setup)
        peer = corl(options.programs, method, arrays_of(run))
        require_equal_steps(run, peer)
        yield figure(options, run, peer, (name, "CORL", FLOORS[method]))
    guided = A2prConfig()
    run = guided.build(setup)
    given = {"mask": guided.constraint_weight, "vae_weight": guided.vae_weight}
    peer = lamda(options.programs, "a2pr", arrays_of(run), **given)
    keep_some(run)
    require_equal_steps(run, peer)
    guide: Any = learner_of(run).regulariser
    stand_still(run.learner, peer.learner)
    for optimizer in (guide.value_optimizer, guide.vae_optimizer):
        optimizer.param_groups[0]["lr"] = 0.0
    for owner in (peer.learner.value_optimizer, peer.learner.vae_optimizer):
        owner.param_groups[0]["lr"] = 0.0
    yield figure(options, run, peer, ("A2PR step", "released A2PR", FLOORS["a2pr"]))
    yield from prdc(options, setup)


def prdc(options: argparse.Namespace, setup: Setup) -> Iterator[Figure]:
    """PRDC, its lists made, of actors that stay where they are."""
    config = PrdcConfig()
    run = config.build(setup)
    peer = lamda(options.programs, "prdc", arrays_of(run), beta=config.beta)
    pool = torch.randperm(len(run.table), generator=torch.Generator().manual_seed(5))[:POOL]
    list_search_of(run).make_lists(pool)
    require_equal_steps(run, peer, pool)
    stand_still(run.learner, peer.learner)
    for place in ("a fresh actor", "near the data"):
        if place == "near the data":
            near_the_data(run)
        same_weights(run, peer)
        yield figure(options, run, peer, (f"PRDC step, {place}", "released PRDC", FLOORS[place]), pool)


def figure(
    options: argparse.Namespace,
    run: OfflineRun,
    peer: Released,
    says: tuple[str, str, float],
    pool: Tensor | None = None,
) -> Figure:
    """Time steps: ours on rows of a pool or on any, the peer's on any; in the middle of a run of each."""
    blocks = {"ours": ours_of(run, pool), "peer": theirs_of(peer)}
    for block in blocks.values():
        for _ in range(SETTLED // BLOCK):
            block()
    case, name, floor = says
    sides, clock = (("float32", blocks["ours"]), (name, blocks["peer"])), time.process_time
    return compare(case, *sides, floor, rounds=options.rounds, clock=clock, steps=BLOCK)


@torch.no_grad()
def keep_some(run: OfflineRun) -> None:
    """Shift A2PR's V so that it keeps two thirds of the rows, as in training; a new one may keep none."""
    learner = learner_of(run)
    guide: Any = learner.regulariser
    batch = run.table.gather(torch.arange(len(run.table)))
    value = guide.value(batch.cond)[0]
    above = value - learner.critic(batch.cond, batch.action, members=1)[0]
    guide.value.bias[-1].sub_(above.quantile(0.67))
