"""docs/ is built to one site, in which every link and every page of the contents leads somewhere."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(docs), str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_site_is_built_without_a_warning(tmp_path):
    built = build(ROOT / "docs", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {
        page.stem for page in (tmp_path / "site").glob("*.html")
    }
