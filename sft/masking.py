"""Texts without secrets, and without what identifies people and machines. Standard library only: the doctor needs it.

Secrets are known by their form (a key block, a token's prefix), by where they stand (a header, a URL) or by the name
before them. Forms: the rule sets of gitleaks and detect-secrets, and the vendors' documentation.
"""

import os
import re
import socket

SECRET = "<secret>"
FORMS = [
    # key blocks, whole or cut off, line ends as they are or as \n in JSON
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|.*?(?:\n\s*\n|\Z))",
    r"\b(?:hf|api_org|gh[pousr]|npm|r8|gsk|dop_v1|[rsp]k_(?:live|test))_[A-Za-z0-9]{12,}",
    r"\b(?:github_pat_|gl(?:pat|dt|rt|cbt|ptt)-|xox[abeoprs]-|xapp-|pypi-AgE|nvapi-|shpat_|GOCSPX-|ya29\.|dckr_pat_|lin_api_|"
    r"whsec_|hvs\.|AGE-SECRET-KEY-|sk-(?=[\w-]*\d)|(?:xai|pplx)-(?=\w*\d))[\w-]{8,}",
    r"\b(?:AKIA|ASIA|LTAI|AKID|AKLT)[A-Za-z0-9]{12,}\b",
    r"\bAIza[\w-]{30,}",
    r"\bms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}",
    r"\beyJ[\w-]{8,2000}\.[\w-]{8,}(?:\.[\w-]*)*",  # JSON web tokens
    r"\b\d{8,10}:AA[\w-]{30,}",  # Telegram
    r"\$(?:1|2[abxy]|5|6|y|apr1|argon2id?)\$[^\s:\"']{16,}",  # hashes of passwords
]
PLACES = [  # group 1 stays
    r"(?i)(authorization:[ \t]*digest[ \t]+)[^\r\n]+",
    r"(?i)(\b(?:proxy-)?authorization\\?[\"']?[ \t]*[:=][ \t]*\\?[\"']?(?:(?:basic|bearer|digest|token|negotiate|apikey|aws4-hmac-sha256)[ \t]+)?)[^\"'\r\n\\]+",
    r"(?i)(\bbearer[ \t]+)(?=[^\s\"']*\d)[\w.~+/=-]{8,}",
    r"(\bBasic[ \t]+)(?=\S*[\dA-Z=])[A-Za-z0-9+/]{12,}=*(?![\w-])",
    r"(?i)(\b(?:set-)?cookie2?\\?[\"']?[ \t]*[:=][ \t]*\\?[\"']?)[^\"'\r\n\\]+",
    r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/|open\.feishu\.cn/open-apis/bot/v2/hook/)[\w/-]+",
    r"(?i)(\blogin[ \t]+\S{1,100}[ \t]+password[ \t]+)\S+",  # .netrc
    r"(\b(?:mysql|mysqldump|sshpass|docker login)\b[^\n]{0,300}?[ \t]-p[ \t]*)[^\s-]\S*",
    r"(\bcurl\b[^\n]{0,300}?[ \t](?:-u|--user)[ \t]*[\"']?[^\s:\"']+:)[^\s\"']+",
    r"(?i)(\b(?:password|passphrase|passwd)[ \t]+is[ \t]+[\"']?)(?=[^\s,;]*\d)[^\s\"',;]+",
    r"((?:密码|口令|密钥)[ \t]*(?:[:：=是为][ \t]*)+)[^\s,，。;；]+",
]
NAME = r"[A-Za-z_][\w.-]{0,80}"  # bounded, as all that repeats: a line of a megabyte takes no longer than its share
NAMED = re.compile(  # a name and what stands between it and its value: `name: `, `"name": `, `--name `, `"--name", `
    rf"--?(?P<flag>{NAME})(?:\\{{0,8}}[\"'][ \t]*,[ \t]*(?=\\{{0,8}}[\"'])|[ \t]+(?!-))|(?P<name>{NAME})\\{{0,8}}[\"']?[ \t]*(?:=>|:=|==?|:)[ \t]*"
)
VALUE = re.compile(
    r"""(\\{1,8}")(.*?)\\{1,8}"|(")((?:[^"\\\n]|\\.)*)"|(')((?:[^'\\\n]|\\.)*)'|(["']?)([^\s"'&;]+)"""  # quotes, content
)
QUERY = re.compile(r"([?&])([\w.%-]+)=([^&#\s\"'<>]+)")

