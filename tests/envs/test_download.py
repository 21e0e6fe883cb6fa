"""Downloads from a server of our own that can break off, change its files, and know ranges or not."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from messages import mentions

import burnish
from envs.datasets import read_dataset
from envs.datasets.catalogue import catalogue, find_dataset, lookup
from envs.datasets.download import fetch
from envs.evaluation.scores import references
from policies.errors import ConfigError, DatasetError

CONTENT = np.random.default_rng(0).bytes(3_000_000)
SUM = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; what it sends is counted in `sent`, when it begins to.

    Attributes:
        breaks: Bytes of the body after which the next connections break off.
        tags: Whether files have entity tags; ranges: whether parts are served.

    Below /hub/ an answer leads elsewhere and tells the SHA-256, as Hugging Face does for large files.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/x.bin": CONTENT}
        self.breaks: list[int] = []
        self.sent, self.requests = 0, 0
        self.tags = self.ranges = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests += 1
        content = self.server.files.get(self.path.removeprefix("/hub"))
        if content is None:
            self.send_error(404)
            return
        if self.path.startswith("/hub/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/hub"))
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.end_headers()
            return
        tag, first = f'"{hashlib.sha1(content).hexdigest()}"', 0
        wanted = self.headers.get("Range") if self.server.ranges else None
        if wanted and self.headers.get("If-Range") == tag:
            first = int(wanted.removeprefix("bytes=").rstrip("-"))
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if self.server.tags:
            self.send_header("ETag", tag)
        self.end_headers()
        end = first + self.server.breaks.pop(0) if self.server.breaks else len(content)
        self.server.sent += end - first  # before the bytes leave: who reads the count has them already
        self.wfile.write(content[first:end])
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_a_file_arrives_whole_and_leaves_nothing_else(tmp_path: Path, server: Server) -> None:
    seen: list[tuple[int, int | None]] = []
    path = fetch(f"{server.address}/x.bin", tmp_path / "a" / "x.bin", progress=lambda *p: seen.append(p))
    assert path.read_bytes() == CONTENT
    assert [item.name for item in path.parent.iterdir()] == ["x.bin"]
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and seen == sorted(seen)
    fetch(f"{server.address}/x.bin", path)
    assert server.requests == 1, "what is there is not fetched again"


def test_a_broken_connection_is_continued_within_one_call(tmp_path: Path, server: Server) -> None:
    server.breaks = [1_000_000, 500_000]
    path = fetch(f"{server.address}/x.bin", tmp_path / "x.bin", sha256=SUM)
    assert path.read_bytes() == CONTENT
    assert server.requests == 3 and server.sent == len(CONTENT), "no byte is sent twice"


def test_an_interrupted_download_is_continued_by_the_next_call(tmp_path: Path, server: Server) -> None:
    server.breaks = [1_200_000]
    with pytest.raises(DatasetError, match=mentions("1200000 bytes")):
        fetch(f"{server.address}/x.bin", tmp_path / "x.bin", attempts=1)
    assert not (tmp_path / "x.bin").exists(), "nothing unfinished has the final name"
    assert fetch(f"{server.address}/x.bin", tmp_path / "x.bin", attempts=1).read_bytes() == CONTENT
    assert server.sent == len(CONTENT)


def test_a_call_that_was_killed_is_continued(tmp_path: Path, server: Server) -> None:
    def kill(have: int, size: int | None) -> None:
        if have > 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"{server.address}/x.bin", tmp_path / "x.bin", progress=kill)
    have = (tmp_path / "x.bin.part").stat().st_size
    assert have > 1_000_000
    first = server.sent
    assert fetch(f"{server.address}/x.bin", tmp_path / "x.bin").read_bytes() == CONTENT
    assert server.sent - first == len(CONTENT) - have


def test_a_file_that_changed_meanwhile_begins_again(tmp_path: Path, server: Server) -> None:
    server.breaks = [1_200_000]
    with pytest.raises(DatasetError):
        fetch(f"{server.address}/x.bin", tmp_path / "x.bin", attempts=1)
    server.files["/x.bin"] = CONTENT[::-1]
    assert fetch(f"{server.address}/x.bin", tmp_path / "x.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("missing", ["tags", "ranges"])
def test_servers_without_tags_or_ranges_begin_again(tmp_path: Path, server: Server, missing: str) -> None:
    setattr(server, missing, False)
    server.breaks = [1_200_000]
    assert fetch(f"{server.address}/x.bin", tmp_path / "x.bin").read_bytes() == CONTENT
    assert server.sent == len(CONTENT) + 1_200_000


def test_a_part_that_is_complete_is_put_in_place(tmp_path: Path, server: Server) -> None:
    server.breaks = [1_200_000]
    with pytest.raises(DatasetError):
        fetch(f"{server.address}/x.bin", tmp_path / "x.bin", attempts=1)
    (tmp_path / "x.bin.part").write_bytes(CONTENT)
    assert fetch(f"{server.address}/x.bin", tmp_path / "x.bin", sha256=SUM).read_bytes() == CONTENT
    (tmp_path / "x.bin").rename(tmp_path / "whole")


@pytest.mark.parametrize("how", ["given", "linked"])
def test_a_wrong_checksum_is_refused_and_thrown_away(tmp_path: Path, server: Server, how: str) -> None:
    url, target = f"{server.address}{'/hub' * (how == 'linked')}/x.bin", tmp_path / "x.bin"
    if how == "linked":
        server.breaks = [1_200_000]
        with pytest.raises(DatasetError):
            fetch(url, target, attempts=1)
        spoiled = bytearray((tmp_path / "x.bin.part").read_bytes())
        spoiled[7] ^= 1
        (tmp_path / "x.bin.part").write_bytes(spoiled)
    with pytest.raises(DatasetError, match=mentions("x.bin SHA-256")):
        fetch(url, target, sha256=None if how == "linked" else "0" * 64)
    assert list(tmp_path.iterdir()) == []
    assert fetch(url, target, sha256=SUM).read_bytes() == CONTENT
    target.write_bytes(b"damaged")
    with pytest.raises(DatasetError, match=mentions("x.bin SHA-256")):
        fetch(url, target, sha256=SUM)


def test_without_a_network_there_is_one_clear_message(tmp_path: Path, server: Server) -> None:
    address = server.address
    server.shutdown()
    server.server_close()
    with pytest.raises(DatasetError, match=mentions("/x.bin refused")):
        fetch(f"{address}/x.bin", tmp_path / "x.bin")
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_one_fetches_and_the_other_waits(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    begun, other = threading.Event(), []
    waits = threading.Thread(
        target=lambda: other.append(fetch(f"{server.address}/x.bin", tmp_path / "x.bin"))
    )

    def show(have: int, size: int | None) -> None:
        if not begun.is_set():
            begun.set()
            waits.start()
            while "waiting for it" not in caplog.text:  # locks of two open files differ, also in one process
                time.sleep(0.01)

    with caplog.at_level("INFO"):
        path = fetch(f"{server.address}/x.bin", tmp_path / "x.bin", progress=show)
    waits.join()
    assert other == [path] and path.read_bytes() == CONTENT
    assert server.requests == 1
    assert list(tmp_path.iterdir()) == [path]


def test_who_waits_for_a_download_that_fails_fetches_itself(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    waits = threading.Thread(target=lambda: fetch(f"{server.address}/x.bin", tmp_path / "x.bin"))

    def show(have: int, size: int | None) -> None:
        waits.start()
        while "waiting for it" not in caplog.text:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        fetch(f"{server.address}/x.bin", tmp_path / "x.bin", progress=show)
    waits.join()
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def test_a_refusal_names_the_status_and_is_not_tried_again(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DatasetError, match=mentions("404")):
        fetch(f"{server.address}/none.bin", tmp_path / "none.bin")
    assert server.requests == 1
    server.files["/empty.bin"] = b""  # of which our server has no byte to send
    with pytest.raises(DatasetError, match=mentions("empty.bin 416")):
        fetch(f"{server.address}/empty.bin", tmp_path / "empty.bin")
    with pytest.raises(DatasetError, match=mentions("url http:// https://")):
        fetch("file:///etc/hostname", tmp_path / "x")


# -- names ----------------------------------------------------------------------------------------------


def test_names_are_unique_and_their_files_too() -> None:
    entries = list(catalogue().values())
    assert len({entry.path for entry in entries}) == len(entries) > 200
    assert {entry.family for entry in entries} == {"D4RL", "OGBench", "robomimic", "Minari"}
    with pytest.raises(DatasetError, match=mentions("hopper-medium-v2")):
        lookup("hoper-medium-v2")


def test_d4rl_names_have_reference_scores() -> None:
    assert {one.name for one in catalogue().values() if one.family == "D4RL"} <= set(references())


@pytest.mark.filterwarnings("ignore")
def test_d4rl_addresses_and_reference_scores_are_those_of_d4rl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("D4RL_SUPPRESS_IMPORT_ERROR", "1")
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    infos = pytest.importorskip("d4rl.infos", reason="needs the extra 'd4rl' and its --no-deps step")
    ours = {one.name: one.files[0].url for one in catalogue().values() if one.family == "D4RL"}
    assert ours == {name: infos.DATASET_URLS[name] for name in ours}
    for name in ours:
        known = references()[name]
        expected = (infos.REF_MIN_SCORE[name], infos.REF_MAX_SCORE[name])
        assert (known.min_return, known.max_return) == expected, name


# -- the command ----------------------------------------------------------------------------------------


def npz(value: float = 1.0) -> bytes:
    buffer, ends = io.BytesIO(), np.arange(6) % 3 == 2
    np.savez(buffer, observations=np.full((6, 2), value), actions=np.ones((6, 1)), terminals=ends)
    return buffer.getvalue()


def hdf5() -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["observations"] = np.ones((600, 2))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["x.hdf5", "x.npz"])
@pytest.mark.parametrize("kind", ["cut", "page"])
def test_what_is_no_file_of_its_kind_is_refused_and_thrown_away(
    tmp_path: Path, server: Server, name: str, kind: str
) -> None:
    """The server tells no checksum, and believes that what it sends is all there is."""
    whole = hdf5() if name == "x.hdf5" else npz()
    sent = {"cut": whole[: len(whole) // 2], "page": b"<html>We are closed.</html>"}[kind]
    server.files[f"/{name}"], server.tags = sent, False
    with pytest.raises(DatasetError) as refused:
        fetch(f"{server.address}/{name}", tmp_path / name)
    parts = f"{tmp_path / name} {server.address}/{name} readable {name[2:]} {len(sent)} bytes"
    assert re.search(mentions(parts), str(refused.value))
    assert list(tmp_path.iterdir()) == []
    server.files[f"/{name}"] = whole
    assert fetch(f"{server.address}/{name}", tmp_path / name).read_bytes() == whole


def test_a_name_is_downloaded_once_and_then_read_by_its_name(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURNISH_DATASETS", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    name = "cube-single-play-v0"
    with pytest.raises(DatasetError, match=mentions(f"name={name}")):
        read_dataset(name)
    for part in ("", "-val"):
        server.files[f"/datasets/ogbench/{name}{part}.npz"] = npz()
    path = burnish.download_data(name, mirror=server.address)
    assert path == tmp_path / "data" / "ogbench" / f"{name}.npz" == find_dataset(name)
    assert read_dataset(name).num_episodes == 2
    burnish.download_data(name, mirror=server.address)
    assert server.requests == 2
    path.write_bytes(b"damaged")
    with pytest.raises(DatasetError, match=mentions("SHA-256")):
        burnish.download_data(name, mirror=server.address)


def test_what_another_program_downloaded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_DATASETS", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    theirs = tmp_path / ".ogbench" / "data" / "scene-play-v0.npz"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(npz())
    assert find_dataset("scene-play-v0") == theirs
    for path in (tmp_path / "other.hdf5", Path("hopper-medum-v2.hdf5"), Path("demos")):
        assert find_dataset(path) == path


def test_a_mistyped_name_is_told_the_names_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match=mentions("hopper-medum-v2 hopper-medium-v2")):
        read_dataset("hopper-medum-v2")
    Path("hopper-medum-v2").mkdir()
    assert find_dataset("hopper-medum-v2") == Path("hopper-medum-v2")


def test_any_address_can_be_fetched(tmp_path: Path, server: Server) -> None:
    path = burnish.download_data(url=f"{server.address}/x.bin", sha256=SUM, out=tmp_path)
    host = server.address.removeprefix("http://").replace(":", "_")
    assert path == tmp_path / "url" / host / "x.bin" and path.read_bytes() == CONTENT


def test_files_of_one_name_are_kept_apart_by_their_addresses(tmp_path: Path, server: Server) -> None:
    places = ("/hopper/train.npz", "/walker/train.npz", "/walker/train.npz?v=1", "/walker/train.npz?v=2")
    server.files |= {place: npz(number) for number, place in enumerate(places)}
    for mirror in (None, server.address):
        found = [
            burnish.download_data(
                url=f"{server.address}{place}", mirror=mirror, out=tmp_path / str(mirror is None)
            )
            for place in places
        ]
        assert [path.read_bytes() for path in found] == [server.files[place] for place in places]
        assert {path.name for path in found} == {"train.npz"}, "readers look for files by their names"


def test_files_of_one_folder_stay_together(tmp_path: Path, server: Server) -> None:
    names = ("train.npz", "normalization.npz")
    for query in ("", "?download=true"):
        server.files |= {f"/hopper/{name}{query}": npz() for name in names}
        found = [
            burnish.download_data(url=f"{server.address}/hopper/{name}{query}", out=tmp_path)
            for name in names
        ]
        assert found[0].parent == found[1].parent


def test_a_file_that_was_removed_is_fetched_as_it_is_now(tmp_path: Path, server: Server) -> None:
    def download() -> Path:
        return burnish.download_data(url=f"{server.address}/x.bin", out=tmp_path)

    download().unlink()
    server.files["/x.bin"] = b"a later version"
    path = download()
    assert path.read_bytes() == b"a later version"
    assert download() == path, "the checksum is that of the later version"
    path.write_bytes(CONTENT)
    with pytest.raises(DatasetError, match=mentions("x.bin SHA-256")):
        download()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name= url="),
        ({"url": "http://x/y", "name": "scene-play-v0"}, "name= url="),
        ({"url": "http://x/y", "sha256": "12"}, "sha256 64 url= 12"),
        ({"url": "http://x/"}, "url file"),
        ({"url": "http://x/a/"}, "url file"),
        ({"url": "http://x/../../y"}, "http://x/ / /y"),
        ({"name": "scene-play-v0", "attempts": 0}, "attempts 0"),
    ],
)
def test_mistakes_are_refused_before_anything_is_fetched(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        burnish.download_data(out=tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []
