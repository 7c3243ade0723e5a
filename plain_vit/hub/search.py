"""Scanning text for secrets: the rules of detect-secrets, and additional rules.

Secrets are found in plain text and in the encodings that files use: escaped, percent-encoded, with invisible
characters, in base64 or hexadecimal, over several lines or between other bytes. Binary files in base64 are found too. A
found secret never appears in a message.
"""

import binascii
import html
import math
import os
import re
import unicodedata
import urllib.parse
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import huggingface_hub
import numpy as np

from .anchors import Anchors, anchors_of, lower
from .pickles import is_packed, kind_of

CHUNK = 1_000_000  # characters searched at once
OVERLAP = 20_000  # characters shared by two chunks: more than any secret has
DEPTH = 2  # levels of nested base64
TIMES_ESCAPED = 3  # JSON in JSON in JSON
READABLE = np.array([chr(code).isprintable() and code < 127 for code in range(256)])
SHORTEST_TEXT = 16  # characters in a row among numbers
SHORTEST_FILE = 60  # bytes of a file in base64; a shorter one is an example, with no room for metadata
SHORTEST_KNOWN = 12  # characters; a shorter value of an environment variable may be an ordinary word

# Tokens with a recognizable prefix.
TOKENS = {
    "a token of Hugging Face": r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "a token of GitHub": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{40,}",
    "a token of GitLab": r"\bgl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct)-[\w-]{16,}",
    "a token of PyPI": r"\bpypi-[\w-]{50,}",
    "a token of npm": r"\bnpm_[A-Za-z0-9]{36}|/:_authToken=\s{0,9}[\w-]{36}",
    "a token of Docker": r"\bdckr_(?:pat|oat)_[\w-]{20,}",
    "a key of AWS": r"\b(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA|AROA|AIDA)[0-9A-Z]{16}\b",
    "a key of Google": r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",
    "a key of Azure": r"(?i)\bAccountKey=[A-Za-z0-9+/=]{40,}|[?&]sig=[A-Za-z0-9%+/]{30,}",
    "a key of OpenAI or Anthropic": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a key of a model service": (r"\b(?:gsk_|r8_|nvapi-|xai-|pplx-|fw_|tgp_v1_|co_|jina_|lsv2_\w\w_|csk-)[\w-]{32,}"),
    "a key of Weights and Biases": (
        r"\bwandb_v1_[\w-]{20,}|(?i:wandb\.ai|wandb login|wandb[_ ]?(?:api)?[_ ]?key)\W{1,6}[0-9a-f]{40}\b"
        r"|(?i:wandb login\s{1,9}-[^\n]{0,80}?|\blogin\([^()]{0,100}?)\b[0-9a-f]{40}\b"
    ),
    "a key of Kaggle": (
        r"(?i:\busername\W{1,9}[\w.@-]{1,64}\W{1,9}key\W{1,9})[0-9a-f]{32}\b"
        r"|(?i:\bkey\W{1,9})[0-9a-f]{32}\W{1,9}(?i:username)\b"
    ),
    "a token of Slack": (
        r"\bxox[abeoprs](?:\.xox[bp])?-[\w-]{10,}|\bxapp-\d-[\w-]{10,}"
        r"|hooks\.slack\.com/(?:services|workflows)/[\w/]{20,}"
    ),
    "an address of a Discord webhook": r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "a key of Stripe": r"\b(?:sk|rk|whsec)_(?:live_|test_)?[0-9A-Za-z]{24,}",
    "a token of a service": (
        r"\b(?:shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|hv[sbr]\.[\w-]{24,}|do[op]_v1_[0-9a-f]{64}|dapi[0-9a-f]{32}"
        r"|lin_api_\w{32,}|ntn_\w{40,}|secret_\w{43}|sntrys_[\w+/=]{40,}|figd_[\w-]{30,}|PMAK-[0-9a-f-]{40,}"
        r"|ATATT3[\w=-]{40,}|SG\.[\w-]{16,}\.[\w-]{16,}|key-[0-9a-f]{32}\b|EAAC\w{30,}|rubygems_[0-9a-f]{48}"
        r"|cio[\w-]{32,}|tskey-[\w-]{20,}|pat-na1-[\w-]{30,}|NRAK-[A-Z0-9]{27}|glc_[\w+/=]{32,}|glsa_\w{32,})"
    ),
    "a private key": (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d"
        r"|\bAGE-SECRET-KEY-1[0-9A-Z]{20,}"
    ),
    "a JSON web token": (
        r"(?<![\w-])eyJ[\w-]{10,}={0,2}\.eyJ[\w-]{10,}={0,2}\.[\w-]*|(?<![\w-])eyJ[\w-]{10,}(?:\.[\w-]{16,}){2}"
    ),
}