PASSWORDS = ("password", "passwd", "pwd", "passphrase", "passcode", "pw", "secret", "psw")
GLUED = (
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "accountkey",
    "authkey",
    "sessionid",
    "credential",
    "credentials",
    "auth",
)
OF_KEYS = {"api", "access", "secret", "private", "account", "signing", "encryption", "auth", "master", "license", "service",
           "storage", "shared", "session", "subscription", "client", "deploy", "host"}  # fmt: skip
OF_TEXT_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "special", "end", "start", "turn", "next", "first",
                  "last", "target", "per", "image", "video", "audio", "unexpected", "decoder", "think"}  # fmt: skip
SIGNED = {"signature", "sig", "sign", "key", "code", "credential", "keyid", "accessid", "pair"}  # in a URL's query
NO_SECRETS = {"", "true", "false", "null", "none", "yes", "no", "auto", "on", "off", "required", "optional", "not"}


def _words(name: str) -> list[str]:
    """A name's words in lower case, numbers left out: "accessToken2" → access, token."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_secret(name: str, value: str) -> bool:
    """Whether `value` under that name is to be hidden: a password, or a token or key of some length."""
    words = _words(name)
    if not words or value.lower() in NO_SECRETS or value[0] in "<${%":
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last.endswith(PASSWORDS) or (last == "pass" and before not in ("", "forward", "backward", "first", "second")):
        return True
    if last == "id" and words[-2:] != ["session", "id"]:  # access_key_id
        words, last, before = words[:-1], before, words[-3] if len(words) > 2 else ""
        if last == "token":
            return False
    named = (
        last.endswith(GLUED)
        or (last.endswith("token") and before not in OF_TEXT_TOKENS)
        or (last == "key" and (before in OF_KEYS or (name.isupper() and before != "")))
        or words[-2:] == ["session", "id"]
    )
    return named and len(value) >= 6


def _mask_named(text: str) -> str:
    parts, place = [], 0
    while match := NAMED.search(text, place):
        parts.append(text[place : match.end()])
        place = match.end()
        value = VALUE.match(text, place)
        if not value:
            continue
        quote, content = next((q, c) for q, c in zip(value.groups()[::2], value.groups()[1::2]) if c is not None)
        rest = ""
        if value.group(8) is not None:
            content = value.group(8).rstrip(",.)}]>\\")
            rest = value.group(8)[len(content) :]
        if content and is_secret(match["flag"] or match["name"], content):
            closing = "" if value.group(8) is not None else quote
            parts.append(quote + SECRET + closing + rest)
            place = value.end()
    return "".join(parts) + text[place:]


def _mask_query(match: re.Match) -> str:
    sign, name, value = match.groups()
    hidden = bool(SIGNED & set(_words(name)[-1:])) or is_secret(name, value) or name.lower().endswith("accesskeyid")
    return f"{sign}{name}={SECRET if hidden else value}"


def mask(text: str) -> str:
    """The text without passwords, tokens and keys; <secret> stands for each. Names, schemes and users' URLs stay readable."""
    text = re.sub("|".join(FORMS), SECRET, text, flags=re.DOTALL)
    for pattern in PLACES:
        text = re.sub(pattern, rf"\1{SECRET}", text)
    text = re.sub(r"(://)[^/\s\"'<>]{1,300}@", rf"\1{SECRET}@", text)
    return _mask_named(QUERY.sub(_mask_query, text))


def mask_variables(variables: dict[str, str]) -> dict[str, str]:
    """Environment variables whose values may be written to a file."""
    return {name: SECRET if is_secret(name, value) else mask(value) for name, value in variables.items()}


def anonymise(text: str, keep: tuple[str, ...] = ()) -> str:
    """`mask`, and without user names, home directories, host names, mail and network addresses.

    keep: versions that look like addresses (a driver's 24.1.0.3).
    """
    text = re.sub(r"[\w.+-]{1,64}@[\w-]{1,64}\.[\w.]+", "<mail>", mask(text))
    text = re.sub(r"/(?:home|Users)/[^/\s\"':,;)]+", "/home/<user>", text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    for name in {socket.gethostname(), socket.gethostname().split(".")[0], os.environ.get("HOSTNAME", "")}:
        if name:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "<host>", text)
    for name in {os.environ.get(key, "") for key in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")} - {"root", ""}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<user>", text) if len(name) > 2 else text

    def address(match: re.Match) -> str:
        local = match[0].startswith("127.") or match[0] in ("0.0.0.0", "::1")
        return match[0] if local or match[0] in keep else "<address>"

    text = re.sub(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)", address, text)
    return re.sub(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])|\bfe80::[\w:%]+", "<address>", text)
