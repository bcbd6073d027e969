"""Several hosts, simulated on this machine: what weights cost from host to host, and how long it takes to start.

    python -m plugins.hosts.benchmarks.hosts [--quick | --smoke] [--megabytes M] [--rounds N]

Needs root: the hosts are namespaces with a network, processes and memory of their own, joined by a bridge; one worker
(`ownloop worker`) runs in each. The wire is this machine's memory, and all hosts share its cores.

* A version of 269 MB in 272 tensors goes from h1 to h2: pushed, over one link and over as many as by default, and
  pulled into the tensors of a process there. In the same rounds the same bytes go over one plain TCP connection, over
  as many side by side as there are links, and through TorchStore as a state dict. What vLLM adds to a pull is measured
  by `weight_sync`.
* The same of a version of which every hundredth element has changed, without references.
* The same with three hosts that receive; the bytes that h1 sends are counted on its interface.
* From nothing to the first answers of a mesh with a rank on each of 16 hosts.
* A call to every rank of a mesh with 1 to 64 ranks that do nothing.

Bars: an update has 1.2 times the rate of plain TCP, 0.8 times over a single link, and 10 times TorchStore's; a
hundredth of the elements costs at most 5 % of the bytes; three hosts cost the trainer's host at most 1.5 times the
bytes of one; 16 hosts answer within 20 s; and a call to 64 ranks takes at most 64 times one to a single rank.

Where both ends share two cores, the first bar is hardly in reach: plain TCP side by side keeps both busy for half of
the time that a single connection takes, and the cast and the pull come on top.
"""

import json
import statistics
import sys
from typing import Any

from benchmarks.harness import Bar, parser, print_result
from plugins.hosts.benchmarks.simulated_hosts import Hosts, simulated_hosts

_CONTROLLER = "ctl"


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds, 8 hosts and at most 16 ranks")
    options_parser.add_argument("--megabytes", type=float, default=269.0, help="size of a version")
    options_parser.add_argument("--rounds", type=int, default=7, help="updates measured, after a warm-up")
    options = options_parser.parse_args()
    rounds = 1 if options.smoke else 3 if options.quick else options.rounds
    megabytes = 1.0 if options.smoke else options.megabytes
    num_hosts = 2 if options.smoke else 8 if options.quick else 16
    counts = (1, 2) if options.smoke else (1, 4, 16) if options.quick else (1, 4, 16, 64)
    weights = run(("h1", "h2", "h3", "h4"), "weights", "--megabytes", str(megabytes), "--rounds", str(rounds))
    one, three = ({name: statistics.median(v) for name, v in weights[which].items()} for which in ("one", "all"))
    names = tuple(f"h{index + 1}" for index in range(num_hosts))
    started = run(names, "start")
    calls = run((), "step", "--ranks", ",".join(map(str, counts)))
    most = str(counts[-1])
    fanout = three["bytes"] / one["bytes"]
    print_result(
        "hosts",
        [
            Bar(name="ratio_to_tcp_1_link", value=one["tcp"] / one["update_1_link"], limit=0.8, at_most=False),
            Bar(name="ratio_to_tcp", value=one["tcp"] / one["update"], limit=1.2, at_most=False),
            Bar(name="speedup_over_torchstore", value=one["torchstore"] / one["update"], limit=10, at_most=False),
            Bar(name="bytes_of_1_percent", value=one["bytes_1_percent"] / 1e6 / weights["megabytes"], limit=0.05),
            Bar(name="fanout_bytes_3_hosts", value=fanout, limit=1.5),
            Bar(name=f"seconds_start_{num_hosts}_hosts", value=started["answer"], limit=20),
            Bar(name="growth_of_a_call", value=calls[most] / calls["1"] / counts[-1], limit=1),
        ],
        {
            "megabytes": weights["megabytes"],
            "rounds": rounds,
            **{f"seconds_{name}": one[name] for name in ("tcp", "tcp_side_by_side", "push", "pull", "torchstore")},
            **{f"seconds_{name}": one[name] for name in ("push_1_link", "push_1_percent")},
            **{f"seconds_{name}_3_hosts": three[name] for name in ("push", "pull")},
            "megabytes_sent_1_host": one["bytes"] / 1e6,
            "megabytes_sent_3_hosts": three["bytes"] / 1e6,
            "seconds_connect": started["connect"],
            **{f"ms_call_{count}_ranks": calls[str(count)] for count in counts},
        },
    )


def run(names: tuple[str, ...], part: str, *arguments: str) -> dict[str, Any]:
    """Runs a part of `hosts_controller` beside hosts of these names. Returns its result."""
    with simulated_hosts(_CONTROLLER, *names) as hosts:
        start_workers(hosts, names)
        command = [
            sys.executable,
            "-m",
            "plugins.hosts.benchmarks.hosts_controller",
            part,
            "--hosts",
            ",".join(names),
            *arguments,
        ]
        output = hosts.run(_CONTROLLER, command, timeout_s=280)
        result = output.splitlines()[-1]
        print(f"{part}: {result}", flush=True)
        return json.loads(result)


def start_workers(hosts: Hosts, names: tuple[str, ...]) -> None:
    """A worker on every host."""
    for name in names:
        hosts.start_worker(name)


if __name__ == "__main__":
    main()
