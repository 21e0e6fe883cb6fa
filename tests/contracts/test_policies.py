"""Laws of every policy that registered processes, backbones and samplers can make."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import Laws, each_value, everything, of_each, pairwise
from small_policies import ACTION_DIM, GOAL_DIM, OBS_DIM, statistics
from torch import Tensor

from policies import registry
from policies.backbones.switched import SwitchedField
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError, MissingExtraError
from policies.policy import Policy, PolicyConfig
from policies.processes import GaussianPath
from policies.protocols import TE, Chain, ChainPolicy, Cond
from policies.storage.policy_folder import load_policy, save_policy

SMALL = {
    "width": 16, "widths": (8, 16), "groups": 4, "depth": 1, "heads": 2, "time_dim": 8,
    "num_levels": 5, "steps": 4,
}  # fmt: skip
"""Sizes given to every part that has a field of this name."""

EXPLORING = {"min_std": 0.1, "final_std": None, "clip_action": None, "eta": 1.0, "temperature": 1.0}
"""What makes a sampler add noise, and gives its chain a density where it can have one."""

PERTURBATION, GENTLE_PERTURBATION = 0.1, 0.03
"""Deviation of what is added to fresh weights, and the same for `STEEP` processes."""

CHAIN_METHODS = ("sample_chain", "chain_log_prob", "transition_log_prob")
"""What a policy has all of or none of."""

SHOWN_NO_CHUNK = ("regression",)
"""Processes whose network is only ever shown zeros in place of a chunk: weights that read it do nothing."""

STEEP = ("ebt", "energy")
"""Processes whose network is a gradient. With random weights it is so curved that sampling magnifies rounding
of single precision beyond what tells a law from its violation: they are judged in double precision."""

CHUNKS = {
    "To1-Th4-Ta4": {"obs_steps": 1, "horizon": 4, "act_steps": 4},
    "To2-Th8-Ta3": {"obs_steps": 2, "horizon": 8, "act_steps": 3, "action_start": 1},
    "To3-Th1-Ta1": {"obs_steps": 3, "horizon": 1, "act_steps": 1},
}
CHUNK = CHUNKS["To2-Th8-Ta3"]
BATCHES = (0, 1, 3)


# -- every combination ----------------------------------------------------------------------------------


def small(part: type, **changes: Any) -> Any:
    """Build a registered part with small sizes, and what it has of `changes`."""
    known = {field.name: field for field in dataclasses.fields(part)}
    values = {name: value for name, value in (SMALL | changes).items() if name in known}
    return part(**values)


def few(part: type, steps: int = 2) -> Any:
    """Build a small part that takes few steps where it can be told."""
    return small(part, steps=steps, num_levels=2)


def _default_sampler(process: str) -> Any:
    return registry.from_json("sampler", registry.lookup("process", process)().default_sampler())


def exploring(sampler: type) -> Any:
    """Build a small sampler that adds noise."""
    return small(sampler, **EXPLORING)


def explores(sampler: type) -> bool:
    """Tell whether a sampler can add noise; one that cannot says so."""
    try:
        return exploring(sampler) != small(sampler, clip_action=None)
    except ConfigError as error:
        assert "deterministic" in str(error)
        return False


def build(process: str, backbone: str, sampler: Any, *, goal_dim: int = 0, **chunk: int) -> Policy:
    """Build a policy in general position, with weights away from where they start, which may be zero.

    A part that needs an extra, or another chunk, skips the test and says why.
    """
    try:
        config = PolicyConfig(
            process=small(registry.lookup("process", process)),
            backbone=small(registry.lookup("backbone", backbone)),
            sampler=sampler,
            **(chunk or CHUNK),  # type: ignore[arg-type]
        )
        policy = build_policy(
            config,
            obs_dim=OBS_DIM,
            action_dim=ACTION_DIM,
            goal_dim=goal_dim,
            statistics=statistics(),
            seed=1,
        )
    except MissingExtraError as error:
        pytest.skip(str(error))
    except ConfigError as error:
        if "horizon" in str(error):
            pytest.skip(str(error))
        raise
    generator, size = seeded(2), GENTLE_PERTURBATION if process in STEEP else PERTURBATION
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return policy.eval()


@cache
def fits(process: str, **parts: str) -> bool:
    """Tell whether a process can be combined with a sampler or a backbone, by their names."""
    parts = {"backbone": "mlp"} | parts
    chosen = {group: small(registry.lookup(group, name)) for group, name in parts.items()}
    config = PolicyConfig(process=small(registry.lookup("process", process)), **chosen)
    try:
        build_policy(config, obs_dim=OBS_DIM, action_dim=ACTION_DIM)
    except ConfigError:
        return False
    except MissingExtraError:
        return True  # skipped, with this reason, where it is used
    return True


def combinations() -> Iterator[Any]:
    """Yield every process x backbone x sampler that fits, plain and exploring."""
    for process in registry.parts("process"):
        backbones = [name for name in registry.parts("backbone") if fits(process, backbone=name)]
        for name, sampler in registry.parts("sampler").items():
            if not fits(process, sampler=name):
                continue
            unbounded = {"clip_action": None} if name == "diffusers" else {}  # where eps is all but useless
            variants = {"": small(sampler, **unbounded)} | (
                {"-exploring": exploring(sampler)} if explores(sampler) else {}
            )
            for backbone in backbones:
                for mode, variant in variants.items():
                    yield pytest.param(process, backbone, variant, id=f"{process}-{backbone}-{name}{mode}")


def graphs() -> Iterator[Any]:
    """Yield (process, backbone, sampler) so that a graph is made of every part.

    Every process comes with the sampler that it has by itself, every other sampler with a process, and every
    backbone but the perceptron with a flow. Only `energy` comes with attention, and with `ddim`: gradients of
    attention are another part of a graph than those of a perceptron, which `ebt` has. Loops take two steps,
    those around large networks one. What runs another program's loop makes no graph.
    """
    seen = {registry.lookup("sampler", "ddim")}
    for process in registry.parts("process"):
        sampler = type(_default_sampler(process))
        seen.add(sampler)
        if process not in ("energy", "flow"):
            yield pytest.param(process, "mlp", few(sampler), id=f"{process}-mlp")
    for name, sampler in registry.parts("sampler").items():
        if sampler not in seen and name != "diffusers":
            process = next(p for p in registry.parts("process") if fits(p, sampler=name))
            yield pytest.param(process, "mlp", few(sampler), id=f"{process}-mlp-{name}")
    for backbone in registry.parts("backbone"):
        if backbone != "mlp":
            yield pytest.param(
                "flow", backbone, few(registry.lookup("sampler", "euler"), steps=1), id=f"flow-{backbone}"
            )
    yield pytest.param(
        "energy",
        "transformer",
        small(registry.lookup("sampler", "ddim"), steps=1, spacing="trailing"),
        id="energy-transformer",
    )


def exported() -> list[Any]:
    """Graphs that are exported: every network, one loop around a perceptron; walks by `test_stepwise.py`."""
    cases = list(graphs())
    return cases if everything else [case for case in cases if _is_exported(case)]


def compiled() -> list[Any]:
    """Loops that are compiled: those that are not exported."""
    return COMBINATIONS if everything else [case for case in graphs() if not _is_exported(case)]


def _is_exported(case: Any) -> bool:
    return case.id == "diffusion-mlp" or (case.values[0] == "flow" and case.values[1] != "mlp")


COMBINATIONS = list(combinations())
every_policy = Laws(("process", "backbone", "sampler"), COMBINATIONS)
pytest_generate_tests = every_policy.generate
MISFITS = [
    (process, sampler)
    for process in registry.parts("process")
    for sampler in registry.parts("sampler")
    if not fits(process, sampler=sampler)
]
NOT_RUN_BY = [
    (process, backbone)
    for process in registry.parts("process")
    for backbone in registry.parts("backbone")
    if not fits(process, backbone=backbone)
]


def test_every_process_has_a_sampler_and_every_sampler_a_process() -> None:
    fitting = {
        (p, s) for p in registry.parts("process") for s in registry.parts("sampler") if (p, s) not in MISFITS
    }
    assert {p for p, _ in fitting} == set(registry.parts("process"))
    assert {s for _, s in fitting} == set(registry.parts("sampler"))
    for process, part in registry.parts("process").items():
        assert (process, part().default_sampler()["name"]) in fitting


@pytest.mark.parametrize("sampler", registry.parts("sampler"))
def test_a_sampler_of_another_process_is_refused_by_both_names(sampler: str) -> None:
    for process in (process for process, other in MISFITS if other == sampler):
        with pytest.raises(ConfigError) as refused:
            build(process, "mlp", small(registry.lookup("sampler", sampler)))
        assert f"sampler={sampler}" in str(refused.value) and f"process={process}" in str(refused.value)


@pytest.mark.parametrize(("process", "backbone"), NOT_RUN_BY)
def test_only_a_process_that_says_so_refuses_a_backbone(process: str, backbone: str) -> None:
    sampler = _default_sampler(process)
    with pytest.raises(ConfigError, match=f"process={process} needs .* backbone"):
        build(process, backbone, sampler)
    assert process not in ("diffusion", "flow")


# -- inputs ---------------------------------------------------------------------------------------------


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observe(policy: Policy, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Draw physical observations."""
    shape = (batch, policy.chunk.obs_steps, OBS_DIM)
    obs = {"state": 3.0 + torch.randn(shape, generator=seeded(seed))}
    if policy.goal_dim:
        obs["goal"] = 3.0 + torch.randn(batch, policy.goal_dim, generator=seeded(seed + 1))
    return {name: value.to(policy.dtype) for name, value in obs.items()}


