"""One message from each rank to the next, whatever the number of ranks: where no rank's transition matters."""

from .scanned import Scanned


class Neighbour(Scanned):
    """Covers runs in which every state is known from its own rank's tokens: all passing heads are certified, or no
    sequence passes right through a rank."""

    name = "neighbour"

    def covers(self, crossings):
        return not crossings.kept.any()
