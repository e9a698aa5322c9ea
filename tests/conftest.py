"""Fixtures of all tests: an environment with nothing of ours in it, and the real things that several parts need."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import cheap_passwords
import clickhouse_server
import postgresql_server
import pytest
import pytest_randomly
import rings
from approved import ApprovedWords
from builders import Receiver, ServerProcess, server_process
from fake_accelerator.forked_tests import ForkedTests
from syrupy.assertion import SnapshotAssertion

LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# a shell that starts us in the background ignores it, for all our children
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _child_freezes() -> None:
    """The worker of a DataLoader must not collect what earlier tests left in this process: compiled kernels, event
    loops and thread pools cannot be taken down in a fork (a segmentation fault in the collector, once in 3372
    tests)."""
    gc.freeze()
    gc.enable()


os.register_at_fork(before=gc.disable, after_in_parent=gc.enable, after_in_child=_child_freezes)

pytest_randomly.entrypoint_reseeds = []  # DeepSpeed's would import torch in each process

NOT_IN_LIGHT = {
    "playwright": "dashboard",
    "kubernetes_validate": "e2e/test_deployment.py",
    "oidc_provider_mock": "server/security/test_oidc.py",
}
"""What scripts/install --light leaves out, and the tests that import it."""
collect_ignore = [tests for package, tests in NOT_IN_LIGHT.items() if importlib.util.find_spec(package) is None]

PREFIXES = ("PERFAGENT_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the tests marked `long`, too")
    parser.addoption("--postgresql", action="store_true", help="servers have a PostgreSQL database, not SQLite")
    parser.addoption("--clickhouse", action="store_true", help="servers have their samples in ClickHouse")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist get the address of the one server from the process that starts them."""
    cheap_passwords.use()
    config.pluginmanager.register(rings.Watch())
    config.pluginmanager.register(ForkedTests())
    if config.option.postgresql and not hasattr(config, "workerinput"):
        config.add_cleanup(postgresql_server.start())
    if config.option.clickhouse and not hasattr(config, "workerinput"):
        config.add_cleanup(clickhouse_server.start())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is about the other database, and what is marked `long`, unless --all or -m was given, or the test was
    named by its id."""
    rings.mark_unit_tests(items)
    others = ["sqlite" if config.option.postgresql else "postgresql"]
    others.append("blocks" if config.option.clickhouse else "clickhouse")
    left_out = [item for item in items if any(item.get_closest_marker(other) for other in others)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if config.option.all or config.option.markexpr:
        return
    named = [_address(config, word) for word in config.args if "::" in word]

    def wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("long") is None:
            return True
        inside = item.nodeid.partition("::")[2]
        return any(path == item.path and inside.startswith(test) for path, test in named)

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


def _address(config: pytest.Config, word: str) -> tuple[Path, str]:
    """The file and the test in it that a word of the command line names."""
    file, _, test = word.partition("::")
    return (config.invocation_params.dir / file).resolve(), test


def optimizers_alive() -> list[object]:
    torch = sys.modules.get("torch")
    return (
        [] if torch is None else [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
    )


def pytest_collection_finish() -> None:
    """An optimizer made while tests are collected, as a parameter of one, lives through all of them, and in each of
    their trainings it is a candidate for the one whose steps count."""
    if alive := optimizers_alive():
        raise pytest.UsageError(f"made while tests were collected: {alive}; make it inside of the test")
    freeze_what_is_left()


def freeze_what_is_left() -> None:
    """Half a million objects of imported modules would be looked through by each collection, and by each attach() that
    looks for the model and the optimizer: a fifth of the CPU time of all tests in one process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_optimizer_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """So is one that a file of tests, or we ourselves, hold on to."""
    before = [id(optimizer) for optimizer in optimizers_alive()]
    yield
    for item in request.session.items:  # pytest holds what the last test was given until all of its teardown is over
        (getattr(item, "funcargs", None) or {}).clear()
    gc.collect()
    left = [optimizer for optimizer in optimizers_alive() if id(optimizer) not in before]
    assert not left, "something still refers to these, though their tests are over"
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine's user reaches a test, and no test writes into the user's folders."""
    for name in list(os.environ):
        if name in LAUNCHERS or (name.startswith(PREFIXES) and not name.startswith("PERFAGENT_TEST_")):
            monkeypatch.delenv(name)
    # torch sets it in this process once its compiler is imported
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True, scope="module")
def no_database_is_left() -> Iterator[None]:
    yield
    postgresql_server.drop_all()
    clickhouse_server.drop_all()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A real `perfagent up`, ready, with data of its own."""
    with server_process(tmp_path / "server") as running:
        yield running


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same, one for all tests of a file."""
    with server_process(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A local webhook receiver that accepts everything."""
    with Receiver() as running:
        yield running


@pytest.fixture
def words(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """What people read, as tests/words.ambr has it approved."""
    return snapshot.use_extension(ApprovedWords)
