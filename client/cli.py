"""`spes-p2p`: the commands, and what happens when one of them fails."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from spes_p2p import __version__
from spes_p2p.client.commands import (
    admit,
    attach,
    bootstrap,
    create,
    demo,
    doctor,
    estimate,
    identity,
    join,
    leaderboard,
    leave,
    ledger,
    limits,
    pause,
    recover,
    service,
    simulate,
    status,
)
from spes_p2p.client.output import complain, say
from spes_p2p.ending import end_process
from spes_p2p.errors import EXIT_INTERRUPTED, SpesError

EXIT_BUG = 1

app = typer.Typer(
    help="Train mixture-of-experts language models together with others, without a server.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run_app = typer.Typer(help="Start runs, and keep them going.", no_args_is_help=True)
identity_app = typer.Typer(help="This machine's identity.", no_args_is_help=True)
service_app = typer.Typer(help="Run a node or a bootstrap node as a systemd user service.", no_args_is_help=True)
ledger_app = typer.Typer(help="The certificates that this machine holds.", no_args_is_help=True)

app.command("demo")(demo.demo)
app.command("bootstrap")(bootstrap.bootstrap)
app.command("join")(join.join)
app.command("doctor")(doctor.doctor)
app.command("estimate")(estimate.estimate)
app.command("status")(status.status)
app.command("attach")(attach.attach)
app.command("pause")(pause.pause)
app.command("resume")(pause.resume)
app.command("leave")(leave.leave)
app.command("limits")(limits.limits)
app.command("simulate")(simulate.simulate)
run_app.command("create")(create.create)
run_app.command("admit")(admit.admit)
run_app.command("recover")(recover.recover)
identity_app.command("show")(identity.show)
identity_app.command("backup")(identity.backup)
identity_app.command("restore")(identity.restore)
ledger_app.command("show")(ledger.show)
ledger_app.command("verify")(ledger.verify)
# what it does not know itself are options of the command that the service runs
service_app.command("install", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    service.install
)
service_app.command("uninstall")(service.uninstall)
service_app.command("show")(service.show)
ledger_app.command("leaderboard")(leaderboard.leaderboard)
app.add_typer(run_app, name="run")
app.add_typer(identity_app, name="identity")
app.add_typer(ledger_app, name="ledger")
app.add_typer(service_app, name="service")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"spes-p2p {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error. Goes anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of all commands; `run` has taken `--debug` out already, wherever it stood."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors become one or two lines on standard error."""
    debug = "--debug" in arguments
    rest = [argument for argument in arguments if argument != "--debug"]
    try:
        result = app(rest, prog_name="spes-p2p", standalone_mode=False)
    except typer.TyperException as error:
        return _usage(error)
    except SpesError as error:
        return _failed(error, error.exit_code, debug)
    except BrokenPipeError:
        # the reader of our output has gone; without this, Python complains once more while it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BUG
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        # the last line of defence: whatever it is, a volunteer gets a line and a way to report it
        return _failed(error, EXIT_BUG, debug)
    return result if isinstance(result, int) else 0


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "spes-p2p"
    message = error.format_message()
    if message.startswith("Usage:"):
        say(message)
    else:
        complain(f"{message.rstrip('.')}; see `{command} --help`")
    return error.exit_code


def _failed(error: Exception, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, SpesError):
        complain(str(error))
    else:
        complain(f"internal error: {type(error).__name__}: {error}\nRun the command again with --debug to report it.")
    return exit_code


def main() -> NoReturn:
    """Entry point of the `spes-p2p` script."""
    end_process(run(sys.argv[1:]))
