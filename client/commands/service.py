"""`spes-p2p service install | uninstall | show`: run a node or a bootstrap node as a systemd user service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spes_p2p.bootstrap.flags import cache_bytes, log_lines, quota_limits, size_of
from spes_p2p.bootstrap.options import BootstrapOptions
from spes_p2p.client import folders
from spes_p2p.client.commands import bootstrap, join
from spes_p2p.client.commands.options import Json
from spes_p2p.client.gpu import check_gpu_text
from spes_p2p.client.links import checked_addresses
from spes_p2p.client.output import complain, say, say_json
from spes_p2p.client.settings import Choices, choose, from_flags
from spes_p2p.client.units import KINDS, Kind, Unit, exec_start, kept_environment, unit_name, unit_text, units_folder
from spes_p2p.errors import MachineError, UsageError
from spes_p2p.network.link import format_link, parse_link

SYSTEMCTL_TIMEOUT_S = 60

What = Annotated[str, typer.Argument(help="join or bootstrap.", metavar="join|bootstrap")]


def install(
    context: typer.Context,
    what: What,
    no_start: Annotated[bool, typer.Option("--no-start", help="Write the unit only; start nothing.")] = False,
) -> int:
    """Write a systemd user unit that runs `join` or `bootstrap` with the options given after it, and start it.

    The options are those of that command; an invite link is kept in the data folder and not in the unit. Relative paths
    are relative to the present folder. For a start at boot, before you log in: `loginctl enable-linger`.

    Example: spes-p2p service install join LINK --gpu 0 --data ~/texts
    """
    kind = _kind(what)
    unit = _make_unit(kind, list(context.args))
    from spes_p2p.storage.atomic import make_folder, write_file

    path = units_folder(os.environ) / unit.name
    make_folder(path.parent)
    write_file(path, unit_text(unit).encode())
    say(f"written: {path}")
    by_hand = f"systemctl --user daemon-reload && systemctl --user enable --now {unit.name}"
    if no_start:
        say(f"to start it: {by_hand}")
        return 0
    problem = _systemctl("daemon-reload") or _systemctl("enable", unit.name) or _systemctl("restart", unit.name)
    if problem is not None:
        raise MachineError(f"the unit is written, but systemd did not start it: {problem}\nBy hand: {by_hand}")
    say(f"started; its log: journalctl --user -u {unit.name} -f")
    return 0


def uninstall(what: What) -> None:
    """Stop the service and remove its unit; the data folder stays as it is.

    Example: spes-p2p service uninstall join
    """
    kind = _kind(what)
    path = units_folder(os.environ) / unit_name(kind)
    if not path.exists():
        raise UsageError(f"{path} does not exist: nothing is installed")
    problem = _systemctl("disable", "--now", unit_name(kind))
    path.unlink()
    if problem is None:
        _systemctl("daemon-reload")
    else:
        complain(f"systemd did not stop it: {problem}")
    say(f"removed: {path}")


def show(json: Json = False) -> None:
    """Say which services are installed, with what they start, and whether systemd runs them.

    Example: spes-p2p service show
    """
    found = []
    for kind in KINDS:
        path = units_folder(os.environ) / unit_name(kind)
        if path.exists():
            state = _state(unit_name(kind))
            try:
                command = list(exec_start(path.read_text()))
            except ValueError as error:
                raise UsageError(f"{path}: {error}; install it again") from error
            found.append({"unit": unit_name(kind), "file": str(path), "state": state, "command": command})
    if json:
        say_json(found)
    elif not found:
        say("no service is installed; `spes-p2p service install join` or `bootstrap` does it")
    for one in found if not json else ():
        say(f"{one['unit']}: {one['state']}\n  {one['file']}\n  {' '.join(map(str, one['command']))}")


def _kind(what: str) -> Kind:
    for kind in KINDS:
        if what == kind:
            return kind
    raise UsageError(f"{what!r} is not a service: join or bootstrap")


def _make_unit(kind: Kind, arguments: list[str]) -> Unit:
    """The unit; arguments that its command would refuse are refused here. Raises UsageError, typer.TyperException."""
    parser = typer.Typer(add_completion=False)
    parser.command(kind)(join.join if kind == "join" else bootstrap.bootstrap)
    given = typer.main.get_command(parser).make_context(f"spes-p2p {kind}", list(arguments)).params
    extra = ["--headless", "--log-json"] if kind == "join" else ["--log-json"]
    words = [word for word in arguments if word not in extra]
    if kind == "join":
        _check_join(given)
        words = _without_link(words, given)
    else:
        _check_bootstrap(given)
    return Unit(
        kind=kind,
        command=(sys.executable, "-m", "spes_p2p.client", kind, *extra, *words),
        folder=Path.cwd(),
        environment=kept_environment(os.environ),
    )


def _check_join(given: dict[str, Any]) -> None:
    """Refuse what `join` would refuse at each start, and what a service cannot be. Raises UsageError, ConfigError."""
    for name in ("detach", "tied"):
        if given.get(name):
            raise UsageError(f"--{name}: not in a service, which systemd starts and ends")
    _check_log(given)
    named = {name: given.get("compile_" if name == "compile" else name) for name in Choices.model_fields}
    choices = checked_addresses(from_flags(**named))
    if choices.gpu is not None:
        check_gpu_text(choices.gpu)


def _check_bootstrap(given: dict[str, Any]) -> None:
    """The same for `bootstrap`."""
    if given.get("tied"):
        raise UsageError("--tied: not in a service, which systemd starts and ends")
    _check_log(given)
    quota_limits(given["peer_requests"], given["peer_rate"], given["all_requests"], given["all_rate"])
    cache_bytes(given["cache"])
    size_of("--mirror", given["mirror"], 0)
    listen, announce, peers = (tuple(given.get(name) or ()) for name in ("listen", "announce", "bootstrap"))
    options = BootstrapOptions(data_dir=Path(), listen=listen, announce=announce, peers=peers, metrics=given["metrics"])
    options.check()


def _check_log(given: dict[str, Any]) -> None:
    path = given["log_file"]
    log_lines(Path(path) if path is not None else None, given["log_size"], given["log_keep"])


def _without_link(words: list[str], given: dict[str, object]) -> list[str]:
    """The arguments of `join` with the data folder in place of the link, which is a secret and is kept there."""
    text, named = given.get("link"), given.get("data_dir")
    choices = choose(from_flags(data_dir=named, run=given.get("run")))
    if text is None:
        folder = folders.find_folder(choices.data_dir, choices.run)
        if folders.saved_link(folder) is None:
            raise UsageError("no run to join: give the invite link, such as `service install join spes-p2p:...`")
    else:
        link = parse_link(str(text))
        folder = folders.folder_for(link.run.hex(), choices.data_dir)
        folders.remember(folder, format_link(link))
        words = [word for word in words if word != text]
    return words if named is not None else [*words, "--data-dir", str(folder.absolute())]


def _systemctl(*arguments: str) -> str | None:
    """None, or why it failed."""
    try:
        done = _run(*arguments)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or f"systemctl {arguments[0]} ended with {done.returncode}").splitlines()[0]


def _state(name: str) -> str:
    """Such as `active`, `failed`; `unknown` where systemd does not answer."""
    try:
        return _run("is-active", name).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Raises OSError if there is no systemctl, TimeoutExpired."""
    return subprocess.run(
        ["systemctl", "--user", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SYSTEMCTL_TIMEOUT_S,
        check=False,
    )
