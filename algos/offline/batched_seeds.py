"""Several seeds of an offline algorithm, trained by one batched learner around those of single seeds.

Legend: S seeds, B rows of a batch, E members of an ensemble. A parameter (...) of S modules becomes one of
shape (S, ...), and the modules' own become views of it: each seed is still saved, averaged and exported from
its own modules, while one batched product does the work of S. Learners reduce over the last axes of what
they compute, so a batch (S, B, ...) gives one loss per seed; `descend` adds them up. Numbers agree with those
of single seeds to rounding.

Modules whose parameters are such views must not be trained by themselves any more. Writes to a whole do not
advance the versions of its views, so values that were computed from weights and cached
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
    """A run of one seed, which a `SeedBatch` trains once that has begun."""

    is_batched = False

    def advance(self) -> Metrics:
        """Take gradient steps alone.

        Raises:
            CapabilityError: If a `SeedBatch` trains it.
        """
        self._require_alone()
        return super().advance()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CapabilityError: If a `SeedBatch` trains it.
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
    """Return one run for each seed, as `config.build` would; they share the transitions.

    Args:
        config: Of all.
        setup: Its own seed is not used.
        seeds: Different ones.
    """
    setups = [replace(setup, seed=seed, num_seeds=len(seeds)) for seed in seeds]
    data = config.prepare(setups[0])
    return [config.run(own, data, SeedRun) for own in setups]


class SeedBatch:
    """Runs of several seeds that one batched learner trains.

    Every run draws what it would draw alone, and is saved, evaluated and exported by itself, but once the
    batch has taken a step, runs advance and load only here. Seeds that are behind go first, together.

    Args:
        runs: Made by `build_seeds`; each may have been continued.

    Raises:
        ConfigError: If they were made apart: they must share their transitions.
    """

    def __init__(self, runs: Sequence[OfflineRun]) -> None:
        if any(run.table is not runs[0].table for run in runs):
            raise ConfigError("runs that are trained together must be made together, by build_seeds.")
        self.runs = runs
        self._moving: tuple[OfflineRun, ...] = ()
        self._learner: Any = None

    def advance(self) -> list[Metrics]:
        """Take gradient steps with every seed that is furthest behind.

        Returns:
            What `OfflineRun.advance` would, for each run; empty for those that stood still.
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
        """Return the batched learner of these runs; made anew when other runs moved before."""
        if self._learner is None or self._moving != tuple(runs):
            self._moving = tuple(runs)
            self._learner = batched([run.learner for run in runs])
            for run in runs:
                run.is_batched = True  # type: ignore[attr-defined]
        return self._learner, self._moving


def step_together(learner: Any, runs: Sequence[OfflineRun], rows: Tensor | None = None) -> dict[str, Tensor]:
    """Take a step of every run; returns metrics, each (S,).

    Args:
        learner: Of all runs; see `batched`.
        runs: Whose draws are used.
        rows: (S, B), in place of those that they draw.
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
    """Return one learner that takes the steps of several, which differ by their seeds only.

    Networks, optimisers and regularisers are stacked attribute by attribute; constants are those of the
    first. The networks of the given learners become views: they can be read and saved, but must not step or
    load by themselves any more. The whole has no policy of its own.

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
    """A search for the rows nearest to queries with further axes in front."""

    search: Search

    @property
    def name(self) -> str:
        return self.search.name

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        found = self.search.nearest(row.flatten(), state.flatten(0, -2), action.flatten(0, -2))
        return Nearest(found.row.view_as(row), found.certified.view_as(row))


def stack_parameters(parts: Sequence[Tensor]) -> nn.Parameter:
    """Return parameters (...) as one (S, ...), of which they are views from now on."""
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
        """Return every layer's output for its own inputs."""
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


def stacked(modules: Sequence[M]) -> M:
    """Return a module like the given ones, whose parameters are all of theirs.

    Args:
        modules: Of one shape, made of linear layers with biases, and of what takes any leading axes. One that
            has parameters of its own must know that they have one more in front.

    Raises:
        CapabilityError: If a part has buffers, keeps what it computes from weights, or is a layer without
            bias: such parts are those of one seed.
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
        return self._evaluate_together(h, count, frozen).view(seeds, count, -1).transpose(0, 1)

    def load_members(self, members: Sequence[Sequence[Mapping[str, Tensor]]]) -> NoReturn:
        """Refuse: load those of the ensembles.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("stacked ensembles have the weights of the ensembles; load or read those.")

    def layers_of(self, member: int) -> NoReturn:
        """Refuse: ask the ensembles.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("stacked ensembles have the weights of the ensembles; load or read those.")

    def _stacks(self, parts: nn.ParameterList, count: int, frozen: bool) -> list[Tensor]:
        """Return the weights of the first so many members of every seed, (S E, ...)."""
        stacks = (part[:, :count].flatten(0, 1) for part in parts)
        return [stack.detach() if frozen else stack for stack in stacks]


class BatchedActor(Actor):
    """The actors of S seeds: conditions (S, B, C) to actions (S, B, A).

    Raises:
        CapabilityError: If one was not made by `algos.offline.config.plain_actor`.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.limit = actors[0].limit
        self._network = stacked([require_actor_network(actor.policy) for actor in actors])

    @property
    def network(self) -> nn.Module:
        return self._network  # type: ignore[return-value]


class BatchedPolicyLoss:
    """`PolicyLoss` of the new actors of S seeds, which act in single steps: (S, B).

    Raises:
        CapabilityError: If one was not made by `algos.offline.config.plain_actor`.
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
        CapabilityError: If it is another policy.
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

    The moments of the given optimisers become views of its own and share its step count: none of them may
    step by itself any more. Those that have taken no step yet begin at zero, as Adam does.

    Args:
        parameters: (S, ...).
        parts: Over the parameters of every seed, in the same order, after equally many steps.
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
