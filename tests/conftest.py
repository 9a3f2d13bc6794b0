"""For every test: the order, what several files share, and Ctrl-C, which means something in the background too."""

import signal

import pytest


def pytest_configure(config):
    # A background job inherits an ignored SIGINT, and Python then never raises KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Replays come when most are executed already, and real servers last: nothing runs beside them then."""
    items.sort(key=lambda item: 2 if item.get_closest_marker("vllm") else "replay" in _parameters(item))


@pytest.fixture(scope="session", autouse=True)
def replays(request, tmp_path_factory):
    """Executes notebooks beside the other tests, from the first test on; None where no test wants one."""
    coming = [item.callspec.params["replay"] for item in request.session.items if "replay" in _parameters(item)]
    if not coming:
        yield None
        return
    from replays_for_tests import Replays

    made = Replays(tmp_path_factory.mktemp("replays"), coming)
    yield made
    made.stop()


@pytest.fixture
def some_engine(tmp_path):
    """For a test that starts no server but a command which asks for vLLM first: one is found even without it."""
    import engines_for_tests

    with pytest.MonkeyPatch.context() as patch:
        engines_for_tests.pretend(patch, tmp_path / "engine")
        yield
    engines_for_tests.forget()


@pytest.fixture(scope="session")
def live_servers(request, tmp_path_factory):
    """A real server for each configuration in SERVERS of the test files at hand; all of them start at once."""
    from live_for_tests import side_by_side

    files = {item.module for item in request.session.items if "live_servers" in item.fixturenames}
    configs = [config for file in sorted(files, key=lambda file: file.__name__) for config in file.SERVERS]
    with side_by_side(configs, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
