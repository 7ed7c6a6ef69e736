"""Masks passwords, tokens and keys in whatever is stored, shown, logged, or sent to a tracker."""

import functools
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

MASK = "***"

# Without separators, in lower case: X-API-Key and apiKey are xapikey and apikey.
_SECRET_END = re.compile(
    r"(api|access|secret|private|auth|account|encryption|signing|ssh|master|client|service"
    r"|shared|storage|subscription|license|wandb|openai|anthropic)key(id)?s?$"
    r"|token$|(api|access|auth|bearer|hub|refresh|session)tokens$"
    r"|(password|passwd|passphrase|passcode|secret|credential|authorization|cookie|signature)s?$"
)
# With _ between the words: x_api_key.
_SECRET_WORD = re.compile(
    r"(^|[._])(o?auth|basicauth|bearer|connection_?string|creds?|dsn|jwt|pwd|session|session_?id)$"
    r"|_(pass|sig)$|(^|\.)key$"
)
# A token of a text, or a number a token.
_TEXTS_TOKEN = re.compile(
    r"(^|[._])(audio|bos|cls|end|eos|image|mask|pad|per|sep|special|start|stop|think|unk|video)"
    r"_?token$"
)
# The whole value of these flags is hidden where it is stored: an address may be mistyped.
_STORES = ("store.url", "warm_start_url")

# A URL ends at a space, or at a comma before another URL.
_LINK = re.compile(r"(:/+)((?:(?!,[\w+.-]+:/)\S)+)")
_QUERY = re.compile(r"([?#]).+")
_LOGIN = re.compile(r"""(?<![^\s"'(=,])[\w.+%~/-]+:(?!/)\S*@(?=[\w\[])""")  # user:password@host
_PATH = re.compile(r"(?<!\S)([^\s?/]*/[^\s?]*\?)(\S*=\S*)")  # /path?name=value
_BEARER = re.compile(r"""\b(bearer[ \t]+)([^\s"']\S*)""", re.IGNORECASE)
_KNOWN = re.compile(r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|AKIA)[\w-]{16,}")
_ENCODED = re.compile(r"\S*%[0-9A-Fa-f]{2}\S*")
# {"name": "NAME", "value":, NAME=, NAME: and "NAME":, --NAME=, --NAME with a value behind it, ('NAME', 'value')
_NAME = re.compile(
    r"""(?<![\w.-])(?:(?i:name|key)\\*["'][ \t]*:[ \t]*\\*["'](?P<entry>\w[\w.-]*)\\*["'],\s*"""
    r"""\\*["'](?i:value)\\*["'][ \t]*:"""
    r"""|(?P<name>\w[\w.-]*)\\*["']?[ \t]*(?:=+>?|:=?)"""
    r"""|(?P<flag>--?\w[\w.-]*)(?:=|["'],(?=[ \t]*["'])|[ \t](?!\s*-))"""
    r"""|(?<=\(["'])(?P<first>\w[\w.-]*)["'],(?=[ \t]*["'][^"'\n]*["']\)))[ \t]*"""
)
_QUOTED = r"""(?:[bBrRuU]?(?P<quote>\\*["'])(?:\\.|[^\n])*?(?:(?P=quote)|$))+"""
_SCHEME = r"(?i:(?:basic|bearer|token)[ \t]+)?"
_WORD = rf"""{_SCHEME}(?:{_QUOTED}|[\[{{(].*|(?:"[^"\n]*"|'[^'\n]*'|\S)+)"""
_VALUE = re.compile(_WORD, re.MULTILINE)
_LINE = re.compile(rf"{_QUOTED}|.+", re.MULTILINE)
_BETWEEN_WORDS = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^\w.]+")
_HAS_WORDS = re.compile(r"(authorization|cookie|passphrase)s?$", re.IGNORECASE)
_PUNCTUATION = " \t,;:.)]}'\""


def is_secret(name: str) -> bool:
    """Return whether the value of that name is a secret: that of ``X-API-Key``, not ``pad_token``."""
    words = _BETWEEN_WORDS.sub("_", name.strip("-")).lower().rstrip("_0123456789")
    if _TEXTS_TOKEN.search(words):
        return False
    return bool(_SECRET_WORD.search(words) or _SECRET_END.search(words.replace("_", "")))


