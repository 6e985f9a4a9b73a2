"""Uploads to a hub."""

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from sft.errors import RunFailed, UserError


def check() -> None:
    """Refuses an upload that cannot work before anything is computed. Raises: UserError."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("push_to_hub needs the network, but HF_HUB_OFFLINE is set; unset it, or leave push_to_hub out")
    if not get_token():
        raise UserError(f"push_to_hub needs a token for {constants.ENDPOINT}; run `hf auth login` or export HF_TOKEN")


def upload(directory: Path, repository: str, private: bool) -> None:
    """Uploads a directory to the hub that HF_ENDPOINT names. Raises: RunFailed, leaving the directory as it is."""
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=str(directory), commit_message="Add the merged model"
        )
    except (*HfHubHTTPError.__bases__, OSError) as error:  # whichever HTTP library this version of the hub uses
        raise RunFailed(
            f"{repository} could not be uploaded to {api.endpoint}: {str(error).strip().splitlines()[0]}. The merged model is "
            f"complete in {directory}; `hf upload {repository} {directory}` tries the upload alone"
        ) from error
    print(f"Uploaded to {commit.commit_url}")