# Tokens recognizable by their context.
IN_CONTEXT = {
    "a password in an address": r"://[^\s/:@\"'<>]{0,100}:[^\s/@\"'<>]{1,200}@[\w.\[-]",
    "a login of a .netrc": r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S+",
    "a login of Docker": r"\"(?:auth|identitytoken|registrytoken)\"\s*:\s*\"[\w+/=.-]{8,}\"",
    "a header with a credential": (
        r"(?i)\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token|digest)\s+[\w+/=.~-]{8,}"
    ),
    "a bearer token": r"(?i)\bbearer\s+(?=[\w+/=.~-]*\d)[\w+/=.~-]{20,}",
    "a password of a command": (
        r"(?i)\b(?:curl|wget|mysql|psql|sshpass)\b[^\n]{0,200}\s(?:-u|--user|-p|--password)[ =]?[\"']?"
        r"(?=[^\s\"']*[\d:])[^\s\"'-][^\s\"']{5,}"
    ),
}

LONG = {"a JSON web token", "a login of a .netrc"}  # with parts of unbounded length in the middle

# A name and its value: `WANDB_API_KEY=...`, `"password": "..."`, `token: ...`.
VALUE = (
    r"(?P<rest>[\w-]{0,24})[\"'`]?\]?\s{0,3}(?P<sign>[:=]{1,2}>?|,|\s)\s{0,3}(?P<quote>[\"'`]?)"
    r"(?P<value>[^\s\"'`,;<>(){}\[\]]{6,400})"
)
KEYED = re.compile(
    r"(?P<name>pass(?:word|wd|phrase)|(?<![a-z])p(?:wd|asswort|ass)(?![a-z])|secret|credentials?|api[_.-]?(?:key|token)|tokens?"
    r"|(?:access|auth|account|client|service|private|encryption|signing|master|session|storage|license)[_.-]?(?:key|id)?[_.-]?"
    r"(?:key|token|secret))" + VALUE,
    re.IGNORECASE,
)
VARIABLE = re.compile(r"(?<=[A-Z0-9])(?<!PUBLIC)_(?P<name>KEY)" + VALUE)  # `KAGGLE_KEY=...`; a `key` can be anything
OPTION = re.compile(r"(?:^|[\s\"'`>])--?[\w-]*$")  # before the name: `--password ...`
# Before and after a name and its value that are alone in a line, or in a text within quotes or tags.
ALONE = re.compile(r"(?:^|[\n\"'`>])[ \t]*(?:-[ \t]+)?[\w.-]*$"), re.compile(r"[ \t\r]*(?:#|[\n\"'`<]|$)")
ASSIGNED = re.compile(r"(?:^|[\s\"'`>])[\w.-]*$"), re.compile(r"[\s\"'`<]|$")  # the same for a variable or an option
PASSWORDS = {"password", "passwd", "passphrase", "passwort", "pwd"}
PHRASE = re.compile(  # a password of words or digits, not a reference to one
    r"(?!(?:.*[_-])?(?:password|passwd|passphrase|passwort|pwd)$)[a-z0-9]+(?:[_-][a-z0-9]+)*", re.IGNORECASE
)
CAMEL_CASE = re.compile("[a-z][A-Z]")
WORDS = re.compile(
    r"[A-Za-z]+(?:[_.-][A-Za-z0-9]+)*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[\d.,%eE+-]+|(?:\.{0,2}/)?[\w.-]+/[\w./-]+"
)
PLACEHOLDER = re.compile(
    r"(?:your|my|the|some|insert|enter|add)[-_.].*|\$.*|%.*|\*+|[xX]+|\.+|-+|_+|#.*|none|null|true|false|required|optional"
    r"|mandatory|undefined|encrypted|redacted|disabled|enabled"
    r"|(?:os|self|config|args|options|torch|np|nn|model)\..*|hf_\.*|hf_x+|change_?me",
    re.IGNORECASE,
)
SECRET_VARIABLES = re.compile(r"token|secret|passw|api_?key|access_?key|credential|private_?key", re.IGNORECASE)
# Rules of detect-secrets that are not used: an address or a random string alone is not a secret, and our rule for named
# values covers more names. The last four take quadratic time in the length of a line; ours replace them.
UNUSED_PLUGINS = {
    "IPPublicDetector", "Base64HighEntropyString", "HexHighEntropyString", "KeywordDetector", "NpmDetector",
    "JwtTokenDetector", "OpenAIDetector", "BasicAuthDetector",
}  # fmt: skip
SPACES, SHORT = re.compile(" {9,}"), 250  # characters around a word; no secret of these rules is longer
WITHOUT_DIGITS = {"Private Key"}

