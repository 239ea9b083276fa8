"""How sphinx builds these pages into one site: `make docs`."""

from orchestrator import __version__

project = "orch"
release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["*.py"]
html_theme = "furo"
html_title = f"orch {release}"
myst_heading_anchors = 3
