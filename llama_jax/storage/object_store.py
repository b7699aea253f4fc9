"""S3 and compatible stores, and Google Cloud Storage, through obstore: a Rust library in one wheel.

It finds credentials in the environment and the machine's role; nothing here reads them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from llama_jax.errors import UserError, reason_of, short_repr
from llama_jax.storage.consistent_reader import FOLDER_ENTRY, StoreEntry

INSTALL_COMMAND = 'pip install -e ".[stores]"'
# `timeout` limits a whole request: 16 MiB need 55 KiB/s. Servers without TLS are allowed if the environment names one:
# obstore ignores its environment variable for this when options are passed.
CLIENT_OPTIONS: Any = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "300s", "allow_http": True}
# The retries of obstore, after 0.1, 0.2, ... 15 s: broken connections, timeouts and the status codes 5xx, 408 and 429.
RETRY_CONFIG: Any = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(r"https?://[^\s/:?#]+(:[0-9]+)?(/\S*)?", re.IGNORECASE)
STATUS_CODE = re.compile(r"status code: (\d{3})")
# A large object is uploaded in parts; stores allow 10,000, and parts are held in memory.
MIN_PART_BYTES, MAX_PARTS = 16 << 20, 9_000
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
        endpoint = os.environ.get(name, "")
        if root.startswith("s3:") and endpoint and not ENDPOINT.fullmatch(endpoint):  # at which Rust would panic
            raise UserError(f"{name}={short_repr(endpoint)} must be a URL with a host, such as https://HOST:PORT, or unset")

    try:
        return ObjectBucket(root, from_url(root, client_options=CLIENT_OPTIONS, retry_config=RETRY_CONFIG))
    except (BaseError, ValueError) as error:
        raise UserError(f"{root} cannot be opened: {_obstore_message(error)}") from None


class ObjectBucket:
    """A `Store`."""

    def __init__(self, root: str, bucket: Any) -> None:
        """Wrap a bucket that obstore has opened."""
        self._root = root
        self._bucket = bucket

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        import obstore

        listing = self._call(folder, lambda: obstore.list_with_delimiter(self._bucket, folder or None))
        below = f"{folder}/" if folder else ""
        names = {prefix.removeprefix(below): FOLDER_ENTRY for prefix in listing["common_prefixes"]}
        for info in listing["objects"]:
            if info["path"] != folder:  # some tools write this object to represent the folder
                names[info["path"].removeprefix(below)] = StoreEntry(info["size"], info["e_tag"])
        return names

    def head(self, key: str) -> StoreEntry | None:
        import obstore

        try:
            info = self._call(key, lambda: obstore.head(self._bucket, key))
        except FileNotFoundError:
            return None
        return StoreEntry(info["size"], info["e_tag"])

    def read(self, key: str, start: int, stop: int, version: str | None) -> memoryview:
        import obstore

        options: Any = {"range": (start, stop)} | ({"if_match": version} if version else {})
        return self._call(key, lambda: memoryview(obstore.get(self._bucket, key, options=options).bytes()))

    def write(self, key: str, content: Path | bytes, *, only_new: bool = False) -> None:
        import obstore

        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        part = max(MIN_PART_BYTES, -(-size // MAX_PARTS))
        mode: Any = "create" if only_new else "overwrite"
        self._call(key, lambda: obstore.put(self._bucket, key, content, mode=mode, chunk_size=part))

    def delete(self, key: str) -> None:
        import obstore

        self._call(key, lambda: obstore.delete(self._bucket, key))

    def _call(self, key: str, request: Callable[[], Result]) -> Result:
        """The result of a request; obstore's errors become an OSError that names object and cause."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except BaseException as error:
            # A panic of Rust is not a subclass of Exception.
            if not isinstance(error, OSError | BaseError) and type(error).__name__ != "PanicException":
                raise
            raise self._as_os_error(error, f"{self._root}/{key}" if key else self._root) from None

    def _as_os_error(self, error: BaseException, url: str) -> OSError:
        from obstore import exceptions

        text, line = str(error), _obstore_message(error)
        if not isinstance(error, OSError | exceptions.BaseError):
            return OSError(errno.EIO, f"obstore failed ({reason_of(error)})", url)
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return PermissionError(errno.EACCES, f"the store denies access ({_store_message(error)})", url)
        if isinstance(error, exceptions.AlreadyExistsError):
            return FileExistsError(errno.EEXIST, "the object already exists", url)
        if isinstance(error, exceptions.PreconditionError):
            return OSError(errno.ESTALE, "the object was replaced while it was read; read it again", url)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
            return FileNotFoundError(errno.ENOENT, f"there is no bucket {self._root}", url)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "there is no such object", url)
        if any(sign in line for sign in NO_CREDENTIALS):
            variables = CREDENTIAL_VARIABLES[self._root.partition(":")[0]]
            return PermissionError(errno.EACCES, f"no credentials were found: set {variables} (docs/storage.md)", url)
        if "incorrectly configured region" in line:
            return OSError(errno.EIO, "the bucket is in another region; set AWS_REGION to it", url)
        status = STATUS_CODE.search(line)
        if status is not None and 400 <= int(status[1]) < 500:
            return OSError(errno.EIO, f"the store refused the request ({_store_message(error)})", url)
        if "non-partial response" in line:
            return OSError(errno.EIO, "the store does not support range requests, which are needed", url)
        return OSError(errno.EIO, f"the request failed after retries ({_store_message(error)})", url)


def _obstore_message(error: BaseException) -> str:
    """obstore's message, without the dump of its error structure."""
    return str(error).partition("\n\nDebug source")[0]


def _store_message(error: BaseException) -> str:
    """The store's message with the status, if there is one; otherwise obstore's message, without the address."""
    line = _obstore_message(error)
    words = ": ".join(text for _, text in XML_MESSAGE.findall(line))
    status = STATUS_CODE.search(line)
    if status is not None:
        return reason_of(f"{status[1]} {words}".strip(), 160)
    return reason_of(line.rpartition(" - ")[2], 160)
