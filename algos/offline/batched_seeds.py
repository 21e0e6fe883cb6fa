"""Several networks of one shape as one, for seeds that are trained together.

Legend: S seeds, B rows of a batch, E members of an ensemble. A parameter (...) of S modules becomes one of
shape (S, ...), and the modules' own become views of it: they stay what is saved, averaged and shipped, while
one product does the work of S. Products are computed as those of a single module, one per seed, so numbers
agree to rounding.

Whoever's parameters are such views must not step by itself any more. Writes to a whole do not advance the
versions of its views, so what is computed from the weights of one and kept (`policies.networks.weight_cache`) would
grow stale: modules that do so are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from algos.offline.actor import Actor
from policies.errors import CapabilityError
from policies.networks.critics import Ensemble
from policies.networks.heads import GaussianHead
from policies.networks.mlp_blocks import PlainTrunk
from policies.networks.weight_cache import keeps_values
from policies.policy import Policy
from policies.processes.deterministic import DeterministicPolicy
from policies.processes.gaussian import GaussianPolicy

M = TypeVar("M", bound=nn.Module)
ONE_BY_ONE = "Train the seeds one by one: --multirun seed=0,1,2."


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


class StackedActor(Actor):
    """The actors of S seeds: conditions (S, B, C) to actions (S, B, A).

    Raises:
        CapabilityError: If one is not what `algos.offline.config.plain_actor` makes.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.limit = actors[0].limit
        self._network = stacked([actor_network(actor.policy) for actor in actors])

    @property
    def network(self) -> nn.Module:
        """What is trained."""
        return self._network

    @property
    def policy(self) -> Policy:
        """The policies are those of the actors that are stacked.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError("actors of several seeds have several policies; ask one of them for its own.")

    def __call__(self, cond: Tensor, noise: Tensor, *, grad: bool = True) -> Tensor:
        """Return actions in [-L, L]; noise has no influence."""
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            action = self._network(cond)[0]
        return action if self.limit == 1.0 else action * self.limit


class ActorNetwork(nn.Module):
    """What a new actor learns: from conditions (..., B, C) to means (..., B, A) and deviations, if any.

    It shares the parameters of the policy.

    Args:
        trunk: To the mean before tanh.
        head: Of a Gaussian, whose deviations it has.
    """

    def __init__(self, trunk: PlainTrunk, head: GaussianHead | None = None) -> None:
        super().__init__()
        self.trunk, self._density = trunk, None if head is None else head.config
        self.log_var = None if head is None else head.log_var

    def forward(self, cond: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return both; deviations (..., 1, A)."""
        mean = torch.tanh(self.trunk(cond))
        if self._density is None or self.log_var is None:
            return mean, None
        return mean, self._density.std_of(self.log_var).unsqueeze(-2)


def actor_network(policy: Policy) -> ActorNetwork:
    """Return what is trained of a policy that `algos.offline.config.plain_actor` describes.

    Raises:
        CapabilityError: If it is another.
    """
    network = None
    if policy.chunk.horizon == 1 and isinstance(policy, DeterministicPolicy):
        network = _network_of(policy.trunk)
    if policy.chunk.horizon == 1 and isinstance(policy, GaussianPolicy):
        network = _network_of(policy.head.trunk, policy.head)
    if network is None or _trained(network) != _trained(policy):
        raise CapabilityError(
            "seeds are trained together where algo makes its own actor; init has a policy of another kind. "
            f"{ONE_BY_ONE}"
        )
    return network


def _network_of(trunk: nn.Module, head: GaussianHead | None = None) -> ActorNetwork | None:
    return ActorNetwork(trunk, head) if isinstance(trunk, PlainTrunk) else None


def _trained(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def joined(parameters: Iterable[nn.Parameter], parts: Sequence[torch.optim.Adam]) -> torch.optim.Adam:
    """Return one optimiser of stacked parameters that goes on from the moments of those of every seed.

    Their moments become views of its own, and its count of steps is theirs: none of them may step by itself
    any more. Those that have taken no step yet begin at zero, as Adam does.

    Args:
        parameters: (S, ...), those that learn.
        parts: Over the parameters of every seed, in the same order, after equally many steps.
    """
    options = {name: value for name, value in parts[0].param_groups[0].items() if name != "params"}
    whole = torch.optim.Adam([p for p in parameters if p.requires_grad], **options)
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
