"""Keep an exported adapter as the study's starting point: in bfloat16, without a tokenizer.

python recipes/store_warm.py runs/warm-adapter recipes/targeted-hints/warm
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def store(exported: Path, to: Path) -> Path:
    tensors = load_file(exported / WEIGHTS)
    settings = json.loads((exported / SETTINGS).read_text())
    # What is unset other versions of PEFT may not know.
    settings = {name: value for name, value in settings.items() if value not in (None, {})}
    # As exported it is the folder of a cache, which is nobody else's.
    settings["base_model_name_or_path"] = "smollm2-135m"
    settings["target_modules"] = sorted(settings["target_modules"])
    to.mkdir(exist_ok=True)
    small = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(small, to / WEIGHTS, metadata={"format": "pt"})
    (to / WEIGHTS).chmod(0o644)
    (to / SETTINGS).write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path, help="what `courtside export --adapter` wrote")
    parser.add_argument("to", type=Path, help="the folder of the recipe's warm start")
    options = parser.parse_args()
    folder = store(options.exported, options.to)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
