"""`help`: shows a page of the documentation, which a wheel brings along."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.errors import UsageError
from trainer.shared.setting_fields import close_names

PAGES = "pages"
"""In a wheel; a clone has `docs`."""


@click.command("help")
@click.argument("topic", required=False)
@click.pass_context
def show_help(ctx: click.Context, topic: str | None) -> None:
    """Show a page of the documentation, a command's help, or the list of pages.

    \b
    orch help
    orch help slurm
    orch help run
    """
    pages = _pages()
    main = ctx.find_root().command
    command = main.get_command(ctx, topic) if topic and isinstance(main, click.Group) else None
    if topic in pages:
        return click.echo_via_pager(pages[topic].read_text())
    if command:
        return click.echo(command.get_help(click.Context(command, info_name=f"orch {topic}")))
    if topic:
        near = close_names(topic, [*pages, *(main.commands if isinstance(main, click.Group) else ())])
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"no page and no command is named {topic!r}", f"{meant}pages: {', '.join(pages)}")
    for name, path in pages.items():
        click.echo(f"orch help {name:<16} {path.read_text().partition(chr(10))[0].removeprefix('# ')}")
    return None


def _pages() -> dict[str, Path]:
    package = Path(__file__).resolve().parents[1]
    folder = next(place for place in (package / PAGES, package.parent / "docs") if place.is_dir())
    pages = [*folder.glob("*.md"), *folder.glob("reference/*.md")]
    return {path.stem: path for path in sorted(pages) if path.stem != "index"}
