"""CURVE keys of a policy server and its clients: mutual authentication and encryption.

<keys>/server.key            public key of the server, needed by clients
<keys>/server.key_secret     secret key of the server
<keys>/clients/<name>.key    public keys of accepted clients
<keys>/<name>.key_secret     secret key of a client
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from policies.errors import ConfigError
from policies.serving.messages import require

SERVER, CLIENTS = "server", "clients"
_KEY = re.compile(rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")  # 32 bytes in Z85


def make_keys(folder: str | Path, client: str = "robot") -> Path:
    """Create server keys if missing, and keys of one more client; returns its secret key file."""
    require("zmq")
    from zmq.auth import create_certificates

    home = Path(folder)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", client) or client == SERVER:
        raise ConfigError(f"the name of a client must be a plain word, not 'server'; got '{client}'.")
    if any(path.exists() for path in (home / f"{client}.key_secret", home / CLIENTS / f"{client}.key")):
        raise ConfigError(f"{home} has keys of the client '{client}' already; choose another name.")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / CLIENTS).mkdir(exist_ok=True)
    if not (home / f"{SERVER}.key_secret").exists():
        create_certificates(home, SERVER)
    create_certificates(home, client)
    (home / f"{client}.key").rename(home / CLIENTS / f"{client}.key")
    for path in home.glob("*.key_secret"):
        path.chmod(0o600)
    return home / f"{client}.key_secret"


def server_keys(folder: str | Path) -> tuple[bytes, bytes]:
    """Return the server's public and secret keys."""
    return read_keys(Path(folder) / f"{SERVER}.key_secret")


def read_keys(path: str | Path) -> tuple[bytes, bytes]:
    """Return the public and secret keys of a file."""
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"keys: {path} has no secret key; give the file that ends in .key_secret.")
    return public, secret


def read_public_key(path: str | Path) -> bytes:
    """Return the public key of a file."""
    return _read(path)[0]


def _read(path: str | Path) -> tuple[bytes, bytes | None]:
    require("zmq")
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(path)
        if not all(_KEY.fullmatch(key) for key in (public, secret) if key is not None):
            raise ValueError("a key must have 40 characters of Z85; it is damaged")
    except (OSError, ValueError, IndexError) as error:
        make = "burnish serve keys=<folder> new_client=<name>"
        raise ConfigError(f"keys: {path} cannot be read ({error}). Make keys: {make}.") from None
    return public, secret


def start_authenticator(context: Any, folder: str | Path) -> Any:
    """Accept only clients with keys in the folder; returns the authenticator, to be stopped by the caller."""
    require("zmq")
    from zmq.auth.thread import ThreadAuthenticator

    clients = Path(folder) / CLIENTS
    found = sorted(clients.glob("*.key"))
    if not found:
        raise ConfigError(
            f"keys={folder} has no key in {CLIENTS}/, so no client could connect. Make one: burnish serve "
            f"keys={folder} new_client=<name>."
        )
    for path in found:  # the authenticator would go on without any, or without this client
        read_public_key(path)
    server_keys(folder)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=clients)
    return authenticator
