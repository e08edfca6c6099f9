"""The hub: the nouns (trace, record, backend) and the loop (replay). It imports no spoke."""

__version__ = "0.1.0"
