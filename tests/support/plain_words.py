"""The texts of the product, cut out of its sources, and the patterns of clumsy English that `tests/test_plain_words.py`
counts in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCSTRING, COMMENT, MESSAGE, PAGE = "docstring", "comment", "message", "page"

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<prefix>(?<!\w)[rRbBuUfF]{0,2})
     (?P<quote>\"\"\"|'''|"|')(?P<body>(?:\\.|(?!(?P=quote)).)*?)(?P=quote)""",
    re.VERBOSE | re.DOTALL,
)
_OPEN = tuple("([{,=+%|&")
"""A string on its own line is part of an expression after one of these, otherwise a docstring."""


@dataclass(frozen=True)
class Text:
    """line: the first. words: adjacent comments and adjacent literals are joined."""

    line: int
    kind: str
    words: str


def python_texts(source: str) -> Iterator[Text]:
    """Docstrings, comments and messages (strings of three words at least) in their order."""
    pieces: list[tuple[str, int, int, str]] = []
    for match in _TOKEN.finditer(source):
        kind = _kind(source, match)
        start, end = match.span()
        if pieces and pieces[-1][0] == kind and kind != DOCSTRING and not source[pieces[-1][2] : start].strip():
            last = pieces.pop()
            kind, start, words = kind, last[1], last[3] + source[last[2] : start] + _words(match)
        else:
            words = _words(match)
        pieces.append((kind, start, end, words))
    line, counted = 1, 0
    for kind, start, _, words in pieces:
        line, counted = line + source.count("\n", counted, start), start
        if kind != MESSAGE or len(re.findall(r"[A-Za-z]{2,}\S* ", words)) >= 2:
            yield Text(line, kind, words)


def _kind(source: str, match: re.Match[str]) -> str:
    if match["comment"]:
        return COMMENT
    before = source[max(0, match.start() - 500) : match.start()]
    has_own_line = not before.rpartition("\n")[2].strip()
    is_in_brackets = before.rstrip().endswith(_OPEN)
    return DOCSTRING if match["quote"] == '"""' and has_own_line and not is_in_brackets else MESSAGE


def _words(match: re.Match[str]) -> str:
    if match["comment"]:
        return match["comment"].lstrip("#")
    body = match["body"].replace("\\n", " ")
    return re.sub(r"\{[^{}]*\}", "{}", body) if "f" in match["prefix"].lower() else body


def page_texts(source: str) -> Iterator[Text]:
    """A Markdown page's paragraphs and cells, without headings and blocks of code."""
    source = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]+", "", m[0]), source, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"^#.*", "", source, flags=re.MULTILINE)
    # List items and cells begin a sentence.
    source = re.sub(r"^ *(?:[-*]|\d+\.) +", ". ", source, flags=re.MULTILINE).replace("|", ". ").replace("*", "")
    yield Text(1, PAGE, source)


@dataclass(frozen=True)
class Pattern:
    name: str
    regex: re.Pattern[str]
    instead: str
    kinds: tuple[str, ...] = (DOCSTRING, COMMENT, MESSAGE, PAGE)


def _pattern(name: str, instead: str, *regexes: str, kinds: tuple[str, ...] = Pattern.kinds) -> Pattern:
    """START: of a sentence. A space matches any white space, since lines may end anywhere."""
    start = r"(?:\A\s*|[.!?:;]\s+|\n\s*\n\s*)"
    joined = "|".join(regexes).replace("START ", start).replace(" ", r"\s+")
    return Pattern(name, re.compile(joined), instead, kinds)


