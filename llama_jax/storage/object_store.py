"""S3 and compatible stores, and Google Cloud Storage, through obstore: a Rust library in one wheel.

It finds credentials in the environment and the machine's role; nothing here reads them.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llama_jax.errors import UserError, reason_of, shown
from llama_jax.storage.consistent_reader import FOLDER, StoreEntry, TimedOutError, TransientError

INSTALL_COMMAND = 'pip install -e ".[stores]"'
# Client options in addition to the time limit of a request. Servers without TLS are allowed if the environment names one:
# obstore ignores its environment variable for this when options are passed.
CLIENT_OPTIONS: Any = {"connect_timeout": "10s", "read_timeout": "60s", "allow_http": True}
# Time limits of a whole request in seconds: for small objects, such as the renewal of a lease; for others the minimum and
# the maximum, and in between the time of its bytes at MIN_RATE bytes per second.
SHORT_SECONDS, MIN_SECONDS, MAX_SECONDS, MIN_RATE = 15.0, 120.0, 900.0, 32 << 10
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://[^\s/:?#]+(:[0-9]+)?(/\S*)?", re.IGNORECASE)
STATUS_CODE = re.compile(r"status code: (\d{3})")
# A large object is uploaded in parts; stores allow 10,000, and parts are held in memory.
MIN_PART_BYTES, MAX_PARTS = 16 << 20, 9_000
TRANSIENT_STATUSES = {408, 425, 429}  # the 4xx statuses that may be retried
XML_MESSAGE = re.compile(r"<(Code|Message)>([^<]*)<")
NO_CREDENTIALS = ("169.254.", "token request", "metadata.google", "Error getting credentials", "AssumeRole")
CREDENTIAL_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}

Result = TypeVar("Result")


def open_bucket(root: str) -> ObjectBucket:
    """The bucket at s3://BUCKET or gs://BUCKET."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise UserError(f"{root} needs obstore, which is not installed; {INSTALL_COMMAND}") from None

    for name in ENDPOINTS:
        given = os.environ.get(name, "")
        if root.startswith("s3:") and given and not ENDPOINT.fullmatch(given):  # at which Rust would panic
            raise UserError(f"{name}={shown(given)} must be a URL with a host, such as https://HOST:PORT, or unset")

    def within(seconds: float) -> Any:
        options: Any = CLIENT_OPTIONS | {"timeout": f"{round(seconds * 1000)}ms"}
        # `consistent_reader.with_retries` retries instead, and logs the reason.
        return from_url(root, client_options=options, retry_config={"max_retries": 0})

    try:
        within(MIN_SECONDS)
    except (BaseError, ValueError) as error:
        raise UserError(f"{root} cannot be opened: {_first_line(error)}") from None
    return ObjectBucket(root, within)


ObjectVersion = Mapping[str, str]


class VersionedObject(NamedTuple):
    """One version of an object.

    Attributes:
      mark: identifies this version, so that `swap` replaces only it.
      modified: time of writing by the store's clock, in seconds since 1970.
    """

    content: bytes
    mark: ObjectVersion
    modified: float


