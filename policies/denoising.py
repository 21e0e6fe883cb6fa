"""Denoising policies: diffusion and flow on one backbone, sampled by one loop.

Legend: B batch, K denoising steps, S recorded (fine-tuned) steps, Th predicted horizon, Da action width.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from policies.backbones.switched import SwitchedField
from policies.errors import CapabilityError, ConfigError
from policies.networks.distributions import correlated, correlated_log_prob, gaussian_entropy
from policies.networks.packed import PackedSteps
from policies.policy import Policy, PolicyConfig, reduce_elements
from policies.protocols import (
    TE,
    BoundField,
    Chain,
    Cond,
    Evaluate,
    Hooks,
    Kind,
    Reduction,
    Rng,
    Start,
)
from policies.registry import register
from policies.samplers.loop import Denoised, denoise
from policies.samplers.native_loop import denoise_chunks, takes
from policies.samplers.step_table import StepTable, table_of, transition


@register("policy_class", "denoising")
class DenoisingPolicy(Policy):
    """Denoise noise to a chunk with a few evaluations of one network.

    Attributes:
        field: The backbone; a `SwitchedField` after fine-tuning the last steps.
        sampler: Sampler configuration; replaced with `with_sampler`, never mutated.
        tuned_steps: S, number of last denoising steps whose transitions are recorded and scored.
        log_prob_min_std: Floor on the standard deviation in densities, normalised action units.
        noise_correlation: Of the noise of consecutive chunk rows in recorded steps.
        noise_sensitive: Whether the chunk depends on the noise; False for regression from zero.
    """

    can_drop_goals = True
    noise_correlation = 0.0

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.process = config.process
        backbone = config.backbone.build(
            self.chunk.shape,
            self.encoder.cond_dim,
            token_dim=self.encoder.token_dim,
            second_time=self.process.has_second_time,
        )
        self.field: Any = self.process.field_of(backbone)
        self._use_sampler(config.sampler, tuned_steps=None, log_prob_min_std=None)

    @property
    def guidance(self) -> float:
        return self.config.guidance

    # -- choosing how to sample -------------------------------------------------------------------

    def _use_sampler(self, sampler: Any, *, tuned_steps: int | None, log_prob_min_std: float | None) -> None:
        self.sampler = sampler
        self.table: StepTable = table_of(sampler, self.process)
        self.noise_sensitive = not (self.table.is_deterministic and self.table.start_std == 0)
        self.log_prob_min_std = sampler.min_std if log_prob_min_std is None else log_prob_min_std
        steps = self.table.num_steps
        self.tuned_steps = steps if tuned_steps is None else tuned_steps
        if not 1 <= self.tuned_steps <= steps:
            raise ConfigError(
                f"tuned_steps must lie in 1..{steps}, the sampler's steps; got {self.tuned_steps}."
            )

    def with_sampler(
        self, sampler: Any, *, tuned_steps: int | None = None, log_prob_min_std: float | None = None
    ) -> Self:
        """Return a view with another sampler; weights are shared, attributes are its own."""
        view = self._view()
        view._use_sampler(sampler, tuned_steps=tuned_steps, log_prob_min_std=log_prob_min_std)
        return view

    @property
    def is_deterministic(self) -> bool:
        return self.table.is_deterministic

    # -- NoiseDecoder ---------------------------------------------------------------------------------

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(Th, Da) for a deterministic sampler, else (K+1, Th, Da): start, then one draw per step."""
        return self.chunk.shape if self.is_deterministic else (self.table.num_steps + 1, *self.chunk.shape)

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Denoise `noise` (B, *noise_shape) to a normalised chunk (B, Th, Da); see `NoiseDecoder`.

        A start (x, t) replaces the initial state by x (B, Th, Da) at the first step with sampling time >= t.
        """
        x, first = (None, 0) if start is None else (start[0], self.table.step_at(start[1]))
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self._denoise(cond, noise, hooks, start=x, first_step=first).action

    def _denoise(self, cond: Cond, noise: Tensor, hooks: Hooks = (), **request: Any) -> Denoised:
        """Run the denoising loop: the one in C for requests that it supports; `request` as of `denoise`."""
        is_plain = len(cond) in (1, len(noise)) and noise.shape[-2:] == self.chunk.shape and not hooks
        if not (is_plain and takes(self.table, noise, request.get("start"))):
            return denoise(self.bind(cond), self.table, noise, hooks=hooks, cond=cond, **request)
        packed = self.bind_packed(cond)
        return denoise_chunks(self.bind(cond) if packed is None else packed, self.table, noise, **request)

    def trajectory(self, cond: Cond, noise: Tensor, *, start: Start = None, hooks: Hooks = ()) -> Tensor:
        """Return the chunk; see `PlanDecoder`."""
        return self.decode(cond, noise, start=start, hooks=hooks)

    def chunk_of(self, plan: Tensor) -> Tensor:
        return plan

    def start_noise(self, noise: Tensor) -> Tensor:
        return noise if self.is_deterministic else noise[:, 0]

    def bind(self, cond: Cond) -> BoundField:
        """Bind the network to a condition and the sampler's steps, with the configured guidance."""
        return self.bind_at(cond, *self._net_times(cond))

    def bind_packed(self, cond: Cond) -> list[PackedSteps] | None:
        """Bind the network for the loop in C, without gradients; None where `bind` has to serve."""
        bind = getattr(self.field, "bind_packed", None)
        return None if bind is None or self.guidance != 1 else bind(cond, *self._net_times(cond))

    def _net_times(self, cond: Cond) -> list[Tensor]:
        """Return the network times of all steps, (K,), and the second times where the network takes two."""
        names = ("net_time",) if self.table.second_time is None else ("net_time", "second_time")
        return [self.table.to_device(name, cond.vec) for name in names]

    def bind_at(self, cond: Cond, *times: Tensor) -> BoundField:
        """Bind the network to a condition and to given times (K,), with the configured guidance."""
        if self.guidance == 1:
            return self.field.bind(cond, *times)

        def bind(one: Cond) -> BoundField:
            assert one.free is not None
            return self.field.bind(one.joined(one.free), *times)

        bound, guidance = bind(cond), self.guidance
        shared = functools.cache(lambda count: bind(cond.repeat(count)))  # one condition for all chunks

        def guided(k: int, x: Tensor) -> Tensor:
            pairs = bound if len(cond) == len(x) else shared(len(x))
            conditioned, free = pairs(k, torch.cat([x, x])).unflatten(0, (2, -1))
            return free + guidance * (conditioned - free)

        return guided

    def with_guidance(self, guidance: float) -> Self:
        """Return a view with another goal guidance weight; the policy must be trained with `goal_dropout`.

        Source: classifier-free guidance, arXiv 2207.12598, as BESO (arXiv 2304.02532) applies it to goals:
        free + guidance (conditioned - free), exact in every parametrisation, as all are linear in each other.
        """
        view = self._view()
        view.config = replace(self.config, guidance=guidance)
        view._check_guidance()
        return view

    # -- MatchingLoss ---------------------------------------------------------------------------------

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        times = self.process.levels(device=self.device, dtype=self.dtype)
        level = None
        if times is None:
            t = self.process.sample_time(n, generator=generator, device=self.device, dtype=self.dtype)
        else:
            source = self.device if generator is None else generator.device
            level = torch.randint(len(times), (n,), generator=generator, device=source).to(self.device)
            t = times.index_select(0, level)
        te = TE(t, self._randn((n, *self.chunk.shape), generator), level)
        more = self.process.more_draws(te, generator=generator)
        if self.config.goal_dropout:
            more["drops_goal"] = self._rand(n, generator) < self.config.goal_dropout
        return replace(te, more=more) if more else te

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        cond = cond.freed(te.more["drops_goal"]) if "drops_goal" in te.more else cond
        return reduce_elements(self.process.losses(self.evaluate(cond), action, te), reduce)

    def evaluate(self, cond: Cond) -> Evaluate:
        """Return the network as a function of state and sampling time; see `Evaluate`."""
        process, field = self.process, self.field

        def net(x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None) -> Tensor:
            times, second = t, process.second_net_time(t, t if until is None else until)
            if level is not None:
                levels = process.levels(device=x.device, dtype=t.dtype)
                if len(levels) < len(t):  # fewer times to embed than rows
                    times = levels
                else:
                    level = None
            return field(x, process.net_time(times), cond, time_row=level, second_time=second)

        return net

    # -- ChainPolicy ----------------------------------------------------------------------------------

    @property
    def scored_net(self) -> Any:
        """The network of the recorded steps: the fine-tuned copy where one exists."""
        return self.field.tuned if isinstance(self.field, SwitchedField) else self.field

    @property
    def _first_tuned(self) -> int:
        """The first recorded step, K - S."""
        return self.table.num_steps - self.tuned_steps

    def sample_chain(self, cond: Cond, *, noise: Tensor | None = None, generator: Rng = None) -> Chain:
        """Sample chunks and record the last S transitions; noise (B, K+1, Th, Da) before clipping."""
        self._require_density()
        if noise is None:
            noise = self._randn((len(cond), *self.noise_shape), generator)
        first, correlation = self._first_tuned, self.noise_correlation
        if correlation:  # noise[:, k + 1] is that of step k
            noise = torch.cat([noise[:, : first + 1], correlated(noise[:, first + 1 :], correlation)], dim=1)
        denoised = self._denoise(cond, noise, record_from=first)
        chain, mean = denoised.chain, denoised.mean
        assert chain is not None and mean is not None
        std = self._recorded_std(None, chain)
        return Chain(chain, correlated_log_prob(chain[:, 1:], mean, std, correlation))

    def chain_log_prob(self, cond: Cond, x: Tensor, *, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, device = x.shape[0], x.device
        columns = torch.arange(self.tuned_steps, device=device) if steps is None else steps
        step = columns.repeat(batch)  # (B L,): rows of the chain one after the other
        row = torch.arange(batch, device=device).repeat_interleave(len(columns))
        log_prob, entropy = self.transition_log_prob(cond, x[row, step], x[row, step + 1], step, row)
        shape = (batch, len(columns), *self.chunk.shape)
        return log_prob.view(shape), entropy.view(shape)

    def transition_log_prob(
        self, cond: Cond, x: Tensor, x_next: Tensor, step: Tensor, cond_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._require_density()
        first = self._first_tuned
        times = self.table.to_device("net_time", x)[first:]
        second = None if self.table.second_time is None else self.table.to_device("second_time", x)[first:]
        pred = self.scored_net(x, times, cond, cond_row=cond_row, time_row=step, second_time=second)
        mean = transition(self.table, step + first, x, pred)
        std = self._recorded_std(step, x)
        log_prob = correlated_log_prob(x_next, mean, std, self.noise_correlation)
        return log_prob, gaussian_entropy(std).expand_as(x)

    def _recorded_std(self, step: Tensor | None, like: Tensor) -> Tensor:
        """Standard deviations (S, 1, 1|Da) of recorded steps, or (M, 1, 1|Da) of given steps (M,)."""
        scheduled = self.table.to_device("schedule_std", like)[self._first_tuned :]
        std = scheduled.clamp(min=self.log_prob_min_std).unsqueeze(1)
        return std if step is None else std.index_select(0, step)

    def _require_density(self) -> None:
        """Refuse a sampler without chain density, or with a density other than the scored one."""
        if self.guidance != 1:
            raise CapabilityError(
                f"with guidance={self.guidance:g} the chain has no density. Use with_guidance(1)."
            )
        clip, final, floor = self.table.clip_action, self.sampler.final_std, self.log_prob_min_std
        scored = self.table.schedule_std[-1].clamp(min=floor)
        recorded = self.table.net_time[self._first_tuned :]
        has_zero_std = bool((self.table.schedule_std.clamp(min=floor) <= 0).any())
        if self.is_deterministic or has_zero_std or self.table.memory is not None:
            reason = "is deterministic"
            advice = "Use a stochastic sampler (ddpm, or ddim with eta > 0) with a positive noise floor."
        elif clip is not None:
            reason, advice = f"clamps the finished chunk to ±{clip:g}", "Use clip_action=null."
        elif self.table.clip_state is not None:
            reason, advice = f"clamps states to ±{self.table.clip_state:g}", "Use clip_state=null."
        elif final is not None and bool((scored - final).abs().max() > 1e-6):
            reason = f"ends with a deviation of {final:g}, which is scored as {scored.max():g}"
            advice = f"Use final_std=null, or {scored.max():g}."
        elif isinstance(self.field, SwitchedField) and not bool(self.field.is_tuned(recorded).all()):
            reason = f"records {self.tuned_steps} steps, the first of which are those of the frozen network"
            advice = "Use with_sampler(…, tuned_steps=<as many as were tuned>)."
        else:
            return
        name = type(self.sampler).__name__
        raise CapabilityError(f"sampler '{name}' {reason}, so its chain has no density. {advice}")

    # -- Field ----------------------------------------------------------------------------------------

    def predict(self, x: Tensor, t: Tensor, cond: Cond, *, kind: Kind) -> Tensor:
        pred = self.evaluate(cond)(x, t)
        if self.guidance != 1:
            assert cond.free is not None
            free = self.evaluate(cond.free)(x, t)
            pred = free + self.guidance * (pred - free)
        return self.process.convert(x, t, pred, self.process.kind, kind)
