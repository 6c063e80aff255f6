"""First code of every started process: ties its life to its parent's, pins it, becomes the target.

Runs as ``python -I -S launch.py PARENT_PID CPUS ARG…`` and ends in ``execv`` of the same Python
with the arguments, so that it imports nothing of ours and leaves no extra process. ``CPUS`` is a
comma-separated list or ``-``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cpus, *command = sys.argv[1:]
    if sys.platform == "linux":
        # A control process that is killed cannot clean up: the kernel does it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before the line above
            sys.exit(1)
        if cpus != "-":
            os.sched_setaffinity(0, {int(core) for core in cpus.split(",")})
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 (no shell is wanted)


if __name__ == "__main__":
    main()
