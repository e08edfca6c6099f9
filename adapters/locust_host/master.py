"""Locust's master: passes messages on, measures the workers' clocks and shows the live page.

It decides nothing. What it is told by the run comes over `link`, whose end is the run's end.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any

import gevent  # type: ignore[import-untyped]
import gevent.queue  # type: ignore[import-untyped]
import gevent.socket  # type: ignore[import-untyped]
from locust.env import Environment
from locust.exception import RPCError
from locust.runners import STATE_MISSING, STATE_RUNNING, MasterRunner
from locust.stats import stats_history

from adapters.locust_host.wire import SIZES, TYPE, Message, pack, unpack
from harness.errors import EXIT_BAD_INPUT

_PINGS = 20
_PING_S = 2.0
_SILENT_BEATS = 10
"""Heartbeats of a second each that a worker may miss."""


def serve(link: int, bind: str, port: int, web_port: int | None) -> int:
    """Until the run says so, or ends."""
    return _Master(link).serve(bind, port, web_port)


class _Master:
    def __init__(self, link: int) -> None:
        self._link = gevent.socket.socket(fileno=link)
        self._up: gevent.queue.Queue[Message] = gevent.queue.Queue()
        self._pongs: dict[str, gevent.queue.Queue[tuple[float, float]]] = {}
        self._environment = Environment()
        self._runner: MasterRunner

    def serve(self, bind: str, port: int, web_port: int | None) -> int:
        gevent.spawn(self._send_up)
        place = f"{bind}:{port}"
        try:
            self._runner = self._environment.create_master_runner(bind, port)
            place = f"127.0.0.1:{web_port}"
            web = self._show(web_port)
        except SystemExit:  # so Locust leaves, when it has said why
            return self._fail(f"cannot listen at {place}: choose another port")
        except (OSError, RPCError) as error:
            return self._fail(f"cannot listen at {place}: {error}")
        self._runner.register_message(TYPE, self._heard)
        gevent.spawn(self._watch)
        self._up.put({"kind": "bound", "port": self._runner.server.port, "web": web})
        self._receive()
        self._runner.greenlet.kill(block=False)
        return 0

    def _fail(self, words: str) -> int:
        self._up.put({"kind": "failed", "words": words})
        self._receive()
        return EXIT_BAD_INPUT

    # ---- the run's side

    def _send_up(self) -> None:
        """One after the other, and never in the way of Locust's own listener."""
        with suppress(OSError):  # the run has ended, which is heard in `_receive`
            while True:
                self._link.sendall(pack(self._up.get()))

    def _receive(self) -> None:
        with self._link.makefile("rb") as link:
            while len(sizes := link.read(SIZES.size)) == SIZES.size:
                head, body = SIZES.unpack(sizes)
                message = unpack(link.read(head), link.read(body))
                if message["kind"] == "quit":
                    return
                self._obey(message)

    def _obey(self, message: Message) -> None:
        if message["kind"] == "clock":
            gevent.spawn(self._measure, message["node"])
        elif message["kind"] == "running":
            self._environment.stats.clear_all()
            self._runner.update_state(STATE_RUNNING)
        else:
            self._runner.send_message(TYPE, message, client_id=message["node"])

    # ---- the workers' side

    def _heard(self, environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG002 - Locust's
        at_s = monotonic()
        message: Message = msg.data
        if message["kind"] == "pong":
            self._pongs[msg.node_id].put((at_s, message["now_s"]))
            return
        for request in message.pop("page", ()):
            self._environment.events.request.fire(**request)  # type: ignore[no-untyped-call]
        self._up.put(message | {"node": msg.node_id})

    def _measure(self, node: str) -> None:
        """How far a worker's clock is ahead of ours, by the fastest of some pings."""
        pongs = self._pongs.setdefault(node, gevent.queue.Queue())
        best_s, ahead_s = float("inf"), 0.0
        for _ in range(_PINGS):
            sent_s = monotonic()
            self._runner.send_message(TYPE, {"kind": "ping"}, client_id=node)
            try:
                back_s, theirs_s = pongs.get(timeout=_PING_S)
            except gevent.queue.Empty:
                continue
            if back_s - sent_s < best_s:
                best_s, ahead_s = back_s - sent_s, theirs_s - (sent_s + back_s) / 2
        self._up.put({"kind": "clock", "node": node, "ahead_s": ahead_s, "error_s": best_s / 2})

    def _watch(self) -> None:
        """Tell of workers that are not heard of any more."""
        while True:
            gevent.sleep(1)
            for node, client in list(self._runner.clients.items()):
                if client.state == STATE_MISSING and client.heartbeat <= -_SILENT_BEATS:
                    del self._runner.clients[node]
                    self._up.put({"kind": "missing", "node": node, "after_s": _SILENT_BEATS})

    # ---- the live page

    def _show(self, port: int | None) -> str | None:
        """Its address."""
        if port is None:
            return None
        with gevent.socket.create_server(("127.0.0.1", port)):
            pass  # taken: this raises here and not in a greenlet of Locust's
        self._environment.create_web_ui("127.0.0.1", port)
        gevent.spawn(stats_history, self._runner)
        self._environment.events.test_stopping.add_listener(self._stopped)  # type: ignore[no-untyped-call]
        return f"http://127.0.0.1:{port}"

    def _stopped(self, **_: Any) -> None:
        self._up.put({"kind": "stopped"})
