"""Makes the README's pictures from a run on the lab's paced hosts, an A2000 and a V100, at the catalogue's speeds.

Needs root and two minutes, and a machine that does nothing else.

    sudo .venv/bin/python docs/pictures.py

docs/pictures/collect.svg is what a terminal shows after `orch collect`, report.png the page, as chromium draws it.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
INVENTORY, CLUSTER = "inventory/lab_a2000_v100.yaml", "lab-a2000-v100"
PACES = {
    "samples_per_s: 333,": "samples_per_s: 2500, fixed_ms: 15.7,",
    "samples_per_s: 833,": "samples_per_s: 5348, fixed_ms: 10.7,",
}
"""In place of the speeds that the lab assumes."""
RUN = [
    "run",
    "--exp",
    "resnet152_cifar",
    "--set",
    "batch=2048",
    "--set",
    "steps=30",
    "--set",
    "shares=measured",
    "--set",
    "strategy=ddp",
    "--nodes",
    "a2000,v100",
]
COLUMNS = 118
PAGE_PX = (1000, 1100)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inventory = at_the_cards_speeds(Path(folder))
        lab("up", inventory)
        try:
            orch(folder, "up", inventory, "--accept-new-host-keys")
            orch(folder, "profile", "--exp", "resnet152_cifar", "--set", "batch=2048")
            orch(folder, *RUN)
            table = orch(folder, "collect", "--job", "latest", "--out", f"{folder}/runs")
        finally:
            lab("down", CLUSTER)
        (run,) = (path for path in Path(folder, "runs").iterdir() if path.is_dir() and not path.is_symlink())
        draw_terminal(table.replace(folder, "~"), ROOT / "docs/pictures/collect.svg")
        draw_page(run / "report.html", ROOT / "docs/pictures/report.png")


def at_the_cards_speeds(folder: Path) -> str:
    text = (ROOT / INVENTORY).read_text()
    for assumed, own in PACES.items():
        if text.count(assumed) != 1:
            raise SystemExit(f"{INVENTORY} has no `{assumed}`: change PACES")
        text = text.replace(assumed, own)
    (folder / "rack.yaml").write_text(text)
    return str(folder / "rack.yaml")


def lab(*words: str) -> None:
    subprocess.run([sys.executable, "deploy/lab.py", *words], cwd=ROOT, check=True)


def orch(home: str, *words: str) -> str:
    """What it prints on standard output, in colours."""
    enter = [
        sys.executable,
        "deploy/lab.py",
        "exec",
        "--cluster",
        CLUSTER,
        "--",
        str(Path(sys.executable).with_name("orch")),
    ]
    place = {"ORCH_HOME": f"{home}/home", "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    done = subprocess.run(
        [*enter, *words], cwd=ROOT, env={**os.environ, **place}, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def draw_terminal(output: str, picture: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(output.rstrip()))
    drawn = console.export_svg(title="orch collect --job latest")
    picture.write_text(
        re.sub(r"@font-face {.*?}", "", drawn, flags=re.DOTALL)
    )  # the reader's own font, from nowhere else


def draw_page(page: Path, picture: Path) -> None:
    size = ",".join(map(str, PAGE_PX))
    words = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}", f"--screenshot={picture}"]
    subprocess.run(["chromium", *words, page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
