"""What a hub gives and takes: where the files of a model lie on this machine and of which commit they are, and uploads."""

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from sft.errors import RunFailed, UserError

MODEL_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja", "*.tiktoken", "LICENSE*"]
SECOND_COPIES = ["consolidated*", "original/*"]  # of the weights, in their makers' own form


def local_directory(name_or_path: str, revision: str | None = None, what: str = "base model") -> tuple[str, str | None]:
    """(directory, commit) of a model or adapter; a hub name is downloaded, or found in the cache. A local directory has no
    commit, and what is neither is returned as it is, for whoever loads it to refuse.

    revision: a commit, tag or branch; None is the newest commit. Raises: UserError when the hub does not give it.
    """
    if Path(name_or_path).is_dir():
        if revision:
            raise UserError(
                f"{what} {name_or_path} is a local directory, which has no revision {revision}; leave it out"
            )
        return name_or_path, None
    if name_or_path.count("/") != 1 or name_or_path.startswith(("/", ".")):
        return name_or_path, None
    try:
        directory = snapshot_download(
            name_or_path, revision=revision, allow_patterns=MODEL_FILES, ignore_patterns=SECOND_COPIES
        )
    except (*HfHubHTTPError.__bases__, OSError, ValueError) as error:  # as below
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"{what} {name_or_path}{at} is neither a directory nor to be had from the hub: "
            f"{str(error).strip().splitlines()[0]} — check the name; without a network give a local directory (HF_ENDPOINT "
            "selects a mirror, HF_HUB_OFFLINE=1 uses the local cache only)"
        ) from error
    return directory, Path(directory).name  # …/snapshots/<commit>


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
