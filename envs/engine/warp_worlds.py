"""N states of one MuJoCo model in mujoco-warp: float32, stepped together; extra `warp`.

Simulated on a GPU where there is one, else on the CPU, slower than MuJoCo, for tests. Tensors share warp's
memory. Buffers of contacts and constraints have a fixed size; more is an error.

Legend: N worlds, M of them addressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from envs.engine.ray_tracing import put_model, require_warp
from policies.errors import EnvironmentFailure

if TYPE_CHECKING:
    import mujoco


class WarpWorlds:
    """Positions `qpos` (N, nq), velocities `qvel` (N, nv) and controls `ctrl` (N, nu), to be written.

    Args:
        model: Compiled for MuJoCo.
        num_worlds: N.
        contacts: Room for contacts per world, shared by all; None: mujoco-warp's guess.

    Raises:
        MissingExtraError: If mujoco-warp is not installed.
        CapabilityError: If it does not support the model.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_worlds: int,
        *,
        contacts: int | None = None,
    ) -> None:
        self._warp, engine = require_warp("env.engine=warp")
        self._device = self._warp.get_preferred_device()
        with self._warp.ScopedDevice(self._device):
            scene = put_model(engine, model, "env.engine=exact")
            data = engine.make_data(model, num_worlds, nconmax=contacts)
            self._data = data
            to_torch = self._warp.to_torch
            self.qpos, self.qvel, self.ctrl = map(to_torch, (data.qpos, data.qvel, data.ctrl))
            self._state = (self.qpos, self.qvel, to_torch(data.qacc_warmstart))
            self._num_contacts = to_torch(data.nacon)
            self._used = (to_torch(data.ncollision), self._num_contacts, to_torch(data.nefc))
            self._most = self._num_contacts.new_zeros(3)  # of pairs that are near, contacts, constraints
            self._contact_world = to_torch(data.contact.worldid)
            self._begun: dict[int, tuple[Any, ...]] = {}  # states of worlds to be set before the next step
            with self.kept(torch.ones(num_worlds, dtype=torch.bool, device=self.qpos.device)):
                self._warp.synchronize_device()  # torch's stream is another one
                engine.step(scene, data)  # compiles the kernels that a capture cannot
                with self._warp.ScopedCapture() as capture:
                    engine.step(scene, data)
                self._warp.synchronize_device()
        self._step = capture.graph

    def put(self, row: int, qpos: Any, qvel: Any) -> None:
        """Begin in this state, at rest inside the solver, with the next step; many rows are set at once."""
        self._begun[row] = (qpos, qvel, 0.0)

    def _begin(self) -> None:
        if not self._begun:
            return
        rows = torch.tensor(list(self._begun), device=self.qpos.device)
        for tensor, values in zip(self._state, zip(*self._begun.values(), strict=True), strict=True):
            full = np.stack([np.broadcast_to(value, tensor.shape[1:]) for value in values])
            tensor[rows] = torch.as_tensor(full, dtype=torch.float32).to(tensor.device)
        self._begun.clear()

    def step(self) -> None:
        """Advance all worlds by one step of physics."""
        self._begin()
        stream = None
        if self._device.is_cuda:
            stream = self._warp.stream_from_torch(torch.cuda.current_stream(self.qpos.device))
        self._warp.capture_launch(self._step, stream=stream)
        torch.maximum(self._most, torch.stack([used.max() for used in self._used]), out=self._most)

    @contextmanager
    def kept(self, worlds: Tensor) -> Iterator[None]:
        """Keep the state of some worlds (N,) bool over a block, whatever it does."""
        self._begin()
        before = [tensor.clone() for tensor in self._state]
        yield
        for tensor, values in zip(self._state, before, strict=True):
            tensor.copy_(torch.where(worlds[:, None], values, tensor))

    def touching(self) -> Tensor:
        """Return whether a world has a contact, (N,) bool, found by the last step before it moved."""
        index = torch.arange(len(self._contact_world), device=self.qpos.device)
        here = torch.where(index < self._num_contacts, self._contact_world, len(self.qpos)).long()
        touches = torch.zeros(len(self.qpos) + 1, dtype=torch.bool, device=here.device)
        return touches.index_fill_(0, here, True)[:-1]

    def require_room(self) -> None:
        """Raise EnvironmentFailure if a step had more contacts or constraints than fit."""
        near, contacts, constraints = self._most.tolist()
        contacts = max(near, contacts)
        if contacts > self._data.naconmax or constraints > self._data.njmax:
            raise EnvironmentFailure(
                f"mujoco-warp has room for {self._data.naconmax} contacts of all worlds and "
                f"{self._data.njmax} constraints of each; a step had {contacts} and {constraints}. "
                "Use env.engine=exact."
            )

    def get_state(self) -> list[Any]:
        """Return positions, velocities and the warm start of the solver, (N, ...) each."""
        self._begin()
        return [tensor.cpu().numpy().copy() for tensor in self._state]

    def set_state(self, state: list[Any]) -> None:
        self._begun.clear()
        for tensor, values in zip(self._state, state, strict=True):
            tensor.copy_(torch.as_tensor(values))
