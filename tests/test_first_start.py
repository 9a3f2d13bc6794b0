"""The start after an install: an answer, or what went wrong, in words."""

from kvlab import first_start
from kvlab.errors import ServerDied


class Server:
    version, ready_s = "0.31.0", 12.4

    def __init__(self, config, log_dir):
        assert config.engine == "cpu" and log_dir.is_dir()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_start_is_told(monkeypatch, capsys):
    monkeypatch.setattr(first_start, "VllmServer", Server)
    assert first_start.main() == 0
    assert capsys.readouterr().out == "vLLM 0.31.0 starts here: ready in 12 s\n"


def test_a_failure_is_told_with_what_next(monkeypatch, capsys):
    def died(_):
        raise ServerDied("It ended.", "no compiler", "apt-get install gcc")

    monkeypatch.setattr(first_start, "VllmServer", type("Broken", (Server,), {"__enter__": died}))
    assert first_start.main() == 1
    assert "Next: apt-get install gcc" in capsys.readouterr().err
