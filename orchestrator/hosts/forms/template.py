"""The inventory that `orch init` writes where no other file says what hosts there are. Pure."""

from __future__ import annotations

from orchestrator.text import one_line

_TEXT = """\
# A cluster for `orch up {file}`. Fill in your hosts; every key: docs/reference/inventory.md.
cluster: {cluster}

# What holds for every host that does not say otherwise.
defaults:
  user: {user}                        # the login name; training needs no root
  # key_file: ~/.ssh/id_ed25519       # else the agent's keys and what ~/.ssh/config says
  # python: /opt/conda/bin/python     # the one that has torch, else python3; `orch setup` makes one
  # proxy_jump: me@gate.lab           # the host to go through
  # workdir: ~/.orch                  # for code, jobs and logs

nodes:
  - name: gpu01
    host: 192.168.1.41                # name, address or alias of ~/.ssh/config
    # port: 22
    # gpus: 1                         # how many it must show
    # gpu: RTX A2000                  # a label, for people
    # bandwidth: 2.5Gbps              # of its link

  - name: gpu02
    host: 192.168.1.42
"""


def template(cluster: str, user: str, file: str) -> str:
    return _TEXT.format(cluster=cluster, user=user, file=one_line(file))