NO_QUESTION = r"(?![^.?]*\?)"
PATTERNS = (
    _pattern("what", "a noun or a verb at the beginning", rf"START (?:What|Who|Whose|Whom|That which)\b{NO_QUESTION}"),
    _pattern(
        "whoever",
        "any ..., no ..., a user who ...",
        r"\b(?:[Ww]hoever|[Ww]hichever|[Nn]obody)\b",
        r"\b[Ww]hatever\b(?! (?:the|its|their|happens)\b)",
    ),
    _pattern("those", "the noun: jobs that, files of", r"\b[Tt]hose (?:that|of|which|who|whose)\b"),
    _pattern(
        "where",
        "if, when",
        rf"START Where\b{NO_QUESTION}",
        r"Raises? \w+ where\b|\bNone where\b",
        r"(?<!from\s)(?<!else\s)\bwhere (?!(?:it|they) (?:is|are|was|were|stood|stands?|lies?)\s*[.,;:)])"
        r"(?:there|it|they|that|nobody|none|no|nothing|one|all|any|each|several|neither|both)\b",
    ),
    _pattern(
        "none",
        "no ..., or the noun",
        r"\b(?:has|have|had|is|are|was|were|gives?|than|with|of) none\b(?! of (?:the|them|these|this|it|its)\b)",
        r"\bnone (?:is|are|that)\b",
    ),
    _pattern(
        "one",
        "the noun",
        r"\b(?:[Aa]n?|[Tt]he) (?!first|last|next|other|same|new|old|current|only|wrong|right|previous)\w+ ones?\b(?!-)",
        r"(?<!the\s)(?<!only\s)\b[Oo]nes? (?:that|which|who|whose)\b",
    ),
    _pattern(
        "alone",
        "only",
        # Hosts and ranks work alone, and things are left so.
        r"\b(?!(?:hosts?|ranks?|process|V100|A2000|A16|torch|be|is|are|was|runs?|does|do|did|leaves?|left|measured) )"
        r"(?!faster )\w+ alone\b",
    ),
    _pattern("beside", "next to, besides, except", r"\b[Bb]eside\b"),
    _pattern("so many", "the number, at most ..., this long", r"\b[Ss]o (?:long|many|often|few|soon|much)\b"),
    _pattern("of", "a sentence with a subject", r"START Of (?!course)[\w`]"),
    _pattern(
        "is X's to",
        "X does, X may",
        r"\b(?:is|are) (?:`?[\w/.]+`?'s?|ours|theirs|mine|its|his) to\b",
    ),
    _pattern(
        "as X has it",
        "the thing itself, or nothing",
        r"(?<!far\s)(?<!soon\s)(?<!fast\s)(?<!long\s)\bas (?!far|soon|fast|long)"
        r"(?:`[^`]+`|\w+(?: \w+){,2}) (?:has|have|says?|knows?) (?:it|them)\b",
    ),
    _pattern("the same", "a whole sentence, or no docstring", r"\A\s*The same\b", kinds=(DOCSTRING,)),
    _pattern(
        "says",
        "report, receive, log, print; a connection",
        r"\b(?:[Hh]ears?|[Hh]eard|[Tt]old|[Tt]ells?|[Ss]ays|[Ss]aid|[Kk]nows|[Ss]trangers?)\b(?![(=])",
        r"\b[Ss]ay\b(?![(),=:])",
    ),
)


@dataclass(frozen=True)
class Hit:
    line: int
    kind: str
    pattern: Pattern
    around: str


def hits(text: Text) -> Iterator[Hit]:
    # Names of the code are not English; masked, they keep their place.
    bare = re.sub(r"`[^`\n]*`", lambda code: re.sub(r"\w", "x", code[0]), text.words)
    for pattern in PATTERNS:
        for match in pattern.regex.finditer(bare) if text.kind in pattern.kinds else ():
            first = match.end() - len(match[0].lstrip(".!?:; \n"))
            around = text.words[max(0, first - 30) : match.end() + 40]
            yield Hit(text.line + text.words.count("\n", 0, first), text.kind, pattern, " ".join(around.split()))


def texts_of(path: Path) -> Iterator[Text]:
    source = path.read_text()
    return python_texts(source) if path.suffix == ".py" else page_texts(source)