# Base64 in lines, as in MIME, PEM, YAML, JSON and source code. No part can match in two ways, so its time is linear.
LINE = r"[A-Za-z0-9+/_-]{16,}+"
LINE_END = r"(?:\\+[rnt]|\\(?=\s)|[\s\"'`,>#*|]){1,60}+"
ENCODED = re.compile(rf"{LINE}(?:{LINE_END}{LINE})*+(?:{LINE_END}[A-Za-z0-9+/_-]{{1,15}}+)?+")
LINES = re.compile(r"\\+[rnt]|(?P<letters>[A-Za-z0-9+/_-]+)")  # the n of an end in a string is no letter of a line
DIGITS_OF_A_NUMBER = 24  # fewer digits in a row are a number, not a text
WITH_A_WORD = 24  # letters; fewer do not have room for a secret after other letters
HEXADECIMAL = re.compile(r"(?:(?:0x)?[0-9a-fA-F]{2}(?:\\[rn]|[\s:,\"'])*+){12,}+")
# Runs of characters in decoded bytes: in UTF-8, and with zero bytes between them.
TEXT = re.compile("[^\0-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]{12,}")
WIDE_TEXT = re.compile(rb"[\t\r\n -~\xa0-\xff](?:\0{1,3}[\t\r\n -~\xa0-\xff]){11,}")
ESCAPED = re.compile(r"\\u\{?([0-9a-fA-F]{4,6})\}?|\\U([0-9a-fA-F]{8})|\\x([0-9a-fA-F]{2})|\\([\"'/nrt\\])")
AT_ONCE, APART = 100, "\n\0\n"  # texts searched together; what no rule and no encoding matches lies between them
INVISIBLE = re.compile("[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]")  # fmt: skip  # noqa: E501

Digits = tuple[int, str]  # the base, 64 or 16, and the digits
Found = tuple[int, str]  # a position, and what is there


def secrets_in(text: str, known: Collection[str] = ()) -> list[tuple[int, str]]:
    """Return the lines that seem to contain a secret and the kind of each, never the secret.

    Args:
        text: Text of any length.
        known: Known secrets, such as the user's token.
    """
    found: dict[int, str] = {}
    line = 1
    for start in range(0, max(1, len(text)), CHUNK):
        chunk = text[start : start + CHUNK + OVERLAP]
        here = list(_found(chunk, known, DEPTH))
        ends = [end.start() for end in re.finditer("\n", chunk)] if here else []
        for position, kind in here:
            found.setdefault(line + bisect_left(ends, position), kind)
        line += text.count("\n", start, start + CHUNK)
    return sorted(found.items())


