"""Recorded logs of vLLM 0.26 (GPU) and 0.31 (CPU), and the lines other releases print."""

from pathlib import Path

import pytest

from kvlab.errors import ServerStopped
from kvlab.failures import advice, server_died
from kvlab.startup_log import full_graph_sizes, last_lines, parse_startup, phase_of, root_cause

FIXTURES = Path(__file__).parent / "fixtures"


def log(name: str) -> str:
    return (FIXTURES / f"startup-{name}.log").read_text()


@pytest.mark.parametrize(
    ("name", "version", "tokens", "concurrency", "kv_gib", "backend", "dtype"),
    [
        ("gpu-0.26-cold", "0.26.0", 92656, 22.62, 9.9, "FLASH_ATTN", "auto"),  # capacity on two lines
        ("gpu-0.26-fp8", "0.26.0", 44096, 10.77, 2.35, "FLASH_ATTN", "fp8"),  # KV bytes pinned
        ("cpu-0.31-cold", "0.31.0", 65536, 8.0, 0.06, None, "auto"),  # capacity on one line
    ],
)
def test_a_recorded_start_is_read(name, version, tokens, concurrency, kv_gib, backend, dtype):  # pitfall 19
    report = parse_startup(log(name))
    assert (report.version, report.capacity_tokens, report.max_concurrency) == (version, tokens, concurrency)
    assert (report.available_kv_gib, report.attention_backend, report.kv_cache_dtype) == (kv_gib, backend, dtype)
    assert f"{tokens:,}" in report.capacity_line
    assert report.max_concurrency_tokens == (8192 if name.startswith("cpu") else 4096)


def test_phases_of_a_cold_gpu_start():
    phases = parse_startup(log("gpu-0.26-cold")).phases
    assert phases["weights"] == pytest.approx(1.814, abs=1e-3)
    assert (phases["compile"], phases["engine init"], phases["graph capture"]) == (29.19, 59.09, 7.0)
    assert (phases["model inspection"], phases["engine imports"], phases["warm-up"]) == (22.0, 26.0, 20.0)


def test_phases_of_a_compiled_cpu_start_come_from_the_time_stamps():
    phases = parse_startup(log("cpu-0.31-cold")).phases
    assert (phases["compile"], phases["kv profiling"], phases["engine init"]) == (19.0, 2.0, 21.26)


def test_an_eager_start_has_no_compile_phase():
    assert not {"compile", "graph capture"} & parse_startup(log("cpu-0.31-eager")).phases.keys()


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("11-29 23:59:55", "11-30 00:00:05", 10.0),
        ("12-31 23:59:50", "01-01 00:00:02", 12.0),
        ("02-28 23:59:59", "02-29 00:00:01", 2.0),
    ],
)
def test_midnight_new_year_and_leap_day(first, second, seconds):
    text = (
        f"(APIServer pid=1) INFO {first} [api_utils.py:286] non-default args: {{}}\n"
        f"(APIServer pid=1) INFO {second} [model.py:2109] Using max model len 8192\n"
    )
    assert parse_startup(text).phases["model inspection"] == seconds


def test_interleaved_processes_give_no_negative_phase():
    text = "INFO 11-29 10:00:05 [a.py:1] non-default args: {}\nINFO 11-29 10:00:04 [b.py:1] Using max model len 8192\n"
    assert parse_startup(text).phases["model inspection"] == 0.0


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("Using FLASHINFER attention backend out of potential backends: ['FLASHINFER'].", "FLASHINFER"),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
        ("Using Flash Attention backend on V1 engine.", "Flash Attention"),
        ("Using 'TRITON' Unquantized MoE backend out of potential backends", None),
    ],
)
def test_attention_backend_lines_of_several_releases(line, backend):  # pitfall 24
    assert parse_startup(f"(EngineCore pid=7) INFO 11-29 10:00:00 [cuda.py:1] {line}").attention_backend == backend


