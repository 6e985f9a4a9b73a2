"""The model's tokenizer, loaded without the libraries that only a model needs."""

import contextlib
import os
from pathlib import Path

import transformers
from packaging.version import Version
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from sft.errors import UserError

BEFORE_5 = Version(transformers.__version__) < Version("5")  # with torch 2.1: 4.55 (requirements-torch21.txt)


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False):
    """The model's tokenizer. Raises: UserError when it cannot be found or read."""
    try:
        return _load_tokenizer(name_or_path, trust_remote_code)
    except Exception as error:  # the tokenizers library raises all its own as plain Exception
        if type(error) is not Exception and not isinstance(error, (TypeError, LookupError, AttributeError)):
            raise
        words = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"model_name_or_path {name_or_path}: its tokenizer cannot be read ({type(error).__name__}: {words}); tokenizer.json or "
            "tokenizer_config.json is damaged; copy or download it again"
        ) from error


def _load_tokenizer(name_or_path: str, trust_remote_code: bool):
    with explained_loading("model_name_or_path", name_or_path):
        settings = get_tokenizer_config(name_or_path) if BEFORE_5 else {}
        if settings.get("tokenizer_class") == "TokenizersBackend":  # transformers 5 wrote it; its 4 has no such class
            extra = settings.get("extra_special_tokens", [])
            return PreTrainedTokenizerFast.from_pretrained(
                name_or_path, extra_special_tokens={}, additional_special_tokens=extra
            )
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def explained_loading(what: str, name_or_path: str):
    """Turns what libraries raise while they load `what` into a sentence. Raises: UserError."""
    looks_local = os.path.isabs(name_or_path) or name_or_path.startswith(".") or name_or_path.count("/") != 1
    if looks_local and not Path(name_or_path).is_dir():
        raise UserError(
            f"{what} {name_or_path} is not a directory; give a local model directory or a hub name (owner/name)"
        )
    try:
        yield
    except UserError:  # a sentence already
        raise
    except ImportError as error:  # flash attention, mostly
        raise UserError(
            f"{what} {name_or_path} needs a package that is not here: {str(error).strip().splitlines()[0]}; install it, or "
            "use attn_implementation: packed_sdpa"
        ) from error
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # transformers names its own argument
            raise UserError(
                f"{what} {name_or_path} needs Python code that lies beside its weights; read that code, and allow it to run "
                "with --trust_remote_code on the command line (what a run's config.json says of it is ignored)"
            ) from error
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"{what} {name_or_path} could not be loaded: {first_line} — check the name; without a network give a local "
            "directory (HF_ENDPOINT selects a mirror, HF_HUB_OFFLINE=1 uses the local cache only)"
        ) from error
