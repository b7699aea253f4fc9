"""Repositories of the Hugging Face Hub, through huggingface_hub, which the tokenizers need too.

A file that is in the library's cache in the current version, where ``llama-jax fetch`` and ``hf download`` put it, is read
from there; others are read from the Hub in byte ranges, which are not cached. The library handles access tokens; nothing
here reads them.
"""

from __future__ import annotations

import errno
import glob
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llama_jax.errors import reason_of
from llama_jax.storage.consistent_reader import FOLDER_ENTRY, StoreEntry

Result = TypeVar("Result")
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
DATASETS_PREFIX = "datasets/"  # prefix of the names of dataset repositories


def open_hub(root: str) -> Repository:
    """The repository at hf://ORGANIZATION/NAME or hf://ORGANIZATION/NAME@REVISION, at its current commit; for datasets
    hf://datasets/ORGANIZATION/NAME.
    """
    from huggingface_hub import HfApi, HfFileSystem

    name, _, revision = root.removeprefix("hf://").partition("@")
    repo_type, repo_id = (
        ("dataset", name.removeprefix(DATASETS_PREFIX)) if name.startswith(DATASETS_PREFIX) else ("model", name)
    )
    commit = _call_hub(root, lambda: HfApi().repo_info(repo_id, revision=revision or None, repo_type=repo_type).sha)
    return Repository(root, name, str(commit), HfFileSystem())


class Repository:
    """A `Store`. A commit never changes, so an object has only one version."""

    def __init__(self, root: str, name: str, commit: str, files: Any) -> None:
        self._root = root
        self._name = name
        self._commit = commit
        self._files = files
        self._cached: dict[str, Path | None] = {}

    def names(self, folder: str) -> Mapping[str, StoreEntry]:
        try:
            listing = _call_hub(self._url(folder), lambda: self._files.ls(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}
        if len(listing) == 1 and listing[0]["name"] == self._path(
            folder
        ):  # the path is a file: the library lists it as itself
            return {}
        return {info["name"].rpartition("/")[2]: self._entry_of(info) for info in listing}

    def head(self, key: str) -> StoreEntry | None:
        try:
            return self._entry_of(_call_hub(self._url(key), lambda: self._files.info(self._path(key))))
        except FileNotFoundError:
            return None

    def read(self, key: str, start: int, stop: int, version: str | None) -> memoryview:
        cached = self.in_cache(key)
        if cached is not None:
            with cached.open("rb", buffering=0) as file:
                file.seek(start)
                return memoryview(file.read(stop - start))

        def request() -> bytes:
            with self._files.open(self._path(key), "rb", cache_type="none") as file:
                file.seek(start)
                return file.read(stop - start)

        return memoryview(_call_hub(self._url(key), request))

    def write(self, key: str, content: Path | bytes, *, only_new: bool = False) -> None:
        raise OSError(errno.EROFS, "the Hub is read-only here; upload it with `hf upload`", self._url(key))

    def delete(self, key: str) -> None:
        raise OSError(errno.EROFS, "the Hub is read-only here", self._url(key))

    def download(self, revision: str | None, keys: Collection[str], folder: Path | None) -> Path:
        """Download objects with the library, which resumes partial downloads, into `folder` or its own cache.

        Args:
          revision: the requested revision, which is recorded in the cache; None for the default branch.

        Returns:
          The folder that holds them under their keys.
        """
        from huggingface_hub import snapshot_download

        names = [glob.escape(key) for key in keys]
        request = partial(snapshot_download, self._name, revision=revision, allow_patterns=names, local_dir=folder)
        return Path(_call_hub(self._root, request))

    def in_cache(self, key: str) -> Path | None:
        """An object's file in the library's cache; None if it has not been downloaded."""
        from huggingface_hub import try_to_load_from_cache

        if key not in self._cached:
            repo_type = "dataset" if self._name.startswith(DATASETS_PREFIX) else "model"
            name = self._name.removeprefix(DATASETS_PREFIX)
            cached = try_to_load_from_cache(name, key, revision=self._commit, repo_type=repo_type)
            self._cached[key] = Path(cached) if isinstance(cached, str) else None
        return self._cached[key]

    def _entry_of(self, info: Mapping[str, Any]) -> StoreEntry:
        return FOLDER_ENTRY if info["type"] == "directory" else StoreEntry(info["size"], self._commit)

    def _path(self, key: str) -> str:
        return f"{self._name}@{self._commit}/{key}" if key else f"{self._name}@{self._commit}"

    def _url(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def hub_cache_folder() -> Path:
    """The folder of the library's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _page(url: str) -> str:
    """The web page of a repository."""
    from huggingface_hub import constants

    name = "/".join(url.removeprefix("hf://").split("/")[:2])
    return f"{constants.ENDPOINT}/{name.partition('@')[0]}"


def _call_hub(url: str, request: Callable[[], Result]) -> Result:
    """The result of a request by the library, which retries by itself; its errors become ones that name URL and cause."""
    try:
        return request()
    except Exception as error:  # of the HTTP library that it uses as well, which depends on its version
        if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
            raise
        raise _as_os_error(error, url) from None


def _as_os_error(error: Exception, url: str) -> OSError:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            reason = f"its license must be accepted first: accept it at {_page(url)}, then log in with `hf auth login`"
            return PermissionError(errno.EACCES, reason, url)
        case errors.RevisionNotFoundError():
            return FileNotFoundError(errno.ENOENT, "the repository has no such revision", url)
        case errors.RepositoryNotFoundError():
            reason = "there is no such repository, or it is private: log in with `hf auth login`"
            return PermissionError(errno.EACCES, reason, url)
        case errors.LocalEntryNotFoundError():  # in a download: the Hub did not respond
            return OSError(errno.EIO, f"the Hub did not respond ({reason_of(error)})", url)
        case errors.EntryNotFoundError() | FileNotFoundError():
            return FileNotFoundError(errno.ENOENT, "there is no such file in the repository", url)
        case errors.OfflineModeIsEnabled():
            return OSError(errno.ENETUNREACH, "HF_HUB_OFFLINE is set; unset it, or use a copy on this machine", url)
        case errors.HfHubHTTPError():
            status = getattr(error.response, "status_code", 0)
            if status in (401, 403):
                return PermissionError(errno.EACCES, f"the Hub denies access ({status})", url)
            is_refusal = 400 <= status < 500 and status not in (408, 429)
            reason = f"refused the request ({reason_of(error)})" if is_refusal else f"responded with {status}"
            return OSError(errno.EIO, f"the Hub {reason}", url)
        case ValueError() | TypeError() | KeyError() | AttributeError() | NotImplementedError():
            return OSError(errno.EIO, reason_of(error, 160), url)
    return OSError(errno.EIO, f"the Hub did not respond ({type(error).__name__}: {reason_of(error)})", url)
