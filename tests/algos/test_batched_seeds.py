"""Several seeds whose steps one learner takes: what each of them learns, saves and is continued with."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import of_each
from test_td3_update import bandit, flow, small
from torch import Tensor, nn

from algos.a2pr import A2prConfig
from algos.base import Setup
from algos.iql import IqlConfig
from algos.offline.batched_seeds import (
    SeedBatch,
    StackedEnsemble,
    StackedLinear,
    build_seeds,
    stack_parameters,
    stacked,
)
from algos.offline.config import OfflineConfig
from algos.offline.loop import OfflineRun
from algos.prdc import PrdcConfig
from algos.rebrac import RebracConfig
from algos.td3_bc import Td3BcConfig
from algos.training import trainer
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from algos.training.serialization import to_plain
from algos.training.trainer import Member, TrainerSettings, train, train_together
from policies import registry
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.networks.critics import EnsembleConfig, Members
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess

SEEDS = (0, 1, 5)
ABLE: list[Any] = [
    (Td3BcConfig, {}),
    (Td3BcConfig, {"critic_layer_norm": True, "ema_decay": 0.9, "warmup_steps": 3}),
    (PrdcConfig, {"search": "lists"}),
    (A2prConfig, {}),
    (RebracConfig, {}),
    (IqlConfig, {}),
    (IqlConfig, {"deterministic": True}),
]


def name_of(case: Any) -> str:
    return case.__name__ if isinstance(case, type) else "-".join(case)


def family_of(case: Any) -> list[str]:
    return [case[0].__mro__[1].__name__]


def config_of(kind: Any, options: dict[str, Any]) -> Any:
    return small(kind, **{"steps": 12, "log_every": 4} | options)


def setup(seed: int = 0) -> Setup:
    return Setup(dataset=bandit(), seed=seed, num_threads=1)


def together(config: Any, seeds: Sequence[int] = SEEDS) -> tuple[list[OfflineRun], SeedBatch]:
    runs = build_seeds(config, setup(), seeds)
    return runs, SeedBatch(runs)


def weights(run: OfflineRun) -> list[Tensor]:
    """Return all that a run has learned."""
    learner: Any = run.learner
    parts = [run.snapshot(), learner.policy, learner.critic, learner.target_critic]
    return [p.detach().clone() for part in parts for p in part.parameters()]


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "options"), ABLE, ids=name_of)
def test_every_seed_learns_what_it_would_learn_alone(kind: Any, options: dict[str, Any]) -> None:
    """To rounding: within a hundredth of what a step of Adam moves, and of what is reported."""
    config = config_of(kind, options)
    runs, group = together(config)
    reports = [group.advance() for _ in range(3)][-1]
    for seed, run, report in zip(SEEDS, runs, reports, strict=True):
        alone = config.build(setup(seed))
        begun = weights(alone)
        expected = [alone.advance() for _ in range(3)][-1]
        assert run.progress == alone.progress == 12
        assert apart(weights(run), weights(alone)) < 0.01 * config.critic_lr
        assert apart(weights(run), begun) > config.critic_lr
        assert report.keys() == expected.keys()
        for name in report.keys() - {"time/steps_per_s"}:
            torch.testing.assert_close(
                torch.as_tensor(report[name]), torch.as_tensor(expected[name]), rtol=1e-3, atol=1e-4
            )


def test_every_algorithm_that_trains_several_seeds_is_among_these() -> None:
    able = {name for name, part in registry.parts("algo").items() if issubclass(part, OfflineConfig)}
    assert able == {registry.name_of("algo", kind()) for kind, _ in ABLE}


def test_seeds_differ() -> None:
    runs, group = together(config_of(Td3BcConfig, {}))
    group.advance()
    assert apart(weights(runs[0]), weights(runs[1])) > 0.01


def test_half_precision_of_several_seeds_stays_near_that_of_one() -> None:
    config = config_of(Td3BcConfig, {"autocast": "bfloat16", "critic_layer_norm": True})
    runs, group = together(config)
    alone = config.build(setup(SEEDS[1]))
    group.advance()
    alone.advance()
    begun = weights(config.build(setup(SEEDS[1])))
    difference, way = (
        float(sum((a - b).abs().sum() for a, b in zip(weights(alone), other, strict=True)))
        for other in (weights(runs[1]), begun)
    )
    assert 0 < difference < 0.05 * way


@pytest.mark.parametrize(("kind", "options"), of_each(ABLE, family_of), ids=name_of)
def test_a_seed_goes_on_alone_from_what_was_saved_of_it(kind: Any, options: dict[str, Any]) -> None:
    config = config_of(kind, options)
    runs, group = together(config)
    group.advance()
    alone = config.build(setup(SEEDS[1]))
    alone.load_state_dict(copy.deepcopy(runs[1].state_dict()))
    assert apart(weights(alone), weights(runs[1])) == 0
    alone.advance()
    group.advance()
    assert apart(weights(alone), weights(runs[1])) < 0.01 * config.critic_lr


def test_what_is_saved_of_a_seed_holds_nothing_of_the_others() -> None:
    config = config_of(A2prConfig, {})
    runs, group = together(config)
    alone = config.build(setup(SEEDS[0]))
    group.advance()
    alone.advance()
    sizes = []
    for run in (runs[0], alone):
        file = io.BytesIO()
        torch.save(to_plain(run.state_dict()), file)
        sizes.append(file.tell())
    assert sizes[0] < 1.02 * sizes[1]


def test_a_policy_that_was_taken_stays_as_it_was() -> None:
    runs, group = together(config_of(Td3BcConfig, {}))
    group.advance()
    taken = runs[0].snapshot()
    before = [p.clone() for p in taken.parameters()]
    group.advance()
    assert apart(before, list(taken.parameters())) == 0
    assert apart(before, list(runs[0].snapshot().parameters())) > 0


def test_seeds_that_are_behind_go_first_and_never_past_the_others() -> None:
    config = config_of(Td3BcConfig, {})
    runs, group = together(config)
    runs[0].advance()
    runs[0].advance()
    config.log_every = 5  # which 8 is no multiple of
    before = weights(runs[0])
    reports = group.advance()
    assert [run.progress for run in runs] == [8, 5, 5]
    assert reports[0] == {} and reports[1]["critic/loss"] != reports[2]["critic/loss"]
    assert apart(before, weights(runs[0])) == 0
    group.advance()
    assert [run.progress for run in runs] == [8, 8, 8]
    group.advance()
    assert [run.progress for run in runs] == [12, 12, 12]
    alone = config.build(setup(SEEDS[2]))
    for _ in range(3):
        alone.advance()
    assert apart(weights(runs[2]), weights(alone)) < 0.01 * config.critic_lr


def test_all_seeds_of_prdc_look_for_their_rows_at_once() -> None:
    config = config_of(PrdcConfig, {"search": "lists"})
    runs, group = together(config)
    asked: list[int] = []
    searches = {id(run.learner.regulariser.search): run.learner.regulariser.search for run in runs}  # type: ignore[attr-defined]
    (search,) = searches.values()
    nearest = search.nearest

    def counted(row: Tensor, *more: Tensor) -> Any:
        asked.append(len(row))
        return nearest(row, *more)

    search.nearest = counted
    group.advance()
    assert asked == [len(SEEDS) * config.batch_size] * 2


def test_transitions_and_their_search_are_shared() -> None:
    runs, _ = together(config_of(PrdcConfig, {}))
    regularisers: set[Any] = {run.learner.regulariser for run in runs}  # type: ignore[attr-defined]
    assert len({id(run.table) for run in runs}) == len(regularisers) == 1


def test_runs_that_were_made_apart_are_not_trained_together() -> None:
    config = config_of(Td3BcConfig, {})
    with pytest.raises(ConfigError, match="must be made together, by build_seeds"):
        SeedBatch([config.build(setup(seed)) for seed in SEEDS])


def test_a_run_of_a_group_neither_advances_nor_loads_by_itself() -> None:
    """It would move what the others share."""
    runs, group = together(config_of(Td3BcConfig, {}))
    state = copy.deepcopy(runs[0].state_dict())
    group.advance()
    for wrong in (runs[0].advance, lambda: runs[0].load_state_dict(state)):
        with pytest.raises(CapabilityError, match=mentions("seeds")):
            wrong()
    group.advance()
    assert [run.progress for run in runs] == [8, 8, 8]


def test_actors_that_sample_are_refused() -> None:
    config = config_of(Td3BcConfig, {})
    policy: Policy = flow()
    runs = build_seeds(config, Setup(dataset=bandit(), init=policy, num_threads=1), SEEDS)
    with pytest.raises(CapabilityError, match=r"where algo makes its own actor; .* --multirun seed=0,1,2"):
        SeedBatch(runs).advance()


@pytest.mark.parametrize("kind", [Td3BcConfig, IqlConfig])
def test_actors_of_several_steps_are_refused(kind: Any) -> None:
    config, one = config_of(kind, {}), torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    policy = build_policy(
        PolicyConfig(
            process=DeterministicProcess(), backbone=MlpConfig(residual=False, hidden_dims=(8,)), horizon=4,
            act_steps=1,
        ),
        obs_dim=2, action_dim=2, statistics={"state": limits, "action": limits},
    )  # fmt: skip
    runs = build_seeds(config, Setup(dataset=bandit(), init=policy, num_threads=1), SEEDS)
    with pytest.raises(CapabilityError, match="where algo makes its own actor"):
        SeedBatch(runs).advance()


# -- continued runs -------------------------------------------------------------------------------------


class Cut(Exception):
    """Ends a training without warning."""


def train_group(config: Any, folders: Sequence[Path], *, stop_at: int | None = None) -> None:
    """Train runs in folders, made where they are missing, to the end or until so many steps are done."""
    runs, group = together(config)
    directories = [
        RunDirectory.open(folder) if folder.exists() else RunDirectory.create_at(folder, {})
        for folder in folders
    ]

    def advance() -> Any:
        if stop_at is not None and min(run.progress for run in runs) >= stop_at:
            raise Cut
        return group.advance()

    members = [Member(run, directory) for run, directory in zip(runs, directories, strict=True)]
    train_together(members, advance, TrainerSettings(checkpoint_every=4), title="group", progress=False)


def bytes_of(folder: Path) -> bytes:
    return (folder / "checkpoints" / "last" / "policy" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("kind", "options"), of_each(ABLE, family_of), ids=name_of)
def test_a_group_resumes_bit_exactly(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Also where it was killed between the checkpoints of two seeds."""
    config = config_of(kind, options)
    whole, parts = ([tmp_path / name / f"seed-{seed}" for seed in SEEDS] for name in ("whole", "parts"))
    train_group(config, whole)
    with pytest.raises(Cut):
        train_group(config, parts, stop_at=8)
    late = RunDirectory(parts[-1])
    late.rewind(4, metrics_bytes=0)
    assert [RunDirectory(folder).latest() for folder in parts] == [8, 8, 4]
    train_group(config, parts)
    for one, other in zip(whole, parts, strict=True):
        assert RunDirectory(other).checkpoints() == [4, 8, 12]
        assert bytes_of(one) == bytes_of(other)