def encode(policy: Policy, batch: int, seed: int = 0) -> Cond:
    return policy.encode(observe(policy, batch, seed))


def loss_inputs(policy: Policy, batch: int) -> tuple[Cond, Tensor, TE]:
    action = torch.rand(batch, *policy.chunk.shape, generator=seeded(5)).to(policy.dtype) * 2 - 1
    return encode(policy, batch), action, policy.sample_te(batch, generator=seeded(6))  # type: ignore[attr-defined]


def judged(policy: Policy, process: str) -> Policy:
    """Return the policy in the precision in which two ways of computing are compared."""
    return policy.double() if process in STEEP else policy


def chain_of(policy: Policy, cond: Cond) -> Chain | None:
    """Sample a chain; None where the policy has none at all, or refuses, saying that it has no density."""
    if not isinstance(policy, ChainPolicy):
        assert not any(hasattr(policy, name) for name in CHAIN_METHODS)
        return None
    try:
        with torch.no_grad():
            return policy.sample_chain(cond, generator=seeded(3))  # type: ignore[attr-defined, no-any-return]
    except CapabilityError as error:
        own: Any = policy.sampler
        assert "no density" in str(error)
        assert not explores(type(own)) or own != exploring(type(own))
        return None


def density_rounding(chain: Chain) -> float:
    """Return by how much single precision may move the log-density of a draw one deviation from its mean.

    A mean passes up to sixteen layers (of the U-Net), each of which rounds by eps of the size of the states;
    one that is off by d moves the log-density by d / std.
    """
    size = max(1.0, float(chain.x.abs().max()))
    return 16 * torch.finfo(torch.float32).eps * size / EXPLORING["min_std"]


