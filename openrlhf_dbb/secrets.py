"""Masks passwords, tokens and keys in whatever is stored, shown, logged, or sent to a tracker."""

import base64
import contextlib
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
    r"|shared|storage|subscription|license|wandb|openai|anthropic|app|groq|hmac|mistral)key(id)?s?$"
    r"|token$|(api|access|auth|bearer|hub|refresh|session)tokens$"
    r"|(password|passwd|passphrase|passcode|secret|credential|authorization|cookie|signature)s?$"
)
# With _ between the words: x_api_key.
_SECRET_WORD = re.compile(
    r"(^|[._])(o?auth|basicauth|bearer|connection_?string|creds?|dsn|jwt|pwd|session|session_?id|pw)$"
    r"|_(pass|pw|sig)$|(^|[._])key$"
)
# The name of a column, a file or a metric: --data.input_key.
_NO_SECRET_KEY = re.compile(
    r"(^|[._])(advantage|answer|audio|cache|chosen|column|dataset|file|foreign|group|id|images?|index|input|item"
    r"|label|lookup|messages?|metric|output|partition|primary|prompt|public|question|(pass_)?rate|reference"
    r"|rejected|responses?|rewards?|scores?|solution|sort|source|state|step|target|task|text|videos?|weights?)_key$"
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
_CUT_LOGIN = re.compile(r"[^/:\[]+:(?=\w)(?!\d+(?!\w))[^/]+$")  # user:password without @host
# token without @host, behind the one slash that a path leaves
_CUT_TOKEN = re.compile(r"(?!localhost\b)[^/:\[.@?#]+\W*$")
_REMOTE = re.compile(r"\b(https?|hf|s3|gs|gcs|ftp)$")
# What stands before @ and is told from a word: a message repeats it where it cuts the URL.
_REPEATED = re.compile(r"(?=\D*\d)[^/?#@]{6,}$")
_LOGIN = re.compile(r"""(?<![^\s"'(=,])[\w.+%~/-]+:(?!/)\S*@(?=[\w\[])""")  # user:password@host
_PATH = re.compile(r"(?<!\S)([^\s?/]*/[^\s?]*\?)(\S*=\S*)")  # /path?name=value
_BEARER = re.compile(r"""\b(bearer[ \t]+)([^\s"']\S*)""", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|AKIA|gsk_|xox[abeprs]-|AIza)[\w-]{16,}"
)
_JWT = re.compile(r"\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]+")
# curl -u user:password
_CURL = re.compile(
    r"""(\bcurl\b[^\n|;]{0,200}?[ \t](?:-u|-U|--user|--proxy-user)[ \t=]?["']?)([^\s"':]+:[^\s"']+)"""
)
_ENCODED = re.compile(r"\S*%[0-9A-Fa-f]{2}\S*")
_PASSWORD = (
    r"pass(?:word|wd|phrase|code)s?|pwd|secret|credentials?|(?:api|access|secret|private)[ _-]?key"
)
# In a sentence: the password of NAME is VALUE. What a sentence says of a password is none.
_SAID = re.compile(
    rf"""\b((?:{_PASSWORD}|token(?=\W+\w+\W+(?=\S*\d)\S{{8}}))(?:[ \t]+(?:for|of)[ \t]+\S+)?"""
    r"""[ \t]+(?:is|was|are)[ \t]+(?!(?:a|an|empty|for|given|hidden|in|incorrect|invalid|missing|needed|no|not"""
    r"""|read|required|set|shown|stored|that|the|to|too|unset|used|wrong)\b)["'`]?)((?<=["'`])[^"'`\n]+|\S+)""",
    re.IGNORECASE,
)
_BASIC = re.compile(r"\b(basic[ \t]+)([\w+/-]{4,}=*)", re.IGNORECASE)
# NAME=, NAME: and "NAME":, --NAME=, --NAME with a value behind it, ('NAME', 'value') and ["NAME", 1]
_NAME = re.compile(
    r"""(?<![\w.-])(?:(?P<name>\w[\w.-]*)\\*["']?[ \t]*(?:=+>?|:=?)"""
    r"""|(?P<flag>--?\w[\w.-]*)(?:=|["'],(?=[ \t]*["'])|[ \t](?!\s*-))"""
    r"""|(?:(?<=[(\[]["'])|(?<=[(\[]\\["']))(?P<first>\w[\w.-]*)\\*["'],"""
    r"""(?=[ \t]*(?:[bru]?\\*"[^"\n]*"|[bru]?\\*'[^'\n]*'|[^\s"',()[\]]+)[ \t]*[)\]]))"""
    r"""[ \t]*(?:[|>][+-]?[ \t]*\n[ \t]+)?"""  # a block of YAML
)
# "name": "NAME" beside "value":, in any order, of JSON, Python and YAML.
_NAMES = ("name", "key", "field", "header", "variable")
_VALUES = ("value", "val")
_ENTRY = re.compile(
    rf"""(?<![\w.-])(?i:{"|".join(_NAMES)})\\*["']?[ \t]*[:=][ \t]*\\*["']?(\w[\w.-]*)"""
)
_ENTRY_END = re.compile(rf"[{{}}()]|\n[ \t]*-|(?i:\b(?:{'|'.join(_VALUES)})\b)")
_NEAR = 200  # characters between a name and its value
_QUOTED = r"""(?:[bBrRuU]?(?P<quote>\\*["'])(?:\\.|[^\n])*?(?:(?P=quote)|$))+"""
_SCHEME = r"(?i:(?:basic|bearer|token)[ \t]+)?"
_LIST = r"[\[{(](?:[ \t]*\n(?:.*\n){0,99}?[ \t]*[\])}]|.*)"  # on one line, or ended by a line of its own
_PARENTHESES = r"""\((?:"[^"\n]*"|'[^'\n]*'|[^()"'\n])*\)"""  # of a call
_WORD = rf"""{_SCHEME}(?:{_QUOTED}|{_LIST}|(?:"[^"\n]*"|'[^'\n]*'|{_PARENTHESES}|\S)+)"""
_VALUE = re.compile(_WORD, re.MULTILINE)
_LINE = re.compile(rf"{_QUOTED}|{_LIST}|.+", re.MULTILINE)
_BETWEEN_WORDS = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^\w.]+")
_HAS_WORDS = re.compile(r"(authorization|cookie|passphrase)s?$", re.IGNORECASE)
_PUNCTUATION = " \t,;:.)]}'\""


