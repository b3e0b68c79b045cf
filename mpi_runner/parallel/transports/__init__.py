"""What carries arrays between ranks, by name. Each transport owns its buffers and counts its own bytes.

A transport offers:
- `name`; `sent`, the bytes that this rank handed to others (`volume` has the rule)
- `stage(engine)`: the engine as the transport's arrays want it
- `buffer(name, shape, dtype)`: memory that stays from call to call
- `start_gather`, `start_send`, `start_receive`: begin, and return what `Control.wait` waits for; `gather`, `send`,
  `receive`, `sum`: the same to their end
"""

from .host import HostTransport

# What is built.
TRANSPORTS = {HostTransport.name: HostTransport}
