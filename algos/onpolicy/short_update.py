"""PPO's update for small minibatches of a Gaussian policy: gradients of plain networks by hand.

A minibatch of some dozen rows costs calls, not arithmetic. Here the networks' gradients are a dozen matrix
products without a graph.

Legend: B rows of a minibatch, Th horizon, Da action width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from algos.base import Quantities
from algos.onpolicy.advantages import Experience
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.ppo_update import GeneratorDraws, PpoUpdate, named_metrics
from algos.onpolicy.ratios import ChainRatio, RatioEstimator, Score
from algos.training.ranks import current
from policies.networks.activations import ACTIVATIONS
from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.networks.heads import Critic, GaussianHead
from policies.networks.mlp_blocks import PlainTrunk
from policies.processes.gaussian import GaussianPolicy
from policies.protocols import Cond

Gradients = dict[Tensor, Tensor]  # by parameter

SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": torch.ops.aten.tanh_backward,
    "relu": lambda grad, out: torch.ops.aten.threshold_backward(grad, out, 0),
}
"""Activation -> gradient of its argument, from that of its output and the output."""


def update_of(config: OnPolicyConfig, ratio: RatioEstimator, critic: nn.Module, **given: Any) -> PpoUpdate:
    """Return PPO's update: `ShortUpdate` where it computes all that the settings ask for."""
    is_short = _is_plain(critic) and _is_gaussian(ratio) and _asks_for_no_more(config, **given)
    return (ShortUpdate if is_short else PpoUpdate)(config, ratio=ratio, critic=critic, **given)


def _is_plain(network: nn.Module) -> bool:
    trunk = getattr(network, "trunk", None)
    if not isinstance(network, Critic | GaussianHead) or not isinstance(trunk, PlainTrunk):
        return False
    on_cpu = trunk.inlet.weight.is_cpu
    return trunk.norms is None and network.config.activation in SLOPES and on_cpu


def _is_gaussian(ratio: RatioEstimator) -> bool:
    policy = ratio.policy
    if type(ratio) is not ChainRatio or type(policy) is not GaussianPolicy or policy.noise_correlation:
        return False
    return _is_plain(policy.head)


def _asks_for_no_more(config: OnPolicyConfig, **given: Any) -> bool:
    more = (given.get("encoder"), given.get("cloning"), given.get("demonstrations"))
    few = config.batch_size <= config.microbatch_size and current().world == 1
    plain = not config.entropy_coef and config.value_clip is None and config.surrogate == "ppo"
    return few and plain and not any(more)


class Layers:
    """The linear layers of a plain trunk with an activation between them."""

    def __init__(self, network: Any) -> None:
        self._layers: list[nn.Linear] = [network.trunk.inlet, *network.trunk.layers]
        self._activate = ACTIVATIONS[network.config.activation][1]
        self._slope = SLOPES[network.config.activation]

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the input (B, ·) of every layer, and the output."""
        activations = [x]
        for layer in self._layers:
            x = torch.addmm(layer.bias, x, layer.weight.t())
            activations.append(x if layer is self._layers[-1] else self._activate(x))
        return activations

    def gradients(self, activations: list[Tensor], grad: Tensor) -> Gradients:
        """Return the gradients of all weights from that of the output (B, out)."""
        gradients: Gradients = {}
        for i, layer in reversed(list(enumerate(self._layers))):
            gradients[layer.weight], gradients[layer.bias] = grad.t().mm(activations[i]), grad.sum(dim=0)
            if i:
                grad = self._slope(grad.mm(layer.weight), activations[i])
        return gradients


class ShortUpdate(PpoUpdate):
    """`PpoUpdate` of a `GaussianPolicy` and a `Critic` of plain layers; the same numbers to rounding."""

    ratio: ChainRatio

    def __init__(self, config: OnPolicyConfig, **given: Any) -> None:
        super().__init__(config, **given)
        self._mean, self._value = Layers(self.ratio.policy.head), Layers(self.critic)
        self._weights = self.ratio.reduction_weights()

    @torch.no_grad()
    def actor_gradient(
        self, experience: Experience, index: Tensor, *, draws: GeneratorDraws
    ) -> tuple[list[Tensor], Quantities]:
        head, advantage = self.ratio.policy.head, self.weighted_advantage(experience, index)
        activations = self._mean.forward(experience.cond.rows(index).vec)
        out = activations[-1].tanh() if head.config.squash else activations[-1]
        mean, std = out.view(-1, *head.chunk_shape), head.config.std_of(head.log_var)
        x = experience.record["chain"][:, 1].index_select(0, index)
        old = experience.record["log_prob"].flatten().index_select(0, index)
        log_prob, entropy = gaussian_log_prob(x, mean, std), gaussian_entropy(std).expand_as(mean)
        new, saturated = self.ratio.reduce(log_prob)
        score = Score(new - old, self.ratio.reduce_executed(entropy), saturated)
        losses, sums = self.objective(score, advantage, self.clip_range, len(index))
        # Derivatives of the mean loss, by the chain rule; clipped rows and clamped densities have none.
        plain = -advantage * score.log_ratio.exp()  # equal to its derivative with respect to the log ratio
        of_log_ratio = torch.where(losses == plain, plain, 0.0) / len(index)
        of_log_prob = of_log_ratio[:, None, None] * self._weights
        if (bounds := self.ratio.log_prob_range) is not None:
            of_log_prob = of_log_prob * ((log_prob >= bounds[0]) & (log_prob <= bounds[1]))
        error = (x - mean) / std
        grad = of_log_prob * error / std  # of the mean
        if head.config.squash:
            grad = torch.ops.aten.tanh_backward(grad, mean)
        gradients = self._mean.gradients(activations, grad.flatten(1))
        if isinstance(head.log_var, nn.Parameter):
            of_log_var = 0.5 * (of_log_prob * (error.square() - 1.0)).sum(dim=(0, 1))
            gradients[head.log_var] = of_log_var * head.config.is_free(head.log_var)
        return [gradients[parameter] for parameter in self.actor], named_metrics(sums)

    @torch.no_grad()
    def critic_gradient(self, experience: Experience, index: Tensor) -> tuple[list[Tensor], Tensor]:
        readable = experience.cond if experience.seen is None else experience.seen
        features = readable.rows(index)
        inputs = features.vec if isinstance(features, Cond) else features
        activations = self._value.forward(inputs.flatten(1))
        error = activations[-1].squeeze(1) - experience.target.index_select(0, index)
        grad = error * (self.config.vf_coef / len(index))
        gradients = self._value.gradients(activations, grad.unsqueeze(1))
        return [gradients[parameter] for parameter in self.critic_params], 0.5 * error.square().mean()
