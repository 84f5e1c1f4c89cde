"""A Ray cluster of two nodes on this machine, with a CPU each and a small object store."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rankup

STORE = 80 * 2**20  # bytes; Ray accepts no less


@contextmanager
def two_nodes(**resources: Any) -> Iterator[Any]:
    """A cluster that this process is connected to. The second node has these resources, too, and
    can be removed: the driver is on the first."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rankup[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # So that workers find this package, and the project if it is not installed.
    here, source = Path(__file__).parents[1], Path(rankup.__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (source, here)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own are none of ours
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=STORE, **resources)
            cluster.wait_for_nodes()
            ray.init(cluster.address, log_to_driver=False, logging_level="error")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