def test_a_group_that_was_killed_at_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    config = config_of(Td3BcConfig, {})
    whole, parts = ([tmp_path / name / f"seed-{seed}" for seed in SEEDS] for name in ("whole", "parts"))
    train_group(config, whole)
    with pytest.raises(Cut):
        train_group(config, parts, stop_at=4)
    for folder in parts[1:]:
        RunDirectory(folder).rewind(None)
    train_group(config, parts)
    assert [bytes_of(folder) for folder in parts] == [bytes_of(folder) for folder in whole]


def test_a_seed_that_was_trained_further_alone_is_not_set_back(tmp_path: Path) -> None:
    config = config_of(Td3BcConfig, {})
    folders = [tmp_path / f"seed-{seed}" for seed in SEEDS]
    train_group(config, folders)
    RunDirectory(folders[0]).rewind(4)
    kept = bytes_of(folders[1])
    train_group(config, folders)
    assert [RunDirectory(folder).latest() for folder in folders] == [12, 12, 12]
    assert bytes_of(folders[1]) == kept


def test_not_even_by_one_checkpoint(tmp_path: Path) -> None:
    config = config_of(Td3BcConfig, {})
    folders = [tmp_path / f"seed-{seed}" for seed in SEEDS]
    with pytest.raises(Cut):
        train_group(config, folders, stop_at=8)
    alone = config.build(setup(SEEDS[0]))
    train(alone, RunDirectory(folders[0]), TrainerSettings(checkpoint_every=4), progress=False)
    kept = bytes_of(folders[0])
    assert [RunDirectory(folder).latest() for folder in folders] == [12, 8, 8]
    train_group(config, folders)
    assert [RunDirectory(folder).latest() for folder in folders] == [12, 12, 12]
    assert bytes_of(folders[0]) == kept


