"""The command line as a person meets it: pages, tables, one-line errors, Hydra's powers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from entry import exit_code
from hydra.errors import HydraException
from messages import mentions

from algos.training.run_directory import RunDirectory
from burnish import cli, demo
from burnish.commands import doctor as doctor_command
from burnish.commands.doctor import main as doctor
from burnish.commands.list import availability
from burnish.commands.list import main as list_command
from burnish.config.commands import COMMANDS
from burnish.config.nodes import GROUPS
from burnish.config.overrides import Overrides, groups_of, keys_of, with_home
from envs.engine import rendering
from policies.errors import ConfigError


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed entry point's code in a process of its own."""
    home = str(Path(cli.__file__).resolve().parents[1])
    variables = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "burnish", *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)


def test_the_front_page_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page and command.example in page for name, command in COMMANDS.items())
    assert max(map(len, page.splitlines())) <= 110


def test_an_unknown_command_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["trian"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Did you mean 'train'?" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "algo.lrr=1"], "unknown key 'algo.lrr'"),
        (["train", "algo.lr=fast"], "algo.lr: Value 'fast'"),
        (["train", "algo.lr=-1"], "algo.lr must be above 0; got -1.0."),
        (["train", "algo=bc"], "algo=bc needs demonstrations"),
        (["train", "init=nowhere", "algo=dppo", "env=avoid"], "init=nowhere does not exist"),
        (["train", "dataset=nowhere.hdf5"], "nowhere.hdf5"),
        (["train", "resume=nowhere"], "nowhere"),
        (["train", "device=tpu"], "device"),
        (["train", "dataset=x", "seed=-1"], "seed must be from 0 to 4294967295; got -1."),
        (["train", "evaluation.steps=0"], "error: evaluation.steps must be at least 1"),
        (["train", "evaluation.first_seed=-1"], "error: evaluation.first_seed must be from 0 to"),
        (["train", "evaluation.steer.limit=0"], "error: evaluation.steer.limit must be above 0"),
        (["eval", "policy=x", f"first_seed={10**30}"], "first_seed must be from 0 to"),
        (["collect", "env=avoid", "env.expert.noise=nan"], "env.expert.noise must be at least 0; got nan"),
        (["collect", "env=avoid", "noise=nan"], "noise must be at least 0; got nan."),
        (["collect", "env=avoid", f"first_seed={10**30}"], "first_seed must be from 0 to"),
        (["report", "run=x", "episodes=-1"], "episodes must be at least 0; got -1."),
        (["export", "policy=x", "seed=-1"], "seed must be from 0 to"),
        (["eval"], "eval needs policy="),
        (["eval", "policy=x", "start_noise=some"], "start_noise must be one of random, zero; got 'some'"),
        (["collect"], "collect needs env=<name>, or policy=<run>; tasks with an expert: avoid"),
        (["collect", "env=ant"], "env=ant has no expert"),
        (["collect", "env=Reacher-v5"], "env=Reacher-v5; a gymnasium environment is env=gym env.id=<id>"),
        (["export", "graph=half"], "graph must be one of whole, step; got 'half'"),
        (["import"], "import needs weights=<checkpoint>"),
        (["import", "weights=x.pt"], "import needs source=<program>; choose one of: diffusion_policy, dppo"),
        (["import", "weights=x.pt", "source=dppo"], "weights=x.pt is no file"),
        (["import", "x.pt"], "'x.pt' is not key=value; write weights=x.pt."),
        (
            ["train", "experiment=study_prdc"],
            "unknown option experiment=study_prdc. Did you mean 'hopper_study_prdc'? Near: see burnish list",
        ),
        (["train", "resume=no/run", "algo.env_steps=5"], "no/run is not a run directory: there is no"),
        (["import", "source=octo"], "unknown option source=octo; choose one of: diffusion_policy, dppo"),
        (["import", "source=dppo", "source.num_levels=many"], "source.num_levels: Value 'many'"),
        (["report"], "report needs run="),
        (["train", "+algo.learning_rate=9"], "unknown key 'algo.learning_rate'; BcConfig has: steps"),
        (
            ["train", "policy.normalizer.stat=limits"],
            "unknown key 'policy.normalizer.stat'. Did you mean 'state'? Policy.normalizer has: state, goal",
        ),
        (["train", "encoder.tokens=true"], "unknown key 'encoder.tokens'; StateEncoderConfig has: (none)"),
        (["eval", "compose=[a,b]", "weights=0.5"], "weights must be a list"),
        (["train", "--algo", "bc"], "keys are given without dashes; write algo=bc instead of --algo"),
        (["train", "--algo.lr=1"], "keys are given without dashes; write algo.lr=1"),
        (["train", "--experiment", "avoid_bc"], "write experiment=avoid_bc instead of --experiment"),
        (["eval", "--num-workers", "2"], "write num_workers=2 instead of --num-workers"),
        (["eval", "--polcy", "x"], "unknown option '--polcy'; keys are given as key=value. Did you mean"),
        (["eval", "-e", "5"], "unknown option '-e'"),
        (["eval", "--cfg", "everything"], "argument --cfg/-c: invalid choice"),
        (["eval", "runs/base"], "'runs/base' is not key=value; write policy=runs/base."),
        (["collect", "algo=bc"], "burnish collect has no 'algo'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_end_in_one_line_and_leave_nothing_behind(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(*arguments) == 2
    error = capsys.readouterr().err
    assert re.search(mentions(message), error)
    assert error.count("\n") == 1 and "Traceback" not in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    logs = [getattr(handler, "baseFilename", "") for handler in logging.getLogger().handlers]
    assert not [log for log in logs if str(tmp_path) in log]  # nothing is written to a folder that is gone


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert exit_code("import", "source=dppo", "weights=~/x.pt") == 2
    assert f"weights={tmp_path}/x.pt is no file" in capsys.readouterr().err
    assert with_home("compose=[~/a,b/~/c,~/d]") == f"compose=[{tmp_path}/a,b/~/c,{tmp_path}/d]"
    for text in ("keys='~/k'", "~env", "name=a~/b", "--cfg"):
        assert with_home(text) == text


def test_plain_values_may_have_letters_of_any_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, value in {
        "dataset=d\u00e9mos 1.hdf5": "d\u00e9mos 1.hdf5",
        "init=/data/J\u00f6rg/a=b": "/data/J\u00f6rg/a=b",
        "init=\u65e5\u672c\\": "\u65e5\u672c\\",
        "init='\u00e9'": "\u00e9",
        "init=['\u00e9','b']": ["\u00e9", "b"],
    }.items():
        parsed = Overrides.parse([text])
        assert parsed.items[0].value == value
        assert Overrides.parse(parsed.texts) == parsed
    assert exit_code("import", "source=dppo", "weights=J\u00f6rg/x 1.pt") == 2
    assert "weights=J\u00f6rg/x 1.pt is no file" in capsys.readouterr().err
    for text in ("init=a,\u00e9", "init=[\u00e9]", "init=a (1).hdf5"):
        with pytest.raises(ConfigError, match=mentions("""cannot read init="'…'" """)):
            Overrides.parse([text])


def test_a_mistake_leaves_empty_folders_of_the_person_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for theirs in ("mine/inner", "runs"):
        Path(theirs).mkdir(parents=True)
    for place in (["hydra.run.dir=mine/inner"], ["hydra.run.dir=mine/inner/new/newer"], []):
        assert exit_code("train", "algo=bc", *place) == 2
        assert sorted(map(str, Path().rglob("*"))) == ["mine", "mine/inner", "runs"]


def test_a_run_goes_on_in_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code("train", "resume=one", "hydra.run.dir=other") == 2
    error = capsys.readouterr().err
    assert "resume=one goes on in that run's own directory; got hydra.run.dir=other" in error
    assert not list(tmp_path.iterdir())


def test_a_run_below_a_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    for place in ("afile", "afile/below"):
        assert exit_code("train", f"hydra.run.dir={place}") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"burnish: error: {place}: ") and error.count("\n") == 1


def test_a_mistake_in_a_process_of_its_own_exits_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _run("eval", "--polcy", "x", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("burnish: error: ") and done.stderr.count("\n") == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_TRACEBACK", "1")
    with pytest.raises(HydraException):  # its traceback is Python's own
        exit_code("train", "algo.lrr=1")


def test_cfg_job_prints_the_composed_configuration_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code("train", "experiment=hopper_dppo", "algo.gamma=0.5", "--cfg", "job") == 0
    shown = capsys.readouterr().out
    assert "gamma: 0.5" in shown and "name: hopper_dppo" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name, c in COMMANDS.items() if c.schema])