def without_passwords(text: str) -> str:
    """Return the text with its secrets masked.

    Of a URL, with two slashes or with the one that a path leaves: what is before the last ``@``,
    and behind ``?`` or ``#``. Behind a name that :func:`is_secret`: the word, what is quoted, or
    the rest of the line if it is a list, a header or a passphrase. A word that hides one of these
    by percent-encoding, and a token of a known form: all of it.

    Example:
        >>> without_passwords("reward http://ann:p@ss/w@host/score?token=1,http://other/score#2")
        'reward http://***@host/score?***,http://other/score#***'
        >>> without_passwords("--hub_token hf_1 --input_key a {'X-API-Key': 'b', 'pad_token': '</s>'}")
        "--hub_token *** --input_key a {'X-API-Key': '***', 'pad_token': '</s>'}"
    """
    text = _LINK.sub(_without_login_and_query, text)
    text = _LOGIN.sub(f"{MASK}@", text)
    text = _PATH.sub(_first_and_mask, text)
    text = _without_named(text)
    text = _BEARER.sub(_first_and_mask, text)
    text = _KNOWN.sub(MASK, text)
    return _ENCODED.sub(_unless_it_hides, text) if "%" in text else text


def _mask(secret: str) -> str:
    """Return the mask, with the punctuation of the text that follows the secret."""
    return MASK + secret[len(secret.rstrip(_PUNCTUATION)) :]


def _first_and_mask(found: re.Match[str]) -> str:
    return found[1] + _mask(found[2])


def _without_login_and_query(link: re.Match[str]) -> str:
    user, at, place = link[2].rpartition("@")  # a password may hold an @
    if _QUERY.search(user):  # or a ?, or the query holds the @
        return link[1] + _mask(link[2])
    login = MASK + at if user else ""
    return link[1] + login + _QUERY.sub(lambda query: query[1] + _mask(query[0]), place)


def _without_named(text: str) -> str:
    parts: list[str] = []
    end = 0
    for named in _NAME.finditer(text):
        name = named[named.lastgroup or 0]
        if named.start() < end or not is_secret(name):
            continue
        value = (_LINE if _HAS_WORDS.search(name) else _VALUE).match(text, named.end())
        if value is None:
            continue
        quote = value["quote"]
        parts.append(text[end : named.end()])
        parts.append(quote + MASK + quote if quote else _mask(value[0]))
        end = value.end()
    return "".join(parts) + text[end:]


def _unless_it_hides(word: re.Match[str]) -> str:
    plain = unquote(word[0])
    for form in (plain, "".join(plain.split())):  # a URL has no spaces
        if without_passwords(form) != form:
            return MASK
    return word[0]


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a value with its texts masked; all of it is masked if its name :func:`is_secret`.

    The name of an entry of a list is a flag before it, or the other one of a pair. What JSON does
    not have becomes its text.

    Example:
        >>> without_secrets({"hub_token": "hf_1", "input_key": "a", "files": ["s3://k:p@bucket/a"]})
        {'hub_token': '***', 'input_key': 'a', 'files': ['s3://***@bucket/a']}
    """
    is_hidden = is_secret(name) or name.endswith(_STORES)
    if is_hidden and value and value is not True:
        return MASK
    if isinstance(value, int | float | None):
        return value
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**without_secrets(vars(value)))
    if isinstance(value, Mapping):
        value = _without_named_value(value)
        return {without_passwords(str(key)): without_secrets(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(without_secrets, value, _names(value)))
    return without_passwords(str(value))


def _names(values: Sequence[Any]) -> Iterator[str]:
    """Yield the name of each entry of a command line or of a pair; "" if it has none."""
    before = ""
    for value in values:
        is_name = isinstance(before, str) and (before.startswith("-") or len(values) == 2)
        yield before if is_name else ""
        before = value


def _without_named_value(entry: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return ``{"name": NAME, "value": VALUE}`` with the value masked if its name is secret."""
    by_key = {str(key).lower(): key for key in entry}
    name = entry.get(by_key.get("name", by_key.get("key")))
    if "value" in by_key and isinstance(name, str) and is_secret(name):
        return {**entry, by_key["value"]: MASK}
    return entry


@functools.cache
def mask_process() -> None:
    """Mask what this process logs, and the traceback of an exception that ends it or a thread."""
    make = logging.getLogRecordFactory()

    def masked(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit
            message = f"{record.msg} {record.args}"
        if without_passwords(message) != message:
            record.msg, record.args = without_passwords(message), ()
        if record.exc_info and record.exc_info[1]:
            record.exc_text = masked_traceback(record.exc_info[1])
        return record

    logging.setLogRecordFactory(masked)
    sys.excepthook = lambda _, error, trace: _print(error.with_traceback(trace))
    threading.excepthook = lambda ended: _print(ended.exc_value)


def masked_traceback(error: BaseException) -> str:
    return without_passwords("".join(traceback.format_exception(error)).rstrip())


def _print(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SystemExit) and sys.stderr is not None:
        print(masked_traceback(error), file=sys.stderr)
