"""docs/en/guides/clusters/by_hand.md: `phalanx run` on each of two hosts."""

from __future__ import annotations

from tests.clusters._machines import FOUR, script, sums


def _command(node_rank, path, *flags, master="host-a"):
    flags = ["--nproc-per-node", "2", *flags]
    return ["phalanx", "run", "--nnodes", "2", "--node-rank", str(node_rank), "--master-addr", master, *flags, path]


def test_two_hosts_are_started_by_hand(two, tmp_path):
    path = script(tmp_path)
    said = two.run(_command(0, path), _command(1, path))
    assert sums(said) == FOUR
    assert "Traceback" not in "".join(said)


def test_an_address_and_an_interface_do_without_names(two, tmp_path):
    path = script(tmp_path)
    for number in range(2):
        two.know(number, {})
    master = two.hosts[0].address
    said = two.run(
        *(_command(n, path, "--master-port", "29511", master=master) for n in range(2)),
        env={"GLOO_SOCKET_IFNAME": two.hosts[0].interface},
    )
    assert sums(said) == FOUR


def test_a_host_whose_own_name_is_loopback_is_told_what_to_do(two, tmp_path):
    path = script(tmp_path)
    two.know(0, {"host-a": "127.0.1.1"})  # as installers of Debian and Ubuntu write it
    started = [two.start(n, _command(n, path)) for n in range(2)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], said
    assert "host-a is 127.0.1.1 here, which is this host's loopback" in said[0]
    assert "use 10.77.0.1" in said[0]