def test_a_run_that_cannot_be_continued_costs_the_others_nothing(tmp_path: Path) -> None:
    config = config_of(Td3BcConfig, {})
    folders = [tmp_path / f"seed-{seed}" for seed in SEEDS]
    train_group(config, folders)
    RunDirectory(folders[1]).rewind(8)
    RunDirectory(folders[2]).rewind(8)
    (folders[2] / "checkpoints" / "8" / "training_state" / "state.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=mentions("damaged")):
        train_group(config, folders)
    assert [RunDirectory(folder).checkpoints() for folder in folders] == [[4, 8, 12], [4, 8], [4, 8]]


def test_the_bar_shows_means_over_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Seen:
        def show(self, done: int, total: int, values: Any) -> None:
            shown.append((done, total, dict(values)))

        def close(self) -> None:
            shown.append("closed")

    monkeypatch.setattr(trainer, "open_display", lambda *_, **__: Seen())
    folders = [tmp_path / f"seed-{seed}" for seed in SEEDS]
    train_group(config_of(Td3BcConfig, {}), folders)
    logged = [read_jsonl(RunDirectory(folder).metrics_path) for folder in folders]
    assert [one[:2] for one in shown[:-1]] == [(4, 12), (8, 12), (12, 12)] and shown[-1] == "closed"
    for (_, _, values), *rows in zip(shown, *logged, strict=False):
        expected = sum(row["critic/loss"] for row in rows) / len(rows)
        assert values["critic/loss"] == pytest.approx(expected)


def test_old_checkpoints_go_when_all_seeds_have_the_new_one(tmp_path: Path) -> None:
    config = config_of(Td3BcConfig, {})
    runs, group = together(config)
    directories = [RunDirectory.create_at(tmp_path / f"seed-{seed}", {}) for seed in SEEDS]
    seen: list[list[int]] = []
    save = directories[-1].save_checkpoint

    def saving(*arguments: Any, **options: Any) -> Path:
        seen.append(directories[0].checkpoints())
        return save(*arguments, **options)

    directories[-1].save_checkpoint = saving  # type: ignore[method-assign]
    members = [Member(run, directory) for run, directory in zip(runs, directories, strict=True)]
    settings = TrainerSettings(checkpoint_every=4, keep_checkpoints=1)
    train_together(members, group.advance, settings, title="group", progress=False)
    assert seen == [[4], [4, 8], [8, 12]]
    assert [directory.checkpoints() for directory in directories] == [[12]] * 3


# -- parts ----------------------------------------------------------------------------------------------


def test_parameters_become_views_of_their_stack() -> None:
    parts = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    whole = stack_parameters(parts)
    with torch.no_grad():
        whole[1] = 7.0
    assert parts[1].tolist() == [7.0, 7.0] and parts[2].tolist() == [2.0, 2.0]


def test_stacked_layers_are_the_layers() -> None:
    generator = torch.Generator().manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in SEEDS]
    x = torch.randn(len(nets), 5, 3, generator=generator)
    expected = torch.stack([net(part) for net, part in zip(nets, x, strict=True)])
    whole = stacked(nets)
    assert isinstance(whole[0], StackedLinear)
    torch.testing.assert_close(whole(x), expected)


