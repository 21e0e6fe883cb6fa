"""Complete states of simulators continue bit for bit, and are refused where they do not belong."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from messages import mentions

from envs.engine.physics import get_physics, recorded_physics, set_physics
from policies.errors import CheckpointError

BALLS = """<mujoco><worldbody><geom type="plane" size="1 1 1"/>
<body pos="0 0 .2"><freejoint/><geom size=".1"/></body>
<body pos="0.05 0 .5"><freejoint/><geom size=".1"/></body></worldbody></mujoco>"""


def test_physics_goes_on_bit_for_bit_from_a_state() -> None:
    model = mujoco.MjModel.from_xml_string(BALLS)
    first, second = mujoco.MjData(model), mujoco.MjData(model)
    mujoco.mj_step(model, first, nstep=150)  # balls touch: the solver is warm
    mujoco.mj_step(model, second, nstep=140)
    states = get_physics(model, [first, second])
    others = [mujoco.MjData(model), mujoco.MjData(model)]
    set_physics(model, others, states)
    for data, other in zip((first, second), others, strict=True):
        assert data.ncon > 0
        mujoco.mj_step(model, data, nstep=40)
        mujoco.mj_step(model, other, nstep=40)
        assert np.array_equal(recorded_physics(data), recorded_physics(other))
    assert recorded_physics(first).shape == (1 + model.nq + model.nv,)


def test_states_of_other_simulators_are_refused() -> None:
    model = mujoco.MjModel.from_xml_string(BALLS)
    datas = [mujoco.MjData(model), mujoco.MjData(model)]
    states = get_physics(model, datas)
    with pytest.raises(CheckpointError, match=mentions("physics (1, 69) (2, 69)")):
        set_physics(model, datas, states[:1])
    with pytest.raises(CheckpointError, match=mentions("physics (2, 68) (2, 69)")):
        set_physics(model, datas, states[:, 1:])
