"""The command lines that a plan holds: the trainer's, rendered from its settled settings, and torchrun's. Pure.

    trainer_arguments(draft, "cuda", draft.split.told)      ("-m", "trainer", "--exp=mnist_lenet", "--epochs=1", ...)

Nothing else writes or changes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.planning.draft import Draft


def trainer_arguments(draft: Draft, device: str, told: Mapping[str, str]) -> tuple[str, ...]:
    """What the person set, as they wrote it; then what was found of the host and decided in this plan, which goes
    before it.

    device: of the host. told: what the split of the batch tells the ranks.
    """
    request = draft.request
    found = {"device": device, "backend": draft.carrier.backend}
    decided = {name: str(getattr(request.settings, name)) for name in draft.decided}
    ours = {**{name: value for name, value in found.items() if name not in request.chosen}, **told, **decided}
    theirs = {name: text for name, text in request.chosen.items() if name not in ours}
    return (*request.command, *(f"--{name}={value}" for name, value in {**theirs, **ours}.items()))


def torchrun_arguments(
    nodes: int, node_rank: int, ranks: int, master_address: str, *, elastic: bool = False
) -> tuple[str, ...]:
    """torchrun's arguments. Rendezvous is `static`: with `c10d` the node rank is ignored, workers open a second, random
    port, the hosts' wall clocks are compared, and what anybody lays into the store is unpickled.

    elastic: how many hosts there are, and which of them this is, is filled in on the host at each start.
    """
    options: dict[str, str | int] = {
        "--nnodes": "{nodes}" if elastic else nodes,
        "--node-rank": "{node_rank}" if elastic else node_rank,
        "--nproc-per-node": ranks,
        "--rdzv-backend": "static",
        "--master-addr": master_address,
        "--master-port": "{rendezvous_port}",
        "--max-restarts": 0,
    }
    # Else each run leaves a folder in the host's /tmp.
    options["--log-dir"] = "{job_dir}/torchrun"
    flags = tuple(str(part) for option in options.items() for part in option)
    # torchrun starts our wrapper, not the script: only the wrapper knows the rank's true exit code.
    return ("-m", "orch_remote.launch", *flags, "--no-python", "{python}", "-m", "orch_remote.rank", "{job_dir}")
