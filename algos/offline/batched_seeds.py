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
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from algos.base import Metrics, Setup
from algos.iql import PolicyLoss
from algos.offline.config import OfflineConfig
from algos.offline.loop import OfflineRun
from algos.offline.neighbors import Nearest, Search
from algos.offline.td3_update import Actor, ActorNetwork, Regulariser, actor_network
from algos.training.metrics import Means
from algos.transitions import Batch
from policies.errors import CapabilityError, ConfigError
from policies.networks.critics import Ensemble
from policies.networks.distributions import gaussian_log_prob
from policies.networks.weight_cache import keeps_values
from policies.policy import Policy
from policies.threads import torch_threads

M = TypeVar("M", bound=nn.Module)
ONE_BY_ONE = "Train the seeds one by one: --multirun seed=0,1,2."


class SeedRun(OfflineRun):
    """A run of one seed that a `SeedBatch` can train."""

    is_batched = False

    def advance(self) -> Metrics:
        """Take gradient steps of this seed alone.

        Raises:
            CapabilityError: If a `SeedBatch` trains the run.
        """
        self._require_alone()
        return super().advance()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CapabilityError: If a `SeedBatch` trains the run.
        """
        self._require_alone()
        super().load_state_dict(state)

    def _require_alone(self) -> None:
        if self.is_batched:
            raise CapabilityError(
                "this run takes its steps together with other seeds. Build it anew to advance it alone or to "
                "continue it from a state."
            )


def build_seeds(config: OfflineConfig, setup: Setup, seeds: Sequence[int]) -> list[OfflineRun]:
    """Return one run per seed, as `config.build` would; runs share the transitions.

    Args:
        config: Configuration of all runs.
        setup: Setup of all runs; its seed is ignored.
        seeds: Distinct seeds.
    """
    setups = [replace(setup, seed=seed, num_seeds=len(seeds)) for seed in seeds]
    data = config.prepare(setups[0])
    return [config.run(own, data, SeedRun) for own in setups]


class SeedBatch:
    """Runs of several seeds with one batched learner.

    Random numbers, checkpoints, evaluation and export are per run. After the first step of the batch, runs
    advance and load only here. The runs with the fewest steps advance first, together.

    Args:
        runs: Runs of one `build_seeds` call; each may be resumed.

    Raises:
        ConfigError: If the runs do not share their transitions.
    """

    def __init__(self, runs: Sequence[OfflineRun]) -> None:
        if any(run.table is not runs[0].table for run in runs):
            raise ConfigError("runs that are trained together must be made together, by build_seeds.")
        self.runs = runs
        self._moving: tuple[OfflineRun, ...] = ()
        self._learner: Any = None

    def advance(self) -> list[Metrics]:
        """Take gradient steps with the runs that have taken the fewest.

        Returns:
            Metrics of `OfflineRun.advance` per run; empty for runs that did not advance.
        """
        done = min(run.progress for run in self.runs)
        learner, moving = self._learner_of([run for run in self.runs if run.progress == done])
        ahead = [run.progress for run in self.runs if run.progress > done]
        config, start, means = moving[0].config, time.perf_counter(), Means()
        count = min([config.log_every, moving[0].total - done, *(other - done for other in ahead)])
        with torch_threads(moving[0].num_threads):
            for _ in range(count):
                means.add(step_together(learner, moving))
            measured = {name: value.unbind(0) for name, value in means.tensors().items()}
            biases = [run.overestimation() for run in moving]
        rate = {"time/steps_per_s": count / (time.perf_counter() - start)}
        found: dict[int, Metrics] = {
            id(run): {**{name: value[s] for name, value in measured.items()}, **biases[s], **rate}
            for s, run in enumerate(moving)
        }
        return [found.get(id(run), {}) for run in self.runs]

    def _learner_of(self, runs: Sequence[OfflineRun]) -> tuple[Any, tuple[OfflineRun, ...]]:
        """Return the batched learner of these runs; rebuilt when the set of runs changes."""
        if self._learner is None or self._moving != tuple(runs):
            self._moving = tuple(runs)
            self._learner = batched([run.learner for run in runs])
            for run in runs:
                run.is_batched = True  # type: ignore[attr-defined]
        return self._learner, self._moving


def step_together(learner: Any, runs: Sequence[OfflineRun], rows: Tensor | None = None) -> dict[str, Tensor]:
    """Take one step of every run; returns metrics, each (S,).

    Args:
        learner: Batched learner of all runs; see `batched`.
        runs: Runs whose generators are used.
        rows: (S, B) rows that replace the drawn ones.
    """
    drawn, draws = zip(*(run.draw() for run in runs), strict=True)
    together = {name: torch.stack([each[name] for each in draws]) for name in draws[0]}
    measured: dict[str, Tensor] = learner.step(
        runs[0].table.gather(torch.stack(drawn) if rows is None else rows), together
    )
    for run in runs:
        run.learner.steps = learner.steps
        run.count_step()
    return measured


def batched(learners: Sequence[Any]) -> Any:
    """Return one learner that steps several learners, which differ in their seeds only.

    Networks, optimisers and regularisers are stacked attribute by attribute; constants come from the first.
    The given networks become views: they can be read and saved, but must not step or load separately. The
    batched learner has no policy of its own.

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


