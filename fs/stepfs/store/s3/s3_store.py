"""A store on S3.

Cancellation abandons all verbs but `create` at once. An abandoned thread ends with its timeout and touches no memory of the
caller: a read writes under a lock, an upload stops, and its checksum covers a changed buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from stepfs._internal import entropy
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.api import (
    DELETE_RESENT_S_MAX,
    Buffer,
    Counts,
    Entry,
    Progress,
    Put,
    byte_views,
    check_key,
    check_prefix,
    ignore_progress,
)
from stepfs.store.calls import Calls, age_s, http_date
from stepfs.store.s3.clients import Clients
from stepfs.store.s3.errors import FAILURES, broke_in_body, read_error
from stepfs.store.s3.upload import SINGLE_BYTES_MAX, Upload, encryption
from stepfs.store.server_answers import (
    PASSING,
    PIECE_BYTES,
    ReadTarget,
    Verdict,
    create_outcome,
    is_passing,
    whole_body,
)
from stepfs.store.settings import DATA_THREADS_MAX, S3, of_profile
from stepfs.store.silence import Silence

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import DeleteTypeDef, ListObjectsV2OutputTypeDef, ListObjectsV2RequestTypeDef

T = TypeVar("T")
Listing = list[Entry]  # inside the class `list` is the verb
COMMIT_TIMEOUT_S: Final = 15.0  # losers of a race wait up to 4 s on SeaweedFS
DATA_TIMEOUT_S: Final = 20.0  # without a byte; a loaded server takes seconds to acknowledge 64 MiB
_ADVICE_S: Final = 3.0  # for a request whose answer is only advice
_PAGE: Final = 1000  # S3's limit, for listing and for deleting
_ATTEMPTS_MAX: Final = 4
_SENDS_BODY: Final = {"PutObject", "UploadPart"}


class AnswerCount:
    """Counts the answers that began."""

    answers = 0


def download(client: S3Client, bucket: str, key: str, offset: int, target: ReadTarget) -> None:
    """Fill the rest of the buffer with the object's bytes from `offset` + `target.done`; one request."""
    first = offset + target.done
    last = offset + target.done + target.remaining - 1
    response = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")
    target.answers += 1
    body: Any = response["Body"]
    with closing(body), target.connected(body._raw_stream.shutdown):  # noqa: SLF001 - the only way to end a blocked read
        if not response.get("ContentRange", "").startswith(f"bytes {first}-"):
            raise RefusedError(f"s3://{bucket}/{key}: the server ignores Range requests; use another server")
        while piece := body.read(PIECE_BYTES):
            target.append(piece)


def page_entries(page: ListObjectsV2OutputTypeDef, prefix: str, *, ages: bool) -> list[Entry]:
    """The entries of one answer, keys without `prefix`. Without a readable Date every age is 0: unknown."""
    headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    now = http_date(headers.get("date")) if ages else None
    return [
        Entry(item["Key"].removeprefix(prefix), item["Size"], age_s(item.get("LastModified"), now))
        for item in page.get("Contents", [])
    ]


