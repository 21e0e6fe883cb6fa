"""FPO and FPO++ against the released programs: losses, samples, ratios, objectives, gradients, statistics.

Times of the JAX program run the other way. Its advantages are estimated anew for every minibatch, look one
step further than their targets, and leave out steps that were cut off; here they are made so from our `gae`.
Not covered, because the package does not implement it: positive advantages by softplus; the entropy estimate
of neighbours; statistics that forget (`rs_std_*`); the shapes of minibatches (`mb_*`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_fpo import Stack, embed, gridworld_policy, normalised, playground_policy
from official_networks import read
from torch import Tensor, nn

from algos.fpo import FpoConfig
from algos.onpolicy.advantages import Experience
from algos.onpolicy.fpo_ratio import FpoRatio, Matching, time_of
from algos.onpolicy.losses import SURROGATES, gae
from algos.onpolicy.ppo_update import GeneratorDraws, PpoUpdate
from algos.onpolicy.ratios import Rows
from algos.onpolicy.running_normalizer import RunningMeanStd
from policies.denoising import DenoisingPolicy
from policies.protocols import Cond

FORWARD = {"rtol": 1e-5, "atol": 1e-6}
GRADIENT = {"rtol": 1e-3, "atol": 1e-6}
STEP = {"rtol": 0.0, "atol": 2e-6}

PREDICTIONS = {"u": "velocity", "u_but_supervise_as_eps": "eps"}
CLIP = 0.05
DISCOUNT, LAMBDA, REWARD_SCALE = 0.995, 0.95, 10.0


class Value(nn.Module):
    """The released value function as a critic."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        super().__init__()
        self.net = Stack({name[6:]: value for name, value in arrays.items() if name.startswith("value.")})

    def forward(self, obs: Tensor) -> Tensor:
        return self.net(obs).squeeze(-1)


