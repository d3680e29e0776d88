"""``python -m bench.hosts``: collectives between hosts, on flat Gloo and on phalanx, over links of limited rate.

The hosts are namespaces of this machine (`tests.namespaces`) on links of a chosen rate and delay, which needs root.
Every rank has one thread and is in both groups; the engines take turns in small rounds. The benchmark also measures the
round trip and the bandwidth of plain TCP over the links.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import plan, record, report
from bench.__main__ import measure
from bench.plan import KiB, MiB, Point, Settings
from bench.ranks import ROOT, RankSet
from tests.namespaces import Host, hosts, why_no_hosts

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
SIZES = (4, KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB)
ENGINES = ("phalanx", "gloo")
_MASTER_PORT = "29500"  # certainly free, because no other program uses these namespaces
_TURN_S = 0.03
_LINK_S = 120.0


class HostRanks(RankSet):
    """`num_local` ranks on each host, which meet as under torchrun: through the variables for ``env://``."""

    def __init__(self, on: Sequence[Host], num_local: int, engines: Sequence[str]) -> None:
        self._hosts, self._num_local = on, num_local
        super().__init__(",".join(engines), len(on) * num_local)

    def _launch(self, folder: str, environment: dict[str, str]) -> None:
        for rank in range(self._world_size):
            node, local = divmod(rank, self._num_local)
            host = self._hosts[node]
            contract = {
                "RANK": rank, "WORLD_SIZE": self._world_size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self._num_local,
                "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(self._hosts), "MASTER_ADDR": self._hosts[0].address,
                "MASTER_PORT": _MASTER_PORT, "GLOO_SOCKET_IFNAME": host.interface,
            }  # fmt: skip
            command = [sys.executable, "-m", "bench.worker", self.kind, f"{folder}/parent"]
            tail = [str(rank), str(self._world_size), "env://"]
            environ = environment | {name: str(value) for name, value in contract.items()}
            self._processes.append(host.start([*command, *tail], environ, stdin=subprocess.DEVNULL))


def measure_link(here: Host, there: Host) -> dict[str, float]:
    """Return the round-trip time and the bytes per second of plain TCP, see `bench.link`."""
    command = [sys.executable, "-m", "bench.link"]
    server = there.start([*command, "serve", there.address], cwd=ROOT)
    client = here.start([*command, "measure", there.address], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    printed = client.communicate(timeout=_LINK_S)[0]
    if client.returncode or server.wait(_LINK_S):
        raise RuntimeError("the link could not be measured; see the message above")
    return json.loads(printed)


def measure_all(given: argparse.Namespace, on: Sequence[Host]) -> list[report.Result]:
    """Measure every operation and size that the arguments name."""
    points = [
        Point(op, size, len(on) * given.ranks_per_host, given.engines, given.rounds, _TURN_S)
        for op in given.ops
        for size in ((0,) if op == "barrier" else given.sizes)
    ]
    results = []
    with HostRanks(on, given.ranks_per_host, given.engines) as ranks:
        for point in points:
            results.append(measure(point, dict.fromkeys(given.engines, ranks), Settings.point_s))
            times = ", ".join(f"{plan.LABELS[e]} {report.time_text(results[-1].median(e))}" for e in given.engines)
            print(f"{point.op} {plan.size_text(point.size_bytes)}: {times}", file=sys.stderr, flush=True)
    return results


def print_results(title: str, engines: Sequence[str], results: Sequence[report.Result]) -> None:
    """Print each engine's median and fastest turn; the last column is Gloo's time as a multiple of phalanx's."""
    header = ["operation", "size"]
    for engine in engines:
        header += [plan.LABELS[engine], "fastest"]
    has_ratio = set(ENGINES) <= set(engines)
    rows = []
    for result in results:
        row = [result.point.op, plan.size_text(result.point.size_bytes)]
        for engine in engines:
            row += [report.time_text(result.median(engine)), report.time_text(min(result.samples[engine]))]
        rows.append([*row, f"{result.ratio('gloo', 'phalanx'):.3g}x" if has_ratio else ""])
    report.print_table(title, [*header, "faster" if has_ratio else ""], rows)


def _one_of(known: Sequence[str]) -> object:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        if not names or set(names) - set(known):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {text}")
        return names

    return parse


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(plan.parse_size(size) for size in text.split(","))


def parse_arguments(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="ranks on each (default 2)")
    parser.add_argument("--rate", default="10gbit", help="of each host's link, each way, as 1gbit (default 10gbit)")
    parser.add_argument("--delay-ms", type=float, default=0.1, help="one way (default 0.1)")
    parser.add_argument(
        "--ops", type=_one_of(OPS), default=("all_reduce",), metavar="OP,OP", help=f"of {', '.join(OPS)}"
    )
    parser.add_argument(
        "--engines", type=_one_of(ENGINES), default=ENGINES, metavar="ENGINE,ENGINE", help="default both"
    )
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="SIZE,SIZE", help="as in 4,64K,1M")
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="turns of each engine, at least 3")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for hosts.json")
    record.add_arguments(parser, "hosts.json")
    return parser.parse_args(args)


def main() -> None:
    given = parse_arguments()
    start = time.monotonic()
    if why_not := why_no_hosts():
        sys.exit(f"Cannot make hosts here: {why_not}")
    facts = report.machine_facts("")
    facts |= {name: getattr(given, name) for name in ("hosts", "ranks_per_host", "rate", "delay_ms")}
    with hosts(given.hosts, given.rate, given.delay_ms) as on:
        if len(on) > 1:
            link = facts["link"] = measure_link(on[1], on[0])
            one, both = (link[f"{ways}_bytes_s"] * 8 / 1e9 for ways in ("one", "both"))
            trip = report.time_text(link["round_trip_s"])
            print(f"Plain TCP: {one:.2f} Gbit/s one way, {both:.2f} each way at once, round trip {trip}")
        results = measure_all(given, on)
    facts["load_after"] = os.getloadavg()[0]
    layout = f"{given.hosts} hosts x {given.ranks_per_host} ranks on {plan.usable_cpus()} CPUs"
    print_results(f"{layout}, {given.rate}, {given.delay_ms:g} ms one way: medians", given.engines, results)
    path = given.json or given.out / "hosts.json"
    table = report.table(results, link=f"{given.rate}, {given.delay_ms:g} ms")
    record.write(path, given.note, facts, [table], report.raw(results, []))
    print(f"\n{path} written, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
