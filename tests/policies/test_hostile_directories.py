"""A policy directory of a stranger: nothing in it is executed, and what is wrong is said in one line."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import exit_code_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import mentions
from pairwise import everything
from small_policies import small_policy

from policies.errors import BurnishError, CheckpointError
from policies.processes.diffusion import VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.storage.config_json import describe
from policies.storage.policy_folder import load_policy, save_policy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = small_policy(VPDiffusion(num_levels=5), DDIM(steps=3))
    return save_policy(policy, tmp_path_factory.mktemp("honest") / "policy", provenance={"task": "avoid"})


@pytest.fixture
def directory(honest: Path, tmp_path: Path) -> Path:
    home = tmp_path / "policy"
    home.mkdir()
    for name in ("config.json", "model.safetensors"):
        (home / name).write_bytes((honest / name).read_bytes())
    return home


def refused(home: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_policy(home)
    return str(caught.value)


def edit(home: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((home / "config.json").read_text())
    change(data)
    (home / "config.json").write_text(json.dumps(data))


# -- JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "config.json JSON"),
        ('{"a":' * 200 + "1" + "}" * 200, "JSON deep"),
        ('{"format": NaN}', "finite NaN"),
        ('{"format": 1e999}', "finite 1e999"),
        ('{"format": -Infinity}', "finite"),
        ('{"format": ' + "9" * 10_000 + "}", "64 bits"),
        ('{"format": 1, "format": 1}', "format twice"),
        ("[1]", "JSON list"),
        ("{", "config.json JSON"),
        ("", "config.json JSON"),
        ("\udcff", "config.json JSON"),
        ('{"format": true}', "format 1 True"),
        ('{"format": 1.0}', "format 1"),
    ],
)
def test_json_that_is_none_or_says_two_things_is_refused(text: str, reason: str, directory: Path) -> None:
    (directory / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert re.search(mentions(reason), refused(directory))


def test_a_description_of_megabytes_is_not_read(directory: Path) -> None:
    with (directory / "config.json").open("wb") as file:
        file.truncate(1 << 33)
    assert re.search(mentions("config.json most"), refused(directory))


# -- values -------------------------------------------------------------------------------------------------

LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a width as text": (lambda d: d.update(obs_dim="5"), "obs_dim 5"),
    "a width as a truth": (lambda d: d.update(obs_dim=True), "obs_dim True"),
    "a width as a fraction": (lambda d: d.update(horizon=3.5), "horizon 3.5"),
    "a negative width": (lambda d: d.update(obs_dim=-1), "config.json"),
    "a giant width": (lambda d: d.update(obs_dim=10**15), "100000"),
    "a giant network": (lambda d: d["parts"]["backbone"].update(width=90_000), "weights"),
    "a deep network": (
        lambda d: d["parts"]["backbone"].update(num_blocks=90_000) or d["parts"]["backbone"].update(width=1),
        "does not describe a policy",
    ),
    "giant images": (
        lambda d: d["parts"].update(encoder={"name": "vit"}) or d.update(images={"a": [96_000, 96_000, 3]}),
        "does not",
    ),
    "images of nothing": (lambda d: d.update(images={"a": [1]}), "does not describe a policy"),
    "many texts": (lambda d: d.update(normalizer={str(i): "limits" for i in range(2000)}), "1000"),
    "a long text": (lambda d: d["normalizer"].update(state="x" * 2000), "1000"),
    "an unknown mode": (lambda d: d["normalizer"].update(state="eval"), "normalizer eval"),
    "an unknown key": (lambda d: d.update(__class__="os.system"), "__class__"),
    "no parts": (lambda d: d.pop("parts"), "missing parts"),
    "an unknown part": (lambda d: d["parts"].update(hook={"name": "x"}), "parts objects"),
    "an unknown name": (lambda d: d["parts"]["process"].update(name="nothing"), "process nothing"),
    "a dotted path": (lambda d: d["parts"]["process"].update(name="os.system"), "process"),
    "a name that is a path": (lambda d: d["parts"]["backbone"].update(name="../../evil"), "../../evil"),
    "a name that is a list": (lambda d: d["parts"]["sampler"].update(name=["ddim"]), "sampler"),
    "a part that is a text": (lambda d: d["parts"].update(process="diffusion"), "parts objects"),
    "a width of a part as text": (
        lambda d: d["parts"]["backbone"].update(width="16"), "backbone.width int 16"
    ),
    "a truth as a number": (lambda d: d["parts"]["process"].update(num_levels=True), "num_levels int"),
    "a target to import": (lambda d: d["parts"]["process"].update(_target_="os.system"), "process"),
    "steps without end": (lambda d: d["parts"]["sampler"].update(steps=10**9), "100000"),
    "itself as a member": (
        lambda d: d.update(members=[copy.deepcopy(d)], composition={"weights": ["x"]}), "composition.weights"
    ),
    "members without end": (
        lambda d: d.update(members=[copy.deepcopy(d)] * 65, composition={"weights": [1.0]}), "members 64"
    ),
    "provenance as a text": (lambda d: d.update(provenance="x"), "provenance object"),
    "a side of the switch as a text": (
        lambda d: d.update(switch_time=1.5, tuned_above="no"), "tuned_above no"
    ),
    "a side of the switch as a number": (lambda d: d.update(tuned_above=0), "tuned_above 0"),
    "a clip as a text": (lambda d: d.update(observation_clip="5"), "observation_clip"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_descriptions_that_lie_are_refused_by_the_key(lie: str, directory: Path) -> None:
    change, reason = LIES[lie]
    edit(directory, change)
    assert re.search(mentions(reason), refused(directory))


def test_compositions_in_compositions_end(directory: Path) -> None:
    def nest(data: dict[str, Any]) -> None:
        for _ in range(12):
            inner = copy.deepcopy(data)
            data.update(members=[inner], composition={"weights": [1.0]})

    edit(directory, nest)
    assert re.search(mentions("members list"), refused(directory))


def refuse_giants(honest: Path, giants: list[Path]) -> None:
    """Refuse directories with no more than 6 GiB of addresses and 400 MiB of memory."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 6 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    load_policy(honest)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in giants:
        with pytest.raises(CheckpointError):
            load_policy(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
def test_declared_sizes_are_compared_before_memory_is_taken(honest: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"obs_dim": 100_000, "obs_steps": 100_000},
        {"backbone": {"width": 60_000}},
        {"backbone": {"hidden_dims": [100_000] * 900}},
        {"horizon": 100_000, "act_steps": 1, "action_dim": 100_000},
        {"process": {"num_levels": 100_000}, "backbone": {"time_dim": 100_000}},
    ]
    paths = []
    for number, change in enumerate(changes):
        home = tmp_path / str(number)
        home.mkdir()
        (home / "model.safetensors").write_bytes((honest / "model.safetensors").read_bytes())
        data = json.loads((honest / "config.json").read_text())
        for key, value in change.items():
            if isinstance(value, dict):
                data["parts"][key] |= value
            else:
                data[key] = value
        (home / "config.json").write_text(json.dumps(data))
        paths.append(home)
    assert exit_code_of(lambda: refuse_giants(honest, paths)) == 0