def test_fp8_is_noted_and_scale_warnings_are_kept():  # pitfall 24
    warning = "Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that k/v_scale are set."
    report = parse_startup(log("gpu-0.26-fp8") + f"\n(EngineCore pid=7) WARNING 11-29 10:00:00 [kv.py:163] {warning}")
    assert "accuracy drop without a proper scaling factor" in report.kv_dtype_note
    assert report.scale_warnings == (warning,)
    assert warning in report.warnings
    assert parse_startup(log("gpu-0.26-cold")).kv_dtype_note is None


def test_blocks_are_read_where_a_release_prints_them():
    assert parse_startup("Overriding num_gpu_blocks=512 with num_gpu_blocks_override=24").num_blocks == 24
    assert parse_startup("# GPU blocks: 27184, # CPU blocks: 2340").num_blocks == 27184
    assert parse_startup(log("gpu-0.26-cold")).num_blocks is None


def test_engine_processes_are_named():
    assert parse_startup(log("cpu-0.31-cold")).engine_pids == (4657, 4774)


def test_colours_do_not_hide_the_log():
    off = "\x1b[0m"
    text = "\n".join(
        f"\x1b[0;36m(EngineCore pid=7){off} \x1b[32mINFO{off} \x1b[90m11-29 17:06:{second}{off} [a.py:1]{off} {message}"
        for second, message in [(36, "Using max model len 4096"), (47, "Initializing a V1 LLM engine (v0.31.0) with")]
    )
    report = parse_startup(text)
    assert report.phases == {"engine imports": 11.0}
    assert report.engine_pids == (7,)
    assert last_lines(text)[0].startswith("(EngineCore pid=7) INFO")
    assert root_cause(text + f"\n\x1b[31mValueError: no room{off}") == "ValueError: no room"


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        (log("gpu-0.26-cold"), {"weights": 3.22, "peak_activation": 0.64, "non_torch": 0.22, "graphs": 0.53}),
        (
            "Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is (0.1, 13.98 GiB). "
            "Actual usage is 3.44 GiB for consumed memory (weights + non-torch), 0.64 GiB for peak activation, and "
            "0.53 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with",
            {"weights_and_non_torch": 3.44, "peak_activation": 0.64, "graphs": 0.53, "requested": 13.98},
        ),
    ],
)
def test_memory_is_read_in_the_words_of_two_releases(text, memory):  # pitfall 19
    found = parse_startup(text).memory_gib
    assert found.items() >= memory.items()
    assert found["free_at_start"] == 139.29


def test_a_cpu_start_states_no_gpu_memory():
    assert parse_startup(log("cpu-0.31-eager")).memory_gib == {}


def test_an_empty_log_is_nulls():
    report = parse_startup("")
    assert (report.capacity_tokens, report.version, report.phases, report.warnings) == (None, None, {}, ())
    assert root_cause("") is None


def test_phases_follow_one_another_in_a_recorded_start():
    names = [name for line in log("gpu-0.26-cold").splitlines() if (name := phase_of(line))]
    order = list(dict.fromkeys(names))
    assert order[:4] == ["model inspection", "engine imports", "engine start", "weights"]
    assert order[-3:] == ["warm-up", "API start", "first answer"]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("gpu-0.26-no-flashinfer", "ModuleNotFoundError: No module named 'flashinfer'"),
        ("cpu-0.31-too-long", "ValueError: To serve at least one request with the model's max seq len (8192)"),
    ],
)
def test_root_cause_is_not_the_last_line(name, start):  # pitfall 28
    assert root_cause(log(name)).startswith(start)


def test_a_mistyped_model_is_told_by_its_name_and_not_by_the_advice_below_it(tmp_path):
    path = tmp_path / "server.log"
    advised = "If this is a private repository, make sure to pass a token having permission to this repo"
    before = "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error.\n\nThe above was the direct cause:\n"
    path.write_text(f"{before}Traceback (most recent call last):\n{NO_SUCH_MODEL}\n{advised}\n")
    told = str(server_died("during its start-up", 1, path))
    assert f"Its log says: {NO_SUCH_MODEL}\n" in told and "Likely cause: the hub has no such model" in told
    assert told.count("Next:") == 1 and "Next: correct the model name" in told


