"""How long this process has been running, its start-up included."""

import os
import time

_IMPORTED = time.monotonic()


def seconds_since_start():
    """Wall seconds since the operating system started this process; where it does not tell, since this module was loaded."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            # The name of the program, in brackets, may hold blanks.
            started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return float(uptime.read().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
