"""`spes-p2p identity show`: this machine's peer id."""

from __future__ import annotations

from spes_p2p.client import folders
from spes_p2p.client.commands.options import DataDir, Json
from spes_p2p.client.output import say, say_json
from spes_p2p.client.settings import choose, from_flags
from spes_p2p.node.files import IDENTITY_FILE
from spes_p2p.storage.identity import load_or_create_identity


def show(data_dir: DataDir = None, json: Json = False) -> None:
    """Print this machine's peer id; the identity is created if there is none yet."""
    choices = choose(from_flags(data_dir=data_dir))
    folder = choices.data_dir or folders.last_folder() or folders.default_folder()
    path = folder / IDENTITY_FILE
    identity = load_or_create_identity(path)
    if json:
        say_json({"peer": identity.text, "file": str(path.absolute())})
    else:
        say(identity.text)
