"""A serving system in virtual time: prefill, decode, caches, links and their topologies."""
