"""Batched training of several seeds of an offline algorithm.

Legend: S seeds, B rows of a batch, E ensemble members. Parameters (...) of S modules become views of one
parameter (S, ...): each seed is still saved, averaged and exported from its own modules, and one batched
product replaces S products. Learners reduce over the last axes, so a batch (S, B, ...) gives one loss per
seed; `descend` adds them up. Results equal single-seed training up to rounding.

Modules whose parameters are views must not be trained separately. Writes to a stacked parameter leave the
version counters of its views unchanged, so cached functions of the weights
(`policies.networks.weight_cache`) would become stale: modules that cache are refused.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from algos.base import Metrics, Quantities, Setup
from algos.iql import PolicyLoss
from algos.offline.config import OfflineConfig
from algos.offline.loop import OfflineRun, replayed
from algos.offline.neighbors import Nearest, Search
from algos.offline.td3_update import Actor, ActorNetwork, Regulariser, actor_network
from algos.training.metrics import Means
from algos.transitions import Batch, TransitionTable
from policies.errors import CapabilityError, ConfigError
from policies.networks.critics import Ensemble, Evaluation, Members, inputs_of, taken
from policies.networks.distributions import gaussian_log_prob
from policies.networks.recorded import Recorded
from policies.networks.weight_cache import keeps_values
from policies.policy import Policy
from policies.threads import torch_threads

M = TypeVar("M", bound=nn.Module)
ONE_BY_ONE = "Train the seeds one by one: --multirun seed=0,1,2."


def build_seeds(config: OfflineConfig, setup: Setup, seeds: Sequence[int]) -> list[OfflineRun]:
    """Return one run per distinct seed, as `config.build` would; runs share the transitions."""
    config.require("online_steps", not config.online_steps, f"0 with several seeds. {ONE_BY_ONE}")
    setups = [replace(setup, seed=seed, num_seeds=len(seeds)) for seed in seeds]
    data = config.prepare(setups[0])
    return [config.run(own, data) for own in setups]


class SeedBatch:
    """Runs of several seeds with one batched learner.

    Random numbers, checkpoints, evaluation and export are per run. After the first step of the batch, runs
    advance and load only here. The runs with the fewest steps advance first, together.

    Args:
        runs: Runs of one `build_seeds` call; each may be resumed.
    """

    def __init__(self, runs: Sequence[OfflineRun]) -> None:
        if any(run.table is not runs[0].table for run in runs):
            raise ConfigError("runs that are trained together must be made together, by build_seeds.")
        self.runs = runs
        self._active: tuple[OfflineRun, ...] = ()
        self._learner: Any = None

    def advance(self) -> list[Metrics]:
        """Take gradient steps with the runs that have taken the fewest; the others return no metrics."""
        done = min(run.progress for run in self.runs)
        learner, active = self._learner_of([run for run in self.runs if run.progress == done])
        ahead = [run.progress for run in self.runs if run.progress > done]
        first, start, means = active[0], time.perf_counter(), Means()
        count = min([first.config.log_every, first.total - done, *(other - done for other in ahead)])
        with torch_threads(first.num_threads):
            for _ in range(count):
                means.add(step_together(learner, active, recorded=self._recorded))
            measured = {name: value.unbind(0) for name, value in means.read().items()}
            excess = [run.overestimation() for run in active]
        rate = {"time/steps_per_s": count / (time.perf_counter() - start)}
        found: dict[int, Metrics] = {
            id(run): {**{name: value[s] for name, value in measured.items()}, **excess[s], **rate}
            for s, run in enumerate(active)
        }
        for run in active:
            run.warn(found[id(run)])
        return [found.get(id(run), {}) for run in self.runs]

    def _learner_of(self, runs: Sequence[OfflineRun]) -> tuple[Any, tuple[OfflineRun, ...]]:
        """Return the batched learner of these runs; rebuilt when the set of runs changes."""
        if self._learner is None or self._active != tuple(runs):
            self._active = tuple(runs)
            self._learner = batched([run.learner for run in runs])
            self._recorded = Recorded(partial(_take, self._learner, runs[0].table), writes_weights=True)
            for run in runs:
                run.is_batched = True
        return self._learner, self._active


def _take(learner: Any, table: TransitionTable, row: Tensor, draws: Quantities, _: Any) -> Quantities:
    measured: Quantities = learner.step(table.gather(row), draws)
    return measured


def step_together(
    learner: Any,
    runs: Sequence[OfflineRun],
    rows: Tensor | None = None,
    recorded: Recorded[Quantities] | None = None,
) -> Quantities:
    """Take one step of every run; return metrics, each (S,). `rows` (S, B) replace the drawn ones."""
    drawn, draws = zip(*(run.draw() for run in runs), strict=True)
    together = {name: torch.stack([each[name] for each in draws]) for name in draws[0]}
    recorded = Recorded(partial(_take, learner, runs[0].table)) if recorded is None else recorded
    measured = replayed(recorded, learner, torch.stack(drawn) if rows is None else rows, together)
    for run in runs:
        run.learner.steps = learner.steps
        run.count_step()
    return measured


def batched(learners: Sequence[Any]) -> Any:
    """Return one learner that steps several learners, which differ in their seeds only.

    Networks, optimisers and regularisers are stacked attribute by attribute; constants come from the first.
    The given networks become views: they can be read and saved, but must not step or load separately.

    Raises:
        CapabilityError: If an actor or a module cannot be stacked.
    """
    whole = copy.copy(learners[0])
    values = {name: [vars(one)[name] for one in learners] for name in vars(whole)}
    for name, parts in values.items():
        setattr(whole, name, _stacked_attribute(parts))
    networks = [getattr(part, "network", part) for part in vars(whole).values()]
    stacks = [p for part in networks if isinstance(part, nn.Module) for p in part.parameters()]
    by_place = {parameter.data_ptr(): parameter for parameter in stacks}
    for name, parts in values.items():
        if isinstance(parts[0], torch.optim.Adam):
            own = parts[0].param_groups[0]["params"]  # views of the first seed, at the start of each stack
            setattr(whole, name, joined([by_place[parameter.data_ptr()] for parameter in own], parts))
    return whole


def _stacked_attribute(parts: Sequence[Any]) -> Any:
    first = parts[0]
    match first:
        case Actor():
            return BatchedActor(parts)
        case PolicyLoss():
            return BatchedPolicyLoss([part.policy for part in parts])
        case Search():
            return FlatSearch(first)
        case Regulariser():
            return batched(parts)
        case Ensemble():
            return StackedEnsemble(parts)
        case Policy():
            return None
        case nn.Module():
            return stacked(parts)
    return first


class FlatSearch:
    """Nearest-row search for queries with extra leading axes."""

    def __init__(self, search: Search) -> None:
        self.search, self.name = search, search.name

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        found = self.search.nearest(row.flatten(), state.flatten(0, -2), action.flatten(0, -2))
        return Nearest(found.row.view_as(row), found.certified.view_as(row))


def stack_parameters(parts: Sequence[Tensor]) -> nn.Parameter:
    """Return parameters (...) stacked as one (S, ...); the given ones become views of it."""
    whole = nn.Parameter(torch.stack([part.detach() for part in parts]), parts[0].requires_grad)
    for part, view in zip(parts, whole.detach().unbind(0), strict=True):
        part.data = view
    return whole


class StackedLinear(nn.Module):
    """S linear layers: (S, B, in) to (S, B, out)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = stack_parameters([layer.weight for layer in layers])
        self.bias = stack_parameters([layer.bias for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


def stacked(modules: Sequence[M]) -> M:
    """Return a module with the stacked parameters of modules of equal architecture.

    Layers other than linear ones must accept one more leading axis.

    Raises:
        CapabilityError: If a module has buffers, a weight cache, or a linear layer without bias.
    """
    whole = copy.deepcopy(modules[0])
    for name, part in list(whole.named_modules()):
        _require_stackable(part)
        alike = [module.get_submodule(name) for module in modules]
        if isinstance(part, nn.Linear):
            whole.set_submodule(name, StackedLinear(alike))  # type: ignore[arg-type]
            continue
        for own in dict(part.named_parameters(recurse=False)):
            setattr(part, own, stack_parameters([each.get_parameter(own) for each in alike]))
    return whole


def _require_stackable(part: nn.Module) -> None:
    has_buffers = next(part.buffers(recurse=False), None) is not None
    if has_buffers or keeps_values(part) or (isinstance(part, nn.Linear) and part.bias is None):
        raise CapabilityError(
            f"{type(part).__name__} belongs to one seed and cannot be stacked. {ONE_BY_ONE}"
        )


class StackedEnsemble(Ensemble):
    """S ensembles: conditions (S, B, C) and actions (S, B, A) to values (E, S, B)."""

    def __init__(self, ensembles: Sequence[Ensemble]) -> None:
        nn.Module.__init__(self)
        first = ensembles[0]
        self.config, self.activate, self.activate_ = first.config, first.activate, first.activate_
        for name in ("weight", "bias", "scale", "shift"):
            layers = zip(*(getattr(one, name) for one in ensembles), strict=True)
            setattr(self, name, nn.ParameterList(stack_parameters(layer) for layer in layers))

    def forward(
        self,
        cond: Tensor,
        action: Tensor | None = None,
        *,
        members: Members = None,
        frozen: bool = False,
    ) -> Tensor:
        """Return values (E, S, B); see `Ensemble.forward`."""
        x, count = inputs_of(cond, action), self._count(members)
        parts = [self._stacks(part, members, frozen) for part in self._parts]
        if self._is_native(x):
            found = self._stack(len(x) * count)(x, [layer for part in parts for layer in part])
        else:
            h = x.unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)
            found = self._evaluate(torch.baddbmm, h, *parts)
        return found.view(len(x), count, -1).transpose(0, 1)

    def evaluate(self, cond: Tensor, action: Tensor | None, weights: Sequence[Tensor]) -> Evaluation:
        """Return values (E, S, B); see `Ensemble.evaluate`."""
        x, parts = inputs_of(cond, action), self._in_order()
        if self._needs_no_graph(x, parts, weights):
            found = self._stack(len(x) * self.members).evaluate(x, [part.flatten(0, 1) for part in parts])
            if found is not None:
                out, of_parts = found
                return Evaluation(
                    out.view(len(x), self.members, -1).transpose(0, 1),
                    lambda slope: _laid_as(parts, of_parts(slope.transpose(0, 1).reshape(out.shape))),
                )
        return super().evaluate(cond, action, weights)

    def load_members(self, members: Sequence[Sequence[Mapping[str, Tensor]]]) -> NoReturn:
        raise CapabilityError("stacked ensembles share the weights of the single ones; load those.")

    def layers_of(self, member: int) -> NoReturn:
        raise CapabilityError("stacked ensembles share the weights of the single ones; read those.")

    def _stacks(self, parts: nn.ParameterList, members: Members, frozen: bool) -> list[Tensor]:
        """Return the weights of the same members of every seed, (S E, ...)."""
        stacks = (taken(part, members, axis=1).flatten(0, 1) for part in parts)
        return [stack.detach() if frozen else stack for stack in stacks]


def _laid_as(parts: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.view_as(part) for part, grad in zip(parts, grads, strict=True)]


class BatchedActor(Actor):
    """The actors of S seeds: conditions (S, B, C) to actions (S, B, A)."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.limit = actors[0].limit
        self._network = stacked([require_actor_network(actor.policy) for actor in actors])

    @property
    def network(self) -> nn.Module:
        return self._network  # type: ignore[return-value]


class BatchedPolicyLoss(PolicyLoss):
    """`PolicyLoss` of S new single-action actors: losses (S, B)."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._network = None  # gradients of stacks have a graph
        self.network = stacked([require_actor_network(policy) for policy in policies])

    def __call__(self, batch: Batch, draws: Mapping[str, Tensor]) -> Tensor:
        mean, std = self.network(batch.cond)
        if std is None:
            return (mean - batch.plan).square().sum(dim=-1).to(batch.plan)
        return -gaussian_log_prob(batch.plan, mean, std).sum(dim=-1).to(batch.plan)


def require_actor_network(policy: Policy) -> ActorNetwork:
    """Return the network of a policy made by `algos.offline.config.plain_actor`.

    Raises:
        CapabilityError: If the policy was made otherwise.
    """
    network = actor_network(policy)
    if network is None:
        raise CapabilityError(
            f"seeds are trained together where algo makes its own actor; init has another one. {ONE_BY_ONE}"
        )
    return network


def joined(parameters: Sequence[nn.Parameter], parts: Sequence[torch.optim.Adam]) -> torch.optim.Adam:
    """Return one optimiser of stacked parameters that continues from the moments of every seed.

    The moments of the given optimisers, one per seed, become views of the new ones and share the step count:
    they must not step separately. Without a previous step, moments start at zero, as in Adam.
    """
    options = {name: value for name, value in parts[0].param_groups[0].items() if name != "params"}
    whole = torch.optim.Adam(parameters, **options)
    groups = [one.param_groups[0]["params"] for one in (whole, *parts)]
    for parameter, *own in zip(*groups, strict=True):
        states = [one.state[each] for one, each in zip(parts, own, strict=True)]
        count = states[0].get("step", torch.zeros((), device=parameter.device)).clone()
        whole.state[parameter] = state = {"step": count}
        for name in ("exp_avg", "exp_avg_sq"):
            given = [one.get(name, torch.zeros_like(each)) for one, each in zip(states, own, strict=True)]
            state[name] = torch.stack(given)
        for s, one in enumerate(states):
            one |= {"step": count, "exp_avg": state["exp_avg"][s], "exp_avg_sq": state["exp_avg_sq"][s]}
    return whole
