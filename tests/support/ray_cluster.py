"""Nodes of a Ray cluster on this machine, for tests: `python ray_cluster.py DIRECTORY NODE…`, run where ray is installed.

NODE is the number of its CPUs, and further variables of its environment: `1` or `1,PYTHONPATH=/shadow`. The address of the
cluster is written when all are up; each line on standard input is the number of a node that is lost there and then. The
cluster ends with this process, also with a killed one.
"""

from __future__ import annotations

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster


def settings(text: str) -> dict[str, object]:
    cpus, *variables = text.split(",")
    environment = {**os.environ, **dict(one.split("=", 1) for one in variables)}
    return {
        "num_cpus": int(cpus), "object_store_memory": 80 << 20, "include_dashboard": False, "env_vars": environment,
    }  # fmt: skip


def main(directory: str, *nodes: str) -> None:
    # Its address is also written to where Ray usually lies, which it does not make.
    os.environ["RAY_TMPDIR"] = directory
    os.makedirs(f"{directory}/ray")
    first, *others = map(settings, nodes)
    cluster = Cluster(initialize_head=True, head_node_args={**first, "temp_dir": directory})
    up = [cluster.head_node, *(cluster.add_node(wait=False, **one) for one in others)]
    cluster.wait_for_nodes()
    os.write(1, f"{cluster.address}\n".encode())
    for line in sys.stdin:
        cluster.remove_node(up[int(line)], allow_graceful=False)
        os.write(1, b"lost\n")
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
