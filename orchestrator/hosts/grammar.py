"""Validates and normalises each text of an inventory, and expands node names like `gpu[01-16]`. Pure.

Functions raise ValueError with the expected form. They are the first defence against option and shell injection: no
accepted name begins with `-`, and names that become file names contain no separator.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence

from orchestrator.errors import UsageError
from orchestrator.units import some

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
USER = r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}"
INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,14}"
ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
ENV_FORM = "letters, digits and `_`, at most 255, no digit first"
SBATCH_OURS = frozenset(
    (
        "array",
        "chdir",
        "job-name",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "requeue",
        "signal",
        "wrap",
    )
)
MAX_TEXT = 4096
MOST_HOSTS = 4096
"""After expansion of ranges."""
MAX_ENV_BYTES = 128 * 1024
"""Linux's limit for one `NAME=value` string (MAX_ARG_STRLEN)."""

# RFC 1123 has no underscores, but aliases in ~/.ssh/config often do.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# The resolver would read these as IPv4 addresses in older forms of inet_aton (127.1, 0x7f000001).
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
# Control and format characters (bidi among them), halves of characters, and line or paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def show(value: object) -> str:
    """Quoted, escaped, at most 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def name(text: str) -> str:
    return _match(NAME, text, "letters, digits, `.`, `_` and `-`, at most 63, beginning with a letter or digit")


def user(text: str) -> str:
    return _match(USER, text, "a login name like ubuntu, at most 64 characters")


def interface(text: str) -> str:
    return _match(INTERFACE, text, "an interface name like eno1, at most 15 characters")


def env_name(text: str) -> str:
    return _match(ENV_NAME, text, f"a variable's name: {ENV_FORM}")


def env_value(text: str) -> str:
    if len(text.encode()) > MAX_ENV_BYTES - 1024:
        raise ValueError("is longer than the 127 KiB that Linux passes on in one variable; put it in a file")
    return text


def line(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty; remove the key to leave it out")
    return _printable(text)


def script(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty; remove the key to leave it out")
    for part in text.split("\n"):
        _printable(part.replace("\t", " "))
    return text


def _printable(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError(f"must be at most {MAX_TEXT} characters")
    for character in text:
        if unicodedata.category(character) in _UNPRINTABLE:
            raise ValueError(f"must be one line without control characters, and holds U+{ord(character):04X}")
    return text


def path(text: str) -> str:
    """Absolute or `~/`: independent of the current folder."""
    if not line(text).startswith(("/", "~/")):
        raise ValueError(f"must be an absolute path or begin with ~/, not {show(text)}")
    return text


def no_range(text: str) -> str:
    if set("[]") & set(text):
        raise ValueError(
            f"must be without brackets, not {show(text)}: a range needs one of the same length in the entry's `name`; "
            "`{name}` stands for the node's name"
        )
    return text


def program(text: str) -> str:
    """A path, or the bare name of a program on the PATH."""
    return path(text) if "/" in text or not re.match(r"[A-Za-z0-9_]", line(text)) else text


def folder_of_ours(text: str) -> str:
    """A folder that we may delete: not the root, the home folder or a parent of it."""
    parts = [part for part in path(text).split("/")[1:] if part not in ("", ".")]
    if not parts or ".." in parts:
        raise ValueError(f"must name a folder of its own below / or ~, without `..`, not {show(text)}")
    return text


def host(text: str) -> str:
    """A host name (RFC 1123) or an IP address, without brackets."""
    if text.startswith("[") and text.endswith("]"):
        return _ip6(text[1:-1])
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:.*", text):
        return _ip6(text)
    for sign, advice in (("@", "the user goes in `user:`"), ("%", _NO_ZONE), (":", "the port goes in `port:`")):
        if sign in text:
            raise ValueError(f"must be only a host name or an IP address, not {show(text)}; {advice}")
    if not text.isascii():
        raise ValueError(f"{show(text)} must be written in its ASCII form (xn--...)")
    return _host_name(text)


_NO_ZONE = "zone ids (%eth0) are not supported, so give an address that needs none"


def _host_name(text: str) -> str:
    labels = text.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise ValueError(f"{show(text)} is not an IPv4 address; write four numbers like 192.168.1.41") from None
    if text.endswith(".") and len(text) > 1:
        raise ValueError(f"must be written without the final dot, not {show(text)}")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{show(text)} is not a host name or an IP address; write it like gpu1.lab or 192.168.1.41")
    return text


def _ip6(text: str) -> str:
    if "%" in text:
        raise ValueError(f"{show(text)}: {_NO_ZONE}")
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise ValueError(f"{show(text)} is not an IPv6 address; write it like 2001:db8::41") from None


def address(text: str) -> tuple[str, int | None]:
    """A numeric address and its prefix length, if given."""
    numeric, slash, length = text.partition("/")
    if "%" in numeric:
        raise ValueError(f"{show(text)}: {_NO_ZONE}")
    try:
        found = ipaddress.ip_address(numeric)
    except ValueError:
        raise ValueError(f"{show(text)} is not a numeric address; write it like 192.168.1.41 or .../24") from None
    if found.is_unspecified or found.is_multicast:
        raise ValueError(f"{show(text)} is not the address of a single host")
    if not slash:
        return str(found), None
    if not re.fullmatch(r"[0-9]{1,3}", length) or int(length) > found.max_prefixlen:
        raise ValueError(f"{show(text)}: the prefix length behind `/` must be from 0 to {found.max_prefixlen}")
    return str(found), int(length)


def host_key(text: str) -> str:
    """`ssh-ed25519 AAAA...` or `SHA256:...`, without comment."""
    if re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", text):
        return text
    kind, _, rest = text.partition(" ")
    encoded = rest.split(" ")[0]
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    # RFC 4253, section 6.6: a public key begins with its own type, as a string behind its length.
    if kind not in _KEY_TYPES or not blob.startswith(len(kind).to_bytes(4, "big") + kind.encode()):
        raise ValueError(f"{show(text)} is not a host key; write it like `ssh-ed25519 AAAA...` or `SHA256:...`")
    return f"{kind} {encoded}"


def proxy_jump(text: str) -> str:
    """`[user@]host[:port][,...]` as in ssh_config."""
    return ",".join(_hop(hop) for hop in text.split(","))


def login(text: str) -> str:
    """`[user@]host[:port]`."""
    if "," in text:
        raise ValueError(f"{show(text)} must be a single host; hosts to go through are in `proxy_jump:`")
    return _hop(text)


def login_parts(text: str) -> dict[str, str | int]:
    """text: a `login`. `host`, and `user` and `port` if they are in it."""
    user, at, where = text.rpartition("@")
    name, port = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", where).groups()  # type: ignore[union-attr]  # `login`
    found = {"user": user if at else None, "host": name.strip("[]"), "port": int(port) if port else None}
    return {key: value for key, value in found.items() if value is not None}


def slurm_word(text: str) -> str:
    """A value of an option of sbatch."""
    return _match(r"[A-Za-z0-9_\[(][!-~]{0,199}", text, "one word without blanks, as sbatch takes it")


def sbatch_option(text: str) -> str:
    _match(r"--[a-z][a-z-]*(=[ -~]{1,200})?", text, "an option of sbatch like --mail-type=END")
    name = text[2:].partition("=")[0]
    if name in SBATCH_OURS:
        raise ValueError(f"--{name} is set by orch")
    return text


def _hop(text: str) -> str:
    match = re.fullmatch(r"(?:([^@]*)@)?(\[[^\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?", text)
    if not match:
        raise ValueError(f"{show(text)} is not a jump host; write [user@]host[:port], several joined by commas")
    login = f"{user(match[1])}@" if match[1] is not None else ""
    where = host(match[2])
    if match[3] is not None and not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"{show(text)}: the port must be from 1 to 65535")
    return login + (f"[{where}]" if ":" in where else where) + (f":{int(match[3])}" if match[3] else "")


def _match(pattern: str, text: str, form: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{show(text)} must be {form}")
    return text


# Expands node names like `gpu[01-16],v100*`. Pure.
#
# Every name of a range must exist, so that a missing host is noticed. Callers check plain names.

MOST_NAMES = 10_000
SHOWN = 12
_COMMA = re.compile(r",(?![^\[\]]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def names_in(listed: str | None, known: Sequence[str], whose: str) -> list[str]:
    """Each name once, in order; empty if nothing was listed.

    whose: the owner of `known`, for messages. Raises UsageError for a wrong pattern or one without a match.
    """
    words = [word.strip() for word in _COMMA.split(listed or "")]
    found = [name for word in words if word for name in _names_of(word, known, whose)]
    if (listed or "").strip() and not found:
        raise UsageError(f"{listed!r} names no node of {whose}", _there_are(known))
    return list(dict.fromkeys(found))


def _names_of(word: str, known: Sequence[str], whose: str) -> list[str]:
    if word in known or not set("*?[]") & set(word):
        return [word]
    names = list(itertools.islice(without_brackets(word), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise UsageError(f"{word} stands for more than {MOST_NAMES} names", _there_are(known))
    if not set("*?") & set(word):
        if missing := [name for name in names if name not in known]:
            raise UsageError(f"{word}: no {some(missing, 3)} in {whose}", _there_are(known))
        return names
    fits = re.compile("|".join(re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") for name in names))
    if not (found := [name for name in known if fits.fullmatch(name)]):
        raise UsageError(f"{word} matches no node of {whose}", _there_are(known))
    return found


def without_brackets(word: str) -> Iterator[str]:
    """Raises UsageError."""
    parts = _BRACKETS.split(word)
    if any(set("[]") & set(part) for part in parts):
        raise UsageError(f"{word}: brackets do not match", "write a range like gpu[01-16] or gpu[1-4,8]")
    choices = [_numbers(word, part) if position % 2 else [part] for position, part in enumerate(parts)]
    for combined in itertools.product(*choices):
        yield "".join(combined)


def _numbers(word: str, listed: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7. Raises UsageError."""
    numbers = list[str]()
    for part in listed.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or (len(last) < len(first)):
            raise UsageError(f"{word}: {part!r} is not a range", "write a range like gpu[01-16] or gpu[1-4,8]")
        if int(last) - int(first) >= MOST_NAMES:
            raise UsageError(f"{word} stands for more than {MOST_NAMES} names", "write a shorter range, or gpu*")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _there_are(known: Sequence[str]) -> str:
    return f"its nodes: {some(known, SHOWN)}"
