"""Exit codes of every command, the same on every rank."""

PASS = 0
MISMATCH = 1
USAGE = 2
GOLDEN = 3
INTERNAL = 70
STOPPED = 75
NOTHING_COMPARED = 77
