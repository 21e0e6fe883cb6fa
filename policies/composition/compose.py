"""Compose policies: `compose`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.composition.operators import Composition, Weight
from policies.composition.policy import ComposedPolicy
from policies.policy import Policy
from policies.wrappers.planner import ComposedPlanner, PlannerPolicy

AnyComposition = ComposedPolicy | ComposedPlanner


def compose(
    members: Sequence[Policy],
    weights: Sequence[Weight],
    *,
    operator: str = Composition.operator,
    columns: Sequence[Sequence[int] | None] = (),
    obs_dim: int | None = None,
    temperature: float = Composition.temperature,
    sampler: Any = None,
) -> AnyComposition:
    """Compose policies; see `Composition` for the options.

    Returns a `ComposedPolicy`; of planners a `ComposedPlanner`, whose lead gives value and actions.

    Example:
        >>> from policies.build import build_policy
        >>> from policies.policy import PolicyConfig
        >>> one, two = (build_policy(PolicyConfig(), obs_dim=3, action_dim=2, seed=s) for s in (0, 1))
        >>> compose([one, two], [0.4, 0.6]).act(torch.zeros(5, 1, 3)).shape
        torch.Size([5, 4, 2])
    """
    seen = tuple(None if one is None else tuple(one) for one in columns)
    composition = Composition(tuple(weights), operator, seen, obs_dim, temperature)
    policy = ComposedPolicy(members, composition, sampler=sampler)
    lead = members[0]
    return ComposedPlanner(policy, lead.wrapper) if isinstance(lead, PlannerPolicy) else policy
