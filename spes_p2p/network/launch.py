"""Become another program that dies with its parent. Run as a script: `python launch.py <parent pid> <program> <args>`.

On Linux the kernel is asked to kill this process when its parent ends, in whichever way, os._exit and SIGKILL included.
Elsewhere the program is only started; libp2p's daemon then leaves by itself once its client has gone.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main(parent: int, command: list[str]) -> None:
    """Replace this process by `command`; ends with status 1 if `parent` has already gone."""
    if sys.platform == "linux":
        import ctypes  # here: this script has to start fast where it is not needed

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