class S3Store:
    """`stepfs.store.api.Store` under `prefix` of `bucket`; no request is sent before the first call.

    `endpoint_url` None: the AWS chain's. STEPFS_SSE ('AES256', 'aws:kms', …) and STEPFS_SSE_KMS_KEY_ID: encryption.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        of_origin: bool = False,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        data_timeout_s: float = DATA_TIMEOUT_S,
        data_threads: int | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.bucket = bucket
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.counts = Counts()
        self.server = ""  # the Server header of the last answer
        self._prefix = f"{prefix}/" if prefix else ""
        self._clients = Clients(
            endpoint_url,
            commit_timeout_s,
            data_timeout_s,
            data_threads or DATA_THREADS_MAX,
            url=self.url,
            of_origin=of_origin,
            on_request=self._count,
            on_server=self._see,
            on_throttled=lambda: self.counts.add(throttled=1),
        )
        self._calls = Calls(self.url, S3, data_threads, silence)
        self._sending = threading.local()  # verb and keys of the call that this thread runs

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        name = self._name(key)
        answered, what = AnswerCount(), f"s3://{self.bucket}/{name}"

        def fetch() -> bytes:
            response = self._clients.data().get_object(Bucket=self.bucket, Key=name)
            answered.answers += 1
            with closing(response["Body"]) as body:
                pieces = iter(partial(body.read, PIECE_BYTES), b"")
                # A proxy that sends the body in chunks leaves the length out.
                size = response.get("ContentLength", 0)
                return whole_body(pieces, size, bytes_max, what, self._calls.sign_of_life)

        found = await self._get(key, fetch, answered)
        self.counts.add(bytes_read=len(found or b""))
        return found

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        name = self._name(key)
        target = ReadTarget(buffer, landed, self._calls.sign_of_life)

        def fetch() -> int:
            try:
                botocore = partial(download, self._clients.data(), self.bucket, name, offset, target)
                self._clients.direct().download(name, offset, target, botocore)
            except FAILURES as error:
                if target.remaining and read_error(error).verdict is not Verdict.PAST_END:
                    raise
            return target.done

        if target.remaining == 0:
            return 0
        try:
            return await self._get(key, fetch, target, data=True)
        finally:
            target.abandon()  # after any end of the wait: a thread may still be reading
            self.counts.add(bytes_read=target.done)

    async def create(self, key: str, body: bytes) -> Put:
        name = self._name(key)
        upload = Upload(self.bucket, name, byte_views([body]), encryption())
        try:
            await self._call("create", (key,), lambda: upload.create(self._clients.commit(), body), abandon=False)
        except FAILURES as error:
            outcome = create_outcome(read_error(error))
            if outcome is None:
                raise self._explain(error, "create", key) from error
            if outcome is Put.EXISTS:
                self._calls.rights.prove("create", [key])
            return outcome
        return Put.CREATED

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        name = self._name(key)
        views = byte_views(parts)
        upload = Upload(self.bucket, name, views, encryption())

        async def call(work: Callable[[], T], /, *, abandon: bool = True) -> T:
            return await self._call("put", (key,), work, abandon=abandon, data=True)

        try:
            if upload.length <= SINGLE_BYTES_MAX:
                await call(lambda: upload.send(self._clients.data(), crc32c))
            else:
                await upload.send_pieces(self._clients.data, call)
        except FAILURES as error:
            raise self._explain(error, "put", key, "write") from error
        finally:
            upload.abandoned.set()  # a thread that is still sending stops

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> Listing:
        check_prefix(prefix)
        found: Listing = []
        request: ListObjectsV2RequestTypeDef = {"Bucket": self.bucket, "Prefix": self._prefix + prefix}
        if after:
            request["StartAfter"] = self._prefix + after
        while limit is None or len(found) < limit:
            request["MaxKeys"] = _PAGE if limit is None else min(_PAGE, limit - len(found))
            try:
                page = await self._call("list", (prefix,), lambda: self._clients.data().list_objects_v2(**request))
            except FAILURES as error:
                raise self._explain(error, "list", prefix) from error
            found += page_entries(page, self._prefix, ages=ages)
            if not page.get("IsTruncated"):
                break
            request["ContinuationToken"] = page["NextContinuationToken"]
        return found

    async def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        for start in range(0, len(names), _PAGE):
            await self._delete_all(tuple(names[start : start + _PAGE]))

    @property
    def profile(self) -> str | None:
        return self._clients.chosen.profile if self._clients.chosen else None  # known after a request

    async def keeps_versions(self) -> bool:
        """Whether the bucket keeps overwritten and deleted objects; False if the server does not answer soon."""
        with suppress(StepfsError, *FAILURES), trio.move_on_after(_ADVICE_S):
            state = await self._call("get", (), lambda: self._clients.data().get_bucket_versioning(Bucket=self.bucket))
            return state.get("Status") == "Enabled"  # suspended: later writes replace each other
        return False

    async def _delete_all(self, batch: tuple[str, ...]) -> None:
        began_s = trio.current_time()
        for attempt in range(_ATTEMPTS_MAX):
            try:
                failed = await self._call("delete", batch, partial(self._delete, batch))
            except FAILURES as error:
                late = attempt == _ATTEMPTS_MAX - 1 or trio.current_time() - began_s > DELETE_RESENT_S_MAX
                if late or read_error(error).verdict not in PASSING:
                    raise self._explain(error, "delete", batch[0]) from error
            else:
                if not failed:
                    self._calls.rights.prove("delete", batch)
                    return
                for key, code in failed.items():
                    if not is_passing(code):
                        raise RefusedError(f"cannot delete {key} in {self.url} ({code}); check the rights of this role")
                batch = tuple(failed)
                if trio.current_time() - began_s > DELETE_RESENT_S_MAX:
                    break
            await trio.sleep(entropy.uniform(0.0, 0.1 * 2**attempt))
        raise StoreUnreachableError(f"cannot delete {batch[0]} in {self.url}: the server puts it off; retry later")

    async def aclose(self) -> None:
        await trio.to_thread.run_sync(self._clients.close)

    def _delete(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete at most 1,000 keys. Returns key → error code of those that are still there."""
        named: DeleteTypeDef = {"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True}
        answer = self._clients.delete().delete_objects(Bucket=self.bucket, Delete=named)
        failed = {error.get("Key", ""): error.get("Code", "") for error in answer.get("Errors", [])}
        return {name.removeprefix(self._prefix): code for name, code in failed.items() if code != "NoSuchKey"}

    async def _call(
        self, verb: str, keys: tuple[str, ...], work: Callable[[], T], *, abandon: bool = True, data: bool = False
    ) -> T:
        """Run `work` in a thread. `data`: it moves a body of any size, and must not delay control requests."""

        def labelled() -> T:
            self._sending.label = (verb, *keys)
            try:
                return work()
            except FAILURES as error:
                if read_error(error).verdict is not Verdict.SKEWED:
                    raise
                return work()  # with a fresh signature; the server did nothing for the stale one

        result = await self._calls.run(verb, labelled, data=data, abandon=abandon)
        if verb != "delete":  # a delete has an answer for each key
            self._calls.rights.prove(verb, keys)
        return result

    def _explain(self, error: Exception, verb: str, key: str, doing: str = "") -> StepfsError:
        if self.profile is not None:
            self._calls.words = of_profile(self.profile)
        return self._calls.explained(read_error(error), verb, key, doing, late=self._clients.may_come_late())

    async def _get(
        self, key: str, fetch: Callable[[], T], answered: AnswerCount | ReadTarget, *, data: bool = False
    ) -> T | None:
        """The result of `fetch`, called again for the rest of a body that did not arrive whole; None: absent. A
        request that no answer began is not repeated: the client has already done so.
        """
        for attempt in range(_ATTEMPTS_MAX):
            before = answered.answers
            try:
                return await self._call("get", (key,), fetch, data=data)
            except FAILURES as error:
                if read_error(error).verdict is Verdict.ABSENT:
                    self._calls.rights.prove("get", [key])
                    return None
                began = answered.answers > before
                if not (began and broke_in_body(error)) or attempt == _ATTEMPTS_MAX - 1:
                    raise self._explain(error, "get", key, "read") from error
            await trio.sleep(entropy.uniform(0.0, 0.1 * 2**attempt))
        raise AssertionError

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _count(self, operation: str, headers: Mapping[str, Any]) -> None:
        self.counts.note(*self._sending.label)
        if operation in _SENDS_BODY:
            self.counts.add(bytes_written=int(headers.get("Content-Length") or 0))

    def _see(self, server: str) -> None:
        self.server = server or self.server
        self._calls.sign_of_life()