def is_secret(name: str) -> bool:
    """Return whether the value of that name is a secret: that of ``X-API-Key``, not ``pad_token``."""
    words = _BETWEEN_WORDS.sub("_", name.strip("-")).lower().rstrip("_0123456789")
    if _TEXTS_TOKEN.search(words) or _NO_SECRET_KEY.search(words):
        return False
    return bool(_SECRET_WORD.search(words) or _SECRET_END.search(words.replace("_", "")))


def without_passwords(text: str) -> str:
    """Return the text with its secrets masked.

    Of a URL, with two slashes or with the one that a path leaves: what is before the last ``@``,
    here and where the text repeats it, or all of it where a message was cut before that, and behind
    ``?`` or ``#``. Behind a name that
    :func:`is_secret`, in the entry of such a ``name``, and of "the password is": the word, what is
    quoted, or the rest of the line if it is a list, a header or a passphrase. A word that hides one
    of these by percent-encoding, and a token of a known form: all of it.

    Example:
        >>> without_passwords("reward http://ann:p@ss/w@host/score?token=1,http://other/score#2")
        'reward http://***@host/score?***,http://other/score#***'
        >>> without_passwords("--hub_token hf_1 --input_key a {'X-API-Key': 'b', 'pad_token': '</s>'}")
        "--hub_token *** --input_key a {'X-API-Key': '***', 'pad_token': '</s>'}"
    """
    repeated = _repeated_logins(text)
    text = _LINK.sub(_without_login_and_query, text)
    text = _LOGIN.sub(f"{MASK}@", text)
    text = _PATH.sub(_first_and_mask, text)
    text = _without_named(text)
    text = _BEARER.sub(_first_and_mask, text)
    text = _BASIC.sub(_without_basic, text)
    text = _SAID.sub(_first_and_mask, text)
    text = _CURL.sub(_first_and_mask, text)
    text = _KNOWN.sub(MASK, text)
    text = _JWT.sub(MASK, text)
    for login in repeated:
        text = text.replace(login, MASK)
    return _ENCODED.sub(_unless_it_hides, text) if "%" in text else text


def _mask(secret: str) -> str:
    """Return the mask, with the punctuation of the text that follows the secret."""
    return MASK + secret[len(secret.rstrip(_PUNCTUATION)) :]


def _first_and_mask(found: re.Match[str]) -> str:
    return found[1] + _mask(found[2])