def test_root_cause_of_pydantic_argparse_and_bare_errors():
    pydantic = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (100000) is greater than the derived [type=value_error]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n"
    )
    assert root_cause(pydantic).startswith("Value error, User-specified max_model_len")
    argparse = "usage: vllm serve\nmain.py: error: unrecognized arguments: --no-such-flag\n"
    assert root_cause(argparse) == "main.py: error: unrecognized arguments: --no-such-flag"
    assert root_cause("  File x\n    assert tp <= nodes\nAssertionError\n") == "AssertionError at `assert tp <= nodes`"


def test_a_warning_that_mentions_an_error_is_no_root_cause():
    assert root_cause("(EngineCore pid=7) WARNING 11-29 10:00:00 [x.py:1] ImportError: no tcmalloc\n") is None
    assert root_cause(log("cpu-0.31-eager")) is None


# What vLLM 0.31 said of a name that the hub does not have.
NO_SUCH_MODEL = (
    "OSError: Qwen/Qwen3-0.6X is not a local folder and is not a valid model identifier listed on "
    "'https://huggingface.co/models'"
)
MAX_LEN = "Value error, User-specified max_model_len (100000) is greater than the derived max_model_len "


@pytest.mark.parametrize(
    ("cause", "step"),
    [
        ("ValueError: ... the estimated maximum model length is 3968. Try increasing", "max_model_len to 3968"),
        ("ValueError: No available memory for the cache blocks. Try", "raise kv_cache_memory_bytes"),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU", "kvlab ps"),
        (
            "ValueError: Available memory on node 0 on kv cache allocation is less than requested memory",
            "lower kv_cache",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu_memory_utilization"),
        ("InductorError: InvalidCxxCompiler: No working C++ compiler found", "enforce_eager"),
        ("main.py: error: unrecognized arguments: --no-such-flag", "remove --no-such-flag"),
        ("main.py: error: argument --kv-cache-dtype: invalid choice: 'fp4'", "--kv-cache-dtype"),
        ("RuntimeError: Cannot find any model weights with `x`", "load_format"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "VLLM_USE_FLASHINFER_SAMPLER"),
        ("ModuleNotFoundError: No module named 'numba'", "pip install numba"),
        ("OSError: [Errno 98] Address already in use", "without a fixed port"),
        ("ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).", "block_size"),
        (MAX_LEN + "(max_position_embeddings=8192.0 or ...)", "8192"),
        ("Value error, max_num_batched_tokens (1024) is smaller than max_model_len (4096).", "enable_chunked_prefill"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached", "local folder"),
        (NO_SUCH_MODEL, "correct the model name"),
        (
            "ValueError: Invalid repository ID or local directory specified: 'Qwen/Qwen3-0.6X'.",
            "correct the model name",
        ),
        ("ValueError: To serve at least one request with the model's max seq len (8192), 1 GiB", "lower max_model_len"),
        (
            "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers.",
            "tensor_parallel_size",
        ),
        ("RuntimeError: Failed to infer device type", 'engine = "cpu"'),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "make install"),
        ("RuntimeError: operator torchvision::nms does not exist", "make install"),
    ],
)
def test_each_known_failure_has_its_own_next_step(cause, step):
    why, next_step = advice(cause)
    assert why and step in next_step
    assert "{" not in next_step.replace("{ VLLM", "").replace('" }', "")


def died(tmp_path, text, code, **more):
    path = tmp_path / "server.log"
    path.write_text(text)
    return str(server_died("while it was in use", code, path, **more))


ENGINE_KILLED = (
    "(APIServer pid=5) WARNING 11-29 19:58:36 [core_client.py:809] engine core exited unexpectedly\n"
    "(APIServer pid=5) ERROR 11-29 19:58:36 [async_llm.py:871] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)
START_KILLED = (
    "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore_DP0': -9}\n"
)


@pytest.mark.parametrize(
    ("text", "code", "gone"),
    [
        ("INFO: serving\n", 137, False),
        ("INFO: serving\n", -9, True),
        (ENGINE_KILLED, None, True),
        (ENGINE_KILLED, 0, True),
        (ENGINE_KILLED, 0, False),  # its main process was gone before anybody looked
        (START_KILLED, 1, False),
    ],
)
def test_a_kill_is_named_and_not_the_line_that_follows_from_it(tmp_path, text, code, gone):  # pitfall 28
    told = died(tmp_path, text, code, engine_gone=gone)
    assert "signal 9 (SIGKILL)" in told and "memory" in told.partition("Likely cause:")[2]
    assert "stack trace" not in told and "See root cause" not in told and told.count("Next:") == 1


def test_a_kill_for_lack_of_memory_is_known_from_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.failures.oom_kills", lambda: 3)
    assert "Likely cause: out of memory: the kernel" in died(tmp_path, "", 137, oom_before=2)
    assert "Likely cause: somebody or the system" in died(tmp_path, "", 137, oom_before=3)
    assert "Likely cause: somebody or the system" in died(tmp_path, "", 137, oom_before=None)


def test_an_engine_with_an_error_of_its_own_is_explained_by_it(tmp_path):
    text = "(EngineCore pid=6) ERROR 11-29 19:58:36 [core.py:1] RuntimeError: CUDA out of memory\n" + ENGINE_KILLED
    told = died(tmp_path, text, None, engine_gone=True)
    assert "its engine first" in told and "killed" not in told
    assert "Its log says: RuntimeError: CUDA out of memory" in told


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[leash] ending the server: a signal asked for it\n", 0),
        ("INFO: Shutting down\n", 143),
        ("INFO 11-30 20:00:00 [launcher.py:130] [shutdown] API server: shutdown triggered\n" + ENGINE_KILLED, 0),
    ],
)
def test_a_server_that_was_asked_to_end_is_told_from_one_that_failed(tmp_path, text, code):
    told = died(tmp_path, text, code)
    assert "was asked to end while it was in use" in told and "kvlab stop" in told and "resumes" in told
    assert isinstance(server_died("", code, tmp_path / "server.log"), ServerStopped)


