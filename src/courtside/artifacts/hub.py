"""Uploads an export to the Hugging Face hub, or to the server that HF_ENDPOINT names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from courtside.artifacts.serving import public_name
from courtside.errors import RunError, UserError
from courtside.recipe.student import StudentConfig


def open_hub(repo: str, adapted: StudentConfig | None) -> Any:
    """A client that may write; a UserError says what is missing. Called before anything is written.

    The token comes from HF_TOKEN or from `hf auth login`. `adapted` is the student of an adapter.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if adapted is not None and public_name(adapted.model) is None:
        raise UserError(
            f"--push --adapter: the base model {adapted.model!r} is a folder of this machine, so "
            "nobody else could load the adapter. Push the merged weights (without --adapter)"
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: no name for a repository ({error})") from None
    if get_token() is None:
        raise UserError(
            "--push: there is no token for the hub. Set HF_TOKEN, or log in with `hf auth login`"
        )
    hub = HfApi()
    try:
        hub.whoami()
    except HfHubHTTPError as error:
        raise UserError(
            f"--push: {constants.ENDPOINT} refuses the token ({_first_line(error)}). Set HF_TOKEN "
            "to one that may write"
        ) from None
    except _connection_errors() as error:
        raise UserError(
            f"--push: {constants.ENDPOINT} cannot be reached ({_first_line(error)}). Leave --push "
            f"out, and upload the folder later: hf upload {repo} FOLDER"
        ) from None
    return hub


def push_folder(hub: Any, folder: Path, repo: str) -> str:
    """Upload into the repository and return its address. A new repository is private."""
    try:
        address = hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export by courtside")
    except _connection_errors() as error:
        raise RunError(
            f"--push {repo}: the upload failed ({_first_line(error)}). The export is in {folder}: "
            f"hf upload {repo} {folder}"
        ) from None
    return str(address)


def _connection_errors() -> Any:
    """OSError, and the base class of errors in the HTTP library that huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