def idle_weights(policy: Policy) -> set[str]:
    """Return the names of the parameters whose value makes no difference to the loss."""
    inputs, idle = loss_inputs(policy, 7), set()
    with torch.no_grad():
        loss = policy.matching_loss(*inputs)  # type: ignore[attr-defined]
        for name, parameter in policy.named_parameters():
            value = parameter.clone()
            parameter.mul_(1.5)
            if torch.equal(policy.matching_loss(*inputs), loss):  # type: ignore[attr-defined]
                idle.add(name)
            parameter.copy_(value)
    return idle


# -- laws -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "chunk", "goal_dim"),
    each_value(of_each(COMBINATIONS, lambda case: case.values), list(CHUNKS.values()), [0, GOAL_DIM]),
)
def test_shapes_and_types_at_every_batch(case: Any, chunk: dict[str, int], goal_dim: int) -> None:
    process, backbone, sampler = case.values
    policy = build(process, backbone, sampler, goal_dim=goal_dim, **chunk)
    spec = policy.chunk
    for batch in BATCHES:
        cond, action, te = loss_inputs(policy, batch)
        noise = policy.sample_noise(batch, generator=seeded())
        assert len(cond) == batch and noise.shape == (batch, *policy.noise_shape)
        decoded = policy.decode(cond, noise)
        assert decoded.shape == (batch, spec.horizon, ACTION_DIM) and decoded.isfinite().all()
        physical = policy.act(observe(policy, batch), noise=noise)
        assert physical.shape == (batch, spec.act_steps, ACTION_DIM)
        torch.testing.assert_close(policy.physical(decoded)[:, spec.executed], physical)
        for how, shape in (
            ("none", action.shape), ("step", action.shape[:2]), ("sample", (batch,)), ("mean", ())
        ):  # fmt: skip
            loss = policy.matching_loss(cond, action, te, reduce=how)  # type: ignore[attr-defined]
            assert loss.shape == shape and (loss.isfinite().all() or batch == 0)
        assert {x.dtype for x in (decoded, physical, loss, noise, cond.vec)} == {torch.float32}


