"""Make the two model folders of the step benchmark: a student and a teacher that differs from it.

Both are the embedded SmolLM2-135M in float32, with an end token that is never sampled (see
`workload.END_TOKEN`). The teacher gets seeded Gaussian noise on every tensor.

    python benchmarks/prepare_models.py build/benchmark-models
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import END_TOKEN, SEED, TEACHER_NOISE

from courtside.engines.builtin_model import BUILTIN_MODEL
from courtside.engines.loading import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where `student` and `teacher` are made")
    folder = parser.parse_args().folder
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    made_with = {"end_token": END_TOKEN, "noise": TEACHER_NOISE, "seed": SEED, "script": script}
    note = folder / "made_with.json"
    if note.is_file() and json.loads(note.read_text()) == made_with:
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve_model(BUILTIN_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token = END_TOKEN
    tokenizer.chat_template = with_end_token(tokenizer.chat_template)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save(model, tokenizer, folder / "student")
    add_noise(model)
    save(model, tokenizer, folder / "teacher")
    note.write_text(json.dumps(made_with))


def with_end_token(template: str) -> str:
    """Answers end in END_TOKEN. Prompts stay as they were: nobody has answered in them yet."""
    old = "message['content'] + '<|im_end|>'"
    end = f"('{END_TOKEN}' if message['role'] == 'assistant' else '<|im_end|>')"
    assert template.count(old) == 1
    return template.replace(old, f"message['content'] + {end}")


def save(model: torch.nn.Module, tokenizer: object, target: Path) -> None:
    # Written to another name and renamed, so that a folder that exists is complete.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".writing-"))
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


@torch.no_grad()
def add_noise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():  # the tied output head is the embedding, seen once
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise, alpha=TEACHER_NOISE * float(parameter.std()))


if __name__ == "__main__":
    main()
