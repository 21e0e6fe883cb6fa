"""What the tokens of BESO's network see of each other; its numbers are those of `test_importing_beso`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import mentions
from small_backbones import COND, build, inputs

from policies.backbones.gpt import GptConfig
from policies.errors import CapabilityError, ConfigError


def test_an_action_sees_all_goals_earlier_actions_and_states_up_to_its_own() -> None:
    net = build("gpt-goals").double()  # two states and a goal of two numbers each, five actions
    x, time, cond = inputs(net, 2)
    x.requires_grad_(), cond.vec.requires_grad_()
    out = net(x, time, cond)
    for action in range(x.shape[1]):
        of_x, of_cond = torch.autograd.grad(out[:, action].sum(), [x, cond.vec], retain_graph=True)
        assert (of_x.abs().amax((0, 2)) > 0).tolist() == [other <= action for other in range(x.shape[1])]
        seen = (of_cond.abs().amax(0) > 0).tolist()
        assert seen == [True, True, action >= 1, action >= 1, True, False]  # one entry of goals is unread


def test_a_time_for_every_action_and_tokens_are_refused() -> None:
    net = build("gpt")
    x, time, cond = inputs(net, 2)
    with pytest.raises(CapabilityError, match=mentions("gpt (2, 5)")):
        net(x, time[:, None].expand(-1, 5), cond)
    with pytest.raises(CapabilityError, match=mentions("gpt transformer")):
        net.config.build((5, 3), COND, token_dim=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 6, "heads": 4}, "backbone.heads backbone.width=6 4"),
        ({"goal_tokens": 1}, "backbone.goal_tokens backbone.obs_tokens=1"),
        ({"obs_tokens": 4}, "backbone.obs_tokens 4 6"),
        ({"obs_tokens": 6}, "horizon 6 5"),
        ({"obs_tokens": 3, "goal_tokens": 1, "goal_unread": (2,)}, "backbone.goal_unread 1 2"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        GptConfig(**fields).build((5, 3), COND)
