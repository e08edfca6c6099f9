"""A replay shared out among Locust workers, on this machine or on many: `host=locust`.

host      in the process of the run, which never imports Locust: who is there, who is ready,
          when all start, who died; their records into the run directory
master    Locust's master, a child: passes messages on, measures clocks, shows the live page
worker    Locust's worker, a child or a process of another machine: replays its sessions
wire      how the run and its master talk
"""