@pytest.mark.parametrize("backbone", registry.parts("backbone"))
def test_any_horizon_from_one_to_thirty_three(backbone: str) -> None:
    """Networks that halve their rows pad and crop, and every row matters."""
    for horizon in range(1, 34) if everything else (*range(1, 10), 15, 16, 17, 31, 32, 33):
        steps = {"obs_steps": 1 + horizon % 3, "horizon": horizon, "act_steps": 1 + horizon // 2}
        policy = build(
            "flow", backbone, small(registry.lookup("sampler", "euler"), clip_action=None), **steps
        )
        cond, action, te = loss_inputs(policy, 2)
        noise = policy.sample_noise(2, generator=seeded()).requires_grad_()
        chunk = policy.decode(cond, noise, grad=True)
        assert chunk.shape == (2, horizon, ACTION_DIM) and chunk.isfinite().all()
        (grad,) = torch.autograd.grad(chunk.square().sum(), noise)
        assert bool((grad.abs().sum(-1) > 0).all())
        assert policy.matching_loss(cond, action, te, reduce="step").shape == (2, horizon)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "process",
    [
        name
        for name, part in registry.parts("process").items()
        if issubclass(part, GaussianPath) and part.is_integrable
    ],
)
def test_a_path_runs_to_data_at_its_rates_and_its_target_tells_data_from_noise(process: str) -> None:
    path = small(registry.lookup("process", process))
    ends = path.alpha_sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends[0][0] < ends[1][0] and [float(end[1]) for end in ends] == pytest.approx([1.0, 0.0])
    t, step = torch.linspace(0.03, 0.97, 16, dtype=torch.float64), 1e-6  # never on one of few levels
    after, before = path.alpha_sigma(t + step), path.alpha_sigma(t - step)
    for rate, high, low in zip(path.rates(t), after, before, strict=True):
        torch.testing.assert_close(rate, (high - low) / (2 * step), rtol=1e-5, atol=1e-5)
    x0, eps = torch.randn(2, 16, 4, 3, generator=seeded(), dtype=torch.float64)
    told = path.resolve(path.corrupt(x0, eps, t), t, path.target(x0, eps, t), path.kind)
    torch.testing.assert_close(torch.stack(told), torch.stack([x0, eps]), rtol=1e-8, atol=1e-8)


