"""The command lines that a plan holds: the trainer's, rendered from its settled settings, and torchrun's. Pure.

    trainer_arguments(draft, "cuda", draft.split.settings)  ("-m", "trainer", "--exp=mnist_lenet", "--epochs=1", ...)
    trainer_settings(draft, "cuda", draft.split.settings)   {"epochs": "1", ...}, which a script has in its environment

Nothing else writes or changes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.planning.draft import Draft


def trainer_arguments(draft: Draft, device: str, of_split: Mapping[str, str]) -> tuple[str, ...]:
    settings = trainer_settings(draft, device, of_split)
    return (*draft.request.command, *(f"--{name}={value}" for name, value in settings.items()))


def trainer_settings(draft: Draft, device: str, of_split: Mapping[str, str]) -> dict[str, str]:
    """The settings that the person gave, as they wrote them; then those that the host and this plan decide, which win.

    device: of the host. of_split: the settings that follow from the split of the batch.
    """
    request = draft.request
    of_host = {"device": device, "backend": draft.carrier.backend}
    decided = {name: str(getattr(request.settings, name)) for name in draft.decided}
    ours = {**{name: value for name, value in of_host.items() if name not in request.chosen}, **of_split, **decided}
    theirs = {name: text for name, text in request.chosen.items() if name not in ours}
    return {**theirs, **ours}


def torchrun_arguments(nodes: int, node_rank: int, ranks: int, master_address: str) -> tuple[str, ...]:
    """torchrun's arguments. Rendezvous is `static`: with `c10d` the node rank is ignored, workers open a second, random
    port, the hosts' wall clocks are compared, and what anybody lays into the store is unpickled.
    """
    options: dict[str, str | int] = {
        "--nnodes": nodes,
        "--node-rank": node_rank,
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
