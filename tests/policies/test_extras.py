"""Optional packages that are missing are named, with what installs them and why they cannot be imported."""

from __future__ import annotations

import re
import sys

import pytest
from messages import mentions

from policies.errors import MissingExtraError
from policies.extras import require
from policies.serving import messages


def test_a_package_that_is_there_is_returned() -> None:
    assert require("json.decoder", extra="robots") is sys.modules["json.decoder"]


def test_a_missing_package_names_its_extra_and_the_reason() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package.inner", extra="robots", what="walking", instead="or crawl")
    reason = "No module named 'no_such_package'"
    assert re.search(mentions(f"walking ({reason}) burnish[robots] crawl"), str(caught.value))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_extra_of_two_steps_names_both() -> None:
    with pytest.raises(MissingExtraError, match=mentions("burnish[d4rl] --no-deps d4rl==1.1 gym==")):
        require("no_such_package", extra="d4rl")


def test_serving_says_why_its_packages_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(MissingExtraError, match=mentions("msgpack")):
        messages.require("msgpack")