def test_every_command_has_a_help_page(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(command, "--help") == 0
    page = capsys.readouterr().out
    assert f"usage: burnish {command}" in page
    listed = [line.split(":")[0].strip() for line in page.split("configuration (")[0].splitlines()[1:]]
    offered = {*GROUPS, "experiment"} & set(listed)
    assert offered == set(groups_of(command))
    assert offered <= set(keys_of(command))
    assert "common" not in page and "$" not in page
    assert "\n\n\n" not in page.split("configuration (")[0]


def test_multirun_runs_every_job_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = exit_code(
        "collect",
        "--multirun",
        "env=avoid",
        "episodes=1",
        "first_seed=3,4",
        "out=${first_seed}.hdf5",
    )
    assert code == 0
    assert sorted(path.name for path in tmp_path.glob("*.hdf5")) == ["3.hdf5", "4.hdf5"]


def test_multirun_with_and_without_an_option_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", observations=np.zeros((9, 2)), actions=np.eye(9)[:, :1])
    tiny = ("algo.steps=1", "backbone.width=8", "progress=false", "num_workers=0")
    swept = ("sampler=null,ddim", "hydra.sweep.dir=sweep", "--multirun")
    assert exit_code("train", "dataset=data.npz", *tiny, *swept) == 0
    chosen = [RunDirectory.open(tmp_path / "sweep" / job).config["sampler"] for job in "01"]
    assert chosen[0] is None and chosen[1]["name"] == "ddim"
    assert exit_code("train", "process=flow,null", "--multirun") == 2
    assert "needs an option of process" in capsys.readouterr().err


def test_completion_offers_commands_then_keys_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, expected in (
        ("burnish ", "doctor"),
        ("burnish train algo=", "algo=dppo"),
        ("burnish train algo.batch_s", "algo.batch_size="),
    ):
        monkeypatch.setenv("COMP_LINE", line)
        assert exit_code("-sc", "query=bash") == 0
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("algos", "dppo"),
        ("envs", "avoid"),
        ("processes", "diffusion"),
        ("encoders", "resnet"),
        ("backbones", "mlp"),
        ("samplers", "ddim"),
        ("datasets", "robomimic"),
        ("experiments", "avoid_edm_bc bc avoid"),  # algorithm and task, which are its parent's
    ],
)
def test_list_has_a_line_for_every_choice(
    kind: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_command([kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = expected.split()
    assert any(line.split()[: len(first)] == first for line in lines)
    assert all(not line.lstrip().startswith(("None", "nan")) for line in lines)


def test_doctor_finds_this_installation_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(["--no-render"]) == 0
    shown = capsys.readouterr().out
    for subject in ("python", "torch", "mujoco", "threads", "package policies", "parts"):
        assert f"  {subject} " in shown
    assert "FAIL" not in shown


def test_doctor_notices_a_foreign_package_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "configs"
    foreign.mkdir()
    (foreign / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "configs", raising=False)
    assert doctor(["--no-render"]) == 1
    assert "hides ours" in capsys.readouterr().out


def test_doctor_says_in_words_why_a_renderer_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "AttributeError: 'NoneType' has no 'glGetError'")

    monkeypatch.setattr(doctor_command.subprocess, "run", fails)
    monkeypatch.setattr(doctor_command, "has_library", lambda name: False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    found = {finding.subject: finding.detail for finding in doctor_command._rendering()}
    assert found["rendering osmesa"].startswith("not usable: libOSMesa is not installed (Debian: libosmesa6)")
    assert found["rendering egl"].startswith("not usable: libEGL is not installed")
    assert found["rendering glfw"].startswith("not usable: it needs a screen")
    assert not any("Error" in detail for detail in found.values())


@pytest.mark.parametrize(
    ("working", "libraries", "chosen", "good", "words"),
    [
        ({"egl", "osmesa"}, ("EGL", "OSMesa"), None, True, "drawn by egl: MUJOCO_GL is not set, and"),
        ({"osmesa", "glfw"}, ("EGL", "OSMesa"), None, True, "drawn by glfw"),
        ({"osmesa", "glfw"}, ("OSMesa",), None, True, "drawn by glfw"),
        ({"osmesa"}, ("OSMesa",), None, True, "drawn by osmesa: MUJOCO_GL is not set, libEGL is not"),
        ({"osmesa"}, ("EGL", "OSMesa"), None, False, "set MUJOCO_GL=osmesa"),
        ({"osmesa"}, ("EGL", "OSMesa"), "osmesa", True, "drawn by osmesa: MUJOCO_GL says so"),
        ({"egl"}, ("EGL",), "osmesa", False, "unset MUJOCO_GL to try all"),
    ],
)
def test_doctor_says_which_renderer_is_taken_and_why(
    working: set[str],
    libraries: tuple[str, ...],
    chosen: str | None,
    good: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_command, "_try_renderer", lambda name: (name in working, "on llvmpipe"))
    monkeypatch.setattr(rendering, "has_library", lambda name: name in libraries)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if chosen:
        monkeypatch.setenv("MUJOCO_GL", chosen)
    (found,) = (finding for finding in doctor_command._rendering() if finding.subject == "pictures")
    assert found.is_good is good and words in found.detail


def test_doctor_compares_releases_with_what_an_extra_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing packages, releases that do not serve, and extras inside of extras."""
    asked = [
        'alpha==1.0; extra == "sim"',
        'beta>=2,<3; extra == "sim"',
        'gamma; extra == "other"',
        'burnish[other,sim]; extra == "all"',
        "numpy>=2",
    ]
    installed = {"alpha": "1.0", "beta": "3.1", "numpy": "2.4.6", "mujoco": "3.6.0"}
    monkeypatch.setattr(doctor_command.metadata, "requires", lambda _: asked)
    extras = {"Provides-Extra": ["sim", "other", "all"]}
    monkeypatch.setattr(
        doctor_command.metadata, "metadata", lambda _: SimpleNamespace(get_all=lambda name: extras[name])
    )
    monkeypatch.setattr(doctor_command, "installed_version", installed.get)
    found = {f.subject: (f.is_good, f.detail) for f in doctor_command._extras()}
    assert found["extra sim"] == (False, "beta 3.1 is not <3,>=2: pip install 'burnish[sim]'")
    assert found["extra other"] == (False, "missing gamma: pip install 'burnish[other]'")
    assert found["extra all"][1].startswith("missing gamma, beta 3.1 is not <3,>=2: pip")
    core = {f.subject: f for f in doctor_command._packages()}
    assert core["numpy"].is_good and "alpha" not in core
    installed["numpy"] = "1.26"
    core = {f.subject: f for f in doctor_command._packages()}
    assert core["numpy"].needed and core["numpy"].detail == "numpy 1.26 is not >=2: pip install 'numpy>=2'"


def test_doctor_asks_for_the_second_step_that_pip_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "installed_version", {"d4rl": "1.1"}.get)
    (found,) = doctor_command._second_step("d4rl")
    assert not found.is_good and found.detail == "missing gym: pip install --no-deps d4rl==1.1 gym==0.23.1"
    assert not list(doctor_command._second_step("export"))


def test_a_task_without_its_packages_is_listed_with_the_command_that_installs_them() -> None:
    assert availability((), "") == availability(("numpy", "torch"), "mazes") == "yes"
    assert availability(("numpy", "nowhere"), "mazes") == "no: pip install 'burnish[mazes]'"
    assert availability(("nowhere",), "metaworld").endswith("pip install --no-deps metaworld==3.1.1")
    assert availability(("nowhere",), "") == "no: pip install nowhere"


def test_tasks_are_listed_without_torch_and_simulators() -> None:
    heavy = "{'torch', 'scipy', 'h5py', 'mujoco', 'gymnasium', 'gymnasium_robotics', 'ogbench', 'robosuite'}"
    imports = "from burnish.commands import list; list.main(['envs']); import sys"
    code = f"{imports}; assert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hopper" in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--fast"], 2), (["env=avoid"], 2)])
def test_the_demo_explains_itself_and_refuses_arguments(
    arguments: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        demo.main(arguments)
    assert ended.value.code == code and list(tmp_path.iterdir()) == []
    shown = capsys.readouterr()
    assert "usage: burnish-demo" in shown.out + shown.err
    assert code or ("make demo" in shown.out and "runs/<date>" in shown.out)


def test_threads_default_to_one_unless_the_person_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("words", [["list", "algos"], ["train", "--help"]], ids=" ".join)
def test_pages_that_only_name_parts_import_none(words: list[str], tmp_path: Path) -> None:
    home = str(Path(cli.__file__).resolve().parents[1])
    code = (
        "import sys; from burnish import cli\n"
        f"sys.argv = ['burnish']\ntry: cli.main({words})\n"
        "except SystemExit as ended: assert not ended.code\n"
        "heavy = {'torch', 'mujoco', 'gymnasium'} & set(sys.modules)\n"
        "parts = [name for name in sys.modules if name.startswith(('algos.dppo', 'policies.processes'))]\n"
        "assert not heavy and not parts, (heavy, parts)"
    )
    variables = os.environ | {"PYTHONPATH": home}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_renderer_whose_library_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    for name, library in (("osmesa", "libOSMesa"), ("egl", "libEGL")):
        monkeypatch.setenv("MUJOCO_GL", name)
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "--help"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(
            f"burnish: error: MUJOCO_GL={name} needs {library}, which is not"
        )


def test_the_front_page_loads_nothing_numeric(tmp_path: Path) -> None:
    home = str(Path(cli.__file__).resolve().parents[1])
    code = (
        "import sys; from burnish import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'hydra', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    )
    variables = os.environ | {"PYTHONPATH": home}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