# -- files --------------------------------------------------------------------------------------------------

CODE = "import pathlib; pathlib.Path(__file__).parent.joinpath('executed').touch()\n"


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_other_files_are_not_opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "sitecustomize.py", "conftest.py", "policy.py", "torch.py", "setup.py"):
        (directory / name).write_text(CODE)
    for name in ("pytorch_model.bin", "model.pkl", "training_state.pt", "config.pkl"):
        (directory / name).write_bytes(pickle.dumps(Bomb(directory / "executed")))
    (directory / "config.yaml").write_text("!!python/object/apply:os.system ['touch executed']")
    monkeypatch.chdir(directory)
    load_policy(directory)
    assert not (directory / "executed").exists()


def test_a_pickle_in_place_of_the_weights_is_not_unpickled(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(pickle.dumps(Bomb(directory / "executed")))
    assert "damaged" in refused(directory)
    assert not (directory / "executed").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_out_of_the_directory_are_refused(name: str, directory: Path, tmp_path: Path) -> None:
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert "link" in refused(directory)


def test_links_within_the_directory_and_to_it_are_followed(directory: Path, tmp_path: Path) -> None:
    (directory / "config.json").rename(directory / "other.json")
    (directory / "config.json").symlink_to("other.json")
    (tmp_path / "link").symlink_to(directory)
    followed, own = load_policy(tmp_path / "link").state_dict(), load_policy(directory).state_dict()
    assert list(followed) == list(own) and all(torch.equal(followed[name], own[name]) for name in own)


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    assert "regular file" in refused(directory)
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    assert re.search(mentions("no config.json"), refused(directory))


def header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


TENSOR = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,%d]}}'
MALFORMED = {
    "empty": b"",
    "a header of all the memory there is": struct.pack("<Q", 2**63 - 1) + b"{}",
    "a header that is none": header(b"\xff\xfe"),
    "a list": header(b"[]"),
    "a shape without bytes": header(TENSOR % (b"1000000000,1000000000", 4)) + bytes(4),
    "a shape that overflows": header(TENSOR % (b"9223372036854775807,4", 16)) + bytes(16),
    "offsets out of the file": header(TENSOR % (b"1000", 4000)),
    "a negative shape": header(TENSOR % (b"-1", 4)) + bytes(4),
    "an unknown type": header(TENSOR.replace(b"F32", b"PKL") % (b"1", 4)) + bytes(4),
    "bytes that belong to nothing": header(TENSOR % (b"1", 4)) + bytes(400),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_weights_are_refused(kind: str, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(MALFORMED[kind])
    assert "damaged" in refused(directory)


# -- checksums ----------------------------------------------------------------------------------------------


def test_a_bit_that_flipped_is_found(honest: Path, directory: Path) -> None:
    (directory / "SHA256SUMS").write_text((honest / "SHA256SUMS").read_text())
    load_policy(directory)
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    assert re.search(mentions("model.safetensors SHA-256"), refused(directory))


def test_a_description_that_was_changed_is_found(honest: Path, directory: Path) -> None:
    (directory / "SHA256SUMS").write_text((honest / "SHA256SUMS").read_text())
    edit(directory, lambda data: data.update(observation_clip=4.0))
    assert re.search(mentions("config.json SHA-256"), refused(directory))
    (directory / "SHA256SUMS").unlink()
    assert load_policy(directory).config.observation_clip == 4.0


@pytest.mark.parametrize("size", [0, 30, 66, 70, 79, 120, 150])
def test_checksums_that_were_cut_off_are_found(size: int, honest: Path, directory: Path) -> None:
    """The first line has 78 bytes."""
    text = (honest / "SHA256SUMS").read_text()
    (directory / "SHA256SUMS").write_text(text[:size])
    assert re.search(mentions("SHA256SUMS damaged"), refused(directory))


@pytest.mark.parametrize("kept", [lambda text: text[:78], lambda text: text[78:].rstrip(), lambda _: "\n"])
def test_a_file_without_a_line_is_not_compared(kept: Any, honest: Path, directory: Path) -> None:
    (directory / "SHA256SUMS").write_text(kept((honest / "SHA256SUMS").read_text()))
    load_policy(directory)


def test_the_checksums_of_a_checkpoint_are_compared_too(directory: Path) -> None:
    (directory.parent / "SHA256SUMS").write_text(f"{'0' * 64}  policy/config.json\n")
    assert re.search(mentions("config.json SHA-256"), refused(directory))


# -- fuzzing ------------------------------------------------------------------------------------------------

DESCRIPTION = json.loads(json.dumps(describe(small_policy(VPDiffusion(num_levels=5), DDIM(steps=3)))))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


PLACES = [path for path in places(DESCRIPTION) if path]
LETTERS = "az_09 ./:'\"\\{}[]!\n\r\t\0\x7f\x85\u2028é\U0001f916"
KEYS = st.text(LETTERS, max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 9)
    | st.floats()
    | st.text(LETTERS, max_size=20)
    | st.sampled_from(["os.system", "../../etc/passwd", "ddpm", "flow", "mlp", "__class__", "0", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
SHARED_FOLDER = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
"""Every example writes its files anew; a busy machine may take long to draw one."""
CHANGES = st.lists(
    st.tuples(st.sampled_from(PLACES), st.none() | st.just(...) | VALUES), min_size=1, max_size=3
)


def changed(data: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place, or take away what is there (`...`), if the place still exists."""
    for key in path[:-1]:
        if not isinstance(data, dict | list) or (isinstance(data, dict) and key not in data):
            return
        if isinstance(data, list) and not (isinstance(key, int) and key < len(data)):
            return
        data = data[key]
    if isinstance(data, dict):
        data.pop(path[-1], None) if value is ... else data.update({path[-1]: value})


@settings(max_examples=80 if everything else 30, suppress_health_check=SHARED_FOLDER)
@given(changes=CHANGES)
def test_any_change_of_a_description_loads_or_is_refused_in_words(
    changes: list[tuple[tuple[Any, ...], Any]], directory: Path
) -> None:
    data = copy.deepcopy(DESCRIPTION)
    for path, value in changes:
        changed(data, path, value)
    (directory / "config.json").write_text(json.dumps(data))
    try:
        load_policy(directory)
    except BurnishError as error:
        assert str(directory) in str(error)


@settings(max_examples=40, suppress_health_check=SHARED_FOLDER)
@given(content=st.binary(max_size=200), keep=st.integers(0, 400))
def test_any_bytes_are_refused_in_words(content: bytes, keep: int, honest: Path, directory: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((honest / name).read_bytes()[:keep] + content)
    with pytest.raises(CheckpointError):
        load_policy(directory)
