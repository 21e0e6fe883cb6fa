"""OGBench's environment shared by many rows.

`envs.tasks.ogbench.stepper` steps the rows in turn: the state of a row besides its physics is copied by
`get_variables` and `set_variables`. This module imports MuJoCo; it is imported when a world is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
from gymnasium.spaces import Box

from envs.spec import Array

_ROW_VARIABLES = ("_cur_button_states", "_target_button_states", "_target_drawer_pos", "_target_window_pos")
_LOCKED_JOINTS = ("drawer_slide", "window_slide")
_HANDLES = ("drawer_handle", "window_handle")  # materials, in the colour of the button that locks them
_ALPHA = 0.1
_VISUAL: dict[str, tuple[str | None, float]] = {
    **{f"ur5e/robotiq/{name}": (None, _ALPHA) for name in ("metal", "silicone", "gray")},
    **{f"ur5e/{name}": (None, _ALPHA) for name in ("black", "jointgray", "linkgray", "lightblue")},
    "ur5e/robotiq/black": ("purple", _ALPHA),
    "ur5e/robotiq/pad_gray": ("purple", 0.5),
}
"""Colour (None: its own) and opacity of materials in OGBench's visual worlds."""
_TARGET_SITES = ("drawer_handle_center_target", "window_handle_center_target")

_Official: Any = object
"""Stands for one of OGBench's classes, which `share` puts here."""


class SharedWorld(_Official):
    """Base that `share` puts before one of OGBench's classes.

    Attributes are OGBench's own except `_box`, `_has_buttons`, `_in_model` (parts of the model that belong to
    a row) and `_applied` (button states that the colours show).
    """

    def __init__(self, **options: Any) -> None:
        self._box = Box(np.float32(-1), np.float32(1), (5,), np.float32)
        super().__init__(**options)
        self._has_buttons = hasattr(self, "_cur_button_states")

    @property
    def action_space(self) -> Box:
        """Action box; OGBench makes a fresh, unseeded one per call."""
        return self._box

    def compile(self) -> None:
        """Compile the model without starting an episode, and find the parts of it that belong to a row."""
        self._mjcf_model = self.build_mjcf_model()
        self.compile_model_and_data()
        self._never_compiled = False
        self._in_model: dict[str, Array] = {}
        if hasattr(self, "_target_drawer_pos"):
            sites = [self._model.site(name).pos for name in _TARGET_SITES]
            locks = [self._model.joint(name).damping for name in _LOCKED_JOINTS]
            self._in_model = {f"model {i}": view for i, view in enumerate([*sites, *locks])}

    def reset(self, *, seed: int) -> tuple[Array, dict[str, Any]]:
        """Start an episode; everything in it follows from the seed."""
        self._box.seed(seed)
        self._applied: Array | None = None
        result: tuple[Array, dict[str, Any]] = super().reset(seed=seed)
        return result

    def get_variables(self) -> dict[str, Array]:
        """Return copies of the state of a row besides its physics."""
        kept = {name: np.array(getattr(self, name)) for name in _ROW_VARIABLES if hasattr(self, name)}
        return kept | {name: view.copy() for name, view in self._in_model.items()}

    def set_variables(self, variables: Mapping[str, Array]) -> None:
        for name, value in variables.items():
            if name in self._in_model:
                self._in_model[name][:] = value
            else:
                setattr(self, name, value.copy() if value.ndim else float(value))

    def pre_step(self) -> None:
        """Copy only the buttons' positions of the previous state, which detect presses."""
        self._prev_qpos, self._prev_qvel = self._data.qpos, self._data.qvel
        if self._has_buttons:
            self._prev_button_states = self._cur_button_states.copy()
            self._prev_ob_info = {
                f"privileged/button_{i}_pos": self._data.joint(f"buttonbox_joint_{i}").qpos.copy()
                for i in range(self._num_buttons)
            }

    def _apply_button_states(self) -> None:
        """Colour buttons and set locks if a state is new; the forward pass is part of the physics."""
        if self._applied is not None and np.array_equal(self._applied, self._cur_button_states):
            mujoco.mj_forward(self._model, self._data)
        else:
            super()._apply_button_states()
            self._applied = self._cur_button_states.copy()

    def advance(self, action: Array) -> None:
        """Advance the physics by one control step, and the buttons with it."""
        self.set_control(action)
        self.pre_step()
        mujoco.mj_step(self._model, self._data, nstep=self._n_steps)
        mujoco.mj_rnePostConstraint(self._model, self._data)  # contact forces for the observation
        if self._has_buttons:
            self.post_step()

    def paint(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Colour a rendering model for an appearance.

        Source:
            `build_mjcf_model` with `ob_type` = pixels, and `_apply_button_states`.
        """
        for name, (color, alpha) in _VISUAL.items():
            rgba = model.material(name).rgba
            rgba[:3] = rgba[:3] if color is None else self._colors[color][:3]
            rgba[3] = alpha
        for i, group in enumerate(getattr(self, "_cube_geom_ids_list", ())):
            for geom in group:
                model.geom_rgba[geom] = self._cube_colors[i]
            model.geom_rgba[self._cube_target_geom_ids_list[i], 3] = 0.0
        states = appearance.get("_cur_button_states", np.empty(0))
        pressed = "white" if self._in_model else "blue"  # in the world with drawer and window, or puzzles
        colors = [self._colors["red" if state == 0 else pressed] for state in states]
        for i, color in enumerate(colors):
            model.geom_rgba[self._button_geom_ids_list[i]] = color
        for handle, color in zip(_HANDLES if self._in_model else (), colors, strict=False):
            model.material(handle).rgba = color

    def is_solved(self) -> bool:
        return bool(self._success) if self._has_buttons else all(self._compute_successes())


def share(official: type) -> Any:
    """Derive our environment from one of OGBench's."""
    return type("World", (SharedWorld, official), {})
