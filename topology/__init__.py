"""What a swarm is: the topology file, its graph, and who takes part in which round."""

from topology.errors import TopologyError
from topology.file import Topology, load

__all__ = ["Topology", "TopologyError", "load"]