@every_policy
def test_the_loss_reaches_exactly_the_trainable_parameters(process: str, backbone: str, sampler: Any) -> None:
    policy = build(process, backbone, sampler)
    idle = idle_weights(policy) if process in SHOWN_NO_CHUNK else set()
    named = dict(policy.train().named_parameters())
    assert named and all(parameter.requires_grad for parameter in named.values())
    for frozen in (set(), set(list(named)[::2])):
        for name, parameter in named.items():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        policy.matching_loss(*loss_inputs(policy, 7), reduce="mean").backward()  # type: ignore[attr-defined]
        reached = {n for n, p in named.items() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        assert reached == set(named) - frozen - idle
        assert all(named[name].grad is None for name in frozen)


@every_policy
def test_decoding_is_a_function_of_condition_and_noise(process: str, backbone: str, sampler: Any) -> None:
    policy = build(process, backbone, sampler)
    cond, noise = encode(policy, 3), policy.sample_noise(3, generator=seeded())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = policy.decode(cond, noise)
    policy.sample_noise(2, generator=seeded(9))
    assert torch.equal(policy.decode(cond, noise), first)
    assert torch.equal(policy.sample_noise(3, generator=seeded()), noise)
    assert torch.equal(torch.get_rng_state(), state)
    other = policy.decode(cond, policy.sample_noise(3, generator=seeded(1)))
    assert policy.noise_sensitive is not torch.equal(other, first)
    assert not torch.equal(policy.decode(encode(policy, 3, seed=4), noise), first)


@every_policy
def test_rows_do_not_see_each_other(process: str, backbone: str, sampler: Any) -> None:
    policy = judged(build(process, backbone, sampler), process)
    obs, noise = observe(policy, 7), policy.sample_noise(7, generator=seeded())
    whole = policy.act(obs, noise=noise)
    rows = [policy.act({k: v[i : i + 1] for k, v in obs.items()}, noise=noise[i : i + 1]) for i in range(7)]
    size = whole.abs().amax((1, 2), keepdim=True).clamp(min=1)  # of the numbers that a chunk's are sums of
    torch.testing.assert_close(torch.cat(rows) / size, whole / size, atol=1e-5, rtol=1e-5)
    cond, start = encode(policy, 3), policy.sample_noise(3, generator=seeded(2))
    inputs = [cond.vec.clone().requires_grad_(), start.requires_grad_()]
    decoded = policy.decode(Cond(inputs[0]), inputs[1], grad=True)
    for grad in torch.autograd.grad(decoded[1].sum(), inputs, allow_unused=True):
        assert grad is None or (bool((grad[[0, 2]] == 0).all()) and bool(grad.isfinite().all()))
    cond, action, te = loss_inputs(policy, 3)
    some = Cond(cond.vec[1:2]), action[1:2], te.rows(slice(1, 2))
    loss = policy.matching_loss(cond, action, te)  # type: ignore[attr-defined]
    torch.testing.assert_close(policy.matching_loss(*some), loss[1:2], atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


@every_policy
def test_embedding_every_level_once_changes_no_loss_and_no_gradient(
    process: str, backbone: str, sampler: Any
) -> None:
    policy = build(process, backbone, sampler).to(torch.float64)
    cond, action, te = loss_inputs(policy, 9)
    results = []
    for draws in (te, dataclasses.replace(te, level=None)):
        loss = policy.matching_loss(cond, action, draws, reduce="mean")  # type: ignore[attr-defined]
        results.append((loss, *torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)))
    has_levels = isinstance(policy, DenoisingPolicy) and policy.process.levels() is not None
    assert (te.level is not None) == has_levels
    for once, per_row in zip(*results, strict=True):
        torch.testing.assert_close(once, per_row, atol=1e-12, rtol=1e-9)


@every_policy
def test_a_saved_policy_returns_bit_by_bit(process: str, backbone: str, sampler: Any, tmp_path: Path) -> None:
    policy = build(process, backbone, sampler, goal_dim=GOAL_DIM)
    again = load_policy(save_policy(policy, tmp_path / "policy"))
    obs, noise = observe(policy, 4), policy.sample_noise(4, generator=seeded())
    assert again.noise_shape == policy.noise_shape and again.sampler == policy.sampler  # type: ignore[attr-defined]
    assert again.chunk == policy.chunk and again.config.process == policy.config.process
    assert torch.equal(again.act(obs, noise=noise), policy.act(obs, noise=noise))
    inputs = loss_inputs(policy, 4)
    assert torch.equal(again.matching_loss(*inputs), policy.matching_loss(*inputs))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("process", "backbone", "sampler", "dtype"), pairwise(COMBINATIONS, [torch.float32, torch.float64])
)
def test_the_ratio_of_a_fresh_chain_is_one(
    process: str, backbone: str, sampler: Any, dtype: torch.dtype
) -> None:
    policy = judged(build(process, backbone, sampler).to(dtype), process)
    dtype = policy.dtype
    cond = encode(policy, 7)
    chain = chain_of(policy, cond)
    if chain is None:
        return
    again, entropy = policy.chain_log_prob(cond, chain.x)  # type: ignore[attr-defined]
    assert chain.x.shape == (7, policy.tuned_steps + 1, *policy.chunk.shape)
    assert again.shape == entropy.shape == chain.log_prob.shape
    assert again.dtype == entropy.dtype == dtype and entropy.isfinite().all()
    difference = (again - chain.log_prob).abs()
    assert difference.mean((-2, -1)).max() <= (1e-6 if dtype == torch.float64 else density_rounding(chain))
    assert difference.sum((-2, -1)).max() <= (1e-6 if dtype == torch.float64 else 1e-4)