@pytest.mark.parametrize("part", [nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)])
def test_what_belongs_to_one_seed_is_not_stacked(part: nn.Module) -> None:
    with pytest.raises(CapabilityError, match=mentions("--multirun seed=0,1,2")):
        stacked([nn.Sequential(copy.deepcopy(part)) for _ in SEEDS])


def test_views_are_saved_without_what_they_are_views_of() -> None:
    whole = torch.arange(6.0).view(3, 2)
    part = to_plain({"part": whole[1]})["part"]
    assert part.tolist() == [2.0, 3.0] and part.untyped_storage().nbytes() == 8
    assert to_plain(whole).data_ptr() == whole.data_ptr()
    assert to_plain(torch.ones(1).expand(4)).tolist() == [1.0] * 4


@pytest.mark.parametrize("members", [None, 1, torch.tensor([2, 0])], ids=["all", "one", "chosen"])
@pytest.mark.parametrize("norm", [{}, {"layer_norm": True}, {"layer_norm": True, "norm_after": True}])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("width", [8, 256])
def test_stacked_ensembles_are_the_ensembles(
    members: Members, norm: dict[str, bool], frozen: bool, width: int
) -> None:
    """Values, and what reaches inputs and weights; large ones are read out one after the other."""
    generator = torch.Generator().manual_seed(0)
    config = EnsembleConfig(members=3, hidden_dims=(width, width), **norm)  # type: ignore[arg-type]
    nets = [config.build(3, 2) for _ in SEEDS]
    apart = [copy.deepcopy(net) for net in nets]
    cond, action = (torch.randn(len(nets), 130, n, generator=generator) for n in (3, 2))
    found: list[tuple[Tensor, Tensor]] = []
    whole = StackedEnsemble(nets)
    for forward in (
        lambda c, a: torch.stack(
            [net(*x, members=members, frozen=frozen) for net, *x in zip(apart, c, a, strict=True)], dim=1
        ),
        lambda c, a: whole(c, a, members=members, frozen=frozen),
    ):
        asked = action.clone().requires_grad_(True)
        values = forward(cond, asked)
        values.square().sum().backward()
        assert asked.grad is not None
        found.append((values.detach(), asked.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    for name, stack in whole.named_parameters():
        alone = [dict(net.named_parameters())[name].grad for net in apart]
        if frozen:
            assert stack.grad is None and alone == [None] * len(nets)
        else:
            expected = torch.stack([grad for grad in alone if grad is not None])
            torch.testing.assert_close(stack.grad, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(CapabilityError, match=mentions("ensembles")):
        whole.layers_of(0)