def _repeated_logins(text: str) -> list[str]:
    """Return the tokens and passwords of the URLs of a text that it may repeat, the longest first."""
    logins = set()
    for link in _LINK.finditer(text):
        user = link[2].rpartition("@")[0]
        for login in (user, user.partition(":")[2]):
            if _REPEATED.match(login):
                logins.add(login)
    return sorted(logins, key=len, reverse=True)


def _without_login_and_query(link: re.Match[str]) -> str:
    user, at, place = link[2].rpartition("@")  # a password may hold an @
    if _QUERY.search(user):  # or a ?, or the query holds the @
        return link[1] + _mask(link[2])
    if not at and len(link[1]) < len(":///") and _CUT_LOGIN.match(place):
        return link[1] + _mask(place)
    is_path = link[1] == ":/" and _REMOTE.search(link.string[: link.start()][-9:])
    if not at and is_path and _CUT_TOKEN.match(place):
        return link[1] + _mask(place)
    login = MASK + at if user else ""
    return link[1] + login + _QUERY.sub(lambda query: query[1] + _mask(query[0]), place)


def _without_named(text: str) -> str:
    parts: list[str] = []
    end = 0
    for named in _NAME.finditer(text):
        name = named[named.lastgroup or 0]
        if name.lower() in _VALUES:
            name = _name_beside(text, named)
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


def _name_beside(text: str, field: re.Match[str]) -> str:
    """Return the secret's name in an entry that has the field ``value``; "" if there is none."""
    value = _LINE.match(text, field.end())
    end = value.end() if value and value["quote"] else field.end()
    before = _ENTRY_END.split(text[max(field.start() - _NEAR, 0) : field.start()])[-1]
    after = _ENTRY_END.split(text[end : end + _NEAR])[0]
    return next(filter(is_secret, _ENTRY.findall(f"{before} {after}")), "")


def _without_basic(found: re.Match[str]) -> str:
    """Return "Basic user:password in base64" masked; "basic arithmetic" stays."""
    word = found[2]
    with contextlib.suppress(ValueError):
        if b":" in base64.b64decode(
            word + "=" * (-len(word) % 4), altchars="-_" if {*"-_"} & {*word} else None
        ):
            return _first_and_mask(found)
    return found[0]


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
        return {
            without_passwords(str(key)): _without_entry(str(key), entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return list(map(without_secrets, value, _names(value)))
    return without_passwords(str(value))


def _without_entry(name: str, value: Any) -> Any:
    """Return the value of an entry with its secrets masked; a number named ``pass`` is a rate."""
    if name.lower() == "pass" and isinstance(value, str) and value:
        return MASK
    return without_secrets(value, name)


def _names(values: Sequence[Any]) -> Iterator[str]:
    """Yield the name of each entry of a command line or of a pair; "" if it has none."""
    before = ""
    for value in values:
        is_name = isinstance(before, str) and (before.startswith("-") or len(values) == 2)
        yield before if is_name else ""
        before = value


def _without_named_value(entry: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return ``{"name": NAME, "value": VALUE}`` with the value masked if its name is secret."""
    names = [name for key, name in entry.items() if str(key).lower() in _NAMES]
    if not any(isinstance(name, str) and is_secret(name) for name in names):
        return entry
    return {key: MASK if str(key).lower() in _VALUES else value for key, value in entry.items()}


@functools.cache
def mask_process() -> None:
    """Mask what this process logs, and the traceback of an exception that ends it or a thread."""
    make = logging.getLogRecordFactory()

    def masked(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        _mask_record(record)
        return record

    logging.setLogRecordFactory(masked)
    sys.excepthook = lambda _, error, trace: _print(error.with_traceback(trace))
    threading.excepthook = lambda ended: _print(ended.exc_value)


def own_log(name: str) -> logging.Logger:
    """Return a logger whose records are masked in processes of others too, such as TRL's."""
    log = logging.getLogger(name)
    log.addFilter(_mask_record)
    return log


def _mask_record(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except Exception:  # arguments that do not fit
        message = f"{record.msg} {record.args}"
    if without_passwords(message) != message:
        record.msg = without_passwords(message)
        record.args = ()
    if record.exc_info and record.exc_info[1]:
        record.exc_text = masked_traceback(record.exc_info[1])
    return True


def masked_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text, with its secrets masked."""
    return without_passwords("".join(traceback.format_exception(error)).rstrip())


def _print(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SystemExit) and sys.stderr is not None:
        print(masked_traceback(error), file=sys.stderr)