@pytest.mark.parametrize(("code", "gone"), [(None, True), (137, True), (0, True)])
def test_an_engine_that_ends_because_it_was_asked_was_not_killed(tmp_path, code, gone):
    told = died(tmp_path, "[leash] ending the server: a signal asked for it\n", code, engine_gone=gone)
    assert "was asked to end" in told and "signal 9" not in told


def test_the_unknown_is_not_guessed():
    assert advice("RuntimeError: something new") == (None, None)


def test_the_error_names_cause_lines_and_step(tmp_path):  # pitfall 28
    path = tmp_path / "server.log"
    path.write_text(log("cpu-0.31-too-long") + "\nnanobind: leaked 514 functions!\n - leaked function\n")
    text = str(server_died("during its start-up", 1, path))
    assert "estimated maximum model length is 3968" in text and "Next: set max_model_len to 3968 or less" in text
    assert "RuntimeError: Engine core initialization failed" in text and "nanobind" not in text


def test_the_error_of_an_empty_log_says_so(tmp_path):
    text = str(server_died("during its start-up", 3, tmp_path / "none.log"))
    assert "exit code 3" in text and "it is empty" in text and "read the whole log" in text


def test_last_lines_split_progress_bars():
    assert last_lines("a\rb\n\nc\n", 2) == ["b", "c"]


def test_the_sizes_of_full_graphs_are_the_smallest_of_the_capture_sizes():
    config = "with config: 'cudagraph_capture_sizes': [1, 2, 4, 8, 16, 24, 32, 40], 'x': 1\n"
    bars = "Capturing CUDA graphs (PIECEWISE): 100%|##| 8/8 [00:01<00:00]\rCapturing CUDA graphs (FULL): 100%|##| 7/7 ["
    assert full_graph_sizes(config + bars) == (1, 2, 4, 8, 16, 24, 32)
    assert full_graph_sizes(config + bars.replace("FULL", "decode, FULL")) == (1, 2, 4, 8, 16, 24, 32)
    assert full_graph_sizes(config) == full_graph_sizes(bars) == ()


def test_a_bare_assertion_is_told_by_its_statement_and_not_by_the_carets_below_it():
    text = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    assert kind in KINDS\n'
    assert root_cause(text + "           ^^^^^^^^^^^^^\nAssertionError\n") == "AssertionError at `assert kind in KINDS`"
