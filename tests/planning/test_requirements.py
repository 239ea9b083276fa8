"""A requirements file as hosts may have it."""

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning import Requirements, read_requirements


def write(folder, text, name="requirements.txt"):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def test_files_within_it_are_read_along(tmp_path):
    write(tmp_path, "einops>=0.7  # for attention\n", "sub/base.txt")
    write(tmp_path, "numpy<2\n", "sub/limits.txt")
    file = write(
        tmp_path,
        "\ufeff# ours\n-r sub/base.txt\n-c sub/limits.txt\n--extra-index-url https://u:${TOKEN}@host/simple\n"
        "foo[bar] \\\n  ==1.0 ; python_version < '3.12'\npkg @ git+https://github.com/a/b@c0ffee\nhttps://a/b-1.0.whl\n",
    )
    assert read_requirements(file) == Requirements(
        (
            "einops>=0.7",
            "--extra-index-url https://u:${TOKEN}@host/simple",
            "foo[bar]   ==1.0 ; python_version < '3.12'",
            "pkg @ git+https://github.com/a/b@c0ffee",
            "https://a/b-1.0.whl",
        ),
        ("numpy<2",),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-e .", "editable install"),
        ("./pkg", "is a file of this machine"),
        ("/abs/pkg.whl", "is a file of this machine"),
        ("pkg @ file:///x", "is a file of this machine"),
        ("pkg-1.0.whl", "is a file of this machine"),
        ("--trusted-host wheels.example", "is not for hosts"),
        ("--find-links wheels", "is not for hosts"),
        ("-i http://me:s3cret@host/simple", "an address holds a password"),
        ("--pre; rm -rf /", "is not for hosts"),
    ],
)
def test_what_hosts_cannot_or_should_not_have_is_named_with_its_line(line, words, tmp_path):
    file = write(tmp_path, f"tqdm\n{line}\n")
    with pytest.raises(UsageError) as raised:
        read_requirements(file)
    assert str(raised.value).startswith(f"{file}:2: ") and words in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for file in (tmp_path / "none.txt", tmp_path, write(tmp_path, "# nothing\n"), write(tmp_path, "-r b.txt", "a.txt")):
        write(tmp_path, "-r a.txt\n", "b.txt")
        with pytest.raises(UsageError):
            read_requirements(file)
