"""Ways of a state across ranks, by the name that `--scan` takes.

A route offers `forward(side, skips, control...)`; see `route.Route`. Each states its own bytes, messages and memory.
"""

from .allgather import Allgather
from .serial import Serial

# What is built, in the order in which they are told.
ROUTES = {route.name: route for route in (Serial(), Allgather())}
