"""Ways of a state across ranks, by the names that `--scan` takes. Each states its own bytes, memory and time.

See `route.Route` for what they offer.
"""

from .allgather import Allgather
from .chain import ChainRoute
from .exscan import Exscan
from .heads import Heads, Levels
from .neighbour import Neighbour
from .serial import Serial

# What is built, in the order in which they are told.
ROUTES = {route.name: route
          for route in (Serial(), Neighbour(), ChainRoute(), Allgather(), Heads(), Exscan(), Levels())}
