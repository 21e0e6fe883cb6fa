"""Networks of the released programs of Q-chunking, FQL, EXPO and IDQL, from their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from official_networks import stored
from torch import Tensor, nn

from algos.transitions import Batch
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.critics import Ensemble
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow
from policies.protocols import BoundField, Cond
from policies.samplers.ode import Euler

CLOSE = {"rtol": 1e-5, "atol": 5e-6}
STATED = {"rtol": 1e-5, "atol": 1e-5}
"""Tolerance that the reference numbers of FQL, EXPO and DQC state."""


def arrays_of(path: Path) -> dict[str, Any]:
    """Read every array of a reference file."""
    found = stored(path)
    return {name: str(one) if one.dtype.kind == "U" else torch.from_numpy(one) for name, one in found.items()}


@dataclass(frozen=True)
class FlowConfig:
    """Builds the flow of a file."""

    layers: tuple[Layer, ...]
    one_step: bool = False  # the network is the action itself, not the velocity

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Flow:
        return Flow(self.layers, shape, one_step=self.one_step)


class Flow(nn.Module):
    """Dense layers over [observation, chunk, time] with GELU between them.

    With `one_step` they read no time and return the action x + v that one Euler step makes.
    """

    def __init__(self, layers: tuple[Layer, ...], shape: tuple[int, int], *, one_step: bool) -> None:
        super().__init__()
        self.shape, self.one_step = shape, one_step
        names = ("kernel", "bias", "scale", "shift")
        for i, layer in enumerate(layers):
            for name in names:
                part = getattr(layer, name)
                self.register_parameter(f"{name}_{i}", None if part is None else nn.Parameter(part.clone()))
        self._count = len(layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        names = ("kernel", "bias", "scale", "shift")
        return tuple(Layer(*(getattr(self, f"{name}_{i}") for name in names)) for i in range(self._count))

    def forward(
        self, x: Tensor, time: Tensor, cond: Cond, *_: Any, time_row: Any = None, **__: Any
    ) -> Tensor:
        if self.one_step:
            return evaluate(self.layers, torch.cat([cond.vec, x.flatten(1)], dim=1)).view(-1, *self.shape) - x
        h = torch.cat([cond.vec, x.flatten(1), time.expand(len(x))[:, None]], dim=1)
        return evaluate(self.layers, h).view(-1, *self.shape)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k], cond)


@dataclass(frozen=True)
class Layer:
    """A dense layer (in, out), or a stack of them, and the normalisation after its activation, if any."""

    kernel: Tensor
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None


def layers_of(arrays: Mapping[str, Any], prefix: str) -> tuple[Layer, ...]:
    def part(kind: str, i: int, what: str) -> Tensor | None:
        return arrays.get(f"{prefix}.{kind}_{i}.{what}")

    found = []
    for i in takewhile(lambda i: part("Dense", i, "kernel") is not None, count()):
        dense = (arrays[f"{prefix}.Dense_{i}.{what}"] for what in ("kernel", "bias"))
        found.append(Layer(*dense, *(part("LayerNorm", i, what) for what in ("scale", "bias"))))
    return tuple(found)


def critic_layers(arrays: Mapping[str, Any], name: str) -> tuple[Layer, ...]:
    """Return the layers of the critics of IDQL and EXPO."""
    prefix = f"{name}.VmapStateActionValue_0"
    head = Layer(arrays[f"{prefix}.Dense_0.kernel"], arrays[f"{prefix}.Dense_0.bias"], None, None)
    return (*layers_of(arrays, f"{prefix}.MLP_0"), head)


def critic_sizes(layers: tuple[Layer, ...]) -> dict[str, Any]:
    """Return the settings of an ensemble with these layers (E, in, out)."""
    dims = tuple(layer.kernel.shape[2] for layer in layers[:-1])
    return {"critics": layers[0].kernel.shape[0], "critic_dims": dims}


def evaluate(layers: tuple[Layer, ...], h: Tensor) -> Tensor:
    """Return what dense layers make of (B, in), or stacks of layers of (1, B, in)."""
    for i, layer in enumerate(layers):
        h = torch.matmul(h, layer.kernel) + layer.bias.unsqueeze(-2)
        if i < len(layers) - 1:
            h = F.gelu(h, approximate="tanh")
        if layer.scale is not None and layer.shift is not None:
            h = F.layer_norm(h, h.shape[-1:], eps=1e-6)
            h = h * layer.scale.unsqueeze(-2) + layer.shift.unsqueeze(-2)
    return h


def values_of(arrays: Mapping[str, Any], net: str, state: Tensor, chunk: Tensor) -> Tensor:
    """Return what the critics (E, B) of a file say of states (B, Do) and flat chunks (B, A)."""
    prefix = f"param_{net}.value_net"
    return evaluate(layers_of(arrays, prefix), torch.cat([state, chunk], dim=1)[None]).squeeze(-1)


def flow_policy(
    arrays: Mapping[str, Any], net: str, horizon: int, *, one_step: bool = False
) -> DenoisingPolicy:
    """Return the policy of a file's flow, or of its one-step student."""
    width = int(arrays["cfg_action_dim"]) if "cfg_action_dim" in arrays else arrays["batch_actions"].shape[-1]
    clip = None if one_step else 1.0
    config = PolicyConfig(
        process=RectifiedFlow(time_scale=1.0),
        backbone=FlowConfig(layers_of(arrays, f"param_{net}.mlp"), one_step),
        sampler=Euler(steps=1 if one_step else int(arrays["cfg_flow_steps"]), clip_action=clip),
        horizon=horizon,
        act_steps=horizon,
        normalizer={"state": "identity", "action": "identity"},
        observation_clip=None,
    )
    made = build_policy(config, obs_dim=arrays["batch_observations"].shape[1], action_dim=width)
    assert isinstance(made, DenoisingPolicy)
    return made


