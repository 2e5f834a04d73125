"""Questions to the hub: the commit of a revision, and the files of a commit with their sizes and digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rubberband.errors import InputError
from rubberband.spec.fetching import Source

TOKEN = "HF_TOKEN"
"""Variable with the token, as `resources.secrets` names it."""
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a commit."""

    path: str
    size: int
    digest: str
    """Hexadecimal SHA-256 of a large file; of a small one Git's SHA-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A commit of a model or a dataset."""

    commit: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class NoAnswerError(Exception):
    """The hub cannot be asked now; the message is one line that says why."""


def look_up(source: Source, commit: str | None, token: str | bool | None, endpoint: str | None = None) -> Listing:
    """Return the files of a source at `commit`; None: that of its revision now.

    `token`: None is that of this user, False is none. `endpoint`: None is that of HF_ENDPOINT. Raises InputError for
    what the hub refuses, NoAnswerError if it does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    name, kind, place = source.name, source.kind, source.place
    remedy, api = f"write resources.secrets: [{TOKEN}]", HfApi(endpoint, token=token)
    try:
        found: Any = api.repo_info(
            name, repo_type=kind, revision=commit or source.revision, files_metadata=True, timeout=_PATIENCE_S
        )
        if getattr(found, "gated", False):  # its files are listed for everyone
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        url = f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        why = f"the token of {TOKEN} has no access" if token else "there is no token"
        raise InputError(f"{place}: {name} is gated, and {why}; accept its terms at {url}, and {remedy}") from None
    except RevisionNotFoundError:
        raise InputError(
            f"{place}: {name} has no revision {commit or source.revision}; name a branch, a tag or a commit"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{place}: the hub {api.endpoint} has no {kind} {name}, or it is private; correct the name, or {remedy}"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise InputError(f"{place}: the hub refuses the token for {name} ({status}); correct {TOKEN}") from None
        raise NoAnswerError(f"{api.endpoint} answers {status}") from None
    except Exception as error:  # of the HTTP client, which is another one in other versions
        raise NoAnswerError(f"{api.endpoint} does not answer ({type(error).__name__})") from None
    files = tuple(
        File(path=each.rfilename, size=each.size or 0, digest=(each.lfs.sha256 if each.lfs else each.blob_id) or "")
        for each in found.siblings or ()
    )
    return Listing(commit=str(found.sha), files=files)
