"""What is said of versions: that the claims are those of pyproject.toml, and what each costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from courtside.engines import compatibility
from courtside.engines.compatibility import (
    TESTED,
    describe_new_versions,
    format_release,
    parse_release,
    refuse_old_versions,
)
from courtside.engines.loading import load_model
from courtside.errors import ModelError
from courtside.recipe.student import StudentConfig
from courtside.training.weights import StudentWeights

REPOSITORY = Path(__file__).resolve().parents[3]


def test_pyproject_asks_for_the_oldest_that_was_tested_and_bars_no_newer_one() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for tested in TESTED:
        (line,) = [d for d in project["dependencies"] if re.match(rf"{tested.package}\W", d)]
        assert line == f"{tested.package}>={format_release(tested.oldest)}"


def test_measured_numbers_have_versions_that_were_tested() -> None:
    pins = dict(
        line.split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    for tested in TESTED:
        assert tested.oldest <= parse_release(pins[tested.package]) <= tested.newest


def test_make_versions_runs_both_ends() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for tested in TESTED:
        for end in (tested.oldest, tested.newest):
            assert re.search(rf"{tested.package}=={re.escape(format_release(end))}\.", makefile)


def test_the_documentation_names_both_ends() -> None:
    page = (REPOSITORY / "docs" / "supported-models.md").read_text()
    for tested in TESTED:
        oldest, newest = format_release(tested.oldest), format_release(tested.newest)
        assert re.search(rf"\| {tested.package} \| {oldest}\.\d+ \| {newest}\.\d+ \|", page)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        tested = next(t for t in TESTED if t.package == package)
        return versions.get(package, format_release(tested.newest) + ".1+cpu")

    monkeypatch.setattr(compatibility, "version", version)


def test_versions_that_were_tested_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, transformers="5.17.0", torch="2.11.0+cu130", peft="0.21.0")
    refuse_old_versions()
    assert describe_new_versions() == []
    install(monkeypatch)
    refuse_old_versions()
    assert describe_new_versions() == []


def test_a_newer_one_is_named_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = TESTED[1].newest
    for newer in (f"{major}.{minor + 1}.0.dev0", f"{major + 1}.0"):
        install(monkeypatch, transformers=newer)
        refuse_old_versions()
        (note,) = describe_new_versions()
        assert note.startswith(f"transformers {newer} is newer than {major}.{minor}, the newest")
        assert "probe" in note


@pytest.mark.parametrize("older", ["5.16.1", "4.57.6"])
def test_an_older_one_is_refused_with_the_fix(older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, transformers=older)
    says = rf"transformers {older} is installed.*5\.17 or newer.*pip install -e \."
    with pytest.raises(ModelError, match=says):
        refuse_old_versions()


def test_it_is_refused_before_anything_of_it_is_imported(tmp_path: Path) -> None:
    """By an installation whose version is too old and whose code cannot be imported."""
    (tmp_path / "transformers-4.57.6.dist-info").mkdir()
    metadata = tmp_path / "transformers-4.57.6.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    (tmp_path / "transformers.py").write_text("raise ImportError('it has no AttentionInterface')\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import courtside.engines.local"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert process.returncode and "ModelError: transformers 4.57.6 is installed" in process.stderr


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise compatibility.PackageNotFoundError(package)

    monkeypatch.setattr(compatibility, "version", missing)
    with pytest.raises(ModelError, match=r"torch is not installed: pip install -e \."):
        refuse_old_versions()


def test_checkpointing_is_switched_by_either_name(tiny_folder: Path) -> None:
    """By the name that the installed version has, without its warning about the other."""
    config = StudentConfig(model=str(tiny_folder), gradient_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        weights = StudentWeights(config, seed=0)
        assert weights.uses_gradient_checkpointing
        assert not compatibility.uses_activation_checkpointing(weights.copy())

    class Older:
        is_gradient_checkpointing = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
            assert gradient_checkpointing_kwargs == {"use_reentrant": False}
            self.is_gradient_checkpointing = True

        def gradient_checkpointing_disable(self) -> None:
            self.is_gradient_checkpointing = False

    model = Older()
    compatibility.enable_activation_checkpointing(model)
    assert compatibility.uses_activation_checkpointing(model)
    compatibility.disable_activation_checkpointing(model)
    assert not compatibility.uses_activation_checkpointing(model)


def test_a_soft_cap_of_attention_is_not_left_out(tmp_path: Path) -> None:
    """With every version: SDPA has none, and some versions choose it for Gemma 2 nonetheless."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, attn_logit_softcapping=0.5,
        initializer_range=0.5, attn_implementation="eager", pad_token_id=1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded: Any = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(20)[None] * 7
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    difference = loaded(ids).logits - model(ids).logits
    assert float(difference.detach().abs().max()) > 1e-2, "else the cap would not show"
