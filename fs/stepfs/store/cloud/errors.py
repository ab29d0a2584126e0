"""What obstore's errors say: texts, which are read for the status and the code of an answer."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from stepfs.store.server_answers import Answer, Verdict, verdict_of

_STATUS: Final = re.compile(r"Error performing [A-Z]+ \S+ in \S+ - Server returned non-2xx status code: (\d{3})\b")
_DELETED: Final = re.compile(r"Bulk delete request failed for key [^:]+: .*\(code: (\d{3})\)", re.DOTALL)
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_REASON: Final = re.compile(r'(?:message|error): "([^"]+)"|\b(TimedOut|Incomplete\w+)\b')
_OF_PROVIDER: Final = re.compile(r"credential provider: (.+?)(?:\.\s|$)")  # its first sentence
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_TOKEN: Final = re.compile(r"performing token request|credential error|credential provider")
_SKEWED: Final = re.compile(r"date header too old|in a reasonable timeframe", re.IGNORECASE)
_EXPIRED: Final = re.compile(r"not valid in the specified time frame", re.IGNORECASE)


def read_answer(text: str) -> Answer:
    head, _, cause = text.partition("\n\nDebug source:")
    found = _STATUS.search(head)
    lead = head[: found.start()] if found else head
    status = int(found[1]) if found else 0
    named = _CODE.search(head, found.end()) if found else None
    code = named[1] if named else ""
    said = f"{status} {code}".strip() if found else _reason(head, cause)
    if not found and (deleted := _DELETED.search(head)):
        status = int(deleted[1])  # of one blob of a batch, whose answer has a status alone
        absent = status == HTTPStatus.NOT_FOUND
        verdict = Verdict.ABSENT if absent else verdict_of(status, "")
        return Answer(verdict, f"{status} in a batch", status)
    if head.endswith("bytes long") and "Wanted range starting at" in head:
        return Answer(Verdict.PAST_END, said)
    if _SKEWED.search(head):
        return Answer(Verdict.SKEWED, said, status)
    if _NO_TOKEN.search(lead):
        return Answer(Verdict.EXPIRED, f"no token: {said}")
    if not found:
        distrusted = "InvalidCertificate" in cause
        return Answer(Verdict.DISTRUSTED if distrusted else Verdict.UNREACHABLE, said)
    return Answer(Verdict.EXPIRED if _EXPIRED.search(head) else verdict_of(status, code), said, status)


def unusable(text: str) -> Answer:
    """The reason why no client can be made: wrong settings, of which nothing is quoted."""
    said = _QUOTED.sub("…", text.partition("\n\nDebug source:")[0])
    return Answer(Verdict.EXPIRED, " ".join(said.split())[:300])


def _reason(head: str, cause: str) -> str:
    if provided := _OF_PROVIDER.search(head):
        return provided[1][:300]
    found = _REASON.findall(cause)
    return ("; ".join(message or word for message, word in found) or " ".join(head.split()))[:300]
