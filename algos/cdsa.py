"""CDSA: a score model that corrects the actions of a policy (`policies.wrappers.score_correction`).

Trained on transitions without rewards: denoising score matching on [s, a] at the correction's noise levels,
and inverse dynamics by regression, both in standardised units. The policy is frozen.

    score loss    = mean (eps_hat(x + sigma eps, sigma) - eps)^2        eps_hat = - sigma f
    dynamics loss = mean (I(s, s') - a)^2

Source: the idea is from arXiv 2406.07541 (CDSA); the equations are ours, see the wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algos.base import Setup, dataset_of, goal_dim_of
from algos.offline.config import warn_of_clipped_actions
from algos.offline.loop import THREADS, OfflineRun
from algos.optim import average_gradients, restore_optimizer, warmup_cosine
from algos.transitions import Batch, Rewarding, TransitionTable, deviations, tabulate
from envs.datasets.action_bounds import actions_for
from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads
from policies.wrappers.score_correction import CorrectedPolicy, Correction

_PROBES = 4096  # rows for calibrating the gate


class CorrectionLearner:
    """Trains the correction of a policy on transitions in the encoding of its inner policy."""

    def __init__(self, policy: CorrectedPolicy, table: TransitionTable, config: CdsaConfig) -> None:
        self._policy, self.config, self.steps = policy, config, 0
        policy.mean.copy_(table.cond.double().mean(dim=0))
        policy.std.copy_(deviations(table.cond))
        last = len(table) - 1
        rows = torch.linspace(0, last, min(_PROBES, len(table)), device=table.device).long()
        self._probes = table.gather(rows.clamp(max=last))  # above 2^24 the last one may be rounded up
        self._trained = [*policy.score.parameters(), *policy.inverse.parameters()]
        self.optimizer = torch.optim.AdamW(self._trained, lr=config.lr, weight_decay=0.0, fused=True)
        self._sigmas = torch.tensor(policy.wrapper.sigmas, device=table.device, dtype=policy.dtype)

    @property
    def policy(self) -> CorrectedPolicy:
        """The corrected policy, with its gate calibrated under the current weights."""
        self.set_gate()
        return self._policy

    @torch.no_grad()
    def set_gate(self) -> None:
        """Set the gate to the `gate_quantile` of the data's out-of-distribution scores."""
        policy, probes = self._policy, self._probes
        found = policy.out_of_distribution_score(policy.standardized(probes.cond), probes.action)
        quantile = policy.wrapper.gate_quantile
        policy.gate.copy_(found.quantile(quantile) if quantile else found.new_tensor(-1.0))

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        device, width = self._sigmas.device, self._probes.cond.shape[1] + self._probes.action.shape[1]
        eps = torch.randn(n, width, generator=generator, device=generator.device).to(self._sigmas)
        level = torch.randint(len(self._sigmas), (n,), generator=generator, device=generator.device)
        return {"eps": eps, "level": level.to(device)}

    def step(self, batch: Batch, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        policy, rate = self._policy, self.config
        lr = warmup_cosine(self.steps, lr=rate.lr, min_lr=0.1 * rate.lr, warmup=0, cycle=rate.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self.steps else rate.lr
        self.steps += 1
        state, successor = policy.standardized(batch.cond), policy.standardized(batch.next_cond)
        sigma, eps = self._sigmas[draws["level"]], draws["eps"]
        noisy = torch.cat([state, batch.action], dim=1) + sigma[:, None] * eps
        found = policy.noise_in(noisy[:, : state.shape[1]], noisy[:, state.shape[1] :], sigma)
        score_loss = F.mse_loss(found, eps)
        dynamics_loss = F.mse_loss(policy.dynamics(state, successor), batch.action)
        self.optimizer.zero_grad(set_to_none=True)
        (score_loss + dynamics_loss).backward()
        average_gradients(self.optimizer)
        nn.utils.clip_grad_norm_(self._trained, 10.0, foreach=True)
        self.optimizer.step()
        return {"score/loss": score_loss.detach(), "dynamics/loss": dynamics_loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        policy, optimizer = self._policy.state_dict(), self.optimizer.state_dict()
        return {"steps": self.steps, "policy": policy, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        restore_optimizer(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])


@register("algo", "cdsa")
@dataclass
class CdsaConfig(Checked):
    """Correction of a policy's actions by the score of a dataset.

    Source:
        After arXiv 2406.07541; see `policies.wrappers.score_correction`.
    """

    fixed_length: ClassVar[bool] = True  # the learning-rate schedule depends on `steps`
    splits_batches: ClassVar[bool] = True  # over the processes of a run

    steps: int = bounded(20_000, ge=1)  # gradient steps
    batch_size: int = bounded(256, ge=1)  # transitions
    lr: float = bounded(1e-3, gt=0)  # AdamW, initial; cosine decay to a tenth
    correction: Correction = field(default_factory=Correction)
    log_every: int = bounded(1000, ge=1, was="block_steps")  # gradient steps between two log rows

    def build(self, setup: Setup) -> OfflineRun:
        """Check the setup and return the algorithm, ready to advance.

        Raises:
            ConfigError: If policy or dataset is missing, or their widths differ.
            CapabilityError: If the policy cannot be corrected this way.
        """
        algo = name_of("algo", self)
        if setup.init is None:
            raise ConfigError(f"algo={algo} corrects a policy; got none. Give init=<policy directory>.")
        dataset = dataset_of(setup, algo, "transitions")
        goal_dim_of(setup, dataset)
        dataset = actions_for(dataset, setup.init, None if setup.env is None else setup.env.spec)
        with torch_threads(setup.threads(THREADS)):
            base = setup.init.clone().eval().requires_grad_(False)
            with seeded_weights(derive_seed(setup.seed, "correction")):
                policy = self.correction.wrap(base).to(setup.device)
            table = tabulate(dataset.to(setup.device), policy.base, Rewarding())
            warn_of_clipped_actions(table, setup, algo)
            return OfflineRun(self, setup, CorrectionLearner(policy, table, self), table, dataset)