class Case:
    """A minibatch of the JAX program, one row per action or per draw."""

    def __init__(self, arrays: dict[str, Tensor], mode: str, averages: int) -> None:
        self.arrays = arrays
        draws = arrays["cfm_eps"].shape[2]
        self.config = FpoConfig(
            clip_range=CLIP, prediction=PREDICTIONS[mode], num_draws=draws, per_draw=not averages,
            difference_range=None if averages else (-3.0, 3.0), normalize_advantage=False, vf_coef=0.5,
            actor_lr=3e-4, actor_min_lr=None, critic_lr=3e-4, critic_min_lr=None,
        )  # fmt: skip
        self.policy = playground_policy(arrays, len(arrays["schedule_t_current"]))
        self.ratio = self.config.estimator(self.policy)
        self.critic = Value(arrays)
        self.learner = PpoUpdate(
            self.config, ratio=self.ratio, actor=list(self.policy.field.parameters()), critic=self.critic
        )
        record = {
            "action": arrays["cfm_action"].flatten(0, 1)[:, None],
            "eps": arrays["cfm_eps"].flatten(0, 1)[:, :, None],
            "t": 1 - arrays["cfm_t_discrete"].flatten(0, 1).squeeze(-1),
            "loss": arrays[f"old_cfm_{mode}"].flatten(0, 1),
        }
        self.record, self.obs = record, normalised(arrays, arrays["cfm_obs"]).flatten(0, 1)
        self.estimate_advantages()
        self.index = torch.arange(len(self.obs) * self.ratio.inner_steps)

    def estimate_advantages(self) -> None:
        """Estimate advantages and targets with the present critic."""
        value, target, advantage = appraised(self.arrays, self.critic)
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        # Steps that were cut off count with an error of zero.
        target = torch.where(self.arrays["truncation"] == 0, target, value)
        columns = (part.flatten() for part in (advantage, target, value))
        self.experience = Experience(Cond(self.obs), self.record, *columns)

    def gradients(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        draws = GeneratorDraws(torch.Generator())
        return self.learner.actor_gradient(self.experience, self.index, draws=draws)


@torch.no_grad()
def appraised(arrays: dict[str, Tensor], critic: Value) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, targets and advantages (T, B) by our `gae`, as the program forms them."""
    value = critic(normalised(arrays, arrays["cfm_obs"]))
    follows = torch.cat([value[1:], critic(normalised(arrays, arrays["next_obs"][-1:]))])
    cut, ends = arrays["truncation"] != 0, arrays["discount"] == 0
    # A reward that makes the error of a step that was cut off zero.
    reward = torch.where(cut, value - DISCOUNT * follows * ~ends, REWARD_SCALE * arrays["reward"])
    _, target = gae(reward, value, follows, ends, cut, gamma=DISCOUNT, lam=LAMBDA)
    further = torch.cat([target[1:], follows[-1:]])
    advantage = (reward + DISCOUNT * further * ~ends - value) * ~cut
    return value, target, advantage


def named(gradients: list[Tensor], module: nn.Module) -> dict[str, Tensor]:
    return {name.split(".")[-1]: g for (name, _), g in zip(module.named_parameters(), gradients, strict=True)}


@pytest.mark.golden("fpo_playground_loss*.npz")
def test_values_targets_and_advantages(golden_path: Path) -> None:
    arrays = read(golden_path)
    for ours, name in zip(appraised(arrays, Value(arrays)), ("values", "vs", "adv"), strict=True):
        torch.testing.assert_close(ours, arrays[f"gae_{name}"], rtol=1e-5, atol=1e-5)


@pytest.mark.golden("fpo_playground_loss*.npz")
def test_time_features_and_samples(golden_path: Path) -> None:
    arrays = read(golden_path)
    torch.testing.assert_close(embed(arrays["embed_t_in"].squeeze(1)), arrays["embed_t_out"], **FORWARD)
    policy = playground_policy(arrays, len(arrays["schedule_t_current"]))
    torch.testing.assert_close(
        1 - torch.tensor(policy.table.times[:-1]), arrays["schedule_t_current"], **FORWARD
    )
    cond = Cond(normalised(arrays, arrays["sample_obs"]))
    action = policy.decode(cond, arrays["sample_x1_noise"][:, None])
    torch.testing.assert_close(action[:, 0], arrays["sample_action"], **FORWARD)


def losses_of(policy: DenoisingPolicy, prediction: str, obs: Tensor, *draws: Tensor) -> Tensor:
    """Return the losses (M, n) of actions (M, d) with eps (M, n, d) and times of ours (M, n)."""
    action, eps, t = draws
    ratio = FpoRatio(policy, Matching(prediction=prediction), num_draws=t.shape[1])
    repeated = action.repeat_interleave(t.shape[1], 0)[:, None], eps.flatten(0, 1)[:, None], t.flatten()
    return ratio.losses(Cond(obs).repeat(t.shape[1]), *repeated).view_as(t)


@pytest.mark.golden("fpo_playground_loss*.npz")
def test_matching_losses_in_both_modes(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = playground_policy(arrays, len(arrays["schedule_t_current"]))
    obs = normalised(arrays, arrays["cfm_obs"]).flatten(0, 1)
    action, eps = arrays["cfm_action"].flatten(0, 1), arrays["cfm_eps"].flatten(0, 1)
    for mode, prediction in PREDICTIONS.items():
        for times, name in (("cfm_t", "cfm_loss"), ("cfm_t_discrete", "cfm_loss_disc")):
            t = 1 - arrays[times].flatten(0, 1).squeeze(-1)
            loss = losses_of(policy, prediction, obs, action, eps, t)
            torch.testing.assert_close(loss, arrays[f"{name}_{mode}"].flatten(0, 1), **FORWARD)
            if prediction == "eps":
                assert not loss[t == 0].any()
    loss = losses_of(
        policy,
        "eps",
        normalised(arrays, arrays["sample_obs"]),
        arrays["sample_action"],
        arrays["sample_loss_eps"],
        1 - arrays["sample_loss_t"].squeeze(-1),
    )
    torch.testing.assert_close(loss, arrays["sample_initial_cfm_loss"], **FORWARD)


@pytest.mark.parametrize("averages", [1, 0])
@pytest.mark.parametrize("mode", PREDICTIONS)
@pytest.mark.golden("fpo_playground_loss*.npz")
def test_ratios_objectives_and_gradients(golden_path: Path, mode: str, averages: int) -> None:
    arrays = read(golden_path)
    case, tag = Case(arrays, mode, averages), f"{mode}_avg{averages}"
    rows = Rows.sorted_from(case.index, case.ratio.inner_steps)
    with torch.no_grad():
        ratio = case.ratio.score(case.experience, rows).log_ratio.exp()
    for name, ours in (("mean", ratio.mean()), ("min", ratio.min()), ("max", ratio.max())):
        torch.testing.assert_close(ours, arrays[f"{tag}.policy_ratio_{name}"], rtol=1e-5, atol=1e-5)
    gradients, metrics = case.gradients()
    value_gradients, value_loss = case.learner.critic_gradient(case.experience, case.index)
    value_loss = case.config.vf_coef * value_loss
    for ours, name in (
        (metrics["policy/loss"], "policy_loss"),
        (metrics["policy/clip_fraction"], "clipped_ratio_mean"),
        (value_loss, "v_loss"),
    ):
        torch.testing.assert_close(ours, arrays[f"{tag}.{name}"], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(metrics["policy/loss"] + value_loss, arrays[f"loss_{tag}"], **FORWARD)
    compared = 0
    for module, grads, what in (
        (case.policy.field, gradients, "policy"),
        (case.critic, value_gradients, "value"),
    ):
        for name, gradient in named(grads, module).items():
            key = f"grad_{tag}.{what}.{name}"
            if key in arrays:
                torch.testing.assert_close(
                    gradient, arrays[key], **GRADIENT, msg=lambda m, k=key: f"{k}: {m}"
                )
                compared += 1
    assert compared or mode == "u"


def minibatch_of(step: Path) -> Path:
    """Return the file that holds the minibatch of a step: that of its name, or the only one."""
    own = step.with_name(step.name.replace("_step", "_loss"))
    losses = [own] if own.exists() else list(step.parent.glob("fpo_playground_loss*.npz"))
    assert len(losses) == 1, f"the minibatch of {step.name} is in {own.name}"
    return losses[0]


@pytest.mark.golden("fpo_playground_step*.npz")
def test_two_steps_of_adam(golden_path: Path) -> None:
    arrays = read(golden_path)
    case = Case(read(minibatch_of(golden_path)), "u_but_supervise_as_eps", 1)
    case.learner.config.actor_weight_decay = 0.0
    case.learner.actor_optimizer.param_groups[0]["lr"] = 3e-4
    draws = GeneratorDraws(torch.Generator())
    for step in ("after1", "after2"):
        case.estimate_advantages()
        case.learner.step(case.experience, case.index, draws=draws, train_actor=True)
        for name, weight in case.policy.field.named_parameters():
            torch.testing.assert_close(
                weight.detach(), arrays[f"{step}.policy.{name.split('.')[-1]}"], **STEP
            )


@pytest.mark.golden("fpo_playground_step*.npz")
def test_running_statistics_are_the_true_ones(golden_path: Path) -> None:
    arrays = read(golden_path)
    batches = arrays["rs_x"]
    moments = RunningMeanStd(batches.shape[-1])
    for i, batch in enumerate(batches):
        moments.update(batch)
        assert moments.count == int(arrays[f"rs_count_{i}"])
        torch.testing.assert_close(moments.mean.float(), arrays[f"rs_truemean_{i}"].float(), **FORWARD)
        # The file has the deviation of the sample, without correction.
        std = moments.std * ((moments.count - 1) / moments.count) ** 0.5
        torch.testing.assert_close(std.float(), arrays[f"rs_truestd_{i}"].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.golden("fpo_gridworld*.npz")
def test_the_grid_world(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy = gridworld_policy(arrays, 10)
    start = Cond(arrays["sample_state"][None])
    sampled = policy.decode(start, arrays["sample_noise"][:, None])
    torch.testing.assert_close(sampled[0, 0], arrays["sample_action"], **FORWARD)
    eps, t = arrays["eps"], arrays["t"].squeeze(-1)
    loss = losses_of(policy, "velocity", arrays["state"], arrays["action"], eps, t)
    torch.testing.assert_close(loss, arrays["cfm_loss"], **FORWARD)
    config = FpoConfig(
        prediction="velocity", num_draws=t.shape[1], clip_range=float(arrays["clip"]),
        difference_range=(-3.0, 3.0), normalize_advantage=False,
    )  # fmt: skip
    learner = PpoUpdate(
        config,
        ratio=config.estimator(policy),
        actor=list(policy.field.parameters()),
        critic=nn.Linear(2, 1),
    )
    record = {
        "action": arrays["action"][:, None],
        "eps": eps[:, :, None],
        "t": t,
        "loss": arrays["old_cfm_loss"],
    }
    unused = torch.zeros_like(arrays["adv"])
    experience = Experience(Cond(arrays["state"]), record, arrays["adv"], unused, unused)
    index = torch.arange(len(t))
    ratio = learner.ratio.score(experience, Rows.sorted_from(index, 1)).log_ratio.exp()
    torch.testing.assert_close(ratio, arrays["rho"], **FORWARD)
    gradients, metrics = learner.actor_gradient(experience, index, draws=GeneratorDraws(torch.Generator()))
    torch.testing.assert_close(metrics["policy/loss"], arrays["actor_loss"].float(), **FORWARD)
    for name, gradient in named(gradients, policy.field).items():
        layer, kind = int(name[1:]) + 1, {"W": "weight", "b": "bias"}[name[0]]
        expected = arrays[f"grad.layer{layer}.{kind}"]
        torch.testing.assert_close(gradient.T if kind == "weight" else gradient, expected, **GRADIENT)


REDUCTIONS = {"mean": "mean", "sum": "joint", "sqrt": "sqrt"}


@pytest.mark.golden("fpo_plusplus_surrogate*.npz")
def test_surrogates_and_bounds_of_losses(golden_path: Path) -> None:
    arrays = read(golden_path)
    for theirs, reduction in REDUCTIONS.items():
        matching = Matching(
            reduction=reduction,
            max_loss=float(arrays["loss_clamp"]),
            max_loss_negative=float(arrays["loss_clamp_neg_adv"]),
            max_difference=float(arrays["diff_clamp_max"]),
        )
        advantage = arrays["adv"].expand(-1, arrays["u_pred"].shape[1]).flatten()
        old = reduced(matching, arrays["u_pred_old"], arrays)
        torch.testing.assert_close(old.view_as(arrays["mean.ratio"]), arrays[f"{theirs}.loss_old"], **FORWARD)
        for name in ("ppo", "spo", "aspo"):
            surrogate = SURROGATES[name]
            pred = arrays["u_pred"].clone().requires_grad_()
            new = reduced(matching, pred, arrays)
            difference, _ = matching.difference(matching.bounded(old), matching.bounded(new, advantage))
            ratio = difference.exp()
            torch.testing.assert_close(
                ratio.view_as(arrays["mean.ratio"]), arrays[f"{theirs}.ratio"], **FORWARD
            )
            loss = surrogate(ratio, advantage, torch.full_like(ratio, float(arrays["clip"]))).mean()
            torch.testing.assert_close(loss, arrays[f"{theirs}.{name}.loss"].float(), **FORWARD)
            loss.backward()
            torch.testing.assert_close(pred.grad, arrays[f"{theirs}.{name}.grad_u_pred"], **GRADIENT)


def reduced(matching: Matching, pred: Tensor, arrays: dict[str, Tensor]) -> Tensor:
    errors = matching.errors(pred - arrays["u_target"])
    return matching.reduce(errors.flatten(0, 1)[:, None])


@pytest.mark.golden("fpo_plusplus_surrogate*.npz")
def test_huber_errors_and_the_density_of_times(golden_path: Path) -> None:
    arrays = read(golden_path)
    deltas = [name for name in arrays if name.startswith("huber_") and name != "huber_x"]
    densities = [name for name in arrays if name.startswith("t_icdf_beta")]
    assert deltas and densities
    for key in deltas:
        errors = Matching(huber=float(key.removeprefix("huber_"))).errors(arrays["huber_x"])
        torch.testing.assert_close(errors, arrays[key], **FORWARD)
    for key in densities:
        t = time_of(arrays["t_icdf_u"], float(key.removeprefix("t_icdf_beta")))
        torch.testing.assert_close(t, 1 - arrays[key], **FORWARD)