def secrets_among_numbers(data: bytes, known: Collection[str] = ()) -> list[str]:
    """Return the kinds of secrets in the bytes of tensors: all printable runs are searched.

    Eight printable bytes in a row are rare in random numbers, so only aligned blocks of eight are tested first.
    """
    numbers = np.frombuffer(data, np.uint8)
    blocks = numbers[: len(numbers) // 8 * 8].reshape(-1, 8)
    ascii_blocks = np.flatnonzero(blocks.view(np.uint64)[:, 0] & 0x8080808080808080 == 0)
    readable = READABLE[blocks[ascii_blocks]].all(axis=1)
    found, searched = [], 0
    for place in (ascii_blocks[readable] * 8).tolist():
        if place < searched:
            continue
        start, searched = place, place
        while start > 0 and READABLE[numbers[start - 1]]:
            start -= 1
        while searched < len(numbers) and READABLE[numbers[searched]]:
            searched += 1
        if searched - start >= SHORTEST_TEXT:
            found += [kind for _, kind in secrets_in(data[start:searched].decode("ascii"), known)]
    return list(dict.fromkeys(found))


def known_secrets(token: str | bool | None = None) -> set[str]:
    """Return the secrets of this machine: the user's token, and environment variables named like secrets.

    Args:
        token: Access token of the push.
    """
    values = [value for name, value in os.environ.items() if SECRET_VARIABLES.search(name)]
    long = {value for value in values if len(value) >= SHORTEST_KNOWN and not value.isalpha() and "/" not in value}
    own = {each for each in (token, huggingface_hub.get_token()) if isinstance(each, str) and each}
    return long | own


def _found(text: str, known: Collection[str], depth: int) -> Iterator[Found]:
    """Yield the position and kind of each secret in a chunk; position 0 if only a decoded form reveals it."""
    digits = list(_digits_in(text))
    yield from _in_plain(text, known)
    yield from _in_encodings(digits, known, depth)
    seen = {each for _, each in digits}
    for view in _views(text):
        new = [each for each in dict.fromkeys(each for _, each in _digits_in(view)) if each not in seen]
        seen.update(new)
        for found in (_in_plain(view, known), _in_encodings([(0, each) for each in new], known, depth)):
            yield from ((0, f"{kind}, escaped or disguised") for _, kind in found)


def _in_encodings(digits: Sequence[tuple[int, Digits]], known: Collection[str], depth: int) -> Iterator[Found]:
    inner: dict[str, int] = {}
    for position, each in digits:
        for start, data in enumerate(_decoded(*each)):
            if start == 0 and kind_of(data) and (len(data) >= SHORTEST_FILE or is_packed(data)):
                yield position, "a pickle, packed data, an image or a document in base64"
            inner |= {text: position for text in _texts_in(data) if text not in inner}
    for some in _together(list(inner)) if depth else ():
        if len(some) == 1 or any(True for _ in _found(APART.join(some), known, depth - 1)):
            for text in some:
                yield from ((inner[text], f"{kind}, encoded") for _, kind in _found(text, known, depth - 1))


def _together(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield texts that are searched at once: long ones alone, short ones together, and only then one by one."""
    yield from ([text] for text in texts if len(text) > SHORT)
    short = [text for text in texts if len(text) <= SHORT]
    for start in range(0, len(short), AT_ONCE):
        yield short[start : start + AT_ONCE]


def _in_plain(text: str, known: Collection[str]) -> Iterator[Found]:
    for secret in known:
        if (position := text.find(secret)) >= 0:
            yield position, "a secret of this machine"
    lowered = lower(text)
    for kind, rule, anchors in _rules():
        for start, end in anchors.regions(text, lowered):
            for match in rule.finditer(text, start, end):
                if "name" not in rule.groupindex:
                    yield match.start(), kind
                elif _is_a_value(match):
                    yield match.start(), f"a value called {match['name'].lower()}"
    for plugin, patterns in _plugins():
        for start, end in (region for anchors in patterns for region in anchors.regions(text, lowered)):
            for value in plugin.analyze_string(SPACES.sub(" " * 8, text[start:end])):
                if plugin.secret_type in WITHOUT_DIGITS or any(char.isdigit() for char in value):
                    yield max(0, text.find(value, start)), plugin.secret_type


def _is_a_value(match: re.Match[str]) -> bool:
    """Return whether the value after a name is a secret, not a word, a variable or a number."""
    name, value, sign, quoted = match["name"].lower(), match["value"], match["sign"], bool(match["quote"])
    if PLACEHOLDER.fullmatch(value):
        return False
    if not quoted and match.string[match.end() : match.end() + 1] in ("(", "["):  # a call or an item in code
        return False
    random = any(map(str.isdigit, value)) and any(map(str.isalpha, value)) and _entropy(value) > 2.5
    mixed = random and len(value) >= 32 and value.lower() != value != value.upper()
    is_word = bool(WORDS.fullmatch(value)) and not mixed
    before = match.string[max(0, match.start() - 60) : match.start()]
    after = match.string[match.end() : match.end() + 60]
    is_long = random and len(value) >= 16 and not is_word
    is_apart = sign.isspace() or sign == ","
    is_name = name.startswith("token") or name.endswith("id") or name == "key"  # also terms of models: cls_token
    if is_apart and not OPTION.search(before):
        return is_long and not is_name
    if is_name:
        return is_long
    if is_apart:
        return random and not is_word
    is_phrase = name in PASSWORDS and not match["rest"] and bool(PHRASE.fullmatch(value))
    if quoted:
        return random or not is_word or (name.startswith("pass") and value.isascii() and value.isalpha()) or is_phrase
    if is_phrase and len(value) >= 8 and "\n" not in match[0]:
        if sign == ":" and not CAMEL_CASE.search(value) and ALONE[0].search(before) and ALONE[1].match(after):
            return True
        if sign == "=" and not value.isidentifier() and ASSIGNED[0].search(before) and ASSIGNED[1].match(after):
            return True
    return (random and not is_word) or (sign == "=" and "= " not in match[0] and value.isascii() and value.isalpha())


def _entropy(text: str) -> float:
    """Return the bits per character."""
    frequencies = [count / len(text) for count in Counter(text).values()]
    return -sum(frequency * math.log2(frequency) for frequency in frequencies)


def _views(text: str) -> Iterator[str]:
    """Yield the text with each encoding of characters decoded, where it has any."""
    if not text.isascii():
        plain = INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
        if plain != text:
            yield plain
    plain = text
    for _ in range(TIMES_ESCAPED):
        if not ESCAPED.search(plain):
            break
        plain = ESCAPED.sub(_character, plain)
        yield plain
    if "&" in text and (plain := html.unescape(text)) != text:
        yield plain
    if "%" in text and (plain := urllib.parse.unquote(text)) != text:
        yield plain


def _character(match: re.Match[str]) -> str:
    if match[4] is not None:
        return {"n": "\n", "r": "\r", "t": "\t"}.get(match[4], match[4])
    code = int(match[1] or match[2] or match[3], 16)
    return chr(code) if code <= 0x10FFFF else match[0]


def _digits_in(text: str) -> Iterator[tuple[int, Digits]]:
    """Yield the position of what can be base64 or hexadecimal, and its digits: lines together and each alone."""
    for match in ENCODED.finditer(text):
        lines = [line for line in LINES.finditer(text, match.start(), match.end()) if line["letters"]]
        for letters, position in _joined(lines).items():
            if len(letters) >= SHORTEST_TEXT and (len(letters) >= DIGITS_OF_A_NUMBER or not letters.isdigit()):
                yield position, (64, letters)
    for match in HEXADECIMAL.finditer(text):
        yield match.start(), (16, re.sub("0x|[^0-9a-fA-F]", "", match[0]))


def _decoded(base: int, digits: str) -> Iterator[bytes]:
    """Yield what digits mean from each of the first ones: a word before them then hides nothing."""
    if base == 64:
        for start in range(4 if len(digits) >= WITH_A_WORD else 1):
            yield from_base64(digits[start:])
    else:
        for start in range(2):
            yield bytes.fromhex(digits[start : start + (len(digits) - start) // 2 * 2])


def _joined(lines: list[re.Match[str]]) -> dict[str, int]:
    """Return the letters that may belong together, with their position: each line, all, and those of a regular block.

    A block has lines of one length and at most one shorter at its end; a word after it is not part of it.
    """
    blocks = [lines[:1]]
    for before, line in pairwise(lines):
        if len(line[0]) > len(before[0]) or len(before[0]) < len(blocks[-1][0][0]):
            blocks.append([])
        blocks[-1].append(line)
    without_a_word = [lines[:-1]] if len(lines) > 2 and len(lines[-1][0]) < SHORTEST_TEXT else []
    together = [lines, *without_a_word, *blocks, *([line] for line in lines)]
    return {"".join(line[0] for line in each): each[0].start() for each in reversed(together)}


def from_base64(letters: str) -> bytes:
    """Return what letters of either alphabet of base64 mean, without those of an incomplete byte at the end."""
    whole = letters[: len(letters) - (len(letters) % 4 == 1)].replace("-", "+").replace("_", "/")
    return binascii.a2b_base64(whole + "=" * (-len(whole) % 4))


def _texts_in(data: bytes) -> Iterator[str]:
    """Yield the texts in decoded bytes; ordinary words are valid base64 of meaningless bytes."""
    yield from TEXT.findall(data.decode("utf-8", "replace"))
    for each in WIDE_TEXT.findall(data) if data.count(0) >= 11 else ():
        yield each.replace(b"\0", b"").decode("latin-1")


@cache
def _rules() -> list[tuple[str, re.Pattern[str], Anchors]]:
    rules = [
        *((kind, re.compile(rule)) for kind, rule in (TOKENS | IN_CONTEXT).items()),
        *(("a named value", rule) for rule in (KEYED, VARIABLE)),
    ]
    return [(kind, rule, anchors_of(rule, OVERLAP) if kind in LONG else anchors_of(rule)) for kind, rule in rules]


@cache
def _plugins() -> list[tuple[Any, list[Anchors]]]:
    """Return the rule objects of detect-secrets with the anchors of each; importing them is slow."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    kinds: Any = get_mapping_from_secret_type_to_class().values()
    plugins = [kind() for kind in kinds if kind.__name__ not in UNUSED_PLUGINS]
    return [(plugin, [anchors_of(pattern, SHORT) for pattern in plugin.denylist]) for plugin in plugins]
