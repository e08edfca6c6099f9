"""`python -m adapters.locust_host worker --master HOST:PORT`: help a run on another machine.

It serves one backend's run and leaves with 0; a worker that is not wanted is told why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

# Locust would put gevent's threads, sockets and locks in the place of Python's, in whose midst a
# backend must run as it does alone. Locust's own parts use gevent's by name.
os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"


def main() -> int:
    """The exit code of a worker or a master. Neither waits for its threads and queues then."""
    parser = argparse.ArgumentParser(prog="python -m adapters.locust_host", description=__doc__)
    roles = parser.add_subparsers(dest="role", metavar="worker", required=True)
    worker = roles.add_parser("worker", help="replay a share of a run")
    worker.add_argument("--master", required=True, metavar="HOST:PORT", help="as the run says")
    worker.add_argument(
        "--token",
        default=os.environ.get("RELAYBENCH_TOKEN", ""),
        help="as the run says; better in the environment, RELAYBENCH_TOKEN",
    )
    roles.add_parser("child")  # a worker that the run itself started; the rest comes by its pipe
    master = roles.add_parser("master")
    master.add_argument("--link", type=int, required=True)
    master.add_argument("--bind", required=True)
    master.add_argument("--port", type=int, required=True)
    master.add_argument("--web-port", type=int)
    chosen = parser.parse_args()
    sys.argv[1:] = []  # else Locust's page takes them for its own
    if chosen.role == "master":
        from adapters.locust_host.master import serve  # noqa: PLC0415 - Locust, only here

        return serve(chosen.link, chosen.bind, chosen.port, chosen.web_port)

    from adapters.locust_host.worker import Seat, work  # noqa: PLC0415 - as above

    if chosen.role == "worker":
        host, _, port = chosen.master.rpartition(":")
        if not host or not port.isdecimal():
            parser.error(f"--master is {chosen.master!r}: give HOST:PORT")
        return work(Seat(host.strip("[]"), int(port), chosen.token))
    line = sys.stdin.readline()
    return work(Seat(**json.loads(line))) if line else 1


code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
