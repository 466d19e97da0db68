"""Sinks get every step once, also when a run is resumed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from courtside.errors import UserError
from courtside.report.trackers import open_trackers


def log_steps(name, folder, first, last):
    trackers = open_trackers([name], folder, project="court", run_name="digits", first_step=first)
    for step in range(first, last):
        trackers[0].log({"step": step, "kl": 1.0 / (step + 1 + first), "loss/a": None}, step)
    trackers[0].close()


def test_tensorboard_shows_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps("tensorboard", tmp_path, 0, 5)
    log_steps("tensorboard", tmp_path, 3, 7)  # resumed from a checkpoint of three steps
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["kl"]
    scalars = events.Scalars("kl")
    assert [event.step for event in scalars] == list(range(7))
    assert scalars[3].value == pytest.approx(1.0 / 7)  # the later one counts


class Service(ModuleType):
    """Speaks the few calls of wandb and trackio that we use, and remembers them."""

    class Error(Exception):
        pass

    def __init__(self, name):
        super().__init__(name)
        self.runs, self.rows, self.finished = [], [], 0

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        self.runs.append(arguments)
        return SimpleNamespace(log=self._log, finish=self.finish, name=arguments["name"])

    def _log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_each_step_once_under_one_identity(tmp_path, monkeypatch, name):
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    log_steps(name, tmp_path, 0, 5)
    log_steps(name, tmp_path, 3, 7)
    assert [step for step, _ in service.rows] == list(range(7))
    assert all(row.keys() == {"kl"} for _, row in service.rows)
    key = "id" if name == "wandb" else "name"
    first, second = service.runs
    assert first[key] == second[key] and first["resume"] == "allow"
    assert first["project"] == "court" and first["name"].startswith("digits")
    assert service.finished == 2
    # Another folder is another run, even under the same name.
    (tmp_path / "other").mkdir()
    log_steps(name, tmp_path / "other", 0, 1)
    assert service.runs[2][key] != first[key]


def test_wandb_without_a_login_is_the_users_to_solve(tmp_path, monkeypatch):
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)

    def refuse(**arguments):
        raise service.Error("api_key not configured")

    service.init = refuse
    with pytest.raises(UserError, match=r"api_key not configured.*WANDB_MODE=offline"):
        open_trackers(["wandb"], tmp_path, project="p", run_name="r")


@pytest.mark.parametrize(
    ("tracker", "package"),
    [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, tracker, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"run\.trackers.*pip install -e '\.\[tracking\]'"):
        open_trackers([tracker], tmp_path, project="p", run_name="r")


def test_unknown_trackers_are_refused(tmp_path):
    with pytest.raises(UserError, match="'csv' is not known"):
        open_trackers(["csv"], tmp_path, project="p", run_name="r")
