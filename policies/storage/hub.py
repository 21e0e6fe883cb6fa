"""Policies on the Hugging Face hub. Uploads and downloads happen only in these functions.

    save_pretrained(policy, "directory")            a policy directory
    push_to_hub("directory", "org/name")            uploads its files and a card
    from_pretrained("org/name", revision="v1")      downloads once, then loads the directory

A hub policy is addressed as `hub://org/name` or `hub://org/name@revision` wherever a policy is expected; a
name without `hub://` is a local path.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from policies.errors import CheckpointError, ConfigError
from policies.policy import Policy
from policies.storage.checksums import CHECKSUMS
from policies.storage.model_card import CARD, render_card
from policies.storage.policy_folder import CONFIG, WEIGHTS, load_policy, read_config, save_policy

PREFIX = "hub://"
_NAME = re.compile(r"(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@(?P<revision>[\w][\w./-]{0,127}))?")

save_pretrained = save_policy


def is_on_hub(name: object) -> bool:
    """Whether a name is a hub address, `hub://…`."""
    return str(name).startswith(PREFIX)


def fetch(name: str, *, endpoint: str | None = None, token: str | None = None) -> Path:
    """Download `hub://org/name[@revision]` to the hub's cache and return the directory.

    Only the four files of a policy directory are downloaded; none is executed. `endpoint` is the URL of the
    hub, `token` reads private repositories (None: that of `hf auth login`, if any).

    Raises:
        ConfigError: If the name is no hub address.
        CheckpointError: If the policy does not exist or the hub is unreachable.
    """
    from huggingface_hub import snapshot_download

    repo, revision = _split(name)
    try:
        files = [CONFIG, WEIGHTS, CHECKSUMS, CARD]
        options: dict[str, Any] = {"revision": revision, "endpoint": endpoint, "token": token}
        return Path(snapshot_download(repo, allow_patterns=files, **options))
    except Exception as error:  # error classes depend on the hub client's HTTP library
        raise CheckpointError(
            f"{name} cannot be fetched from the hub: {_first_line(error)} Check the name, your "
            f"token (hf auth login) and the connection."
        ) from error


def from_pretrained(
    name: str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
) -> Policy:
    """Load a hub policy, `org/name`; see `fetch` and `policies.storage.policy_folder.load_policy`."""
    full = name if is_on_hub(name) else f"{PREFIX}{name}"
    if revision is not None:
        full = f"{full}@{revision}"
    return load_policy(fetch(full, endpoint=endpoint, token=token))


def push_to_hub(
    directory: str | Path,
    name: str,
    *,
    private: bool = True,
    evaluations: Sequence[str | Path] = (),
    licence: str | None = None,
    message: str = "Add a policy",
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a policy directory to the hub and return its URL; creates the repository if missing.

    Args:
        directory: A policy directory; loaded first, so that no damaged one is uploaded.
        name: `org/name`.
        private: Visibility of a newly created repository.
        evaluations: Output files of `burnish eval` for this policy; their results go into the card.
        licence: Licence identifier of the weights, e.g. `mit`.
        message: Commit message.
        endpoint: URL of the hub; None: the default.
        token: Write token; None: that of `hf auth login`.

    Raises:
        ConfigError: If the name is invalid.
        CheckpointError: If the directory or an evaluation is invalid, or the hub refuses.
    """
    from huggingface_hub import HfApi

    repo, revision = _split(f"{PREFIX}{name.removeprefix(PREFIX)}")
    if revision is not None:
        raise ConfigError(f"a policy is put on the main branch; got {name}. Leave @{revision} out.")
    home, results = Path(directory), [_evaluation(path) for path in evaluations]
    load_policy(home)
    card = render_card(read_config(home), _count(home), results, repository=repo, licence=licence)
    with tempfile.TemporaryDirectory() as draft:
        for path in (home / CONFIG, home / WEIGHTS, home / CHECKSUMS):
            if path.is_file():
                shutil.copyfile(path, Path(draft, path.name))
        Path(draft, CARD).write_text(card, encoding="utf-8")
        api = HfApi(endpoint=endpoint, token=token)
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            done = api.upload_folder(repo_id=repo, folder_path=draft, commit_message=message)
        except Exception as error:  # as in `fetch`
            raise CheckpointError(
                f"{name} cannot be put on the hub: {_first_line(error)} Check your token (hf auth login)."
            ) from error
    return str(done.commit_url)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{text.splitlines()[0].rstrip('.')}." if text else f"{type(error).__name__}."


def _split(name: str) -> tuple[str, str | None]:
    match = _NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None or ".." in name:
        raise ConfigError(f"a hub policy must be hub://<owner>/<name>[@<revision>]; got '{name[:200]}'.")
    return match["repo"], match["revision"]


def _count(directory: Path) -> int:
    """Return the number of weights, without normaliser statistics."""
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        names = [name for name in file.keys() if "normalizer." not in name]  # noqa: SIM118
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def _evaluation(path: str | Path) -> dict[str, Any]:
    """Read the part of an evaluation for the card."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {"summary": data["summary"], "protocol_hash": data["protocol_hash"]}
        for name, kind in (("env", str), ("episodes", int)):
            if not isinstance(found["summary"][name], kind):
                raise TypeError(f"{name} must be of type {kind.__name__}")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an evaluation of burnish eval ({error!r}).") from None