@dataclass(frozen=True)
class FlatSearch:
    """Nearest-row search for queries with extra leading axes."""

    search: Search

    @property
    def name(self) -> str:
        return self.search.name

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
        """Return the output of every layer for its own inputs."""
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


def stacked(modules: Sequence[M]) -> M:
    """Return a module with the stacked parameters of the given modules.

    Args:
        modules: Equal architectures of linear layers with biases and layers that accept leading axes. A layer
            with other parameters must support one more leading axis.

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
        self, cond: Tensor, action: Tensor, *, members: int | None = None, frozen: bool = False
    ) -> Tensor:
        """Return values (E, S, B); see `Ensemble.forward`."""
        x = torch.cat([cond, action], dim=-1).unsqueeze(1)
        seeds, count = len(x), self.members if members is None else members
        h = x.expand(-1, count, -1, -1).flatten(0, 1)
        return self._evaluate_batched(h, count, frozen).view(seeds, count, -1).transpose(0, 1)

    def load_members(self, members: Sequence[Sequence[Mapping[str, Tensor]]]) -> NoReturn:
        """Refuse; load the single ensembles instead.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("stacked ensembles have the weights of the ensembles; load or read those.")

    def layers_of(self, member: int) -> NoReturn:
        """Refuse; use the single ensembles instead.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("stacked ensembles have the weights of the ensembles; load or read those.")

    def _stacks(self, parts: nn.ParameterList, count: int, frozen: bool) -> list[Tensor]:
        """Return the weights of the first `count` members of every seed, (S E, ...)."""
        stacks = (part[:, :count].flatten(0, 1) for part in parts)
        return [stack.detach() if frozen else stack for stack in stacks]


class BatchedActor(Actor):
    """The actors of S seeds: conditions (S, B, C) to actions (S, B, A).

    Raises:
        CapabilityError: If an actor was not made by `algos.offline.config.plain_actor`.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.limit = actors[0].limit
        self._network = stacked([require_actor_network(actor.policy) for actor in actors])

    @property
    def network(self) -> nn.Module:
        return self._network  # type: ignore[return-value]


class BatchedPolicyLoss:
    """`PolicyLoss` of S new single-action actors: losses (S, B).

    Raises:
        CapabilityError: If an actor was not made by `algos.offline.config.plain_actor`.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
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
            "seeds are trained together where algo makes its own actor; init has a policy of another kind. "
            f"{ONE_BY_ONE}"
        )
    return network


def joined(parameters: Sequence[nn.Parameter], parts: Sequence[torch.optim.Adam]) -> torch.optim.Adam:
    """Return one optimiser of stacked parameters that continues from the moments of every seed.

    The moments of the given optimisers become views of the new ones and share its step count: the given
    optimisers must not step separately. Without a previous step, moments start at zero, as in Adam.

    Args:
        parameters: (S, ...).
        parts: One optimiser per seed: same parameter order, same step count.
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