class ObjectBucket:
    """A `Store`."""

    def __init__(self, root: str, within: Callable[[float], Any]) -> None:
        """Wrap the bucket that `within(seconds)` opens with obstore with this request timeout."""
        self._root = root
        self._within = cache(within)

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        import obstore

        found = self._call(folder, lambda bucket: obstore.list_with_delimiter(bucket, folder or None))
        below = f"{folder}/" if folder else ""
        names = {prefix.removeprefix(below): FOLDER for prefix in found["common_prefixes"]}
        for each in found["objects"]:
            if each["path"] != folder:  # some tools write this object to represent the folder
                names[each["path"].removeprefix(below)] = StoreEntry(each["size"], each["e_tag"])
        return names

    def head(self, key: str) -> StoreEntry | None:
        import obstore

        try:
            found = self._call(key, lambda bucket: obstore.head(bucket, key))
        except FileNotFoundError:
            return None
        return StoreEntry(found["size"], found["e_tag"])

    def read(self, key: str, start: int, stop: int, version: str | None) -> memoryview:
        import obstore

        options: Any = {"range": (start, stop)} | ({"if_match": version} if version else {})
        seconds = _seconds(stop - start)
        return self._call(key, lambda bucket: memoryview(obstore.get(bucket, key, options=options).bytes()), seconds)

    def write(self, key: str, content: Path | bytes, *, only_new: bool = False) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        part = max(MIN_PART_BYTES, -(-size // MAX_PARTS))
        mode: Any = "create" if only_new else "overwrite"
        try:
            self._call(
                key,
                lambda bucket: obstore.put(bucket, key, content, mode=mode, chunk_size=part),
                _seconds(min(size, part)),
            )
        except AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, "the object already exists", f"{self._root}/{key}") from None

    def stamped(self, key: str) -> VersionedObject | None:
        """A small object with its version, for `swap`; None if it does not exist."""
        import obstore

        def request(bucket: Any) -> VersionedObject:
            found = obstore.get(bucket, key)
            meta = found.meta
            return VersionedObject(bytes(found.bytes()), _mark(meta), meta["last_modified"].timestamp())

        try:
            return self._call(key, request, SHORT_SECONDS)
        except FileNotFoundError:
            return None

    def swap(self, key: str, content: bytes, mark: ObjectVersion | None) -> ObjectVersion | None:
        """Compare and swap: replace the version with this mark, or create the object if it is None.

        Returns:
          The new mark; None if the current version is another one, and nothing was written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        mode: Any = "create" if mark is None else mark
        try:
            return _mark(self._call(key, lambda bucket: obstore.put(bucket, key, content, mode=mode), SHORT_SECONDS))
        except AlreadyExistsError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE or (mark is not None and isinstance(error, FileNotFoundError)):
                return None
            raise

    def delete(self, key: str) -> None:
        import obstore

        self._call(key, lambda bucket: obstore.delete(bucket, key))

    def _call(self, key: str, request: Callable[[Any], Result], seconds: float | None = None) -> Result:
        """The result of a request; obstore's errors become a TransientError, or an OSError that names object and cause.

        Args:
          request: called with obstore's bucket.
          seconds: limit for each request; None is MIN_SECONDS.
        """
        from obstore import exceptions

        url = f"{self._root}/{key}" if key else self._root
        seconds = MIN_SECONDS if seconds is None else seconds
        began = time.monotonic()
        try:
            return request(self._within(seconds))
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, f"the store denies access ({_store_message(error)})", url) from None
        except exceptions.AlreadyExistsError:
            raise
        except exceptions.PreconditionError:
            raise OSError(errno.ESTALE, "the object was replaced while it was read; read it again", url) from None
        except (OSError, exceptions.BaseError) as error:
            found = self._classified(error, url)
            if isinstance(found, TransientError) and time.monotonic() - began >= seconds:
                found = TimedOutError(f"not done within {seconds:g} s")
            raise found from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; not a subclass of Exception
                raise
            raise OSError(errno.EIO, f"obstore failed ({reason_of(error)})", url) from None

    def _classified(self, error: Exception, url: str) -> Exception:
        text, line = str(error), _first_line(error)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
            return FileNotFoundError(errno.ENOENT, f"there is no bucket {self._root}", url)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "there is no such object", url)
        if any(each in line for each in NO_CREDENTIALS):
            wanted = CREDENTIAL_VARIABLES[self._root.partition(":")[0]]
            return PermissionError(errno.EACCES, f"no credentials were found: set {wanted} (docs/storage.md)", url)
        if "incorrectly configured region" in line:
            return OSError(errno.EIO, "the bucket is in another region; set AWS_REGION to it", url)
        status = STATUS_CODE.search(line)
        if status is not None and 400 <= int(status[1]) < 500 and int(status[1]) not in TRANSIENT_STATUSES:
            return OSError(errno.EIO, f"the store refused the request ({_store_message(error)})", url)
        if "non-partial response" in line:
            return OSError(errno.EIO, "the store does not support range requests, which are needed", url)
        return TransientError(_store_message(error))


def _seconds(size: int) -> float:
    """The time limit of a request of this many bytes: one of a few values, because obstore needs a client for each."""
    seconds = MIN_SECONDS
    while seconds * MIN_RATE < size and seconds < MAX_SECONDS:
        seconds *= 2
    return min(seconds, MAX_SECONDS)


def _mark(meta: Mapping[str, Any]) -> ObjectVersion:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _first_line(error: Exception) -> str:
    """obstore's message, without the dump of its error structure."""
    return str(error).partition("\n\nDebug source")[0]


def _store_message(error: Exception) -> str:
    """The store's message with the status, if there is one; otherwise obstore's message, without the address."""
    line = _first_line(error)
    words = ": ".join(text for _, text in XML_MESSAGE.findall(line))
    status = STATUS_CODE.search(line)
    if status is not None:
        return reason_of(f"{status[1]} {words}".strip(), 160)
    return reason_of(line.rpartition(" - ")[2], 160)
