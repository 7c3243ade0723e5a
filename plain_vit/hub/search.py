"""Searching plain text for secrets: values known on this machine, token prefixes, and the rules of detect-secrets.

Nothing is decoded: a secret that is encoded, escaped or split is not found. The protection is the list of files that
are uploaded (`contents.py`); this search is a second check.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import huggingface_hub

PIECE, OVERLAP = 1000, 300  # characters; some rules of detect-secrets take time quadratic in the length of a line
SHORTEST_LINE = 8  # characters; no rule matches a shorter line
SHORTEST_KNOWN = 12  # characters; a shorter value of an environment variable may be an ordinary word
SECRET_VARIABLES = re.compile(r"token|secret|passw|api_?key|access_?key|credential|private_?key", re.IGNORECASE)

# Tokens, by prefix, that detect-secrets does not know, or does not find after other characters.
TOKENS = {
    "a token of Hugging Face": r"(?:hf|api_org)_[A-Za-z0-9]{30}",
    "a token of GitHub": r"gh[pousr]_[A-Za-z0-9]{30}|github_pat_\w{40}",
    "a token of npm": r"npm_[A-Za-z0-9]{36}",
    "a token of Docker": r"dckr_[po]at_[\w-]{20}",
    "a key of Google": r"AIza[\w-]{35}|ya29\.[\w-]{20}|GOCSPX-[\w-]{20}",
    "a key of Azure": r"[?&]sig=[\w%+/]{30}",
    "a key of OpenAI or Anthropic": r"sk-(?:ant|proj|or|svcacct|admin)-[\w-]{20}|sk-(?=[A-Za-z]*\d)[A-Za-z0-9]{32}",
    "a key of a model service": r"(?:gsk|r8|jina)_[A-Za-z0-9]{35}|(?:nvapi|xai|pplx)-[\w-]{40}|tgp_v1_[\w-]{40}",
    "a key of Weights and Biases": r"wandb_v1_[\w-]{20}|wandb[ .]login[^\n]{0,40}?[0-9a-f]{40}",
    "a token of Slack": r"xox[abeoprs]-[\w-]{10}|xapp-\d-[\w-]{10}|hooks\.slack\.com/(?:services|workflows)/[\w/]{20}",
    "an address of a Discord webhook": r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20}",
    "a token of a service": (
        r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|hv[sbr]\.[\w-]{24}|do[op]_v1_[0-9a-f]{64}|dapi[0-9a-f]{32}|figd_[\w-]{30}"
        r"|lin_api_\w{32}|sntrys_[\w+/=]{40}|PMAK-[0-9a-f-]{40}|ATATT3[\w=-]{40}|SG\.[\w-]{16,22}\.[\w-]{16}"
        r"|rubygems_[0-9a-f]{48}|tskey-[\w-]{20}|gl(?:c|sa)_[\w+/=]{32}|whsec_[0-9A-Za-z]{24}|sbp_[0-9a-f]{40}"
        r"|sb_secret_[\w-]{20}"
    ),
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY|PuTTY-User-Key-File-\d|AGE-SECRET-KEY-1[0-9A-Z]{20}",
    "a header with a credential": r"[Aa]uthorization[\"']?\s?[:=]\s?[\"']?(?:[Bb]earer|[Bb]asic)\s[\w+/=.~-]{16}",
    "the value of a token or key": (
        r"(?:[Tt]oken|TOKEN|(?<!PUBLIC)_KEY)[\"'\]]{0,2}\s?[=:]\s?[\"']?"
        r"(?:[0-9a-f]{32}|(?=[\w/+-]{0,99}[0-9])(?=[\w/+-]{0,99}[a-z])(?=[\w/+-]{0,99}[A-Z])[\w/+-]{32})"
    ),
    "encoded data": (
        r";base64,[A-Za-z0-9+/_-]{24}|(?=[A-Za-z+/_-]{0,99}\d)(?=[\d+/_-]{0,99}[A-Za-z])[A-Za-z0-9+/_-]{256}"
        r"|(?:[A-Za-z0-9+/]{60,100}+(?:\\[rn]|[\"',\s]){1,40}+){4}"
    ),
}
RULES = {kind: re.compile(rule) for kind, rule in TOKENS.items()}

# Rules of detect-secrets that are not used: an address or a random text, such as a hash, is not a secret by itself.
UNUSED_PLUGINS = {"IPPublicDetector", "Base64HighEntropyString", "HexHighEntropyString"}
NAMED = "Secret Keyword"  # its values extend to the end of the line; of several words, the first must have a digit
REAL_VALUE = re.compile(r"(?=.*[A-Za-z])(?!(?i:your|my|the|x+$|none|null|true|false))(?:\S{8,}|(?=\S*\d)\S{8,}\s.*)\s*")


def secrets_in(text: str, known: Collection[str] = (), name: str = "text.yaml") -> list[tuple[int, str]]:
    """Return the lines that seem to contain a secret and the kind of each, never the secret.

    Args:
        text: Plain text.
        known: Secrets to search for by value, such as the user's token.
        name: Name of the file: in code, only quoted values count as secrets.
    """
    found = [(text.find(secret), "a secret of this machine") for secret in known if secret in text]
    found += [(match.start(), kind) for kind, rule in RULES.items() for match in rule.finditer(text)]
    ends = [end.start() for end in re.finditer("\n", text)]
    lines = {bisect_right(ends, position) + 1: kind for position, kind in reversed(found)}
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) >= SHORTEST_LINE and number not in lines and (kind := next(_in_line(line, name), None)):
            lines[number] = kind
    return sorted(lines.items())


def known_secrets(token: str | bool | None = None) -> set[str]:
    """Return the secrets of this machine: the user's token, and environment variables named like secrets.

    Args:
        token: Access token of the push.
    """
    values = [value for name, value in os.environ.items() if SECRET_VARIABLES.search(name)]
    long = {value for value in values if len(value) >= SHORTEST_KNOWN and not value.isalpha() and "/" not in value}
    own = {each for each in (token, huggingface_hub.get_token()) if isinstance(each, str) and each}
    return long | own


def _in_line(line: str, name: str) -> Iterator[str]:
    """Yield what the rules of detect-secrets find in a line, searched in overlapping pieces."""
    for start in range(0, max(1, len(line) - OVERLAP), PIECE - OVERLAP):
        for plugin in _plugins():
            for secret in plugin.analyze_line(name, line[start : start + PIECE]):
                if secret.type != NAMED or REAL_VALUE.fullmatch(secret.secret_value):
                    yield "the value of a password or key" if secret.type == NAMED else f"a secret ({secret.type})"


@cache
def _plugins() -> list[Any]:
    """Return the rules of detect-secrets; importing them is slow."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    kinds: Any = get_mapping_from_secret_type_to_class().values()
    return [kind() for kind in kinds if kind.__name__ not in UNUSED_PLUGINS]