def load_critic(critic: Ensemble, layers: tuple[Layer, ...]) -> None:
    """Copy stacked layers (E, in, out) into an ensemble."""
    with torch.no_grad():
        for i, layer in enumerate(layers):
            critic.weight[i].copy_(layer.kernel)
            critic.bias[i].copy_(layer.bias.unsqueeze(-2))
            if layer.scale is not None and layer.shift is not None:
                critic.scale[i].copy_(layer.scale.unsqueeze(-2))
                critic.shift[i].copy_(layer.shift.unsqueeze(-2))


def load_critics(learner: Any, arrays: Mapping[str, Any]) -> None:
    """Copy the critics and target critics of Q-chunking and FQL into a learner."""
    load_critic(learner.critic, layers_of(arrays, "param_critic.value_net"))
    load_critic(learner.target_critic, layers_of(arrays, "param_target_critic.value_net"))


def restore_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients of the only step that an Adam has taken, from its first moments."""
    keep = optimizer.defaults["betas"][0]
    for weight, state in optimizer.state.items():
        weight.grad = state["exp_avg"] / (1 - keep)


def assert_critic_gradient(
    critic: Ensemble, arrays: Mapping[str, Any], name: str, share: float = 1.0, close: Any = CLOSE
) -> None:
    """Compare the gradients of an ensemble, times `share`, with those of a file."""
    for i, layer in enumerate(layers_of(arrays, name)):
        pairs = [(critic.weight[i], layer.kernel), (critic.bias[i], layer.bias.unsqueeze(-2))]
        if layer.scale is not None and layer.shift is not None:
            pairs += [
                (critic.scale[i], layer.scale.unsqueeze(-2)),
                (critic.shift[i], layer.shift.unsqueeze(-2)),
            ]
        for own, official in pairs:
            assert own.grad is not None
            torch.testing.assert_close(share * own.grad, official, **close)


def assert_flow_gradient(field: Flow, arrays: Mapping[str, Any], name: str, close: Any = CLOSE) -> None:
    """Compare the gradients of a flow with those of a file."""
    for i, layer in enumerate(layers_of(arrays, name)):
        for part in ("kernel", "bias"):
            torch.testing.assert_close(getattr(field, f"{part}_{i}").grad, getattr(layer, part), **close)


def head_of(arrays: Mapping[str, Any], name: str, part: str) -> Tensor:
    """Return the joined last layer of the edit actor: means, then deviations."""
    pieces = [arrays[f"{name}.Output{which}.{part}"] for which in ("DenseMean", "DenseLogStd")]
    return torch.cat(pieces, dim=-1)


def install_editor(learner: Any, arrays: Mapping[str, Any], hidden: tuple[Layer, ...]) -> None:
    """Copy the edit actor of a file into a learner."""
    trunk = learner.policy.editor.trunk
    with torch.no_grad():
        for layer, official in zip([trunk.inlet, *trunk.layers], hidden, strict=False):
            layer.weight.copy_(official.kernel.T)
            layer.bias.copy_(official.bias)
        trunk.layers[-1].weight.copy_(head_of(arrays, "param_edit_actor", "kernel").T)
        trunk.layers[-1].bias.copy_(head_of(arrays, "param_edit_actor", "bias"))


def assert_editor_gradient(learner: Any, arrays: Mapping[str, Any], **close: float) -> None:
    """Compare the gradients of the edit actor with those of a file."""
    trunk = learner.policy.editor.trunk
    last, hidden = trunk.layers[-1], [trunk.inlet, *trunk.layers[:-1]]
    torch.testing.assert_close(last.weight.grad.T, head_of(arrays, "grad_edit_actor", "kernel"), **close)
    torch.testing.assert_close(last.bias.grad, head_of(arrays, "grad_edit_actor", "bias"), **close)
    for layer, official in zip(hidden, layers_of(arrays, "grad_edit_actor.MLP_0"), strict=True):
        torch.testing.assert_close(layer.weight.grad.T, official.kernel, **close)
        torch.testing.assert_close(layer.bias.grad, official.bias, **close)


def batch_of(arrays: Mapping[str, Any]) -> Batch:
    """Return the batch of a file, of single actions or of chunks with their return in the last column."""
    action, gamma = arrays["batch_actions"], float(arrays["cfg_discount"])
    is_chunk = action.ndim == 3
    steps = action.shape[1] if is_chunk else 1
    last = (lambda name: arrays[name][:, -1]) if is_chunk else (lambda name: arrays[name])
    flat, rows = action.flatten(1).float(), len(action)
    return Batch(
        cond=arrays["batch_observations"],
        action=flat,
        reward=last("batch_rewards").float(),
        next_cond=last("batch_next_observations"),
        discount=(gamma**steps * last("batch_masks")).float(),
        next_action=torch.zeros_like(flat),
        has_next=torch.zeros(rows),
        plan=flat,
        real=arrays["batch_valid"].float() if is_chunk else torch.ones(rows, 1),
        row=torch.arange(rows),
    )


def valid_rows(batch: Batch) -> Batch:
    """Return the rows whose chunk lies within its episode, the only ones that we draw."""
    kept = batch.real[:, -1] == 1
    columns = {name: part for name, part in vars(batch).items() if isinstance(part, Tensor)}
    return Batch(**{name: part[kept] for name, part in columns.items()})
