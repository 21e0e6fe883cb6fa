"""The hub: what goes up, what comes down, and that nothing happens by itself. The hub is a local stand-in."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import ModelCard
from messages import mentions
from small_policies import observations, small_policy

import burnish
from burnish.runs.locate import locate
from envs.evaluation.intervals import Interval, stated
from policies.errors import CheckpointError, ConfigError
from policies.storage import hub
from policies.storage.policy_folder import save_policy

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATIENCE_S = 120
"""How long both sides wait for each other on a machine that is busy."""


class StandIn:
    """The endpoints of the hub that are used, around a dictionary of files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.requests: list[str] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _json(self, data: Any, status: int = 200) -> None:
                self._reply(status, json.dumps(data).encode(), Content_Type="application/json")

            def do_GET(self) -> None:
                path = unquote(self.path.partition("?")[0])
                stand_in.requests.append(f"{self.command} {path}")
                if not stand_in.files:
                    return self._reply(404, b"", X_Error_Code="RepoNotFound")
                if path.startswith("/api/models/org/name/revision/"):
                    names = [{"rfilename": name} for name in stand_in.files]
                    return self._json({"id": "org/name", "sha": COMMIT, "siblings": names})
                if path.startswith("/api/models/org/name/tree/"):
                    rows = [
                        {"type": "file", "path": k, "size": len(v), "oid": "0"}
                        for k, v in stand_in.files.items()
                    ]
                    return self._json(rows)
                name = path.rpartition("/")[2]
                if "/resolve/" in path and name in stand_in.files:
                    content = stand_in.files[name]
                    etag = f'"{hashlib.sha1(content).hexdigest()}"'
                    return self._reply(200, content, ETag=etag, X_Repo_Commit=COMMIT)
                return self._reply(404, b"", X_Error_Code="EntryNotFound")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                stand_in.requests.append(f"POST {self.path.partition('?')[0]}")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path.startswith("/api/repos/create"):
                    stand_in.created.append(json.loads(body))
                    return self._json(
                        {"url": f"{stand_in.url}/org/name", "id": "org/name", "name": "org/name"}
                    )
                if "/preupload/" in self.path:
                    asked = json.loads(body)["files"]
                    return self._json(
                        {
                            "files": [
                                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                                for f in asked
                            ]
                        }
                    )
                if "/commit/" in self.path:
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            content = base64.b64decode(line["value"]["content"])
                            stand_in.files[line["value"]["path"]] = content
                    url = f"{stand_in.url}/org/name/commit/{COMMIT}"
                    return self._json(
                        {"success": True, "commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None}
                    )
                return self._json({}, 200)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=60)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", PATIENCE_S)
    stand_in = StandIn()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stand_in.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        stand_in.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield stand_in
    stand_in.close()


def evaluation_file(path: Path) -> Path:
    interval = {"value": 0.93, "low": 0.86, "high": 0.97}
    summary = {
        "env": "avoid",
        "episodes": 100,
        "success": interval,
        "return": {"value": 1, "low": 0, "high": 2},
    }
    path.write_text(json.dumps({"summary": summary, "protocol_hash": "f" * 64, "protocol": {}, "rows": []}))
    return path


def test_a_policy_goes_to_the_hub_and_comes_back_bit_for_bit(stand_in: StandIn, tmp_path: Path) -> None:
    policy = small_policy()
    directory = burnish.save_pretrained(policy, tmp_path / "policy", provenance={"name": "tuned"})
    (directory / "notes.txt").write_text("private")
    (directory / "evil.py").write_text("raise SystemExit")
    address = hub.push_to_hub(directory, "org/name", endpoint=stand_in.url, token="t")
    made = stand_in.created[0]  # releases of the hub's client say it in two ways
    assert made.get("private") is True or made.get("visibility") == "private"
    assert address.endswith(COMMIT)
    assert set(stand_in.files) == {"config.json", "model.safetensors", "SHA256SUMS", "README.md"}
    obs, noise = observations(3), policy.sample_noise(3)
    for loaded in (
        hub.from_pretrained("org/name", endpoint=stand_in.url, token="t"),
        burnish.load_policy("hub://org/name"),
        locate("hub://org/name@main").load(),
    ):
        assert torch.equal(loaded.act(obs, noise=noise), policy.act(obs, noise=noise))


