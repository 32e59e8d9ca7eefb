"""A replica set without bad luck: elects, replicates, commits, reads."""

from __future__ import annotations

import pytest

from nearcast.simulation.raft_checks import Operation
from tests.raft_cluster import Cluster, Replica


def elected(cluster: Cluster) -> Replica:
    """Run until somebody leads and everybody knows."""

    def agree() -> bool:
        leader = cluster.leader()
        return leader is not None and all(
            replica.node is None or replica.node.leader == leader.number for replica in cluster.replicas.values()
        )

    assert cluster.run_until(agree)
    leader = cluster.leader()
    assert leader is not None
    return leader


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 7])
def test_a_set_elects_a_leader_and_commits(replicas: int) -> None:
    cluster = Cluster(replicas, replicas)
    leader = elected(cluster)
    operations = [Operation(1, cluster.now, value) for value in range(1, 101)]
    for operation in operations:
        assert leader.publish(operation)
    assert cluster.run_until(lambda: operations[-1].position == 100)
    cluster.run(cluster.now + 0.2)
    for replica in cluster.replicas.values():
        assert replica.topics == {1: list(range(1, 101))}
        read = Operation(1, cluster.now)
        assert replica.read(read)
        assert cluster.run_until(lambda read=read: read.position == 100)  # type: ignore[misc]


def test_another_leads_after_a_crash() -> None:
    cluster = Cluster(1)
    leader = elected(cluster)
    began_s = cluster.now
    leader.crash(power_cut=True)
    assert cluster.run_until(lambda: cluster.leader() is not None)
    assert cluster.now - began_s < 0.4
    leader.start()
    assert elected(cluster) is not leader
