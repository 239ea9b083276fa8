"""The command line of orch. Commands import heavy modules when they run, so that `orch --help` imports only click."""

from __future__ import annotations

import gc
import os

import click

from orchestrator import __version__
from orchestrator.cli.clusters import down, master, reap, status, trust, up
from orchestrator.cli.common import Orch
from orchestrator.cli.doctor import doctor
from orchestrator.cli.help import show_help
from orchestrator.cli.hosts import clusters, data, node, setup, use
from orchestrator.cli.init import init
from orchestrator.cli.jobs import cancel, jobs, logs, top, why
from orchestrator.cli.plan import plan, profile, study
from orchestrator.cli.results import collect, compare, pull, report
from orchestrator.cli.run import run
from orchestrator.cli.ssh import execute, forward, ssh, ssh_config
from orchestrator.cli.sweep import sweep
from orchestrator.cli.ui import ui


@click.group(cls=Orch, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """One training cluster out of GPU hosts that are reached only by SSH.

    \b
    orch up rack.yaml                   connect, probe, elect a master
    orch run --exp resnet152_cifar      launch on every host, follow live
    orch collect                        pull logs and metrics, compare the hosts

    Shell completion: eval "$(_ORCH_COMPLETE=bash_source orch)" (or zsh_source, fish_source).
    """
    gc.set_threshold(50_000, 20, 50)  # imports make many objects and no garbage: collection took a tenth of their time


if "_ORCH_COMPLETE" in os.environ:
    from orchestrator.cli.bash_words import install

    install()

SECTIONS = {
    "Hosts": (
        init,
        up,
        status,
        doctor,
        clusters,
        use,
        node,
        master,
        trust,
        setup,
        data,
        execute,
        ssh,
        forward,
        ssh_config,
    ),
    "Jobs": (run, sweep, jobs, top, ui, logs, why, cancel),
    "Results": (collect, pull, report, compare),
    "Speed, measured and predicted": (profile, plan, study),
    "Cleaning up": (reap, down),
    "Help": (show_help,),
}
"""Commands in the order of their use."""

for title, members in SECTIONS.items():
    main.add_section(title, members)