def test_only_the_files_of_a_policy_are_fetched(stand_in: StandIn, tmp_path: Path) -> None:
    directory = save_policy(small_policy(), tmp_path / "policy")
    hub.push_to_hub(directory, "org/name", endpoint=stand_in.url, token="t")
    stand_in.files |= {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04."}
    home = hub.fetch("hub://org/name", endpoint=stand_in.url)
    assert {path.name for path in home.iterdir()} == {
        "config.json",
        "model.safetensors",
        "SHA256SUMS",
        "README.md",
    }


def test_the_card_is_valid_for_the_hub_and_tells_results_with_their_protocol(
    stand_in: StandIn, tmp_path: Path
) -> None:
    facts = {
        "name": 'it\'s: a "name"\n---\nevil: true',
        "algo": "dppo",
        "env": {"name": "avoid"},
        "dataset": "a|b",
    }
    directory = save_policy(small_policy(), tmp_path / "policy", provenance=facts)
    hub.push_to_hub(
        directory, "org/name", evaluations=[evaluation_file(tmp_path / "e.json")], licence="mit",
        endpoint=stand_in.url, token="t",
    )  # fmt: skip
    text = stand_in.files["README.md"].decode()
    data = ModelCard(text).data
    assert (data.library_name, data.license, data.pipeline_tag) == ("burnish", "mit", "robotics")
    assert "evil" not in data.to_dict() and {"robotics", "diffusion"} <= set(data.tags)
    (result, _) = data.eval_results
    assert (result.dataset_name, result.metric_value) == ("avoid", 0.93)
    assert "| avoid | success rate | 0.93 | 0.86 to 0.97 | 100 | `ffffffffffff` |" in text
    assert 'load_policy("hub://org/name")' in text and "made for `avoid`" in text


def test_a_card_has_the_results_of_one_episode(stand_in: StandIn, tmp_path: Path) -> None:
    """Its return has no interval."""
    directory = save_policy(small_policy(), tmp_path / "policy")
    played = json.loads(evaluation_file(tmp_path / "e.json").read_text())
    played["summary"] |= {"episodes": 1, "return": stated(Interval(3211.4, 3211.4, 3211.4), 1)}
    (tmp_path / "e.json").write_text(json.dumps(played))
    hub.push_to_hub(
        directory, "org/name", evaluations=[tmp_path / "e.json"], endpoint=stand_in.url, token="t"
    )
    assert "| avoid | return | 3,211 | – | 1 |" in stand_in.files["README.md"].decode()


def test_a_name_without_the_prefix_never_leads_to_the_network(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=mentions("hub://org/name")):
        burnish.load_policy("org/name")
    save_policy(small_policy(), tmp_path / "policy")
    burnish.load_policy("policy")
    assert stand_in.requests == []


@pytest.mark.parametrize(
    "name", ["hub://name", "hub://a/b/c", "hub://../x", "hub://a/..", "hub://a/b@../c", "hub://"]
)
def test_a_name_that_is_none_is_refused_before_anything_is_asked(name: str, stand_in: StandIn) -> None:
    with pytest.raises(ConfigError, match=mentions("hub://<owner>/<name>")):
        burnish.load_policy(name)
    assert stand_in.requests == []


def test_what_is_not_there_is_said_in_one_line(stand_in: StandIn) -> None:
    with pytest.raises(CheckpointError, match=mentions("hub://org/name")) as refused:
        hub.fetch("hub://org/name", endpoint=stand_in.url)
    assert "\n" not in str(refused.value)


def test_a_damaged_policy_is_not_uploaded(stand_in: StandIn, tmp_path: Path) -> None:
    weights = save_policy(small_policy(), tmp_path / "policy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=mentions("damaged")):
        hub.push_to_hub(tmp_path / "policy", "org/name", endpoint=stand_in.url, token="t")
    assert stand_in.requests == []


def test_an_evaluation_that_is_none_is_refused(stand_in: StandIn, tmp_path: Path) -> None:
    directory = save_policy(small_policy(), tmp_path / "policy")
    without_task = json.loads(evaluation_file(tmp_path / "e.json").read_text())
    del without_task["summary"]["env"]
    for content in ({}, without_task):
        (tmp_path / "e.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=mentions("evaluation")):
            hub.push_to_hub(directory, "org/name", evaluations=[tmp_path / "e.json"], endpoint=stand_in.url)
