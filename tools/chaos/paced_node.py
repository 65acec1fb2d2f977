"""A node's agent whose replicas have the battery's worker:

    python -m actorium.tools.chaos.paced_node tcp://HEAD:PORT --name NAME --key FILE --run-dir DIR
"""

from __future__ import annotations

import sys
from functools import partial

from actorium.actors.cluster.nodes import node_agent
from actorium.actors.config.cluster_settings import replica_built
from actorium.tools.chaos.rig import WORKER
from actorium.tools.cli.cluster_nodes import join

if __name__ == "__main__":
    node_agent.replica_built = partial(replica_built, worker=WORKER)
    sys.exit(join(sys.argv[1:]))
