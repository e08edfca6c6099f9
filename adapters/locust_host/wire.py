"""Messages: a dict of JSON, and bytes. Between the run and its master they go over a socket pair.

Between the master and its workers they are Locust's own messages, of one type. `kind` says what
each is:

    worker to run     hello, unfit, ready, started, records, spent, ended, failed, broke
    run to worker     setup, start, stop, bye, refused
    master to run     bound, clock, missing, stopped, failed
    run to master     clock, running, quit
    master to worker  ping, and pong back
"""

from __future__ import annotations

import json
import struct
from typing import Any

TYPE = "relaybench"
"""Of Locust's messages that are ours."""
Message = dict[str, Any]
"""`kind`; `node`, Locust's name of the worker that it is from or to; `body`, bytes."""

SIZES = struct.Struct("!II")


def pack(message: Message) -> bytes:
    """Both sizes, the JSON, the bytes."""
    head = json.dumps({key: each for key, each in message.items() if key != "body"}).encode()
    body: bytes = message.get("body", b"")
    return SIZES.pack(len(head), len(body)) + head + body


def unpack(head: bytes, body: bytes) -> Message:
    """The same message."""
    message: Message = json.loads(head)
    return message | {"body": body}
