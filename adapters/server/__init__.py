"""Our simulator on the wall clock behind an OpenAI-compatible port: `relaybench serve`.

    POST /v1/completions, /v1/chat/completions -> Ask -> Request -> Simulator -> tokens, as events

A server of known timing for whoever has no GPU, and what the harness calibrates itself against.
`docs/server.md` lists what it answers; `faults` what it can be asked to do wrong.
"""

from adapters.server.server import Server

__all__ = ["Server"]
