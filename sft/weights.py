"""Base weights on disk: where they are, and each rank reading only its own shard of them."""

from pathlib import Path

from sft.errors import UserError

MODEL_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]


def weights_directory(name_or_path: str) -> Path:
    """The local directory with a model's safetensors files; a hub name is downloaded, or found in the cache.

    Raises: UserError when it cannot be found or holds no safetensors.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            directory = Path(snapshot_download(name_or_path, allow_patterns=MODEL_FILES))
        # The hub's HTTP library has changed twice; its errors are bases of the hub's own.
        except (*HfHubHTTPError.__bases__, OSError, ValueError) as error:
            raise UserError(
                f"base model {name_or_path} is neither a directory nor to be had from the hub: "
                f"{str(error).strip().splitlines()[0]} — give a local directory; HF_ENDPOINT selects a mirror"
            ) from error
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} holds no safetensors files; convert the model's weights to safetensors first")
    return directory
