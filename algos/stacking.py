"""Several networks of one shape as one, for seeds that are trained together.

Legend: S seeds, B rows of a batch, E members of an ensemble. A parameter (...) of S modules becomes one of
shape (S, ...), and the modules' own become views of it: they stay what is saved, averaged and shipped, while
one product does the work of S. Products are computed as those of a single module, one per seed, so numbers
agree to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from algos.actor import Actor
from policies.deterministic import DeterministicPolicy
from policies.ensembles import Ensemble
from policies.errors import CapabilityError
from policies.gaussian import GaussianPolicy
from policies.heads import GaussianHead
from policies.policy import Policy
from policies.trunk import PlainTrunk

M = TypeVar("M", bound=nn.Module)


def tied(parts: Sequence[Tensor]) -> nn.Parameter:
    """Return parameters (...) as one (S, ...), of which they are views from now on."""
    whole = nn.Parameter(torch.stack([part.detach() for part in parts]), parts[0].requires_grad)
    for part, view in zip(parts, whole.detach().unbind(0), strict=True):
        part.data = view
    return whole


class StackedLinear(nn.Module):
    """S linear layers: (S, B, in) to (S, B, out)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = tied([layer.weight for layer in layers])
        self.bias = tied([layer.bias for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        """Return every layer's output for its own inputs."""
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


def stacked(modules: Sequence[M]) -> M:
    """Return a module like the given ones, whose parameters are all of theirs.

    What surrounds linear layers must take any leading axes, and what has parameters of its own must know
    that they have one more in front.
    """
    whole = copy.deepcopy(modules[0])
    for name, part in list(whole.named_modules()):
        alike = [module.get_submodule(name) for module in modules]
        if isinstance(part, nn.Linear):
            whole.set_submodule(name, StackedLinear(alike))  # type: ignore[arg-type]
            continue
        for own in dict(part.named_parameters(recurse=False)):
            setattr(part, own, tied([each.get_parameter(own) for each in alike]))
    return whole


class StackedEnsemble(Ensemble):
    """S ensembles: conditions (S, B, C) and actions (S, B, A) to values (E, S, B)."""

    def __init__(self, ensembles: Sequence[Ensemble]) -> None:
        nn.Module.__init__(self)
        first = ensembles[0]
        self.config, self.activate, self.activate_ = first.config, first.activate, first.activate_
        for name in ("weight", "bias", "scale", "shift"):
            layers = zip(*(getattr(one, name) for one in ensembles), strict=True)
            setattr(self, name, nn.ParameterList(tied(layer) for layer in layers))

    def forward(
        self, cond: Tensor, action: Tensor, *, members: int | None = None, frozen: bool = False
    ) -> Tensor:
        """Return values (E, S, B); see `Ensemble.forward`."""
        x = torch.cat([cond, action], dim=-1).unsqueeze(1)
        seeds, count = len(x), self.members if members is None else members
        h = x.expand(-1, count, -1, -1).flatten(0, 1)
        return self._evaluate_together(h, count, frozen).view(seeds, count, -1).transpose(0, 1)

    def _stacks(self, parts: nn.ParameterList, count: int, frozen: bool) -> list[Tensor]:
        """Return the weights of the first so many members of every seed, (S E, ...)."""
        stacks = (part[:, :count].flatten(0, 1) for part in parts)
        return [stack.detach() if frozen else stack for stack in stacks]


class StackedActor(Actor):
    """The actors of S seeds: conditions (S, B, C) to actions (S, B, A).

    Raises:
        CapabilityError: If one is not what `algos.offline.plain_actor` makes.
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
    """Return what is trained of a policy that `algos.offline.plain_actor` describes.

    Raises:
        CapabilityError: If it is another.
    """
    if isinstance(policy, DeterministicPolicy) and isinstance(policy.trunk, PlainTrunk):
        return ActorNetwork(policy.trunk)
    if isinstance(policy, GaussianPolicy) and isinstance(policy.head.trunk, PlainTrunk):
        return ActorNetwork(policy.head.trunk, policy.head)
    raise CapabilityError(
        "seeds are trained together where algo makes its own actor; init has a policy of another kind. "
        "Train them one by one: --multirun seed=0,1,2."
    )


def join_optimizers(whole: torch.optim.Optimizer, parts: Sequence[torch.optim.Optimizer]) -> None:
    """Give an optimiser of stacked parameters the moments of the optimisers of each, which become views.

    Those that have taken no step yet begin at zero, as Adam does.

    Args:
        whole: Adam over parameters (S, ...).
        parts: Adam over the parameters of every seed, in the same order, after equally many steps.
    """
    groups = [one.param_groups[0]["params"] for one in (whole, *parts)]
    for parameter, *own in zip(*groups, strict=True):
        states = [one.state[each] for one, each in zip(parts, own, strict=True)]
        joined = whole.state[parameter]
        joined["step"] = states[0].get("step", torch.zeros((), dtype=torch.float32)).clone()
        joined["step"] = joined["step"].to(parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            given = [state.get(name, torch.zeros_like(each)) for state, each in zip(states, own, strict=True)]
            joined[name] = torch.stack(given)
            for state, view in zip(states, joined[name].unbind(0), strict=True):
                state[name] = view
        for state in states:
            state["step"] = joined["step"]
