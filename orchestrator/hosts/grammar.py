"""The forms that an inventory's texts may take: each function takes what a person wrote and gives it in one
spelling, or raises ValueError with the form expected. Pure.

    host("[2001:DB8::1]")            # '2001:db8::1'
    address("192.168.1.41/24")       # ('192.168.1.41', 24)

These grammars are the first wall against option and shell injection: nothing that passes begins with `-`, and names
that become file names hold no separator.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import unicodedata

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
USER = r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}"
INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,14}"
ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
ENV_FORM = "letters, digits and `_`, at most 255, no digit first"
MAX_TEXT = 4096
MOST_HOSTS = 4096
"""Of one inventory, its ranges written out."""
MAX_ENV_BYTES = 128 * 1024
"""What Linux takes as one `NAME=value` string of a new program (MAX_ARG_STRLEN)."""

# Underscores are no part of RFC 1123, but common in the aliases of ~/.ssh/config.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# What the resolver would read as an IPv4 address in one of inet_aton's older forms (127.1, 0x7f000001).
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
# Control and format characters (bidi among them), halves of characters, and line or paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def show(value: object) -> str:
    """A value from a file, fit for a message: quoted, escaped, at most 60 characters."""
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
    """One line of text without control characters, fit for a table cell or a shell's `-c`."""
    if not text.strip():
        raise ValueError("must not be empty; remove the key to leave it out")
    return _printable(text)


def script(text: str) -> str:
    """Shell text of one or more lines."""
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
    """A path that means the same wherever a command starts: absolute, or `~/` for the home folder."""
    if not line(text).startswith(("/", "~/")):
        raise ValueError(f"must be an absolute path or begin with ~/, not {show(text)}")
    return text


def no_range(text: str) -> str:
    """A text of an inventory whose ranges have been written out."""
    if set("[]") & set(text):
        raise ValueError(
            f"must be without brackets, not {show(text)}: a range needs one of the same length in the entry's `name`; "
            "`{name}` stands for the node's name"
        )
    return text


def program(text: str) -> str:
    """A path as above, or the bare name of a program to look up on the PATH."""
    return path(text) if "/" in text or not re.match(r"[A-Za-z0-9_]", line(text)) else text


def folder_of_ours(text: str) -> str:
    """A folder whose content we may remove again, so neither the root, nor the home folder, nor a way up from it."""
    parts = [part for part in path(text).split("/")[1:] if part not in ("", ".")]
    if not parts or ".." in parts:
        raise ValueError(f"must name a folder of its own below / or ~, without `..`, not {show(text)}")
    return text


def host(text: str) -> str:
    """A host name (RFC 1123) or an IP address, brackets removed, in its shortest spelling."""
    if text.startswith("[") and text.endswith("]"):
        return _ip6(text[1:-1])
    if re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:.*", text):
        return _ip6(text)
    for sign, advice in (("@", "the user goes in `user:`"), ("%", _NO_ZONE), (":", "the port goes in `port:`")):
        if sign in text:
            raise ValueError(f"must be a host name or an IP address alone, not {show(text)}; {advice}")
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
    """A numeric address and, when it was written behind a `/`, its prefix length."""
    numeric, slash, length = text.partition("/")
    if "%" in numeric:
        raise ValueError(f"{show(text)}: {_NO_ZONE}")
    try:
        found = ipaddress.ip_address(numeric)
    except ValueError:
        raise ValueError(f"{show(text)} is not a numeric address; write it like 192.168.1.41 or .../24") from None
    if found.is_unspecified or found.is_multicast:
        raise ValueError(f"{show(text)} is no single host's address")
    if not slash:
        return str(found), None
    if not re.fullmatch(r"[0-9]{1,3}", length) or int(length) > found.max_prefixlen:
        raise ValueError(f"{show(text)}: the prefix length behind `/` must be from 0 to {found.max_prefixlen}")
    return str(found), int(length)


def host_key(text: str) -> str:
    """`ssh-ed25519 AAAA...` (a comment behind it is dropped) or `SHA256:...`, as ssh-keygen prints them."""
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
    """`[user@]host[:port][,...]` as in ssh_config; an IPv6 address stands in brackets."""
    return ",".join(_hop(hop) for hop in text.split(","))


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