@every_policy
def test_chains_act_like_decoding_and_score_row_by_row(process: str, backbone: str, sampler: Any) -> None:
    policy = judged(build(process, backbone, sampler), process)
    cond = encode(policy, 4)
    chain = chain_of(policy, cond)
    if chain is None:
        return
    whole, _ = policy.chain_log_prob(cond, chain.x)  # type: ignore[attr-defined]
    last = policy.tuned_steps - 1
    row, step = torch.tensor([3, 0, 3]), torch.tensor([last, 0, 0])
    picked, _ = policy.transition_log_prob(  # type: ignore[attr-defined]
        cond, chain.x[row, step], chain.x[row, step + 1], step, row
    )
    largest_draw = 3  # deviations; of its error a density magnifies so much
    torch.testing.assert_close(picked, whole[row, step], rtol=0, atol=largest_draw * density_rounding(chain))
    if not policy.is_deterministic:  # type: ignore[attr-defined]
        noise = policy.sample_noise(4, generator=seeded(8))
        torch.testing.assert_close(
            policy.sample_chain(cond, noise=noise).action, policy.decode(cond, noise)  # type: ignore[attr-defined]
        )  # fmt: skip


@every_policy
def test_float64_agrees_with_float32(process: str, backbone: str, sampler: Any) -> None:
    policy = build(process, backbone, sampler)
    double = policy.clone().double()
    noise = policy.sample_noise(3, generator=seeded())
    obs = observe(policy, 3)
    precise = double.act(obs, noise=noise.double())
    assert precise.dtype == torch.float64 and double.sample_noise(2).dtype == torch.float64
    torch.testing.assert_close(policy.act(obs, noise=noise).double(), precise, atol=1e-4, rtol=1e-4)
    loss = double.matching_loss(*loss_inputs(double, 3), reduce="mean")  # type: ignore[attr-defined]
    assert loss.dtype == torch.float64


@every_policy
def test_a_copy_is_equal_and_independent(process: str, backbone: str, sampler: Any) -> None:
    policy = build(process, backbone, sampler)
    obs, noise = observe(policy, 2), policy.sample_noise(2, generator=seeded())
    before = policy.act(obs, noise=noise)
    other = copy.deepcopy(policy)
    assert torch.equal(other.act(obs, noise=noise), before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert torch.equal(policy.act(obs, noise=noise), before)
    assert not torch.equal(other.act(obs, noise=noise), before)


# -- tracing --------------------------------------------------------------------------------------------


def assert_compiled_equals_eager(policy: Policy, atol: float = 1e-5) -> None:
    obs, noise = observe(policy, 3), policy.sample_noise(3, generator=seeded())

    def act(obs: dict[str, Tensor], noise: Tensor) -> Tensor:
        return policy.executed(policy.decode(policy.encode(obs), noise))

    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(act, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = act(obs, noise)
        for _ in range(2):  # the second call meets warm caches
            torch.testing.assert_close(compiled(obs, noise), expected, atol=atol, rtol=1e-5)
        for parameter in policy.parameters():  # a compiled policy follows its weights
            parameter.mul_(1.1)
        torch.testing.assert_close(compiled(obs, noise), act(obs, noise), atol=atol, rtol=1e-5)


@pytest.mark.parametrize(("process", "backbone", "sampler"), compiled())
def test_a_compiled_policy_is_one_graph_with_the_same_numbers(
    process: str, backbone: str, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, "widths", (8,))  # the next level of a U-Net is the same again
    if type(sampler) is registry.lookup("sampler", "diffusers"):
        pytest.skip("runs another program's loop, which decides in Python at every step")
    atol = 5e-5 if process == "vp" else 1e-5  # its first steps divide by a scale near zero
    assert_compiled_equals_eager(judged(build(process, backbone, sampler), process), atol)


def test_a_compiled_policy_of_two_networks_gives_the_same_numbers() -> None:
    policy = build("diffusion", "mlp", small(registry.lookup("sampler", "ddpm")))
    tuned = copy.deepcopy(policy.field)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.3)
    policy.field = SwitchedField(policy.field, tuned, switch_time=1.5)
    assert_compiled_equals_eager(policy)
