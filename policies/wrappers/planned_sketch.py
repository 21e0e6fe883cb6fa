"""Where a sketch lies in what a policy denoises: in chunks everywhere, in plans among actions or states.

Legend: B batch, H rows of a plan, D their width, O width of a state. Row i of a plan is its state after i
actions, so the guide of a planner is the sketched place p_i itself, not the way to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.protocols import Observation
from policies.wrappers.planner import PlannerPolicy
from policies.wrappers.sketches import ActionSketch, Sketch, WaypointSketch


def guided_entries(policy: Any, sketch: Sketch) -> Tensor | None:
    """Return which entries of a row the sketch guides, (D,) of 0 and 1; None: all of them.

    Raises:
        CapabilityError: If the sketch is of actions, and plans hold states alone.
        ConfigError: If it reads an entry that the state lacks.
    """
    if not isinstance(policy, PlannerPolicy):
        return None
    sizes = policy.wrapper
    entries = torch.zeros(sizes.row_dim)
    if isinstance(sketch, ActionSketch):
        if policy.inverse is not None:
            raise CapabilityError(
                "the plans of this policy hold states, not actions. Sketch a path: positions or waypoints."
            )
        entries[: sizes.action_dim] = 1
        return entries
    observed = list(_path(sketch).observed)
    if max(observed) >= sizes.obs_dim:
        raise ConfigError(
            f"observed must name entries 0 to {sizes.obs_dim - 1} of the state; got {observed}."
        )
    entries[sizes.row_dim - sizes.obs_dim :][observed] = 1
    return entries


def guide_of(policy: Any, sketch: Sketch, obs: Observation) -> Tensor:
    """Return the guide (B, H, D), normalised, 0 where there is none."""
    if not isinstance(policy, PlannerPolicy):
        guide: Tensor = policy.normalize_action(sketch.guide(obs, policy.chunk))
        return guide
    sizes = policy.wrapper
    if isinstance(sketch, ActionSketch):
        return F.pad(policy.normalize_action(sketch.guide(obs, policy.chunk)), (0, sizes.obs_dim))
    path = _path(sketch)
    places = path.targets(obs, policy.chunk)[:, :-1]
    entry = F.one_hot(torch.tensor(path.observed), sizes.obs_dim).to(places)
    states = policy.normalizer.encode("state", places @ entry) * entry.sum(dim=0)
    return F.pad(states, (sizes.row_dim - sizes.obs_dim, 0))


def _path(sketch: Any) -> Any:
    return sketch.path if isinstance(sketch, WaypointSketch) else sketch
