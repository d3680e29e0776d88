"""docs/en/guides/clusters/kubernetes.md: the commands of the manifests, with the variables that each operator sets.

Pods are hosts in namespaces; the names are those that the cluster's DNS gives them.
"""

from __future__ import annotations

import re
import time

import pytest

from tests.clusters._machines import EXAMPLES, FOUR, script, sums

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.fixture
def pods(two, tmp_path):
    """Two pods with two CPUs each, whose working folder has a quick script where the real one has its example."""
    (tmp_path / "examples").mkdir()
    script(tmp_path / "examples", name="train_digits.py")
    return two


def commands_of(container):
    return [[*container["command"], *container.get("args", [])]] * 2


def run(pods, commands, environments):
    two_ranks = {"PHALANX_NPROC_PER_NODE": "2"}  # whatever this machine has
    started = [pods.start(n, commands[n], {**environments[n], **two_ranks}) for n in range(2)]
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert sums(said) == FOUR


def test_the_pods_of_a_pytorchjob_meet(pods):
    [job] = read("pytorchjob.yaml")
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    assert [spec["replicas"] for spec in replicas.values()] == [1, 1]
    master = f"{name}-master-0"
    for number in range(2):
        pods.know(number, {master: pods.hosts[0].address})
    environments = []
    for rank in range(2):
        meet = {"MASTER_ADDR": master, "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(rank)}
        pet = {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": "23456", "PET_NODE_RANK": str(rank), "PET_NNODES": "2"}
        environments.append({**meet, **pet, "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]})
    containers = [spec["template"]["spec"]["containers"][0] for spec in replicas.values()]
    assert {container["name"] for container in containers} == {"pytorch"}
    run(pods, [commands_of(container)[0] for container in containers], environments)


def test_the_pods_of_a_trainjob_meet(pods):
    [job] = read("trainjob.yaml")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    master = f"{name}-node-0-0.{name}"
    for number in range(2):
        pods.know(number, {master: pods.hosts[0].address})
    pet = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": "29500",
    }
    run(pods, commands_of(trainer), [{**pet, "PET_NODE_RANK": str(rank)} for rank in range(2)])


def test_the_pods_of_a_stateful_set_meet_although_dns_is_late(pods):
    service, stateful = read("statefulset.yaml")
    name = stateful["metadata"]["name"]
    assert service["metadata"]["name"] == stateful["spec"]["serviceName"]
    assert service["spec"]["clusterIP"] == "None"
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    names = {f"{name}-0.{service['metadata']['name']}": pods.hosts[0].address}
    pods.know(0, names)
    pods.know(1, {})
    two_ranks = {"PHALANX_NPROC_PER_NODE": "2"}
    started = [pods.start(n, commands_of(container)[n], {"HOSTNAME": f"{name}-{n}", **two_ranks}) for n in range(2)]
    time.sleep(4)
    pods.know(1, names)
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert sums(said) == FOUR


def test_every_image_and_folder_of_the_manifests_is_one_to_fill_in():
    for path in EXAMPLES.glob("*.yaml"):
        images = re.findall(r"image: (\S+)", path.read_text())
        assert set(images) == {"registry.example/phalanx:latest"}, path
